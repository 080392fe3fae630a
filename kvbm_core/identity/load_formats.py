"""Which files of a folder a load format reads: formats that read the same files load the same weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SAFETENSORS = frozenset(("fastsafetensors", "instanttensor", "safetensors"))
# The first of these endings that any file has is read.
_FIRST_OF = {
    "auto": (".safetensors", ".bin", ".pt"),
    "hf": (".safetensors", ".bin", ".pt"),
    "npcache": (".bin", ".pt"),
}


def files_read(load_format: str, folder: Path, names: Collection[str]) -> str:
    """A text that is the same for two formats only if they read the same of ``names``, all within ``folder``.
    OSError, ValueError if the index there cannot be read.
    """
    top = [name for name in names if "/" not in name]
    if load_format == "auto" and any(_is_consolidated(name) for name in names):
        return "auto"  # vLLM reads these; "hf" and SGLang read the others
    if load_format in _FIRST_OF:
        endings = _FIRST_OF[load_format]
        return next((end[1:] for end in endings if any(name.endswith(end) for name in top)), load_format)
    if load_format in _SAFETENSORS:
        return "safetensors"
    if load_format == "runai_streamer" and _names_all(folder, top):
        return "safetensors"
    return load_format


def _is_consolidated(name: str) -> bool:
    return fnmatchcase(name.rpartition("/")[2], "consolidated*.safetensors")


def _names_all(folder: Path, names: Collection[str]) -> bool:
    """Whether the index leaves none of the files out: the streamer does not look at it."""
    if _INDEX not in names:
        return True
    named = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    return {name for name in names if name.endswith(".safetensors")} <= named
