"""SGLang's own host pools and KvbmHiCache on them, without an engine. Runs in SGLang's environment (see
worker).
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from kvbm_sglang_cpu import plugin
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvbm_core.config import Adapter
from kvbm_core.control.asking import ask_here
from kvbm_core.control.messages import Answer, Order, Result, Verb
from kvbm_core.events.consumer import ZmqReader
from kvbm_core.runtime.replicas import NOT_ALIKE
from kvbm_core.storage.disk.allocate import FileOptions, open_file
from kvbm_core.storage.disk.inspect import find_files
from kvbm_core.storage.disk.io import ThreadIo
from kvbm_core.storage.disk.record import record_bytes, slot_offset_bytes, unpack_file, unpack_record
from kvbm_core.testing import toy_store
from kvbm_sglang.hicache import KvbmHiCache
from kvbm_sglang.linker import KvbmLinker
from kvbm_sglang.pools import STATE_EVERY_TOKENS
from kvbm_sglang.store import DEADLINE_S, OwnFile
from tests import settings_walk
from tests.began import begins_now

PAGE_TOKENS, NUM_PAGES, LAYERS = 16, 32, 4
SGLANGS_RESERVE_BYTES = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
# As in an engine on the CPU: these pools are some MB, and other tests need memory beside them.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = plugin.HOST_RESERVE_BYTES
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
        write_weights(Path(changed["model_name"]))
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
        write_weights(Path(model), b"trained further")
        with backend(folder, {"kv": pool}, model_name=model) as store:
            assert store.batch_exists(keys) == 0, "weights"
        write_weights(Path(model))
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
                said_by_kvbm() as lines,
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


def ranks_of_one_writer_and_an_indexer(folder: str, seed: int) -> list[int]:
    """What goes with latents (DSA: keys of the indexer, a draft's latents) is read along as they are. States
    are divided over ranks all the same: each rank has its own.
    """
    keys, pages = keys_of(8), list(range(8))
    pools = [indexed_latents(seed + rank) for rank in (0, 1)]
    side = [
        PoolTransfer(name=name, keys=keys, host_indices=indices(pages, 64)) for name in ("indexer", "draft")
    ]
    mla = {"is_mla_model": True, "tp_size": 2}
    with (
        _stamped(folder) as model,
        backend(folder, pools[0], model_name=model, tp_rank=0, **mla) as writer,
        backend(folder, pools[1], model_name=model, tp_rank=1, **mla) as reader,
    ):
        before = {name: content(pool, pages) for name, pool in pools[0].items()}
        assert all(map(all, writer.batch_set_v2(side).values()))
        assert all(writer.batch_set_v1(keys, indices(pages, 64)))
        hits = [store.batch_exists_v2(keys, side).kv_hit_pages for store in (writer, reader)]
        assert all(reader.batch_get_v1(keys, indices(pages, 64)))
        assert all(map(all, reader.batch_get_v2(side).values()))
        assert {name: content(pool, pages) for name, pool in pools[1].items()} == before
    return hits


def states_beside_latents(folder: str, seed: int) -> list[list[int]]:
    """Hits of two ranks that have the same latents and states of their own: after the first one has stored
    its state, and after both have.
    """
    keys, pages, hits = keys_of(4), list(range(4)), []
    sides = [make_state_pool(4) for _ in (0, 1)]
    for rank, states in enumerate(sides):
        for tensor in states.kv_buffer:
            tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed + rank))
    state = PoolTransfer(name=PoolName.MAMBA, keys=keys[-1:], host_indices=torch.tensor([2]))
    last = PoolTransfer(name=PoolName.MAMBA, keys=["any"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    mla = {"is_mla_model": True, "tp_size": 2}
    with _stamped(folder) as model, ExitStack() as stack:
        ranks = [
            stack.enter_context(
                backend(
                    folder,
                    {"kv": make_pool("mla", "page_first", seed), "mamba": states},
                    model_name=model,
                    tp_rank=rank,
                    **mla,
                )
            )
            for rank, states in enumerate(sides)
        ]
        assert all(ranks[0].batch_set_v1(keys, indices(pages)))
        before = [states.get_data_page(2).clone() for states in sides]
        for store in ranks:
            assert store.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
            hits.append([store.batch_exists_v2(keys, [last]).kv_hit_pages for store in ranks])
        for store, states, expected in zip(ranks, sides, before, strict=True):
            for tensor in states.kv_buffer:
                tensor.zero_()
            assert store.batch_get_v2([state]) == {PoolName.MAMBA: [True]}
            assert torch.equal(states.get_data_page(2), expected)
    return hits


def indexed_latents(seed: int) -> dict[str, Any]:
    """Host pools of a model with DSA, and of its draft."""
    size = NUM_PAGES * 64
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        device = DSATokenToKVPool(
            size=size,
            page_size=64,
            kv_lora_rank=512,
            dtype=torch.bfloat16,
            qk_rope_head_dim=64,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=576,
        )
    place = {"device_capacity_tokens": size, "start_layer": 0, "end_layer": LAYERS, "pin_memory": False}
    info = device.get_device_pool_infos()[0].buffer_info
    kv, draft = (
        MLATokenToKVPoolHost(info, 2.0, 0, 64, "page_first", target_layer_num=LAYERS, **place)
        for _ in range(2)
    )
    indexer = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), kv, pin_memory=False)
    fill(kv, seed)
    fill(draft, seed + 10)
    keys = indexer.index_k_with_scale_buffer
    keys.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return {"kv": kv, "indexer": indexer, "draft": draft}


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
        write_weights(other, b"other")
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


def orders(folder: str, seed: int) -> None:
    """An operator's, over the private socket: a reset of the disk, drain and resume."""
    keys, pages = keys_of(4), list(range(4))
    pool = make_pool("mha", "page_first", seed)
    extra = {"control": "socket", "instance": "one"}

    def give(verb: Verb, tier: Literal["all", "host", "disk"] = "all") -> Answer:
        (answer,) = ask_here(Order(verb=verb, tier=tier, wait_s=20.0)).answers
        return answer

    with (
        tempfile.TemporaryDirectory(prefix="kvbm-") as place,
        patch.object(tempfile, "tempdir", place),
        backend(folder, {"kv": pool}, extra=extra) as store,
    ):
        assert all(store.batch_set_v1(keys, indices(pages)))
        status = give(Verb.STATUS).status
        assert status is not None and status.tiers["disk"][0] == 4 and status.engine == "SGLang, HiCache"
        assert give(Verb.DRAIN).result is Result.DONE
        assert store.batch_exists(keys) == 0 and not any(store.batch_set_v1(keys, indices(pages)))
        assert not any(store.batch_get_v1(keys, indices(pages)))
        assert give(Verb.RESUME).result is Result.DONE and store.batch_exists(keys) == 4
        assert "no host tier here" in give(Verb.RESET, "host").text and store.batch_exists(keys) == 4
        answer = give(Verb.RESET, "disk")
        assert answer.result is Result.DONE and store.batch_exists(keys) == 0
        assert answer.status is not None and answer.status.tiers["disk"][0] == 0
        assert all(store.batch_set_v1(keys, indices(pages))) and store.batch_exists(keys) == 4


def pools_beside_another_engine(seed: int) -> int:
    """Makes a host pool where 4 GiB of memory are free, as our stand-in for SGLang's kernels lets it."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = SGLANGS_RESERVE_BYTES
    plugin.activate()
    with patch.object(base, "available_host_memory_bytes", lambda **_: 4 << 30):
        return int(make_pool("mha", "page_first", seed).size)


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


def make_state_pool(num_states: int, **more: Any) -> MambaPoolHost:
    """A host pool of states."""
    states = MambaStateBufferInfo(
        temporal=torch.zeros(2, num_states, 1, 8, 8), conv=(torch.zeros(2, num_states, 24, 3),), **more
    )
    place = {"device_capacity": num_states, "layout": "page_first", "pin_memory": False}
    plugin.activate()
    return MambaPoolHost(states, 1.0, 0, **place)


def divided_disk(folder: str, seed: int) -> list[int]:
    """A little host memory for states, much for KV; of prompts that fill the disk, how much can be restored
    of each that has all of its KV there.
    """
    kv, states = make_pool("mha", "page_first", seed), make_state_pool(1)
    pages = STATE_EVERY_TOKENS // PAGE_TOKENS
    size = {"extra": {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 8 * pages}}
    with backend(folder, {"kv": kv, "mamba": states}, **size) as store:
        prompts = [keys_of(pages, f"prompt {number}") for number in range(8)]
        for keys in prompts:
            last = {"keys": keys[-1:], "hit_policy": PoolHitPolicy.TRAILING_PAGES}
            state = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([0]), **last)
            assert store.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
            for start in range(0, pages, NUM_PAGES):
                assert all(
                    store.batch_set_v1(keys[start : start + NUM_PAGES], indices(list(range(NUM_PAGES))))
                )
        state = PoolTransfer(name=PoolName.MAMBA, keys=["any"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert [store.batch_exists(keys) for keys in prompts] == [pages] * 8
        return [store.batch_exists_v2(keys, [state]).kv_hit_pages // pages for keys in prompts]


def sizes_of_all_ranks(folder: str, seed: int) -> dict[str, list[float]]:
    """Bytes of each rank's files, as shares of the one size that is set for an engine."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "one": ("mha", {}),
        "two": ("mha", {"tp_size": 2}),
        "stages": ("mha", {"tp_size": 2, "pp_size": 2}),
        "latents": ("mla", {"tp_size": 2, "is_mla_model": True}),
    }
    found: dict[str, list[float]] = {}
    for name, (kind, of_engine) in kinds.items():
        found[name] = []
        for number in range(of_engine.get("tp_size", 1) * of_engine.get("pp_size", 1)):
            ranks = {"tp_rank": number % 2, "pp_rank": number // 2, **of_engine}
            pools = {"kv": make_pool(kind, "page_first", seed), "mamba": make_state_pool(4)}
            with backend(folder, pools, **ranks) as store:
                size = sum(
                    opened.disk.num_slots * record_bytes(store._pools._pages[pool].page_bytes)
                    for pool, opened in store._pools._stores.items()
                )
                found[name].append(size / 1e8)
    return found


RETURNING_ROWS = ("enable_return_routed_experts", "enable_return_indexer_topk")
"""Their answers have something of each token that is kept for device memory alone."""


def side_pools_not_known(folder: str, seed: int) -> dict[str, list[str]]:
    """Engines with a pool of which nothing can be kept -> what is said; of the KV nothing is kept either."""
    keys, pages = keys_of(4), list(range(4))
    kv, states = make_pool("mha", "page_first", seed), make_state_pool(4)
    beside = make_state_pool(4, extra_checkpoint_buffers=(torch.zeros(4, 3),))
    latents = {"is_mla_model": True, "tp_size": 2}
    engines: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "of tomorrow": ({"of_tomorrow": kv}, {}),
        "compressed": ({"deepseek_v4_c4": kv}, {}),
        "state beside states": ({"mamba": beside}, {}),
        "mixed chunks": ({"mamba": states}, {"arguments": {"enable_mixed_chunk": True}}),
        "8 bits": ({"mamba": states}, {"arguments": {"enable_int8_mamba_checkpoint": True}}),
        **{flag: ({}, {"arguments": {flag: True}}) for flag in RETURNING_ROWS},
        "a draft's heads": ({"kv": make_pool("mla", "page_first", seed), "draft": kv}, latents),
        "none": ({"mamba": states, "swa": kv, "draft": kv, "indexer": kv}, {"arguments": {}}),
    }
    said = {}
    for what, (pools, changed) in engines.items():
        with said_by_kvbm() as lines, backend(folder, {"kv": kv, **pools}, **changed) as store:
            is_kept = what == "none"
            assert store.batch_set_v1(keys, indices(pages)) == [is_kept] * 4, what
            assert store.batch_exists(keys) == 4 * is_kept, what
        said[what] = [line for line in lines if "nothing is cached" in line]
    return said


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
    from sglang.srt.managers.io_struct import CheckWeightsReqInput, ReleaseMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    tags = {tag: ReleaseMemoryOccupationReqInput(tags=[tag]) for tag in ("kv_cache", "weights")}
    checks = {action: CheckWeightsReqInput(action=action) for action in ("checksum", "reset_tensors")}
    calls: tuple[tuple[type, str, Any], ...] = (
        (SchedulerWeightUpdaterManager, "release_memory_occupation", tags["kv_cache"]),
        (SchedulerWeightUpdaterManager, "check_weights", checks["checksum"]),
        (SchedulerWeightUpdaterManager, "check_weights", checks["reset_tensors"]),
        (SchedulerWeightUpdaterManager, "begin_weight_update", None),
        (SchedulerWeightUpdaterManager, "end_weight_update", None),
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


class _Scheduler:
    """What makes a backend in an engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))

    def attach(self, stack: ExitStack, folder: str, pools: dict[str, Any]) -> KvbmHiCache:
        """See ``backend``."""
        return stack.enter_context(backend(folder, pools))


def flushed(folder: str, seed: int) -> list[int]:
    """How many pages are found after flushes of SGLang's cache: of the same weights, and of weights that
    somebody has written to the model; and after a restart.
    """
    from sglang.srt.managers.scheduler import Scheduler

    pool, keys, found = make_pool("mha", "page_first", seed), keys_of(4), []
    for writes in ((0, 0, 1), ()):
        model = torch.nn.Linear(4, 4)
        with ExitStack() as stack:
            store = _Scheduler(model).attach(stack, folder, {"kv": pool})
            store.batch_set_v1(keys[:2], indices([0, 1]))
            for written in writes:
                model.weight.data += written
                with suppress(Exception):  # it fails for want of an engine, once it has begun
                    Scheduler.flush_cache(None)
                if written:
                    assert store.batch_set_v1(keys[2:], indices([2, 3])) == [False] * 2
                found.append(store.batch_exists(keys))
            found.append(store.batch_exists(keys))
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
        write_weights(model)
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


def events(folder: str, seed: int) -> list[str]:
    """What a router hears of pages that are kept, that are found after a restart, that are cleared, and that
    are of old weights; wrong ones.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    keys, extra = keys_of(NUM_PAGES), {"events": "zmq", "events_endpoint": f"ipc://{folder}/a"}
    extra["events_replay_endpoint"] = f"ipc://{folder}/b"
    pool, wrong = make_pool("mha", "page_first", seed), list[str]()
    reader = ZmqReader(extra["events_endpoint"], extra["events_replay_endpoint"])

    def hears(what: str, expected: list[str]) -> None:
        there = {("CPU_TIER2", 0): set(map(hash_str_to_int64, expected))} if expected else {}
        ends_at_s = time.monotonic() + RECOVERED_S
        while not (reader.picture.is_current and reader.picture.places == there):
            reader.poll(0.05)
            if time.monotonic() > ends_at_s:
                wrong.append(f"{what}: {reader.picture.places}")
                return

    try:
        with _stamped(folder) as model:
            with backend(folder, {"kv": pool}, model_name=model, extra=extra) as store:
                store.batch_set_v1(keys, indices(list(range(NUM_PAGES))))
                hears("kept", keys)
            with backend(folder, {"kv": pool}, model_name=model, extra=extra) as store:
                store.batch_exists(keys[:3])
                hears("found again", keys[:3])
                store.clear()
                hears("cleared", [])
            with backend(folder, {"kv": pool}, model_name=model, extra=extra) as store:
                store.batch_set_v1(keys, indices(list(range(NUM_PAGES))))
                hears("kept again", keys)
                with suppress(Exception):  # it fails for want of an engine, once it has begun
                    WeightUpdater.update_weights_from_tensor(None, [])
                store.batch_exists(keys[:3])
                hears("not asked for any more", [])
    finally:
        reader.close()
    return wrong


def settings_of_hicache(folder: str, seed: int) -> list[str]:
    """Settings that HiCache's backend neither heeds nor tells of."""
    runs = []
    model = write_weights(Path(folder) / "some-model")
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


def linker_params(has_latents: bool = False, **more: Any) -> SimpleNamespace:
    """What SGLang gives a linker, with a pool of its own."""
    common: dict[str, Any] = {
        "size": NUM_PAGES * PAGE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if has_latents:
        pool: Any = MLATokenToKVPool(kv_lora_rank=512, qk_rope_head_dim=64, **common)
    else:
        pool = MHATokenToKVPool(head_num=2, head_dim=64, **common)
    params = {"page_size": PAGE_TOKENS, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    params |= {"is_eagle": False, "mtp_draft_device_pools": [], "sidecar_draft_device_pools": []}
    params |= {"attn_tp_cache_group": None, "tp_cache_group": None, **more}
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), **params)


def not_cached_by_linker(
    folder: str, components: Sequence[str] = ("FULL",), given: Mapping[str, Any] | None = None, **more: Any
) -> list[str]:
    """What the linker says of an engine that it must not cache for. ``given``: arguments of its server."""
    arguments = arguments_of(write_weights(Path(folder) / "some-model"), **(given or {}))
    parallel = {"attn_tp_rank": 0, "attn_tp_size": 1, "tp_rank": 0, "tp_size": 1, "attn_dp_size": 1}
    size = {"DYN_KVBM_CPU_CACHE_GB": "0.01"}
    with (
        begins_now("kvbm_sglang.weights"),
        patch.dict("os.environ", size),
        get_parallel().override(dp_rank=None, **parallel),
        said_by_kvbm() as lines,
    ):
        kinds = {ComponentType[name] for name in components}
        linker = KvbmLinker(arguments, linker_params(**more), components=kinds)
        is_on = linker._parts._tiers is not None
        linker.close()
    said = [line for line in lines if "nothing is cached" in line]
    assert is_on is not bool(said)
    return said


def settings_of_linker(folder: str, rank: int) -> list[str]:
    """Settings that the linker neither heeds nor tells of; and its page, on the port of its rank."""
    runs = []
    model = write_weights(Path(folder) / "some-model")
    for in_blocks, number in ((True, 0), (False, rank)):  # KV events are the first rank's
        params = linker_params(has_latents=not in_blocks)
        parallel = {"attn_tp_rank": number, "attn_tp_size": 2, "tp_rank": number, "tp_size": 2}
        place, port = f"{folder}/{in_blocks}", settings_walk.free_port()
        with (
            begins_now("kvbm_sglang.weights"),
            settings_walk.everything_set(place, port, in_blocks=in_blocks) as seen,
            get_parallel().override(dp_rank=None, attn_dp_size=1, **parallel),
        ):
            server_args = arguments_of(model)
            linker = KvbmLinker(server_args, params, components={ComponentType.FULL})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port + number}/metrics", timeout=10) as page:
                    assert "kvbm_matched_tokens 0.0" in page.read().decode()
            finally:
                linker.close()
            assert linker._parts._tiers is not None
        assert (NOT_ALIKE in seen.told) is in_blocks
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
def said_by_kvbm() -> Iterator[list[str]]:
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
    write_weights(model)
    yield str(model)


def write_weights(model: Path, tail: bytes = b"") -> str:
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


def heads_first(folder: str, seed: int) -> dict[str, Any]:
    """What of a prompt goes into the shared store, and stays on a disk that is too small, where SGLang says
    what comes before.
    """
    keys, others, pages = keys_of(8), keys_of(8, "other"), list(range(8))
    pool, shared = make_pool("mha", "page_first", seed), list[float]()
    for name in ("disk", "small", "share"):
        Path(folder, name).mkdir()

    def put(names: list[str], prefix: list[str] | None) -> None:
        said = HiCacheStorageExtraInfo(prefix_keys=prefix)
        assert all(store.batch_set_v1(names, indices(pages[: len(names)]), said))

    with _stamped(folder) as model:
        extra = {"KVBM_REMOTE_URL": f"file://{folder}/share", "KVBM_REMOTE_CACHE_GB": 0}
        with (
            backend(f"{folder}/disk", {"kv": pool}, model_name=model, extra=extra) as store,
            patch("kvbm_sglang.hicache.log") as log,
        ):
            for names, prefix in (
                (keys[4:], keys[:4]),
                (keys[:4], []),
                (keys[4:], keys[:4]),
                (others[4:], None),
            ):
                put(names, prefix)
                assert _settled(store)
                shared.append(store.guard_state.metrics.snapshot()["kvbm_offload_blocks_d2o"])
            lines = [call.args[1] for call in log.warning.call_args_list]
        extra = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 8}
        with backend(f"{folder}/small", {"kv": pool}, model_name=model, extra=extra) as store:
            put(keys[:4], [])
            put(others[:4], [])
            put(keys[4:6], keys[:4])
            kept = store.batch_exists(keys)
    return {"shared": shared, "kept": kept, "lines": lines}
