"""One life of KvbmHiCache with the interface classes of one SGLang release: made, filled, read, cleared,
closed.

    python sglang_life.py SOURCES FOLDER

SOURCES holds sglang/srt/mem_cache/... of that release. Its hicache_storage.py and its backend factory are the
real ones; of what these import, what asks for more of SGLang is a stand-in. The host pool is a double, and so
are the arguments of an engine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

PAGE_TOKENS, NUM_PAGES, PAGE_BYTES = 4, 8, 8192
STAND_INS = ("sglang.srt.environ", "sglang.srt.mem_cache.memory_pool_host")
EXTRA_CONFIG = {
    "backend_name": "kvbm",
    "module_path": "kvbm_sglang.hicache",
    "class_name": "KvbmHiCache",
    "interface_v1": 1,
}


class Unset:
    """Any name of it is itself, and has no value."""

    def __getattr__(self, name: str) -> Unset:
        return self

    def get(self) -> None:
        """As an environment variable of SGLang's that is not set."""


class Pool:
    """Tokens of a page lie together: one piece a page."""

    layout, dtype, page_size, size = "page_first", torch.bfloat16, PAGE_TOKENS, NUM_PAGES * PAGE_TOKENS

    def __init__(self, content: int) -> None:
        self.kv_buffer = torch.full((NUM_PAGES, PAGE_BYTES), content, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """As SGLang's pools answer."""
        pages = [index // PAGE_TOKENS for index in indices.tolist()[::PAGE_TOKENS]]
        return [self.kv_buffer[page].data_ptr() for page in pages], [PAGE_BYTES] * len(pages)


def import_release(sources: Path) -> tuple[Any, Any]:
    """(hicache_storage, StorageBackendFactory) of this release."""
    sys.path[:0] = [str(sources), str(Path(__file__).resolve().parents[2])]
    for name in STAND_INS:
        module = types.ModuleType(name)
        module.__dict__.update(envs=Unset(), HostKVCache=Pool)
        sys.modules[name] = module
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    assert Path(hicache_storage.__file__).is_relative_to(sources), "another SGLang is in the way"
    return hicache_storage, StorageBackendFactory


def config_of(kind: type) -> Any:
    """A HiCacheStorageConfig of one rank. KeyError for a field without default that no release has had so
    far.
    """
    known = {
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "m",
    }
    for what in ("tp", "pp", "attn_cp"):
        known |= {f"{what}_rank": 0, f"{what}_size": 1}
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return kind(**{name: known[name] for name in needed}, extra_config=dict(EXTRA_CONFIG))


def indices_of(*pages: int) -> torch.Tensor:
    """One index per token, as SGLang gives them."""
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def fill(write: Any) -> None:
    """Writes until all is taken: a new file is looked at in the background first."""
    until_s = time.monotonic() + 30
    while not all(write()):
        assert time.monotonic() < until_s, "pages are not taken"


def pages_of_the_kv_pool(release: Any, backend: Any, pool: Pool) -> None:
    """Written, found, read to other places."""
    info = release.HiCacheStorageExtraInfo()
    keys = ["aa", "bb", "cc"]
    pool.kv_buffer[:3] = torch.tensor([[1], [2], [3]], dtype=torch.uint8)
    fill(lambda: backend.batch_set_v1(keys, indices_of(0, 1, 2), info))
    assert backend.batch_exists([*keys, "dd"], info) == 3
    found = backend.batch_exists_v2([*keys, "dd"], [], info)
    assert type(found) is release.PoolTransferResult and found.kv_hit_pages == 3, found
    assert backend.batch_get_v1(["cc", "dd", "aa"], indices_of(4, 5, 6), info) == [True, False, True]
    assert pool.kv_buffer[4].unique().tolist() == [3] and pool.kv_buffer[6].unique().tolist() == [1]


def pages_of_a_side_pool(release: Any, backend: Any) -> None:
    """Only a prefix whose last page is in the side pool can be restored; a pool never seen allows none."""
    side, name = Pool(7), release.PoolName.MAMBA
    backend.register_mem_host_pool_v2(side, name)
    tail = release.PoolHitPolicy.TRAILING_PAGES

    def transfer(*pages: int, keys: list[str], of: Any = name) -> Any:
        return release.PoolTransfer(name=of, host_indices=indices_of(*pages), keys=keys, hit_policy=tail)

    assert backend.batch_exists_v2(["aa", "bb"], [transfer(0, keys=["bb"])]).kv_hit_pages == 0
    fill(lambda: backend.batch_set_v2([transfer(0, keys=["bb"])])[name])
    found = backend.batch_exists_v2(
        ["aa", "bb", "cc"], [transfer(0, keys=["cc"])], release.HiCacheStorageExtraInfo()
    )
    assert found.kv_hit_pages == 2, found
    assert getattr(found, "restorable_prefix_pages", [2]) == [2], found
    assert backend.batch_get_v2([transfer(3, keys=["bb"])]) == {name: [True]}
    assert backend.batch_exists_v2(["aa"], [transfer(0, keys=["aa"], of="nobody's")]).kv_hit_pages == 0


class Arguments:
    """An engine's, of a model in a folder."""

    def __init__(self, model: Path) -> None:
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
        self.model_path = str(model)

    def get_model_config(self) -> Any:
        """As ServerArgs answers."""
        return types.SimpleNamespace(hf_config={}, dtype="bfloat16", is_multimodal=False)


def live(sources: Path, folder: Path) -> None:
    """AssertionError, or whatever KvbmHiCache raises, if this release and it do not fit."""
    os.environ.update(DYN_KVBM_DISK_CACHE_DIR=str(folder), DYN_KVBM_DISK_CACHE_GB="0.001")
    release, factory = import_release(sources)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvbm").addHandler(handler)
    config, pool = config_of(release.HiCacheStorageConfig), Pool(0)
    arguments = Arguments(folder / "model")
    with (
        patch("kvbm_sglang.pools.find_server_args", lambda: arguments),
        patch("kvbm_sglang.weights.process_began_ns", lambda: time.time_ns() + 10**9),
    ):
        backend = factory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, release.PoolName.KV)  # as a hybrid model's, which come both ways
    pages_of_the_kv_pool(release, backend, pool)
    files = sorted(path.name for path in folder.rglob("*.blocks") if "kv" in path.name.lower())
    assert len(files) == 1, f"the pool that came both ways has these files: {files}"
    pages_of_a_side_pool(release, backend)
    backend.get_stats()
    backend.clear()
    assert backend.batch_exists(["aa"]) == 0
    backend.close()
    backend.close()
    assert backend.batch_exists(["aa"]) == 0
    assert not said, said


if __name__ == "__main__":
    live(Path(sys.argv[1]), Path(sys.argv[2]))
