"""KvbmLinker: SGLang's direct linker, for ``--unified-cache-external-linker-backend dynamic``.

Interface: UnifiedCacheLinker of SGLang 0.5.23. Selected by ``{"linker": "KvbmLinker", "linker_module_path":
"kvbm_sglang.linker", "linker_extra_config": {...}}``. No logic here but what SGLang's side of it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.control.desk import About
from kvbm_core.errors import LayoutError
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import FailureKind
from kvbm_core.runtime.assembly import announce, control_service, metrics_of, metrics_server, traces_of
from kvbm_sglang.device_pool import HYBRID_POOL, LATENT_POOLS, DevicePages
from kvbm_sglang.engine_settings import code_of, describe_engine, effective
from kvbm_sglang.identity import KV
from kvbm_sglang.linker_assembly import Alike, Ranks, assemble, why_late
from kvbm_sglang.linker_tiers import WaitReady
from kvbm_sglang.side_pools import STATES, flag_of_rows
from kvbm_sglang.weights import weights_identity

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.server_args import ServerArgs

log = logging.getLogger("kvbm")


def _no_pages(*args: Any, **more: Any) -> DevicePages | None:
    return None


def _no_hit(*args: Any) -> list[int]:
    return []


def _no_store(linker: KvbmLinker, transfers: list[PoolTransfer]) -> bool:
    return linker.fail_store()


class KvbmLinker(UnifiedCacheLinker):
    """Pages of the device pool in host memory and on disk. Every hook is guarded.

    What ranks must agree on (what is queued, how many have ended) does not depend on what goes wrong on one
    of them.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        params: CacheInitParams,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.pools: dict[Any, object] = {}  # SGLang looks for a windows' pool in it
        settings = KvbmSettings.from_env(extra_config)
        announce(settings, Adapter.LINKER)
        self.guard_state = GuardState(metrics_of(settings, type(self)))
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        ranks = _ranks_of(params, server_args, _alike(pool, params, server_args))
        pages = self._pages_of(pool, server_args, params, components, has_store=settings.has_remote_tier)
        self._is_cpu = pages is None or pages.memory.is_cpu
        arguments = effective(server_args)
        if late := why_late(settings, str(getattr(arguments, "schedule_policy", ""))):
            log.warning("%s", late)
        model = str(arguments.model_path)
        self._parts = assemble(
            pages,
            settings,
            self.guard_state.metrics,
            model=model,
            engine=describe_engine(server_args),
            weights=weights_identity(arguments, model, code_of(server_args)),
            ranks=ranks,
            num_layers=_num_layers(pool, params),
        )
        self.layer_done_counter = self._parts.counter
        if pages is not None and pages.num_parts:  # SGLang tells the pool of pages alone
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.guard_state.metrics.traces = self._traces = traces_of(settings, model)
        about = About("SGLang, linker", model, ranks.number, lambda: self._parts.namespace)
        self._server = metrics_server(settings, self.guard_state.metrics, about)
        self._control = control_service(
            settings, about, self._parts.control, self.guard_state.metrics, served=self._server
        )

    @guarded("register_kv_caches", _no_pages)
    def _pages_of(
        self, pool: Any, server_args: Any, params: Any, components: set[Any], *, has_store: bool
    ) -> DevicePages | None:
        """None, with a line in the log, for what is not known; nothing is cached then."""
        try:
            reason = _unknown(pool, server_args, params, components, has_store=has_store)
            if reason:
                raise LayoutError(f"kvbm: {reason}")
            if not _has_states(components):
                return DevicePages(pool, int(params.page_size))
            if type(pool).__name__ != HYBRID_POOL:
                raise LayoutError(f"kvbm: pages of a {type(pool).__name__} are not known")
            return DevicePages(pool.full_kv_pool, int(params.page_size), params.req_to_token_pool)
        except LayoutError as error:
            log.error("%s; nothing is cached", error)
            self.guard_state.metrics.failure(FailureKind.LAYOUT)
            return None

    # ---------------------------------------------------------------- the way up

    @guarded("batch_exists", _no_hit)
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        found = self._known(transfers)
        return [] if found is None else self._parts.lookup(rid, list(found[0].keys or []))

    @guarded("start_load_kv", lambda self, rid, transfers: self._fail_load(rid))
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        found = self._known(transfers)
        if found is None:
            return self._fail_load(rid)
        kv, state = found
        self._parts.load(rid, list(kv.keys or []), kv.device_indices, state and state.device_indices)
        return True

    def _fail_load(self, rid: str) -> bool:
        self._parts.fail_load(rid)
        return True

    @guarded("start_load_kv", lambda self: -1)
    def start_layer_wise_loading(self) -> int:
        return self._parts.start(self._when_current_stream_is_through())

    @guarded("wait_for_layer_load", lambda self, counter_index: False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._parts.finish(counter_index)

    @guarded("cancel_queued_load", lambda self, rid: False)
    def cancel_queued_load(self, rid: str) -> bool:
        return self._parts.cancel(rid)

    # ---------------------------------------------------------------- the way down

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None, **more: Any) -> bool:
        return self._offload(transfers)

    @guarded("batch_set", _no_store)
    def _offload(self, transfers: list[PoolTransfer]) -> bool:
        found = self._known(transfers)
        if found is None:
            return self.fail_store()
        kv, state = found
        when = self._when_pages_are_written()
        self._parts.store(list(kv.keys or []), kv.device_indices, when, state and state.device_indices)
        return True

    def fail_store(self) -> bool:
        """Queues a store that fails."""
        self._parts.fail_store()
        return True

    @guarded("get_finished", lambda self: 0)
    def num_completed_offloads(self) -> int:
        return self._parts.num_ended_stores()

    @guarded("get_finished", lambda self: False)
    def pop_completed_offload(self) -> bool:
        return self._parts.take_ended_store()

    # ---------------------------------------------------------------- ends

    @guarded("reset_cache", lambda self: None)
    def reset(self) -> None:
        self._parts.quiesce()

    @guarded("shutdown", lambda self: None)
    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._control is not None:
            self._control.close()
        self._parts.close()
        if self._traces is not None:
            self._traces.close()

    def _known(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, PoolTransfer | None] | None:
        """Pages, and the state behind the last of them if there is one; None if there is anything else: of
        other pools nothing is kept.
        """
        of = {str(transfer.name): transfer for transfer in transfers}
        kv, state = of.pop(KV, None), of.pop(STATES, None)
        if kv is None or of or len(transfers) != 1 + (state is not None):
            return None
        is_behind = state is None or list(state.keys or ()) == list(kv.keys or ())[-1:]
        return (kv, state) if is_behind else None

    # ---------------------------------------------------------------- when device pages may be touched

    def _when_current_stream_is_through(self) -> WaitReady:
        if self._is_cpu:
            return _at_once
        import torch

        event = torch.cuda.Event()
        event.record()
        return partial(_wait_for, [event])

    def _when_pages_are_written(self) -> WaitReady:
        if self._is_cpu:
            return _at_once
        return partial(_wait_for, self.record_offload_ready())


def _at_once() -> None:
    """On a CPU all that came before has been done."""


def _wait_for(events: Sequence[Any]) -> None:
    for event in events:
        event.synchronize()


def _has_states(components: set[Any]) -> bool:
    return any(component.name == "MAMBA" for component in components)


def _num_layers(pool: Any, params: Any) -> int:
    """Of this stage, those with states too."""
    layers = getattr(pool, "full_attention_layer_id_mapping", None)
    if layers is None:
        return int(pool.layer_num)
    return int(max((*layers, *getattr(params.req_to_token_pool, "mamba_map", ())))) + 1


def _unknown(pool: Any, server_args: Any, params: Any, components: set[Any], *, has_store: bool) -> str:
    """What there is that this linker does not know; "" if nothing."""
    names = {component.name for component in components}
    has_draft = params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    checks = (
        (not names <= {"FULL", "MAMBA"}, f"a model with {', '.join(sorted(names))} components"),
        ("MAMBA" in names and has_store, "a hybrid model (states beside attention) with KVBM_REMOTE_URL"),
        (
            "MAMBA" in names and getattr(server_args, "enable_mixed_chunk", False),
            "a hybrid model (states beside attention) with --enable-mixed-chunk",  # sglang issue 39342
        ),
        (has_draft, "KV of a draft model"),
        (
            int(pool.page_size) != int(params.page_size),
            f"{pool.page_size} tokens a page, {params.page_size} in the tree",
        ),
        # SGLang compares the hits of tensor-parallel ranks, and not those of stages: one would load what
        # another one computes, which was seen to give wrong answers.
        (int(params.pp_size) > 1, "pipeline parallelism (--pp-size)"),
        # It gives memory back before it says so, while pages of it may still be read.
        (getattr(server_args, "enable_memory_saver", False), "--enable-memory-saver"),
        (bool(flag_of_rows(server_args)), flag_of_rows(server_args)),
        (getattr(server_args, "disaggregation_mode", "null") != "null", "--disaggregation-mode"),
    )
    return next((f"{what} is not supported by the linker" for is_found, what in checks if is_found), "")


def _alike(pool: Any, params: Any, server_args: Any) -> Alike | None:
    """Those who have the same latents of MLA: the ranks that SGLang takes the shortest hit of."""
    if type(pool).__name__ not in LATENT_POOLS or _is_divided_by_tokens(params, server_args):
        return None
    group = next((g for g in (params.attn_tp_cache_group, params.tp_cache_group) if g is not None), None)
    from torch import distributed

    size = 1 if group is None else distributed.get_world_size(group)
    if size == 1:  # it finds what more ranks have stored, and they what it has
        return Alike(0, 1, lambda mine: [mine])

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * size
        distributed.all_gather_object(found, mine, group=group)
        return found

    return Alike(distributed.get_rank(group), size, exchange)


def _is_divided_by_tokens(params: Any, server_args: Any) -> bool:
    return int(params.attn_cp_size) > 1 or int(getattr(server_args, "dcp_size", 1) or 1) > 1


def _ranks_of(params: Any, server_args: Any, alike: Alike | None) -> Ranks:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    shard = {
        "tp_rank": int(parallel.attn_tp_rank),
        "tp_size": int(parallel.attn_tp_size),
        "pp_rank": int(params.pp_rank),
        "pp_size": int(params.pp_size),
        "attn_cp_rank": int(params.attn_cp_rank),
        "attn_cp_size": int(params.attn_cp_size),
    }
    num_ranks = int(parallel.tp_size) * int(params.pp_size)
    # Under attention DP the tensor-parallel ranks are those of all replicas.
    replica = int(parallel.dp_rank or 0) if int(parallel.attn_dp_size) == 1 else 0
    number = replica * num_ranks + int(params.pp_rank) * int(parallel.tp_size) + int(parallel.tp_rank)
    has_replicas = not getattr(server_args, "enable_dp_attention", False)
    num_engines = int(getattr(server_args, "dp_size", 1) or 1) if has_replicas else 1
    num_nodes = int(getattr(server_args, "nnodes", 1) or 1)
    attention_replica = int(parallel.tp_rank) // (shard["attn_cp_size"] * shard["tp_size"])
    num_here = max(1, num_ranks * num_engines // num_nodes)
    return Ranks(shard, num_ranks, num_here, number, replica or attention_replica, alike)
