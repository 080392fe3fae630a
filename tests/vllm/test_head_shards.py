"""Blocks that engines of another tensor-parallel size find, under vLLM's scheduler: every byte is checked.

The model's KV depends on the number that a head has in the whole model, and vLLM's own allocation decides
where it lies on a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.testing import memory_engine
from tests.vllm.kvbm_engine import KvbmEngine

STORE = "memory://shapes"
PROMPT = range(50)
FOUND_TOKENS = 48
FROM_STORE = "kvbm_onboard_blocks_o2d"
PAIRS = ((1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2))
"""Ranks of who writes, and of who reads."""
MODELS: dict[str, dict[str, Any]] = {
    "MHA": {"kv_heads": 8},
    "GQA": {"kv_heads": 4},
    "GQA with fewer heads than ranks": {"kv_heads": 2},
    "MQA": {"kv_heads": 1},
    "MLA": {"kv_heads": 1, "is_mla": True},
    "MLA of rank 0": {"kv_heads": 1, "is_mla": True, "extra": {"nccl_mla_mode": True}},
    "windows": {"kv_heads": 4, "windows": (None, 8, None), "num_blocks": 160},
}
LAYOUTS = ("LBNHC", "LBHNC", "BLHNC")


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    """That engines share by its URL."""
    memory_engine.register()
    yield
    memory_engine.forget_all()


def engine(folder: Path, ranks: int, *, head_shards: int = 4, **shape: Any) -> KvbmEngine:
    """One that shares blocks."""
    extra = {"remote_head_shards": head_shards, **shape.pop("extra", {})}
    return KvbmEngine(folder, host_blocks=60, store=STORE, ranks=ranks, extra=extra, **shape)


def written(folder: Path, ranks: int, **shape: Any) -> list[int]:
    """The answer of an engine that stores the prompt's blocks."""
    with engine(folder, ranks, **shape) as first:
        answer = first.ask("a", PROMPT, 8)
        first.settle()
        first.assert_clean()
    return answer


def found_tokens(folder: Path, ranks: int, answer: list[int], **shape: Any) -> int:
    """What another engine finds of them; its model checks the bytes of all that it reads."""
    with engine(folder, ranks, **shape) as second:
        assert second.ask("b", PROMPT, 8) == answer
        assert bool(second.metric(FROM_STORE)) is bool(second.external_tokens("b"))
        second.assert_clean()
        return second.external_tokens("b")


@pytest.mark.shows("KVBM_REMOTE_HEAD_SHARDS")
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_any_size_reads_what_another_one_wrote(
    model: dict[str, Any], writer: int, reader: int, tmp_path: Path
) -> None:
    layouts = LAYOUTS[(writer + reader) % 3], LAYOUTS[(2 * writer + reader) % 3]
    answer = written(tmp_path, writer, layout=layouts[0], **model)
    assert found_tokens(tmp_path, reader, answer, layout=layouts[1], **model) == FOUND_TOKENS


@pytest.mark.parametrize(
    "other",
    [{"kv_heads": 8}, {"block_size_tokens": 8}, {"windows": (None, None, None)}, {"head_shards": 2}],
    ids=lambda other: next(iter(other)),
)
@pytest.mark.parametrize("reader", [1, 2])
def test_what_means_something_else_is_not_found(other: dict[str, Any], reader: int, tmp_path: Path) -> None:
    answer = written(tmp_path, 2, kv_heads=4)
    assert found_tokens(tmp_path, reader, answer, **{"kv_heads": 4, **other}) == 0


@pytest.mark.shows("KVBM_REMOTE_HEAD_SHARDS=0")
def test_without_the_setting_sizes_share_nothing(tmp_path: Path) -> None:
    answer = written(tmp_path, 2, kv_heads=4, head_shards=0)
    assert found_tokens(tmp_path, 1, answer, kv_heads=4, head_shards=0) == 0
    assert found_tokens(tmp_path, 2, answer, kv_heads=4, head_shards=0) == FOUND_TOKENS


def test_an_engine_of_the_same_size_reads_them_too(tmp_path: Path) -> None:
    answer = written(tmp_path, 2, kv_heads=4)
    assert found_tokens(tmp_path, 2, answer, kv_heads=4) == FOUND_TOKENS


@pytest.mark.parametrize("lost", ["0of4", "3of4"])
def test_a_block_of_which_a_shard_is_lost_is_a_miss(lost: str, tmp_path: Path) -> None:
    answer = written(tmp_path, 4, kv_heads=4)
    objects = memory_engine.OPENED[-1].objects
    for name in [name for name in objects.objects if f"-{lost}/" in name]:
        objects.pop(name)
    assert found_tokens(tmp_path, 2, answer, kv_heads=4) == 0, "stored again"
    assert found_tokens(tmp_path, 1, answer, kv_heads=4) == FOUND_TOKENS


def test_shards_that_do_not_go_with_the_ranks_are_told_of_and_blocks_kept_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = written(tmp_path, 4, kv_heads=8, head_shards=2)
    (line,) = [message for message in caplog.messages if "HEAD_SHARDS" in message]
    assert "KVBM_REMOTE_HEAD_SHARDS=2: 4 ranks have 2 of 8 KV heads each, and a shard has 4" in line
    assert found_tokens(tmp_path, 4, answer, kv_heads=8, head_shards=2) == FOUND_TOKENS
    assert found_tokens(tmp_path, 2, answer, kv_heads=8, head_shards=2) == 0


def test_on_disk_each_size_has_blocks_of_its_own(tmp_path: Path) -> None:
    """Their names are the same for both."""
    shape: dict[str, Any] = {"kv_heads": 4, "disk_blocks": 40}
    answer = written(tmp_path, 2, **shape)
    memory_engine.forget_all()
    assert found_tokens(tmp_path, 1, answer, **shape) == 0
    memory_engine.forget_all()
    for ranks in (1, 2):
        with engine(tmp_path, ranks, **shape) as again:
            assert again.ask("b", PROMPT, 8) == answer
            assert again.metric("kvbm_onboard_blocks_d2d") == FOUND_TOKENS / again.spec.block_size_tokens
            assert again.metric(FROM_STORE) == 0
            again.assert_clean()
