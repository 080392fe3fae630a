"""Storage backends of SGLang, driven as its HiCache controller drives them. Runs in SGLang's environment."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile, HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from kvbm_sglang.hicache import KvbmHiCache
from tests.engines.sglang.engine import NIXL

_libc = ctypes.CDLL(None, use_errno=True)


class Side:
    """A backend on a host pool: whole batches of pages out and in, SGLang's STORAGE_BATCH_SIZE at a time.

    ``in_place``: the v1 methods, from and into the pool's memory; else SGLang's generic way, a copy of each
    page.
    """

    def __init__(self, name: str, backend: Any, pool: Any, folder: Path, *, in_place: bool) -> None:
        self.name = name
        self.backend = backend
        self.folder = folder
        self._controller = SimpleNamespace(
            storage_backend=backend, storage_host_pool=pool, mem_pool_host=pool, page_size=pool.page_size
        )
        methods = (
            ("_page_set_zero_copy", "_page_get_zero_copy")
            if in_place
            else ("_generic_page_set", "_generic_page_get")
        )
        self._set, self._get = (getattr(HiCacheController, method) for method in methods)
        self._page_tokens = pool.page_size
        backend.register_mem_pool_host(pool)

    def backup(self, keys: Sequence[str], indices: torch.Tensor) -> None:
        """Until the disk has them."""
        for start, batch, part in self._batches(keys, indices):
            if not self._set(self._controller, batch, part):
                raise RuntimeError(f"{self.name}: pages from {start} on were not written")
        _sync(self.folder)

    def prefetch(self, keys: Sequence[str], indices: torch.Tensor) -> None:
        """All of them, or RuntimeError."""
        operation = SimpleNamespace(request_id="benchmark", is_terminated=lambda: False)
        for start, batch, part in self._batches(keys, indices):
            if self._get(self._controller, operation, batch, part) != len(batch):
                raise RuntimeError(f"{self.name}: pages from {start} on were not read")

    def forget_cached(self) -> None:
        """What the kernel keeps of the files in memory goes, so that reads come from the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def _batches(self, keys: Sequence[str], indices: torch.Tensor) -> Any:
        for start in range(0, len(keys), STORAGE_BATCH_SIZE):
            batch = list(keys[start : start + STORAGE_BATCH_SIZE])
            yield start, batch, indices[start * self._page_tokens : (start + len(batch)) * self._page_tokens]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def make_sides(names: Sequence[str], pool: Any, folder: Path, total_bytes: int) -> list[Side]:
    """Each in a folder of its own; kvbm with room for two turns."""
    sides = []
    for name in names:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        sides.append(Side(name, _backend(name, place, total_bytes), pool, place, in_place=name != "file"))
    return sides


@contextmanager
def _engine_of(model: Path) -> Iterator[None]:
    """As in an engine of this model: kvbm keeps nothing of one that it cannot tell from others."""
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"weights")
    arguments = ServerArgs(model_path=str(model), device="cpu")
    with (
        patch("kvbm_sglang.pools.find_server_args", lambda: arguments),
        patch("kvbm_sglang.weights.process_began_ns", lambda: time.time_ns() + 10**9),
    ):
        yield


def _backend(name: str, folder: Path, total_bytes: int) -> Any:
    if name == "kvbm":
        sizes = {"DYN_KVBM_DISK_CACHE_DIR": str(folder), "DYN_KVBM_DISK_CACHE_GB": 2.5 * total_bytes / 1e9}
        with _engine_of(folder / "model"):
            return KvbmHiCache(config_of({"interface_v1": 1, **sizes}), {})
    if name == "file":
        return HiCacheFile(config_of({}), str(folder))
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(folder)
    return HiCacheNixl(config_of(NIXL), file_path=str(folder))


def config_of(extra: dict[str, Any]) -> HiCacheStorageConfig:
    """One rank of one, page first, with SGLang's statistics."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="benchmark",
        extra_config=extra,
    )
