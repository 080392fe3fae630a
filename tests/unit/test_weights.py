"""What tells weights from others of the same name: what the stamp sees, and what it cannot."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.identity.roots import Stamp
from kvbm_core.tokens.weights import SAMPLE_BYTES, WEIGHT_SUFFIXES, model_stamp, weights_stamp
from kvbm_vllm import identity

SIZE_BYTES = 10 * SAMPLE_BYTES


@pytest.fixture
def model(tmp_path: Path, rng: random.Random) -> Path:
    """A folder as models have them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in (1, 2):
        (folder / f"model-{shard}.safetensors").write_bytes(rng.randbytes(SIZE_BYTES))
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "README.md").write_text("words")
    return folder


def flip(path: Path, at: int) -> None:
    """Another byte, the same size."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_copy_elsewhere_has_the_same_stamp(model: Path, tmp_path: Path) -> None:
    stamp = weights_stamp(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert weights_stamp(copy) == stamp == weights_stamp(model)
    assert len(stamp) == 32 and set(stamp) <= set("0123456789abcdef")


def test_links_are_followed_as_in_the_hubs_snapshots(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert weights_stamp(snapshot) == weights_stamp(model)


@pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors"])
@pytest.mark.parametrize(
    "at",
    [
        0,
        SAMPLE_BYTES - 1,
        (SIZE_BYTES - SAMPLE_BYTES) // 2,
        SIZE_BYTES // 2,
        (SIZE_BYTES + SAMPLE_BYTES) // 2 - 1,
        SIZE_BYTES - SAMPLE_BYTES,
        SIZE_BYTES - 1,
    ],
)
def test_other_bytes_of_the_same_size_are_seen_at_the_begin_in_the_middle_and_at_the_end(
    model: Path, name: str, at: int
) -> None:
    stamp = weights_stamp(model)
    flip(model / name, at)
    assert weights_stamp(model) != stamp
    flip(model / name, at)
    assert weights_stamp(model) == stamp


@pytest.mark.parametrize("at", [SAMPLE_BYTES, SIZE_BYTES // 4, SIZE_BYTES - SAMPLE_BYTES - 1])
def test_a_change_between_the_samples_alone_is_not_seen(model: Path, at: int) -> None:
    """The limit of sampling: a hand that patches a few bytes. Training changes next to every number."""
    stamp = weights_stamp(model)
    flip(model / "model-1.safetensors", at)
    assert weights_stamp(model) == stamp


def test_trained_on_is_seen_wherever_it_was(model: Path, rng: random.Random) -> None:
    stamps = {weights_stamp(model)}
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (model / name).write_bytes(rng.randbytes(SIZE_BYTES))
        stamps.add(weights_stamp(model))
    assert len(stamps) == 3


@pytest.mark.parametrize(
    "size_bytes", [0, 1, SAMPLE_BYTES - 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES]
)
def test_all_of_a_small_file_is_seen(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(bytes(size_bytes))
    stamps = {weights_stamp(tmp_path)}
    for at in {0, size_bytes // 3, size_bytes // 2, size_bytes - 1} & set(range(size_bytes)):
        flip(path, at)
        stamps.add(weights_stamp(tmp_path))
        flip(path, at)
    assert len(stamps) == 1 + len(
        {0, size_bytes // 3, size_bytes // 2, size_bytes - 1} & set(range(size_bytes))
    )
    path.write_bytes(bytes(size_bytes + 1))
    assert weights_stamp(tmp_path) not in stamps


def test_names_configuration_and_new_files_are_seen(model: Path) -> None:
    stamps = [weights_stamp(model)]
    (model / "config.json").write_text('{"layers": 3}')
    stamps.append(weights_stamp(model))
    (model / "generation_config.json").write_text("{}")
    stamps.append(weights_stamp(model))
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    stamps.append(weights_stamp(model))
    (model / "model-1.safetensors").unlink()
    stamps.append(weights_stamp(model))
    assert len(set(stamps)) == len(stamps)


def test_bytes_that_move_from_one_file_to_the_next_are_seen(tmp_path: Path) -> None:
    stamps = set()
    for cut in (0, 3, 6):
        (tmp_path / "a.bin").write_bytes(b"abcdef"[:cut])
        (tmp_path / "b.bin").write_bytes(b"abcdef"[cut:])
        stamps.add(weights_stamp(tmp_path))
    assert len(stamps) == 3


def test_what_is_neither_weights_nor_configuration_does_not_matter(model: Path) -> None:
    stamp = weights_stamp(model)
    (model / "README.md").write_text("other words")
    (model / "events.log").write_text("x")
    (model / "sub").mkdir()
    (model / "sub" / "deeper.bin").write_bytes(b"x")
    assert weights_stamp(model) == stamp


@pytest.mark.parametrize("suffix", sorted(WEIGHT_SUFFIXES))
def test_every_kind_of_weights_is_looked_at_also_as_a_single_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(b"one")
    stamp = weights_stamp(path)
    assert stamp and stamp == weights_stamp(tmp_path)
    path.write_bytes(b"two")
    assert weights_stamp(path) != stamp


def test_nothing_has_no_stamp(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty" / "config.json").write_text("{}")  # what it says fits other weights too
    for name in ("empty", "absent", "notes.txt"):
        assert weights_stamp(tmp_path / name) == ""


def test_what_cannot_be_read_has_no_stamp_and_raises_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = weights_stamp(model)
    (model / "gone.bin").symlink_to(model / "nowhere")  # no file
    (model / "loop.bin").symlink_to(model / "loop.bin")
    assert weights_stamp(model) == stamp != ""

    def fail(*args: object) -> bytes:
        raise PermissionError("not for you")

    monkeypatch.setattr(os, "pread", fail)
    assert weights_stamp(model) == ""


# ---------------------------------------------------------------- models by name


def test_a_model_of_the_hub_is_looked_up_where_it_was_downloaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="NOT RUN: huggingface_hub is not installed")
    asked: list[tuple[str, str, str | None, str | None]] = []

    def find(
        name: str, filename: str, cache_dir: str | None = None, revision: str | None = None
    ) -> str | None:
        asked.append((name, filename, cache_dir, revision))
        return str(model / filename) if name == "org/known" else None

    model_stamp.cache_clear()
    monkeypatch.setattr(hub, "try_to_load_from_cache", find)
    assert model_stamp("org/known", "abc", "/models") == weights_stamp(model)
    unknown = model_stamp("org/unknown", "")
    assert asked == [
        ("org/known", "config.json", "/models", "abc"),
        ("org/unknown", "config.json", None, None),
    ]
    assert unknown == model_stamp("org/unknown", ""), "an engine's own blocks must be found"
    model_stamp.cache_clear()
    assert unknown != model_stamp("org/unknown", ""), "another process must not find them"


def test_a_name_that_the_hub_would_refuse_is_known_to_this_process_alone() -> None:
    pytest.importorskip("huggingface_hub", reason="NOT RUN: huggingface_hub is not installed")
    model_stamp.cache_clear()
    first = model_stamp("not/a/name/of/the/hub", "")
    model_stamp.cache_clear()
    assert len(first) == 32 and first != model_stamp("not/a/name/of/the/hub", "")


# ---------------------------------------------------------------- vLLM's models


def vllm_config(model: str, *, weights: str = "", draft: str = "") -> Any:
    """What ``weights_of`` reads of a VllmConfig."""
    of_draft = SimpleNamespace(model=draft, model_weights="", revision=None)
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, model_weights=weights, revision=None),
        load_config=SimpleNamespace(download_dir=None),
        speculative_config=SimpleNamespace(draft_model_config=of_draft) if draft else None,
    )


def test_an_engines_weights_are_those_of_its_folder_and_of_its_drafts(model: Path, tmp_path: Path) -> None:
    identity.stamp_of.cache_clear()
    stamp = Stamp(weights_stamp(model), is_lasting=True)
    assert identity.weights_of(vllm_config(str(model)))() == stamp
    assert identity.weights_of(vllm_config("gguf-name", weights=str(model)))() == stamp
    other = shutil.copytree(model, tmp_path / "other")
    flip(other / "model-1.safetensors", 0)
    assert identity.weights_of(vllm_config(str(other)))() != stamp
    drafted = {identity.weights_of(vllm_config(str(model), draft=str(of)))() for of in (model, other)}
    assert len(drafted) == 2 and all(each.is_lasting for each in drafted)


def test_weights_that_cannot_be_looked_at_mean_nothing_in_another_process(model: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="NOT RUN: huggingface_hub is not installed")
    for config in (
        vllm_config("s3://bucket/model"),
        vllm_config(f"{model}:Q4_K_M"),
        vllm_config(str(model), draft="no/draft"),
    ):
        assert not identity.weights_of(config)().is_lasting
