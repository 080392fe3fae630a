"""DynamoConnector: vLLM's entry class. No logic here; each hook goes to the scheduler's or the worker's part.

Interface: KVConnectorBase_V1 of vLLM 0.26 to 0.33. The class name, and the aliases under which it is loaded,
are those of the KVBM guides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvbm_core.errors import KvbmError
from kvbm_vllm import engine_calls, first_process
from kvbm_vllm.assembly import (
    SchedulerAssembly,
    build_scheduler_side,
    build_worker_side,
    set_failure_policy,
)
from kvbm_vllm.metadata import DynamoConnectorMetadata
from kvbm_vllm.no_cache import NoCache
from kvbm_vllm.pd import PdConnector
from kvbm_vllm.stats import KvbmPromMetrics, KvbmStats
from kvbm_vllm.versions import check_installed
from kvbm_vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # vLLM 0.26 to 0.29 ask get_finished instead
    KVConnectorTransferResults = None

# vLLM looks this class up when it makes its configuration, in the process that will load the weights: before
# that, unless the engine core is a process of its own, which began late enough.
engine_calls.watch()
first_process.watch()

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector"]


def _host_hit_source() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # vLLM < 0.32 does not ask where a hit came from
        return None
    return CacheHitSource.HOST


class DynamoConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in kvbm's tiers and brings them back.

    vLLM makes one instance with the scheduler's role and one per rank with the worker's role. Raises
    ConfigError or UnsupportedError, one line each, when it cannot serve as configured; after that it never
    raises into the engine.
    """

    _cache_hit_source = _host_hit_source()

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        """NoCache for a model that keeps none."""
        if kv_cache_config.kv_cache_groups:
            return super().__new__(cls)
        return NoCache(vllm_config, role, kv_cache_config)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_installed(DynamoConnector, tell=role == KVConnectorRole.SCHEDULER)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._leader_part: SchedulerAssembly | None = None
        self._worker_part: WorkerSide | None = None
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._leader_part = build_scheduler_side(vllm_config, kv_cache_config)
            else:
                self._worker_part = build_worker_side(vllm_config, kv_cache_config)
        except KvbmError as error:
            first_process.leave(str(error))
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is a later miss, not an undelivered result."""
        return False

    @cached_property  # asked for in every hook of every step
    def scheduler_side(self) -> SchedulerAssembly:
        """The scheduler's part; asking an instance of the other role is misuse."""
        if self._leader_part is None:
            raise TypeError("this connector has the worker's role")
        return self._leader_part

    @cached_property
    def worker_side(self) -> WorkerSide:
        """The worker's part; asking an instance of the other role is misuse."""
        if self._worker_part is None:
            raise TypeError("this connector has the scheduler's role")
        return self._worker_part

    def join_transport(self, vllm_config: VllmConfig) -> None:
        """Called by PdConnector, whose configuration this is: another connector moves KV between workers."""
        self.scheduler_side.hooks.leaves_remote_prefills = True
        # Ours was set in a copy, which vLLM does not look at.
        set_failure_policy(vllm_config, self.scheduler_side.settings)

    def shutdown(self) -> None:
        if self._worker_part is not None:
            self._worker_part.shutdown()
        if self._leader_part is not None:
            self._leader_part.close()

    # ---------------------------------------------------------------- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.hooks.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.hooks.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.hooks.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.hooks.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.hooks.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.hooks.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        hooks = self.scheduler_side.hooks
        handed_over = hooks.hand_over(request)
        return hooks.request_finished(request, block_ids), handed_over

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.hooks.has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_side.hooks.take_events()

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.hooks.reset_cache()

    def get_kv_connector_stats(self) -> KvbmStats | None:
        return self._leader_part.stats.take() if self._leader_part is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        return KvbmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvbmPromMetrics:
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.worker_side.handle_preemptions(cast("DynamoConnectorMetadata", kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.bind(cast("DynamoConnectorMetadata", connector_metadata))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker_side.clear()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker_side.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM schedules a request when its whole load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing per layer: whole blocks are read after the forward pass."""

    def wait_for_save(self) -> None:
        self.worker_side.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self.worker_side.get_finished()
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.worker_side.get_finished()
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=self.worker_side.take_failed_requests(),
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.take_metadata()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_failed_blocks()

    # ---------------------------------------------------------------- sleep mode (vLLM 0.33)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        """The KV memory is about to be unmapped: waits until no copy touches it."""
        if self._worker_part is not None:
            self._worker_part.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """The KV memory is back at the same addresses; vLLM has reset its prefix cache."""


def register_names() -> None:
    """Makes the connectors known to vLLM by their names alone; a name that is taken stays as it is.

    MultiConnector (vLLM 0.26 to 0.33) reads its children's stats in the API server's process, where it has
    their class names and no module paths. Without this it raises there, and the server ends.
    """
    for connector in (DynamoConnector, PdConnector):
        with contextlib.suppress(ValueError):  # the name is taken
            KVConnectorFactory.register_connector(
                connector.__name__, connector.__module__, connector.__name__
            )


register_names()
