"""Which weights a folder holds: blocks that outlive a process must not meet a model that was trained on
meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from functools import lru_cache
from pathlib import Path

log = logging.getLogger("kvbm")

SAMPLE_BYTES = 1 << 16
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})


def weights_stamp(folder: Path) -> str:
    """32 hex digits of the weights and configuration in ``folder``; "" if there are no weights in it, or no
    folder.

    Of each file of weights the size and three samples are read, of ``*.json`` everything: training changes
    next to every number, and copying none. Takes milliseconds; the same on every machine.
    """
    try:
        files = sorted(
            path for path in _files(folder) if path.suffix in WEIGHT_SUFFIXES or path.suffix == ".json"
        )
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes() if path.suffix == ".json" else _samples(path))
    except OSError:
        return ""
    return digest.hexdigest()[:32] if any(path.suffix in WEIGHT_SUFFIXES for path in files) else ""


@lru_cache(maxsize=1024)
def model_stamp(name: str, revision: str = "", cache_dir: str = "") -> str:
    """``weights_stamp`` of a path, or of a model of the hub as downloaded to ``cache_dir`` ("" = the usual
    place).

    Looked at once. Where weights cannot be told from others of their name: a stamp of this process alone.
    ImportError for what is no path where huggingface_hub is not installed.
    """
    folder = folder_of(name, revision, cache_dir) or Path(name)
    stamp = weights_stamp(folder)
    if not stamp:
        log.info(
            "kvbm: the weights of %s cannot be looked at: what is stored on disk is not found after "
            "a restart",
            name,
        )
    return stamp or secrets.token_hex(16)


def folder_of(name: str, revision: str = "", cache_dir: str = "") -> Path | None:
    """A model's folder (or single file): its path, or where the hub's cache has it; None if it has not.

    ImportError for what is no path where huggingface_hub is not installed.
    """
    folder = Path(name)
    return folder if folder.exists() else _snapshot_of(name, revision, cache_dir)


def _snapshot_of(name: str, revision: str, cache_dir: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(
            name, "config.json", cache_dir=cache_dir or None, revision=revision or None
        )
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else [path for path in folder.iterdir() if path.is_file()]


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    places = (0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(os.pread(fd, SAMPLE_BYTES, place) for place in places)
    finally:
        os.close(fd)
