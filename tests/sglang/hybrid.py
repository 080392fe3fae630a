"""SGLang's own pools, tree and controller of a hybrid model with kvbm under them, without an engine. Runs in
SGLang's environment (see worker).

The model is a fake one: its keys, values and states are bytes that a hash of the tokens before them seeds. So
each of them can be told to be right, wherever it comes from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kvbm_sglang_cpu import plugin
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

from kvbm_core.storage.disk.inspect import find_files
from kvbm_core.storage.disk.record import slot_offset_bytes, unpack_file
from kvbm_core.types import Tier
from kvbm_sglang.device_pool import DevicePages
from kvbm_sglang.engine_settings import find_server_args
from kvbm_sglang.events import published_hash
from kvbm_sglang.hicache import KvbmHiCache
from kvbm_sglang.identity import page_keys
from kvbm_sglang.linker import KvbmLinker
from kvbm_sglang.store import OwnFile
from tests.began import begins_now
from tests.engines import PATIENCE_S
from tests.sglang.pools import arguments_of, engine_with, said_by_kvbm, write_weights

PAGE_TOKENS, NUM_PAGES, NUM_STATES = 16, 64, 12
ATTENTION_LAYERS, STATE_LAYERS = [1, 3], [0, 2]
SHAPE = Mamba2StateShape(
    conv=[(24, 3)],
    temporal=(2, 8, 16),
    intermediate_size=16,
    conv_dim=24,
    ssm_state_size=16,
    num_heads=2,
    head_dim=8,
    state_size=16,
    conv_kernel=4,
)


class Engine:
    """A rank of an engine: device pools, tree, host pools, controller with its storage threads, kvbm."""

    def __init__(
        self, common: dict[str, Any], kv: Any, states: Any, pools: Any, settings: dict[str, Any] | None = None
    ) -> None:
        """``kv``: the pool of the allocator. ``pools``: KV pools whose rows are the allocator's, layer by
        layer: the model's own, and a draft's. ``settings``: of the linker; None: HiCache.
        """
        self.states, self._pools = states, pools
        self.tokens = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", kv, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=states,
            token_to_kv_pool_allocator=self.tokens,
            page_size=PAGE_TOKENS,
            **common,
        )
        self.tree = UnifiedRadixCache(params)
        self._rids = itertools.count()
        self.store: KvbmHiCache | None = None
        self.linker: KvbmLinker | None = None
        if settings is not None:
            self.linker = self._link(params, settings)
            return
        self.tree.init_hicache(SimpleNamespace(file_storage_path=None), params)
        self.store = self.tree.cache_controller.storage_backend
        if (
            len(pools) > 1 and not params.mtp_draft_device_pools
        ):  # as SGLang does when its draft worker is there
            specs, entries = build_hicache_draft_sidecars(
                draft_device_pools=(pools[1],), tree_cache=self.tree
            )
            for spec, entry in zip(specs, entries, strict=True):
                self.tree.register_sidecar_pool(spec, entry)

    def _link(self, params: CacheInitParams, settings: dict[str, Any]) -> KvbmLinker:
        """As SGLang's registry does."""
        arguments = find_server_args()
        components = set(self.tree.components)
        linker = KvbmLinker(arguments, params, components=components, extra_config=settings)
        self.tree.init_cache_linker(linker)
        params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(
            linker.layer_done_counter
        )
        return linker

    @classmethod
    def of_hybrid(
        cls, shape: Mamba2StateShape, state_dtype: torch.dtype, settings: dict[str, Any] | None = None
    ) -> Engine:
        """Two layers of attention, two with states."""
        states = HybridReqToTokenPool(
            size=4,
            mamba_size=NUM_STATES,
            mamba_spec_state_size=4,
            max_context_len=NUM_PAGES * PAGE_TOKENS,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                shape=shape,
                layers=STATE_LAYERS,
                dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=state_dtype),
            ),
            mamba_layer_ids=STATE_LAYERS,
            enable_mamba_extra_buffer=True,
        )
        kv = HybridLinearKVPool(
            size=NUM_PAGES * PAGE_TOKENS,
            dtype=torch.bfloat16,
            page_size=PAGE_TOKENS,
            head_num=2,
            head_dim=16,
            full_attention_layer_ids=ATTENTION_LAYERS,
            device="cpu",
            mamba_pool=states.mamba_pool,
        )
        components = (ComponentType.FULL, ComponentType.MAMBA)
        common = {"tree_components": components, "enable_mamba_extra_buffer": True}
        return cls(common, kv, states, [kv.full_kv_pool], settings)

    @classmethod
    def with_draft(cls, *, is_packed: bool) -> Engine:
        """Three layers of attention, and a draft model (EAGLE) with one: in the model's own pages, or of
        other heads and in a pool of its own.
        """
        states = ReqToTokenPool(
            size=4, max_context_len=NUM_PAGES * PAGE_TOKENS, device="cpu", enable_memory_saver=False
        )
        common: dict[str, Any] = {"size": NUM_PAGES * PAGE_TOKENS, "page_size": PAGE_TOKENS}
        common |= {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
        kv = MHATokenToKVPool(head_num=2, head_dim=16, layer_num=3, **common)
        heads = {"head_num": 2, "head_dim": 16} if is_packed else {"head_num": 4, "head_dim": 8}
        draft = MHATokenToKVPool(layer_num=1, **heads, **common)
        tree: dict[str, Any] = {"tree_components": (ComponentType.FULL,), "is_eagle": True}
        tree |= {"enable_kv_cache_events": True, "mtp_draft_device_pools": (draft,) if is_packed else ()}
        return cls(tree, kv, states, [kv, draft])

    # ---------------------------------------------------------------- the fake model

    def compute(self, tokens: list[int], ends: list[int], *, known: int = 0) -> None:
        """Computes what is not ``known`` of a prompt, and a state at each of ``ends``; the tree gets them."""
        match = self.match(tokens, self._request())
        indices = self.tree.path_device_indices(match.last_device_node)[:known]
        assert len(indices) == known
        for end in ends:
            fresh = self._alloc(end - len(indices))
            self._write_kv(tokens, len(indices), fresh)
            begun = len(indices)
            indices = torch.cat([indices, fresh])
            slot = self.new_state(tokens[:end]) if self.has_states else None
            key = RadixKey(array("q", tokens[: end + self.is_eagle]), is_bigram=self.is_eagle)
            self.tree.insert(
                InsertParams(key=key, value=indices.clone(), mamba_value=slot, prev_prefix_len=begun)
            )
        self.settle()

    def new_state(self, tokens: list[int]) -> torch.Tensor:
        """A slot with the state after ``tokens``."""
        slot = self._alloc_state()
        for view, expected in self._state(int(slot[0]), tokens):
            view.copy_(expected)
        return slot

    @property
    def has_states(self) -> bool:
        """Whether the model is a hybrid one."""
        return isinstance(self.states, HybridReqToTokenPool)

    @property
    def is_eagle(self) -> bool:
        """Whether a page is named by pairs of tokens: it takes one token more."""
        return bool(self.tree.tree_core.is_eagle)

    def ask(self, tokens: list[int]) -> int:
        """Serves a prompt up to where its model would go on computing; how many tokens of it were known.
        Every byte of KV and of the state that is read is compared.
        """
        request = self._request()
        handle = CacheRequestHandle(request.rid, 0)
        match = self.match(tokens, request)
        held = match.device_prefix_len + match.host_hit_length
        self.tree.prefetch_from_storage(
            handle,
            match.last_host_node,
            array("q", tokens[held:]),
            self.tree.get_last_hash_value(match.last_host_node) if held else None,
        )
        self._wait(lambda: self.tree.check_prefetch_progress(handle))
        match = self.match(tokens, request, cow_mamba=True)
        request.last_node = match.last_device_node
        request.mamba_host_hit_length = match.mamba_host_hit_length
        known = match.device_prefix_len + match.host_hit_length
        if match.host_hit_length or match.mamba_host_hit_length:
            params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            loaded, _ = self.tree.init_load_back(params)
            assert loaded == match.host_hit_length
            self.tree.ready_to_load_host_cache()
            self.settle()
        if known:
            self._check_kv(tokens, self.tree.path_device_indices(match.best_match_node), known)
        if known and self.has_states:
            self._check_state(request, match.best_match_node, tokens[:known])
        if request.kv.mamba_pool_idx is not None:
            self.states.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
        return known

    def ask_linker(self, tokens: list[int]) -> int:
        """As ``ask``, of an engine with the linker: what is loaded is the request's own until its forward."""
        request = self._request()
        match = self.match(tokens, request, cow_mamba=True)
        request.last_node = match.last_device_node
        device, known = match.device_prefix_len, match.device_prefix_len + match.host_hit_length
        indices = self.tree.path_device_indices(match.last_device_node)[:device]
        if match.host_hit_length:
            params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            loaded, _ = self.tree.init_load_back(params)
            assert loaded == match.host_hit_length
            own = self.tree.linker.private_load_indices[request.rid]
            counter = self.linker.layer_done_counter
            counter.set_consumer(self.tree.ready_to_load_host_cache())
            self.states.mamba2_layer_cache(STATE_LAYERS[0])  # a forward reads a layer with states first
            self._check_state_in([int(request.kv.mamba_pool_idx)], tokens[:known])
            self._check_kv(tokens, torch.cat([indices, own]), known)
            assert self.tree.finish_external_linker_loads([request]) == []
            self.tokens.free(own)
        elif known:
            self._check_kv(tokens, indices, known)
            self._check_state_in([int(request.kv.mamba_cow_src_index)], tokens[:known])
        if request.kv.mamba_pool_idx is not None:
            self.states.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
        return known

    def forget_device(self) -> None:
        """Evicts everything from the device, and writes over what was there."""
        num_states = NUM_STATES if self.has_states else 0
        self.tree.evict(EvictParams(num_tokens=NUM_PAGES * PAGE_TOKENS, mamba_num=num_states))
        self.settle()
        for tensor in self._device_tensors():
            tensor.view(torch.uint8).random_(0, 256)

    def forget_host(self) -> None:
        """The host pools as well: what comes back comes from kvbm."""
        self.settle()
        for what in reversed(self.tree.tree_components):
            self.tree.evict_host(4 * NUM_PAGES * PAGE_TOKENS, what)
        self.settle()
        for entry in self.tree.host_pool_group.entries:
            buffers = entry.host_pool.kv_buffer
            for buffer in buffers if isinstance(buffers, list) else [buffers]:
                buffer.view(torch.uint8).random_(0, 256)

    def settle(self) -> None:
        """Until nothing moves."""
        tree = self.tree

        def is_idle() -> bool:
            if tree.linker is not None:
                return not tree.linker.pending_offloads
            return not (tree.ongoing_write_through or tree.ongoing_load_back or tree.ongoing_backup)

        self._wait(is_idle)

    def close(self) -> None:
        """Ends the storage threads, and kvbm."""
        self.tree.shutdown()
        self.tree.release_host_resources()

    # ---------------------------------------------------------------- inside

    def _wait(self, is_over: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        self.tree.check_hicache_events()
        while not is_over():
            assert time.monotonic() < deadline_s, "SGLang's storage threads do not end"
            time.sleep(0.002)
            self.tree.check_hicache_events()

    def _request(self) -> SimpleNamespace:
        return SimpleNamespace(
            rid=f"request {next(self._rids)}",
            kv=ReqKvInfo(),
            session=None,
            last_node=None,
            swa_host_hit_length=0,
            swa_branching_seqlen=None,
            mamba_host_hit_length=0,
        )

    def match(self, tokens: list[int], request: Any = None, **more: Any) -> Any:
        """Of SGLang's tree."""
        key = RadixKey(array("q", tokens))
        return self.tree.match_prefix(MatchPrefixParams(key=key, req=request, **more))

    def _alloc(self, num_tokens: int) -> torch.Tensor:
        if self.tokens.available_size() < num_tokens:
            self.tree.evict_for_alloc(EvictParams(num_tokens=num_tokens))
        found = self.tokens.alloc(num_tokens)
        assert found is not None
        return found

    def _alloc_state(self) -> torch.Tensor:
        slot = self.states.mamba_allocator.alloc(1)
        if slot is None:
            self.tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = self.states.mamba_allocator.alloc(1)
        assert slot is not None
        return slot

    def _layers(self) -> list[torch.Tensor]:
        return [layer for pool in self._pools for layer in (*pool.k_buffer, *pool.v_buffer)]

    def _device_tensors(self) -> list[torch.Tensor]:
        if not self.has_states:
            return self._layers()
        cache = self.states.mamba_pool.mamba_cache
        return [*self._layers(), cache.temporal, *cache.conv]

    def _write_kv(self, tokens: list[int], begin: int, indices: torch.Tensor) -> None:
        for start in range(0, len(indices), PAGE_TOKENS):
            rows = indices[start : start + PAGE_TOKENS]
            end = begin + start + PAGE_TOKENS
            for number, layer in enumerate(self._layers()):
                layer[rows] = _noise(layer[rows], f"kv {number}", tokens[:end])

    def _check_kv(self, tokens: list[int], indices: torch.Tensor, known: int) -> None:
        assert len(indices) == known
        for start in range(0, known, PAGE_TOKENS):
            rows = indices[start : start + PAGE_TOKENS]
            for number, layer in enumerate(self._layers()):
                expected = _noise(layer[rows], f"kv {number}", tokens[: start + PAGE_TOKENS])
                assert _same(layer[rows], expected), f"KV of token {start}, tensor {number}"

    def _state(self, slot: int, tokens: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is in a slot, and what the state after ``tokens`` is."""
        cache = self.states.mamba_pool.mamba_cache
        for number, tensor in enumerate((cache.temporal, *cache.conv)):
            yield tensor[:, slot], _noise(tensor[:, slot], f"state {number}", tokens)

    def _check_state(self, request: Any, node: Any, tokens: list[int]) -> None:
        value = self.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        slots = [] if value is None else [int(value[0])]
        if request.kv.mamba_cow_src_index is None:
            slots.append(int(request.kv.mamba_pool_idx))
        assert slots, "the request has no state"
        self._check_state_in(slots, tokens)

    def _check_state_in(self, slots: list[int], tokens: list[int]) -> None:
        for slot in slots:
            for view, expected in self._state(slot, tokens):
                assert _same(view, expected), f"the state after {len(tokens)} tokens, in slot {slot}"


def _noise(like: torch.Tensor, what: str, tokens: list[int]) -> torch.Tensor:
    digest = hashlib.sha256(f"{what} {tokens}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    raw = torch.empty_like(like, memory_format=torch.contiguous_format)
    raw.view(torch.uint8).random_(0, 256, generator=generator)
    return raw


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def prompt(num_pages: int, seed: int) -> list[int]:
    """Tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50_000, (num_pages * PAGE_TOKENS,), generator=generator).tolist()


@contextmanager
def engine(
    folder: str,
    layout: str = "page_first",
    io: str = "kernel",
    *,
    make: Callable[[], Engine] | None = None,
    policy: str = "write_through",
    extra: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> Iterator[Engine]:
    """``make``: a hybrid one if it is not given. ``arguments``: of the engine."""
    plugin.activate()
    model = write_weights(Path(folder) / "some-model")
    config = {
        "backend_name": "kvbm",
        "module_path": "kvbm_sglang.hicache",
        "class_name": "KvbmHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "DYN_KVBM_DISK_CACHE_DIR": folder,
        "DYN_KVBM_DISK_CACHE_GB": 0.05,
        **(extra or {}),
    }
    memory = {
        "page_size": PAGE_TOKENS,
        "hicache_ratio": 2.0,
        "hicache_size": 0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": io,
        "hicache_write_policy": policy,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(config),
        "_mamba_cache_chunk_size": PAGE_TOKENS,
    }
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with (
        begins_now("kvbm_sglang.weights"),
        engine_with(arguments_of(model, **(arguments or {}))),
        get_context().override_server_args(**memory),
        get_parallel().override(**ranks),
    ):
        made = (make or hybrid)()
        try:
            for opened in made.store._pools._stores.values():
                assert not isinstance(opened.disk, OwnFile) or opened.disk.wait_recovered(PATIENCE_S)
            yield made
            metrics = made.store.guard_state.metrics.snapshot()
            guarded = [series for series, n in metrics.items() if "guarded_errors" in series and n]
            assert not guarded, guarded
        finally:
            made.close()


def hybrid(temporal: tuple[int, ...] = (2, 8, 16), state_dtype: str = "float32") -> Engine:
    """``temporal``: a state's shape, besides that of its convolution."""
    shape = dataclasses.replace(SHAPE, temporal=temporal)
    return Engine.of_hybrid(shape, getattr(torch, state_dtype))


# ---------------------------------------------------------------- scenarios


def back_and_forth(folder: str, layout: str, io: str, policy: str, seed: int) -> dict[str, list[int]]:
    """How much of a prompt is known: on the device, in SGLang's host memory, in kvbm's file, after a
    restart; each time again, as what came back is on the device then.
    """
    tokens, other = prompt(8, seed), prompt(4, seed + 1)
    asked = [tokens, tokens[: 6 * PAGE_TOKENS], tokens[: 5 * PAGE_TOKENS], other, tokens]
    found: dict[str, list[int]] = {}
    with engine(folder, layout, io, policy=policy) as running:
        assert running.ask(tokens) == 0
        running.compute(tokens, [4 * PAGE_TOKENS, 6 * PAGE_TOKENS])  # two chunks
        running.compute(other, [4 * PAGE_TOKENS])
        found["device"] = list(map(running.ask, asked))
        running.forget_device()
        found["host"] = list(map(running.ask, asked))
        running.forget_device()
        running.forget_host()
        found["disk"] = list(map(running.ask, asked))
    with engine(folder, layout, io, policy=policy) as running:
        found["restart"] = list(map(running.ask, asked))
    return found


def without_states(folder: str, seed: int) -> dict[str, Any]:
    """What of a prompt is known whose KV is on the disk, if its states are not, or are wrong."""
    tokens = prompt(8, seed)
    found: dict[str, Any] = {}
    with engine(folder) as running:
        running.compute(tokens, [4 * PAGE_TOKENS, 8 * PAGE_TOKENS])

    def file_of_states() -> Path:
        (path,) = (path for path in find_files(Path(folder), _raise) if path.name.startswith("mamba-"))
        return path

    get = KvbmHiCache._get

    def pretend(store: Any, pool: str, keys: list[str], *more: Any) -> list[bool]:
        return [True] if pool == "mamba" else get(store, pool, keys, *more)

    with engine(folder) as running, patch.object(KvbmHiCache, "_get", pretend):
        try:
            found["a state that was not read"] = running.ask(tokens)
        except AssertionError as error:
            found["a state that was not read"] = str(error)
    with file_of_states().open("r+b") as file:
        header = unpack_file(file.read(4096))
        assert header is not None
        file.seek(slot_offset_bytes(1, header.payload_bytes) + 4096 + seed % header.payload_bytes)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << seed % 8]))
    with engine(folder) as running:
        found["a damaged state"] = [running.ask(tokens), running.ask(tokens)]
    file_of_states().unlink()
    with engine(folder) as running:
        found["no state"] = running.ask(tokens)
        running.compute(tokens, [4 * PAGE_TOKENS])
        running.forget_device()
        running.forget_host()
        found["a state that was computed again"] = running.ask(tokens)
    return found


def told_apart(folder: str, seed: int) -> dict[str, int]:
    """States of as many bytes that mean something else are not found."""
    tokens = prompt(4, seed)
    with engine(folder) as running:
        running.compute(tokens, [4 * PAGE_TOKENS])
    found = {}
    others: dict[str, Callable[[], Engine]] = {
        "shape": partial(hybrid, temporal=(4, 4, 16)),
        "dtype": partial(hybrid, temporal=(2, 8, 32), state_dtype="bfloat16"),
        "the same": hybrid,
    }
    for what, make in others.items():
        with engine(folder, make=make) as running:
            found[what] = running.ask(tokens)
    return found


def late_state(folder: str, seed: int) -> dict[str, int]:
    """A state that is made when its KV has long been stored: a second prompt branches off there."""
    tokens = prompt(8, seed)
    end = 4 * PAGE_TOKENS
    found = {}
    with engine(folder) as running:
        running.compute(tokens, [8 * PAGE_TOKENS])
        found["before"] = running.ask(tokens[:end])
        key = RadixKey(array("q", tokens[:end]))
        indices = running.tree.path_device_indices(running.match(tokens).last_device_node)[:end]
        running.tree.insert(
            InsertParams(
                key=key, value=indices, mamba_value=running.new_state(tokens[:end]), prev_prefix_len=end
            )
        )
        running.settle()
        found["on the device"] = running.ask(tokens[:end])
    with engine(folder) as running:
        found["after a restart"] = running.ask(tokens[:end])
        found["the first one"] = running.ask(tokens)
    return found


def drafts(folder: str, layout: str, io: str, is_packed: bool, seed: int) -> dict[str, Any]:
    """A model with a draft (EAGLE): of both the KV comes back; and whether kvbm's names of pages are those
    that SGLang publishes.
    """
    tokens, make = prompt(8, seed), partial(Engine.with_draft, is_packed=is_packed)
    found: dict[str, Any] = {}
    put: list[str] = []
    keep = KvbmHiCache._put

    def note(store: Any, pool: str, keys: list[str], *more: Any) -> list[bool]:
        put.extend(keys if pool == "kv" else [])
        return keep(store, pool, keys, *more)

    with (
        patch.object(KvbmHiCache, "_put", note),
        engine(folder, layout, io, make=make) as running,
    ):
        assert running.is_eagle
        running.compute(tokens, [4 * PAGE_TOKENS, 7 * PAGE_TOKENS])
        published = [
            number
            for event in running.tree.take_events()
            if type(event).__name__ == "BlockStored"
            for number in event.block_hashes
        ]
        found["names"] = sorted(set(published)) == sorted({published_hash(key) for key in put})
        found["pages"] = len(set(put))
        running.forget_device()
        running.forget_host()
        found["disk"] = running.ask(tokens)
    with engine(folder, layout, io, make=make) as running:
        found["restart"] = running.ask(tokens)
    draft_files = [path for path in find_files(Path(folder), _raise) if path.name.startswith("draft-")]
    assert bool(draft_files) is not is_packed
    for path in draft_files:
        path.unlink()
        with engine(folder, layout, io, make=make) as running:
            found["without the draft's"] = running.ask(tokens)
    return found


def build_model(folder: str, seed: int) -> None:
    """A tiny Qwen3-Next, whose states remember many tokens."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    from tests.engines.tiny_model import build_model as build_qwen3

    build_qwen3(Path(folder))  # its tokenizer
    common = json.loads(Path(folder, "config.json").read_text())
    names = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    config = Qwen3NextConfig(
        **{name: common[name] for name in names},
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-5.0)
    model.to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def linked(folder: str, arguments: dict[str, Any] | None = None, **more: Any) -> Iterator[Engine]:
    """A hybrid engine with the direct linker, whose states are as large as many pages. ``arguments``: of the
    engine; ``more``: settings.
    """
    model = write_weights(Path(folder) / "some-model")
    sizes = {"DYN_KVBM_CPU_CACHE_GB": 0.02, "DYN_KVBM_DISK_CACHE_GB": 0.03, "DYN_KVBM_DISK_CACHE_DIR": folder}
    ranks = {
        "attn_tp_rank": 0,
        "attn_tp_size": 1,
        "tp_rank": 0,
        "tp_size": 1,
        "attn_dp_size": 1,
        "dp_rank": None,
    }
    settings = {**sizes, "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": True, **more}
    with (
        begins_now("kvbm_sglang.weights"),
        patch("tests.sglang.hybrid.find_server_args", lambda: arguments_of(model, **(arguments or {}))),
        get_context().override_server_args(page_size=PAGE_TOKENS, _mamba_cache_chunk_size=PAGE_TOKENS),
        get_parallel().override(**ranks),
    ):
        shape = dataclasses.replace(SHAPE, temporal=(6, 16, 32))
        running = Engine.of_hybrid(shape, torch.float32, settings)
        try:
            yield running
            metrics = running.linker.guard_state.metrics.snapshot()
            assert not [name for name, n in metrics.items() if n and "guarded" in name]
        finally:
            running.close()


def by_linker(folder: str, seed: int) -> dict[str, list[int]]:
    """As ``back_and_forth``, from kvbm's host memory and its file."""
    tokens, other = prompt(8, seed), prompt(4, seed + 1)
    asked = [tokens, tokens[: 6 * PAGE_TOKENS], tokens[: 5 * PAGE_TOKENS], other, tokens]
    found: dict[str, list[int]] = {}
    with linked(folder) as running:
        assert running.ask_linker(tokens) == 0
        running.compute(tokens, [4 * PAGE_TOKENS, 6 * PAGE_TOKENS])
        running.compute(other, [4 * PAGE_TOKENS])
        found["device"] = list(map(running.ask_linker, asked))
        running.forget_device()
        found["host"] = list(map(running.ask_linker, asked))
    with linked(folder) as running:
        found["restart"] = list(map(running.ask_linker, asked))
    return found


def linker_without_states(folder: str, seed: int) -> dict[str, Any]:
    """What the linker finds if a part of a state is gone; whether a wrong state would be seen."""
    tokens = prompt(8, seed)
    found: dict[str, Any] = {}
    with linked(folder) as running:
        running.compute(tokens, [4 * PAGE_TOKENS, 8 * PAGE_TOKENS])
        running.forget_device()
        parts = running.linker._parts
        found["parts"] = parts._num_parts
        with patch.object(DevicePages, "state_number", lambda self, indices: 0):
            try:
                found["another slot"] = running.ask_linker(tokens)
            except AssertionError as error:
                found["another slot"] = str(error)
        last = RadixKey(array("q", tokens))
        names = page_keys(parts._roots.now().hash, get_storage_hash_str(last, None, page_size=PAGE_TOKENS))
        parts._tiers._chain.reset({Tier.DISK})
        parts._tiers._chain.forget(parts._parts_of(names[-1])[1:2])
        found["a part is gone"] = running.ask_linker(tokens)
        parts._tiers._chain.reset({Tier.DISK})  # what was found has gone there again
        parts._tiers._chain.forget(parts._parts_of(names[3])[:1])
        found["both are"] = running.ask_linker(tokens)
    return found


def refused_by_linker(folder: str) -> list[str]:
    """Hybrid engines that the linker caches nothing of: what it says."""
    said = []
    for more in (
        {"KVBM_REMOTE_URL": f"file://{folder}", "KVBM_REMOTE_CACHE_GB": 0},
        {"arguments": {"enable_mixed_chunk": True}},
    ):
        with said_by_kvbm() as lines, linked(folder, **more) as running:
            assert running.linker._parts._tiers is None
        said += [line for line in lines if "nothing is cached" in line]
    return said


def _raise(error: OSError) -> None:
    raise error
