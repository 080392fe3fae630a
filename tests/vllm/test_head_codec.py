"""Blocks that a shared store keeps in float8, under vLLM's scheduler: whose they are, and where they may be.

A model with KV that float8 has too checks every byte. One with any float32 tells how much came back rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.storage.remote.encoding import SMALLER
from kvbm_core.storage.remote.records import trailer_in, unpack_trailer
from kvbm_core.testing import memory_engine
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_head_shards import FOUND_TOKENS, FROM_STORE, PROMPT, STORE

FROM_DISK = "kvbm_onboard_blocks_d2d"


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    """That engines share by its URL."""
    memory_engine.register()
    yield
    memory_engine.forget_all()


def engine(folder: Path, codec: str = "fp8", *, numbers: str = "float32", **more: Any) -> KvbmEngine:
    """One that shares blocks."""
    extra = {"remote_codec": codec, **more.pop("extra", {})}
    return KvbmEngine(folder, host_blocks=60, store=STORE, kv_numbers=numbers, extra=extra, **more)


def rounded_positions(one: KvbmEngine) -> int:
    """At which the model has read what it had not computed."""
    return sum(rank.rounded_positions for rank in one.ranks)


def stored(folder: Path, **more: Any) -> list[int]:
    """The answer of an engine that stores the prompt's blocks."""
    with engine(folder, **more) as first:
        answer = first.ask("a", PROMPT, 8)
        first.settle()
        first.assert_clean()
        assert rounded_positions(first) == 0, "host memory has what was computed"
    return answer


def check_found(folder: Path, answer: list[int], found_tokens: int, **more: Any) -> None:
    """By another engine, whose model checks what it reads."""
    with engine(folder, **more) as second:
        assert second.ask("b", PROMPT, 8) == answer
        assert second.external_tokens("b") == found_tokens
        assert bool(second.metric(FROM_STORE)) is bool(found_tokens)
        second.assert_clean()


@pytest.mark.parametrize(
    ("writer", "reader", "model"),
    [
        (1, 2, {"kv_heads": 8}),
        (4, 1, {"kv_heads": 4}),
        (1, 4, {"kv_heads": 2}),
        (2, 1, {"kv_heads": 4, "windows": (None, 8, None), "num_blocks": 160}),
        (2, 4, {"kv_heads": 1, "is_mla": True}),
    ],
    ids=["MHA", "GQA", "fewer heads than ranks", "windows", "MLA"],
)
def test_other_sizes_read_it(writer: int, reader: int, model: dict[str, Any], tmp_path: Path) -> None:
    shape = {"numbers": "float8", "extra": {"remote_head_shards": 4}, **model}
    answer = stored(tmp_path, ranks=writer, layout="LBNHC", **shape)
    check_found(tmp_path, answer, FOUND_TOKENS, ranks=reader, layout="LBHNC", **shape)


@pytest.mark.parametrize("model", [{}, {"kv_heads": 1}, {"kv_heads": 1, "is_mla": True}], ids=str)
def test_alone_it_is_for_one_number_of_ranks(model: dict[str, Any], tmp_path: Path) -> None:
    shape: dict[str, Any] = {"numbers": "float8", **model}
    answer = stored(tmp_path, ranks=2, **shape)
    check_found(tmp_path, answer, FOUND_TOKENS, ranks=2, **shape)
    check_found(tmp_path, answer, 0, ranks=1, **shape)


def test_encrypted_it_is_found_too(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of an engine")
    extra = {"remote_secret_file": str(secret), "remote_encrypt": True}
    answer = stored(tmp_path, numbers="float8", extra=extra)
    check_found(tmp_path, answer, FOUND_TOKENS, numbers="float8", extra=extra)
    check_found(tmp_path, answer, 0, numbers="float8")


@pytest.mark.shows("KVBM_REMOTE_CODEC", "KVBM_REMOTE_CODEC=fp8")
def test_it_takes_a_quarter_and_says_what_it_is(tmp_path: Path) -> None:
    """Of float32. Each record says its codec, so that nobody takes it for another one."""
    sizes = {}
    for codec in ("none", "fp8"):
        stored(tmp_path, codec=codec, extra={"remote_head_shards": 2})
        objects = memory_engine.OPENED[-1].objects.objects
        fields = [unpack_trailer(trailer_in(memoryview(entry.content))) for entry in objects.values()]
        assert {each.fields.codec for each in fields if each} == {SMALLER if codec == "fp8" else 0}
        sizes[codec] = {each.fields.block_bytes for each in fields if each}
        memory_engine.forget_all()
    (whole,), (small,) = sizes.values()
    num_scales = 2 * 4  # of a head's K and V in two layers: halves of the tokens, halves of each one's
    assert small == whole // 4 + 4 * num_scales


@pytest.mark.shows("KVBM_REMOTE_CODEC=none", "KVBM_REMOTE_CODEC=fp8")
@pytest.mark.parametrize("head_shards", [0, 2])
def test_exact_and_rounded_blocks_never_meet(head_shards: int, tmp_path: Path) -> None:
    """Neither in the store, nor on a disk that an engine with the codec has filled with rounded blocks."""
    heads: dict[str, Any] = {"extra": {"remote_head_shards": head_shards}}
    disk: dict[str, Any] = {"disk_blocks": 60, **heads}
    answer = stored(tmp_path, **heads)
    with engine(tmp_path, **disk) as rounded:  # fills its disk with what it has from the store
        assert rounded.ask("b", PROMPT, 8) == answer
        rounded.settle()
        assert rounded_positions(rounded) > 0
        assert rounded.metric(FROM_STORE) == FOUND_TOKENS / rounded.spec.block_size_tokens
    with engine(tmp_path, "none", **disk) as exact:
        assert exact.ask("b", PROMPT, 8) == answer
        assert exact.external_tokens("b") == 0 == rounded_positions(exact)
        exact.settle()
    memory_engine.forget_all()
    with engine(tmp_path, "none", **disk) as exact:
        assert exact.ask("b", PROMPT, 8) == answer
        assert exact.metric(FROM_DISK) > 0 == rounded_positions(exact)
    with engine(tmp_path, **disk) as rounded:
        assert rounded.ask("b", PROMPT, 8) == answer
        assert rounded.metric(FROM_DISK) > 0 and rounded_positions(rounded) > 0, "they were there all along"


def test_where_heads_are_not_known_there_is_no_store_and_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the host and the disk keep what was computed under its own name."""
    more: dict[str, Any] = {"ranks": 4, "kv_heads": 8, "disk_blocks": 60, "extra": {"remote_head_shards": 2}}
    answer = stored(tmp_path, **more)
    assert not any(opened.objects.objects for opened in memory_engine.OPENED)
    assert "4 ranks have 2 of 8 KV heads each, and a shard has 4" in caplog.text
    (line,) = {line for line in caplog.messages if "the remote tier is off" in line}
    assert (
        "kvbm: KVBM_REMOTE_CODEC=fp8: is for blocks that are kept by KV heads, which is not so here" in line
    )
    with engine(tmp_path, "none", **more) as exact:
        assert exact.ask("b", PROMPT, 8) == answer
        assert exact.metric(FROM_DISK) > 0 == rounded_positions(exact)


def test_audits_do_not_take_rounded_blocks_for_wrong_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = stored(tmp_path)
    with engine(tmp_path, extra={"audit_rate": 1.0}) as audited:
        assert audited.ask("b", PROMPT, 8) == answer
        assert audited.external_tokens("b") == FOUND_TOKENS, "an audit would have computed it"
        audited.settle()
    assert "KVBM_AUDIT_RATE=1.0: has no effect with KVBM_REMOTE_CODEC=fp8" in caplog.text


def test_onboarded_bytes_are_verified_as_ever(tmp_path: Path) -> None:
    answer = stored(tmp_path)
    with engine(tmp_path, extra={"verify_onboard": True}) as verified:
        assert verified.ask("b", PROMPT, 8) == answer
        assert verified.external_tokens("b") == FOUND_TOKENS and rounded_positions(verified) > 0
        verified.assert_clean()
