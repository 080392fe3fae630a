"""SGLang's own host pools and KvbmHiCache on them, without an engine. Runs in SGLang's environment (see
worker).
"""

from __future__ import annotations

import hashlib
import json
import logging
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvbm_core.config import Adapter
from kvbm_core.storage.disk.allocate import FileOptions, open_file
from kvbm_core.storage.disk.inspect import find_files
from kvbm_core.storage.disk.io import ThreadIo
from kvbm_core.storage.disk.record import slot_offset_bytes, unpack_file, unpack_record
from kvbm_core.testing import toy_store
from kvbm_sglang.hicache import KvbmHiCache
from kvbm_sglang.linker import KvbmLinker
from kvbm_sglang.store import DEADLINE_S, OwnFile
from tests import settings_walk
from tests.began import begins_now

PAGE_TOKENS, NUM_PAGES, LAYERS = 16, 32, 4
RECOVERED_S = 30.0


def make_pool(
    kind: str, layout: str, seed: int, dtype: str = "bfloat16", page_tokens: int = PAGE_TOKENS
) -> Any:
    """A host pool of SGLang's, twice NUM_PAGES long, filled with random bytes."""
    size = NUM_PAGES * PAGE_TOKENS
    common: dict[str, Any] = {
        "size": size,
        "page_size": page_tokens,
        "dtype": getattr(torch, dtype),
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    place = {"device_capacity_tokens": size, "start_layer": 0, "end_layer": LAYERS, "pin_memory": False}
    if kind == "mha":
        device: Any = MHATokenToKVPool(head_num=2, head_dim=64, **common)
        host: Any = MHATokenToKVPoolHost
    else:
        device = MLATokenToKVPool(kv_lora_rank=512, qk_rope_head_dim=64, **common)
        host, place = MLATokenToKVPoolHost, {**place, "target_layer_num": LAYERS}
    info = device.get_device_pool_infos()[0].buffer_info
    pool = host(info, 2.0, 0, page_tokens, layout, **place)
    fill(pool, seed)
    return pool


def fill(pool: Any, seed: int) -> None:
    """Other bytes everywhere."""
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(
        torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    )


def indices(pages: list[int], page_tokens: int = PAGE_TOKENS) -> torch.Tensor:
    """The tokens of these pages of a host pool."""
    return torch.cat([torch.arange(page * page_tokens, (page + 1) * page_tokens) for page in pages])


def content(pool: Any, pages: list[int]) -> list[bytes]:
    """The bytes of pages, by SGLang's own copy and not by the addresses that kvbm uses."""
    starts = [page * pool.page_size for page in pages]
    return [
        pool.get_data_page(start, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
        for start in starts
    ]


def keys_of(count: int, salt: str = "") -> list[str]:
    """Page keys as SGLang makes them: hexadecimal SHA-256."""
    return [hashlib.sha256(f"{salt}{number}".encode()).hexdigest() for number in range(count)]


def config_of(**changed: Any) -> HiCacheStorageConfig:
    """One rank of one; ``extra`` are settings in the extra config."""
    extra = {"interface_v1": 1, **changed.pop("extra", {})}
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tests",
        **changed,
    }
    return HiCacheStorageConfig(**values, extra_config=extra)


def arguments_of(model: str, **given: Any) -> ServerArgs:
    """SGLang's own, of this model on a CPU."""
    return ServerArgs(model_path=model, device="cpu", **given)


def engine_with(server_args: Any) -> Any:
    """A context in which these are the arguments of the engine in this process."""
    return patch("kvbm_sglang.pools.find_server_args", lambda: server_args)


@contextmanager
def backend(
    folder: str, pools: dict[str, Any], *, arguments: Any = None, **changed: Any
) -> Iterator[KvbmHiCache]:
    """The backend as SGLang attaches it, with what an earlier one left already found. ``arguments``: of the
    engine, or a dictionary of those that are given to it.
    """
    sizes = {"DYN_KVBM_DISK_CACHE_DIR": folder, "DYN_KVBM_DISK_CACHE_GB": 0.1}
    if "model_name" not in changed:
        changed["model_name"] = str(Path(folder) / "some-model")
        _write_weights(Path(changed["model_name"]))
    if arguments is None or isinstance(arguments, dict):
        arguments = arguments_of(changed["model_name"], **(arguments or {}))
    with begins_now("kvbm_sglang.weights"), engine_with(arguments):
        store = KvbmHiCache(config_of(**{**changed, "extra": {**sizes, **changed.get("extra", {})}}), {})
    try:
        store.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            store.register_mem_host_pool_v2(pool, name)
        store.on_host_pools_registered()
        for opened in store._pools._stores.values():
            assert not isinstance(opened.disk, OwnFile) or opened.disk.wait_recovered(RECOVERED_S)
        yield store
        guarded = [
            series
            for series, n in store.guard_state.metrics.snapshot().items()
            if "guarded_errors" in series and n
        ]
        assert not guarded, guarded
    finally:
        store.close()


# ---------------------------------------------------------------- scenarios


def back_and_forth(folder: str, kind: str, layout: str, seed: int) -> dict[str, Any]:
    """Pages go out, other pages of the pool get them back, and those of a pool made anew after a restart."""
    keys, pages = keys_of(NUM_PAGES), list(range(NUM_PAGES))
    elsewhere = [NUM_PAGES + page for page in reversed(pages)]
    pool = make_pool(kind, layout, seed)
    with _stamped(folder) as model:
        with backend(folder, {"kv": pool}, model_name=model, is_mla_model=kind == "mla") as store:
            before = content(pool, pages)
            assert store.batch_exists(keys) == 0
            assert store.batch_set_v1(keys, indices(pages)) == [True] * NUM_PAGES
            assert store.batch_exists(keys) == NUM_PAGES and store.exists(keys[3])
            assert store.batch_exists([*keys[:5], *keys_of(1, "other"), *keys[5:]]) == 5
            untouched = content(pool, [2 * NUM_PAGES - 1])
            some = keys[: NUM_PAGES - 1]
            assert store.batch_get_v1(some, indices(elsewhere[1:])[: len(some) * PAGE_TOKENS]) == [
                True
            ] * len(some)
            assert content(pool, elsewhere[1:]) == before[: len(some)]
            assert content(pool, [2 * NUM_PAGES - 1]) == untouched
        again = make_pool(kind, layout, seed + 1)
        with backend(folder, {"kv": again}, model_name=model, is_mla_model=kind == "mla") as store:
            assert store.batch_exists(keys) == NUM_PAGES
            assert store.batch_get_v1(keys, indices(pages)) == [True] * NUM_PAGES
            assert content(again, pages) == before
    return {"page_bytes": len(before[0])}


def not_found_by_others(folder: str, seed: int) -> list[str]:
    """Who shares the folder and differs in one thing finds nothing; the writer, come again, finds all of
    it.
    """
    keys, pages = keys_of(8), list(range(8))
    pool = make_pool("mha", "page_first", seed)
    with _stamped(folder) as model:
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert all(store.batch_set_v1(keys, indices(pages)))
        others: dict[str, tuple[Any, dict[str, Any]]] = {
            "layout": (make_pool("mha", "layer_first", seed), {}),
            "layout of the same pieces": (make_pool("mha", "page_first_direct", seed), {}),
            "heads within a page": (make_pool("mha", "page_head", seed), {}),
            "dtype": (make_pool("mha", "page_first", seed, dtype="float16"), {}),
            "page size": (make_pool("mha", "page_first", seed, page_tokens=8), {}),
            "kind": (make_pool("mla", "page_first", seed), {"is_mla_model": True}),
            "model": (pool, {"model_name": "another"}),
            "tp size": (pool, {"tp_size": 2}),
            "tp rank": (pool, {"tp_size": 2, "tp_rank": 1}),
            "pp": (pool, {"pp_size": 2}),
            "pp rank": (pool, {"pp_size": 2, "pp_rank": 1}),
            "cp": (pool, {"attn_cp_size": 2}),
        }
        for what, (other, changed) in others.items():
            with backend(folder, {"kv": other}, **{"model_name": model, **changed}) as store:
                before = content(other, [0])
                assert store.batch_exists(keys) == 0, what
                assert store.batch_get_v1(keys, indices(pages, other.page_size)) == [False] * 8, what
                assert content(other, [0]) == before, what
        _write_weights(Path(model), b"trained further")
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert store.batch_exists(keys) == 0, "weights"
        _write_weights(Path(model))
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert store.batch_exists(keys) == 8
    return list(others)


def bytes_of_unknown_meaning(folder: str, seed: int) -> None:
    """Both kinds of float8 are stored as bytes: the engine's settings tell them apart; none is kept
    without.
    """
    keys, pages = keys_of(4), list(range(4))
    pool, alike = (
        make_pool("mha", "page_first", seed, dtype=f"float8_{kind}") for kind in ("e5m2", "e4m3fn")
    )
    assert pool.dtype == alike.dtype == torch.uint8
    with _stamped(folder) as model:
        e5m2, e4m3 = (arguments_of(model, kv_cache_dtype=f"fp8_{kind}") for kind in ("e5m2", "e4m3"))
        settled = arguments_of(model)  # what the user gave is one thing, what SGLang made of it another
        declare_resolution(settled, "a test", kv_cache_dtype="fp8_e5m2")
        assert settled.kv_cache_dtype == "auto"
        with backend(folder, {"kv": pool}, arguments=e5m2) as store:
            assert all(store.batch_set_v1(keys, indices(pages)))
        with backend(folder, {"kv": alike}, arguments=e4m3) as store:
            assert store.batch_exists(keys) == 0
        with backend(folder, {"kv": pool}, arguments=settled, model_name="under another name") as store:
            assert store.batch_exists(keys) == 4
        with backend(folder, {"kv": pool}, arguments=arguments_of(model)) as store:
            assert store.batch_exists(keys) == 0


def not_cached(folder: str, seed: int) -> dict[str, list[str]]:
    """Engines of which nothing may be kept or found -> what is said of each, besides what is said of all."""
    keys, pages = keys_of(4), list(range(4))
    pool = make_pool("mha", "page_first", seed)
    with _stamped(folder) as model:
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert all(store.batch_set_v1(keys, indices(pages)))
        sees_images = arguments_of(model)
        model_config_of(sees_images).is_multimodal = True
        newer = SimpleNamespace(model_path=model, of_tomorrow=3)
        engines = {
            "dummy": arguments_of(model, load_format="dummy"),
            "lora": arguments_of(model, enable_lora=True),
            "lora at start": arguments_of(model, lora_paths=["an-adapter=/somewhere"]),
            "images": sees_images,
            "a newer SGLang": newer,
        }
        said = {}
        for what, arguments in engines.items():
            with (
                _warnings() as lines,
                backend(folder, {"kv": pool}, arguments=arguments, model_name=model) as store,
            ):
                assert store.batch_exists(keys) == 0, what
                assert store.batch_set_v1(keys, indices(pages)) == [False] * 4, what
                assert store.batch_get_v1(keys, indices(pages)) == [False] * 4, what
            said[what] = [line for line in lines if "nothing is cached" in line]
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert store.batch_exists(keys) == 4, "all of it is still there for those who may have it"
    return said


def told_apart(folder: str, seed: int) -> list[str]:
    """Changes of an engine that shape K and V, yet whose pages were found by the other one."""
    keys, pages = keys_of(4), list(range(4))
    pool = make_pool("mha", "page_first", seed)
    wrong = []
    scales = Path(folder) / "scales.json"
    with _stamped(folder) as model:
        shaping: dict[str, dict[str, Any]] = {
            "rope": {"json_model_override_args": '{"rope_theta": 5000.0}'},
            "quantization": {"quantization": "fp8"},
            "kv dtype": {"kv_cache_dtype": "fp8_e5m2"},
            "scales": {"quantization_param_path": str(scales)},
            "backend": {"attention_backend": "triton"},
            "length": {"context_length": 256},
            "draft": {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2},
            "attention DP": {"enable_dp_attention": True},
        }
        alike: dict[str, dict[str, Any]] = {
            "port": {"port": 30001},
            "name": {"served_model_name": "another"},
            "memory": {"mem_fraction_static": 0.5, "max_total_tokens": 5000, "max_running_requests": 3},
            "seed": {"random_seed": 17},
            "graphs": {"disable_cuda_graph": True},
            "logs": {"log_level": "debug", "enable_metrics": True},
        }
        scales.write_text("1")
        for what, given in {"plain": {}, **shaping}.items():
            with backend(folder, {"kv": pool}, arguments=given, model_name=model) as store:
                if store.batch_exists(keys):
                    wrong.append(what)
                assert all(store.batch_set_v1(keys, indices(pages))), what
        scales.write_text("2")
        with backend(folder, {"kv": pool}, arguments=shaping["scales"], model_name=model) as store:
            if store.batch_exists(keys):
                wrong.append("the content of the scales")
        for what, given in alike.items():
            with backend(folder, {"kv": pool}, arguments=given, model_name=model) as store:
                if store.batch_exists(keys) != 4:
                    wrong.append(f"{what}, which changes nothing")
    return wrong


def ranks_of_one_writer(folder: str, seed: int) -> None:
    """Of latents one rank writes and the others read along; of a second engine they do not."""
    keys, pages = keys_of(8), list(range(8))
    pools = [make_pool("mla", "page_first", seed + rank) for rank in (0, 1)]
    mla = {"is_mla_model": True, "tp_size": 2}
    with (
        _stamped(folder) as model,
        backend(folder, {"kv": pools[1]}, model_name=model, tp_rank=1, **mla) as reader,
    ):
        assert reader.batch_exists(keys) == 0, "its writer is not there yet"
        with backend(folder, {"kv": pools[0]}, model_name=model, tp_rank=0, **mla) as writer:
            before = content(pools[0], pages)
            assert all(writer.batch_set_v1(keys, indices(pages)))
            assert reader.batch_exists(keys) == 8
            assert reader.batch_get_v1(keys, indices(pages)) == [True] * 8
            assert content(pools[1], pages) == before
            _damage(folder, "bit of the payload", 3, seed)
            assert reader.batch_get_v1(keys, indices(pages)) == [True] * 3 + [False] + [True] * 4
            assert writer.clear()
            assert reader.batch_exists(keys) == 0
            assert all(writer.batch_set_v1(keys[:2], indices(pages[:2])))
            assert reader.batch_exists(keys) == 2
        other = patch("kvbm_sglang.pools.engine_claim", lambda config: "another engine")
        with other, backend(folder, {"kv": pools[1]}, model_name=model, tp_rank=1, **mla) as stranger:
            assert stranger.batch_exists(keys) == 0


def shared(folder: str, kind: str, url: str, seed: int) -> dict[str, float]:
    """A second machine, whose disk is empty, has what the first one stored; later it has it on its disk.

    Of latents all ranks of the second one read what one rank of the first one wrote.
    """
    toy_store.register()
    keys, pages = keys_of(8), list(range(8))
    disks = [Path(folder, f"disk{number}") for number in range(2)]
    for place in (*disks, Path(folder, "share")):
        place.mkdir()
    pool = make_pool(kind, "page_first", seed)
    before = content(pool, pages)
    remote = {"extra": {"KVBM_REMOTE_URL": url.format(folder), "KVBM_REMOTE_CACHE_GB": 0}}
    with _stamped(folder) as model:
        engine: dict[str, Any] = {"model_name": model, "is_mla_model": kind == "mla", "tp_size": 2}
        with backend(str(disks[0]), {"kv": pool}, **engine, **remote) as store:
            assert store.batch_set_v1(keys, indices(pages)) == [True] * 8
            assert _settled(store)
            assert store.clear() and store.batch_exists(keys) == 8, "what machines share was cleared"
        with backend(str(disks[1]), {"kv": pool}, **engine, **remote) as store:
            fill(pool, seed + 1)
            assert store.batch_exists([*keys[:5], *keys_of(1, "other"), *keys[5:]]) == 5
            assert store.batch_exists_v2(keys).kv_hit_pages == 8
            assert store.batch_get_v1(keys, indices(pages)) == [True] * 8
            assert content(pool, pages) == before
            assert _settled(store)
            numbers = store.guard_state.metrics.snapshot()
        with backend(str(disks[1]), {"kv": pool}, tp_rank=1, **engine, **remote) as other:
            fill(pool, seed + 1)
            assert other.batch_exists(keys) == (8 if kind == "mla" else 0)
            assert other.batch_get_v1(keys, indices(pages)) == [kind == "mla"] * 8
            assert (content(pool, pages) == before) is (kind == "mla")
        with backend(str(disks[1]), {"kv": pool}, **engine) as store:
            fill(pool, seed + 1)
            assert store.batch_get_v1(keys, indices(pages)) == [True] * 8
            assert content(pool, pages) == before
    return {name: n for name, n in numbers.items() if n}


def _settled(store: KvbmHiCache) -> bool:
    """Waits until nothing is on its way to or from the remote store."""
    chain = store._pools._stores["kv"]._chain
    return chain is not None and chain.settle(RECOVERED_S)


def damaged(folder: str, how: str, seed: int) -> dict[str, Any]:
    """One page of eight is damaged on the disk: it is not loaded, the others are, and it is written again."""
    keys, pages, bad = keys_of(8), list(range(8)), 3
    pool = make_pool("mha", "page_first", seed)
    with _stamped(folder) as model, backend(folder, {"kv": pool}, model_name=model) as store:
        before = content(pool, pages)
        assert all(store.batch_set_v1(keys, indices(pages)))
        _damage(folder, how, bad, seed)
        lost = [bad] if how != "truncated" else pages[bad:]
        fill(pool, seed + 1)
        got = store.batch_get_v1(keys, indices(pages))
        assert got == [page not in lost for page in pages], got
        whole = [page for page in pages if page not in lost]
        assert content(pool, whole) == [before[page] for page in whole]
        assert store.batch_exists(keys) == bad
        fill(pool, seed)
        assert content(pool, pages) == before
        assert all(store.batch_set_v1(keys, indices(pages)))
        fill(pool, seed + 2)
        assert all(store.batch_get_v1(keys, indices(pages)))
        assert content(pool, pages) == before
        failures = {
            name: n for name, n in store.guard_state.metrics.snapshot().items() if "failures" in name and n
        }
    return failures


def cleared(folder: str, seed: int) -> None:
    """clear() forgets this model's pages, for good, and nobody else's; other files in the folder stay."""
    keys, pages = keys_of(4), list(range(4))
    pool = make_pool("mha", "page_first", seed)
    (Path(folder) / "notes.txt").write_text("not kvbm's")
    with _stamped(folder) as model:
        other = Path(folder) / "other-model"
        _write_weights(other, b"other")
        for name in (model, str(other)):
            with backend(folder, {"kv": pool}, model_name=name) as store:
                assert all(store.batch_set_v1(keys, indices(pages)))
                if name == model:
                    assert store.clear()
                    assert store.batch_exists(keys) == 0
        for name, expected in ((model, 0), (str(other), 4)):
            with backend(folder, {"kv": pool}, model_name=name) as store:
                assert store.batch_exists(keys) == expected
    assert (Path(folder) / "notes.txt").read_text() == "not kvbm's"


def side_pools(folder: str, seed: int) -> None:
    """A second pool of pages: each policy gives what the rules say, and its bytes come back."""
    kv, window = make_pool("mha", "page_first", seed), make_pool("mha", "layer_first", seed + 1)
    keys, pages = keys_of(12), list(range(12))
    present = [0, 1, 2, 5, 6, 9]

    def transfer(policy: str, count: int, **more: Any) -> PoolTransfer:
        return PoolTransfer(name=PoolName.SWA, keys=keys[:count], hit_policy=PoolHitPolicy(policy), **more)

    with backend(folder, {"kv": kv, "swa": window}) as store:
        before = content(window, present)
        side = PoolTransfer(name=PoolName.SWA, keys=[keys[p] for p in present], host_indices=indices(present))
        assert store.batch_set_v2([side]) == {PoolName.SWA: [True] * len(present)}
        assert store.batch_exists_v2(keys, [transfer("all_pages", 1)]).kv_hit_pages == 0  # there is no KV yet
        assert all(store.batch_set_v1(keys, indices(pages)))
        every = store.batch_exists_v2(keys, [transfer("all_pages", 1)])
        assert (every.kv_hit_pages, every.restorable_prefix_pages) == (3, [1, 2, 3])
        assert every.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.SWA: 3}
        tail = store.batch_exists_v2(keys, [transfer("trailing_pages", 2)])
        assert (tail.kv_hit_pages, tail.restorable_prefix_pages) == (7, [1, 2, 3, 7])
        both = store.batch_exists_v2(keys, [transfer("trailing_pages", 1), transfer("all_pages", 1)])
        assert both.restorable_prefix_pages == [1, 2, 3]
        groups = store.batch_exists_v2(keys, [transfer("block_groups", 12, group_pages=2, block_pages=4)])
        assert (groups.kv_hit_pages, groups.extra_pool_hit_pages[PoolName.SWA]) == (12, 4)
        assert store.batch_exists_v2(keys).kv_hit_pages == 12
        unknown = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert store.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0
        assert store.batch_set_v2([unknown]) == {PoolName.MAMBA: [False]}
        fill(window, seed + 2)
        assert store.batch_get_v2([side]) == {PoolName.SWA: [True] * len(present)}
        assert content(window, present) == before


def odd_calls(folder: str, seed: int) -> dict[str, float]:
    """What SGLang should never ask for is refused: nothing is read, written or raised."""
    pool = make_pool("mha", "page_first", seed)
    keys = keys_of(2)
    sizes = {"DYN_KVBM_DISK_CACHE_DIR": folder, "DYN_KVBM_DISK_CACHE_GB": 0.1}
    with _stamped(folder) as model, begins_now("kvbm_sglang.weights"), engine_with(arguments_of(model)):
        store = KvbmHiCache(config_of(extra=sizes), {})
    try:
        store._pools.wait_known(RECOVERED_S)
        assert store.batch_exists(keys) == 0  # before any pool is known
        assert store.batch_set_v1(keys, indices([0, 1])) == [False, False]
        store.register_mem_pool_host(pool)
        assert store.batch_set_v1(keys, indices([0])) == [False, False]
        assert store.batch_get_v1([], indices([0])[:0]) == []
        assert store.batch_exists([]) == 0
        assert store.get_stats() is None
    finally:
        store.close()
        store.close()
    assert store.batch_exists(keys) == 0
    return {
        name: n for name, n in store.guard_state.metrics.snapshot().items() if "guarded_errors" in name and n
    }


def weights_updated(folder: str, seed: int) -> list[int]:
    """How many pages are found before and after SGLang updates its weights, or gives their memory back."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    tags = {tag: ReleaseMemoryOccupationReqInput(tags=[tag]) for tag in ("kv_cache", "weights")}
    calls: tuple[tuple[type, str, Any], ...] = (
        (SchedulerWeightUpdaterManager, "release_memory_occupation", tags["kv_cache"]),
        (SchedulerWeightUpdaterManager, "release_memory_occupation", tags["weights"]),
        (SchedulerWeightUpdaterManager, "update_weights_from_disk", None),
        (WeightUpdater, "update_weights_from_disk", "a path"),
        (WeightUpdater, "update_weights_from_tensor", []),
    )
    pool, keys, found = make_pool("mha", "page_first", seed), keys_of(4), []
    for kind, name, argument in calls:
        with backend(folder, {"kv": pool}) as store:
            store.batch_set_v1(keys, indices([0, 1, 2, 3]))
            found.append(store.batch_exists(keys))
            with suppress(Exception):  # it fails for want of an engine, once it has begun
                getattr(kind, name)(None, argument)
            found.append(store.batch_exists(keys))
            assert any(store.batch_set_v1(keys, indices([0, 1, 2, 3]))) == bool(found[-1])
    return found


def statistics(folder: str, seed: int) -> dict[str, Any]:
    """What SGLang's histograms are fed with, and kvbm's own numbers."""
    pool = make_pool("mha", "page_first", seed)
    keys, pages = keys_of(8), list(range(8))
    with backend(folder, {"kv": pool}, enable_storage_metrics=True) as store:
        assert store.get_stats() is None
        assert all(store.batch_set_v1(keys, indices(pages)))
        assert all(store.batch_get_v1(keys[:4], indices(pages[:4])))
        assert store.batch_exists(keys_of(10)) == 8
        taken = store.get_stats()
        assert store.get_stats() is None
        assert type(taken).__name__ == "StorageMetrics"
        assert min(*taken.backup_bandwidth, *taken.prefetch_bandwidth) > 0
        numbers = {name: n for name, n in store.guard_state.metrics.snapshot().items() if n}
    return {"backup_pgs": taken.backup_pgs, "prefetch_pgs": taken.prefetch_pgs, "numbers": numbers}


def refused(extra: dict[str, Any]) -> str:
    """The one line that a wrong setting gives."""
    try:
        KvbmHiCache(config_of(extra=extra), {}).close()
    except ValueError as error:
        return str(error)
    return json.dumps("taken")


def in_any_order(folder: str, seed: int) -> int:
    """Two models with pools of one layout, side by side, started again in the other order; how many files."""
    keys, pages = keys_of(4), list(range(4))
    pools = [make_pool("mha", "page_first", seed + number) for number in range(2)]
    models = [Path(folder, name) for name in ("one", "other")]
    for model in models:
        _write_weights(model)
    expected = [content(pool, pages) for pool in pools]
    for order in ([0, 1], [1, 0]):
        with ExitStack() as stack:
            stores = {
                number: stack.enter_context(
                    backend(folder, {"kv": pools[number]}, model_name=str(models[number]))
                )
                for number in order
            }
            for number, store in stores.items():
                if order[0] == 0:
                    assert all(store.batch_set_v1(keys, indices(pages)))
                else:
                    fill(pools[number], seed + 10)
                    assert store.batch_get_v1(keys, indices(pages)) == [True] * 4
                    assert content(pools[number], pages) == expected[number]
    return len(list(find_files(Path(folder), _raise)))


def joins_later(folder: str, seed: int) -> None:
    """The engine before was killed and is still ending: its file is locked when this one starts."""
    keys, pages, pool = keys_of(4), list(range(4)), make_pool("mha", "page_first", seed)
    with _stamped(folder) as model:
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert all(store.batch_set_v1(keys, indices(pages)))
        (path,) = find_files(Path(folder), _raise)
        holder = open_file(path, FileOptions())
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert store.batch_exists(keys) == 0
            assert store.batch_set_v1(keys, indices(pages)) == [False] * 4
            holder.close()
            store._pools._next_try_s = 0.0  # the pause is over
            assert store.batch_exists(keys) == 4


def settings_of_hicache(folder: str, seed: int) -> list[str]:
    """Settings that HiCache's backend neither heeds nor tells of."""
    runs = []
    model = _write_weights(Path(folder) / "some-model")
    for in_blocks in (True, False):
        place = f"{folder}/{in_blocks}"
        with (
            begins_now("kvbm_sglang.weights"),
            engine_with(arguments_of(model)),
            settings_walk.everything_set(place, settings_walk.free_port(), in_blocks=in_blocks) as seen,
        ):
            store = KvbmHiCache(config_of(), {})
            try:
                pool = make_pool("mha", "page_first", seed)
                store.register_mem_pool_host(pool)
                store.on_host_pools_registered()
                assert all(store.batch_set_v1(keys_of(4), indices([0, 1, 2, 3])))
                kept = store._pools._stores["kv"]
                assert isinstance(kept.disk, OwnFile) and kept._chain is not None
                if in_blocks:
                    assert kept.disk.num_slots == 32
                    told = "2 stores: HiCache uses the first one alone"  # once
                    assert any(told in line for line in seen.told)
                assert kept._deadline_s == DEADLINE_S, "30 s are more than SGLang gives"
                assert isinstance(kept.disk._writer.record_io._io, ThreadIo)
                assert isinstance(kept.disk._reader.record_io._io, ThreadIo)
                assert any("KVBM_DISK_DEADLINE_S=30" in line for line in seen.told)
            finally:
                store.close()
        runs.append(seen)
    return settings_walk.neither_read_nor_told(Adapter.HICACHE, runs)


def linker_params(**more: Any) -> SimpleNamespace:
    """What SGLang gives a linker, with a pool of its own."""
    pool = MHATokenToKVPool(
        size=NUM_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        layer_num=LAYERS,
        head_num=2,
        head_dim=64,
        device="cpu",
        enable_memory_saver=False,
    )
    params = {"page_size": PAGE_TOKENS, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    params |= {"is_eagle": False, "mtp_draft_device_pools": [], "sidecar_draft_device_pools": [], **more}
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), **params)


def not_cached_by_linker(folder: str, **more: Any) -> list[str]:
    """What the linker says of an engine that it must not cache for."""
    arguments = arguments_of(_write_weights(Path(folder) / "some-model"))
    parallel = {"attn_tp_rank": 0, "attn_tp_size": 1, "tp_rank": 0, "tp_size": 1, "attn_dp_size": 1}
    size = {"DYN_KVBM_CPU_CACHE_GB": "0.01"}
    with (
        begins_now("kvbm_sglang.weights"),
        patch.dict("os.environ", size),
        get_parallel().override(dp_rank=None, **parallel),
        _warnings() as lines,
    ):
        linker = KvbmLinker(arguments, linker_params(**more), components={ComponentType.FULL})
        is_on = linker._parts._tiers is not None
        linker.close()
    said = [line for line in lines if "nothing is cached" in line]
    assert is_on is not bool(said)
    return said


def settings_of_linker(folder: str, rank: int) -> list[str]:
    """Settings that the linker neither heeds nor tells of; and its page, on the port of its rank."""
    runs = []
    model = _write_weights(Path(folder) / "some-model")
    parallel = {"attn_tp_rank": rank, "attn_tp_size": 2, "tp_rank": rank, "tp_size": 2, "attn_dp_size": 1}
    params = linker_params()
    for in_blocks in (True, False):
        place, port = f"{folder}/{in_blocks}", settings_walk.free_port()
        with (
            begins_now("kvbm_sglang.weights"),
            settings_walk.everything_set(place, port, in_blocks=in_blocks) as seen,
            get_parallel().override(dp_rank=None, **parallel),
        ):
            server_args = arguments_of(model)
            linker = KvbmLinker(server_args, params, components={ComponentType.FULL})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=10) as page:
                    assert "kvbm_matched_tokens 0.0" in page.read().decode()
            finally:
                linker.close()
            assert linker._parts._tiers is not None
        runs.append(seen)
    return settings_walk.neither_read_nor_told(Adapter.LINKER, runs)


# ---------------------------------------------------------------- inside

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What kvbm says meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvbm").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("kvbm").removeHandler(handler)


@contextmanager
def _stamped(folder: str) -> Iterator[str]:
    """A folder that looks like a model's, so that what is stored is found after a restart."""
    model = Path(folder) / "a-model"
    _write_weights(model)
    yield str(model)


def _write_weights(model: Path, tail: bytes = b"") -> str:
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_LLAMA))
    (model / "model.safetensors").write_bytes(b"weights" * 1000 + tail)
    return str(model)


def _damage(folder: str, how: str, page: int, seed: int) -> None:
    """``page``: which record, in the order of writing."""
    (path,) = find_files(Path(folder), _raise)
    with path.open("r+b", buffering=0) as file:
        header = unpack_file(file.read(4096))
        assert header is not None
        offset = slot_offset_bytes(page, header.payload_bytes)
        file.seek(offset)
        assert unpack_record(file.read(4096)) is not None
        if how == "truncated":
            file.truncate(offset + 5000)
        elif how == "zeroed":
            file.seek(offset + 4096)
            file.write(bytes(4096))
        elif how == "swapped":  # with its neighbour's record
            size = slot_offset_bytes(page + 1, header.payload_bytes) - offset
            file.seek(offset + size)
            neighbour = file.read(size)
            file.seek(offset)
            file.write(neighbour)
        else:
            at = (
                offset
                + 4096
                + (seed % header.payload_bytes if how == "bit of the payload" else -4096 + seed % 100)
            )
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << seed % 8]))


def _raise(error: OSError) -> None:
    raise error
