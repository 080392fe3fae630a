"""Two load formats have the same weights only where they read the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm_core.identity.load_formats import files_read

INDEX = "model.safetensors.index.json"


def read(folder: Path, load_format: str, *names: str) -> str:
    return files_read(load_format, folder, names)


def test_formats_that_read_the_same_safetensors_are_the_same(tmp_path: Path) -> None:
    formats = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
    assert {read(tmp_path, each, "model.safetensors", "a.bin") for each in formats} == {"safetensors"}
    assert read(tmp_path, "auto", "sub/model.safetensors", "a.bin", "a.pt") == "bin"
    assert read(tmp_path, "auto", "a.pt") == read(tmp_path, "npcache", "a.pt") == "pt"
    assert read(tmp_path, "auto", "a.gguf") == "auto"


def test_formats_that_read_other_files_are_others(tmp_path: Path) -> None:
    files = ("consolidated.safetensors", "model.safetensors", "a.bin", "a.pt")
    formats = ("auto", "hf", "mistral", "npcache", "pt", "sharded_state", "bitsandbytes", "gguf")
    assert len({read(tmp_path, each, *files) for each in formats}) == len(formats)
    assert read(tmp_path, "auto", "old/consolidated.safetensors", "model.safetensors") == "auto"


@pytest.mark.parametrize(
    ("others", "expected"), [((), "safetensors"), (("old.safetensors",), "runai_streamer")]
)
def test_the_streamer_reads_also_what_the_index_leaves_out(
    tmp_path: Path, others: tuple[str, ...], expected: str
) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    names = ("1.safetensors", "2.safetensors", INDEX, *others)
    assert read(tmp_path, "runai_streamer", *names) == expected
    assert read(tmp_path, "safetensors", *names) == "safetensors"


def test_an_index_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read(tmp_path, "runai_streamer", INDEX, "1.safetensors")
