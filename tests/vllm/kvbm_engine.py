"""An engine with kvbm in it: its insides in reach, copies that can be held back or made to fail, and a leak
check.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

from kvbm_core.runtime.leader import Leader
from kvbm_core.testing import memory_engine, toy_store
from kvbm_core.testing.gate import Gate
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.transfer.executor import Executor
from kvbm_core.types import Direction
from kvbm_vllm.connector import DynamoConnector
from tests.vllm.engine_config import EngineSpec
from tests.vllm.harness import PATIENCE_S, Engine


class KvbmEngine(Engine):
    """Serves with DynamoConnector, loaded by the guides' command line. Host tier and disk are ready when it
    is made. ``host_blocks`` 0: there is none, only the disk.
    """

    passing_blocks = 0
    """Without a host tier: what blocks pass through on their way to the disk; 0: as much as the disk has."""

    def __init__(
        self,
        folder: Path,
        *,
        host_blocks: int = 256,
        disk_blocks: int = 0,
        store: str | None = None,
        extra: dict[str, Any] | None = None,
        **spec: Any,
    ) -> None:
        self.executors: list[Gate] = []
        sizes = {"cpu_cache_override_num_blocks": host_blocks} if host_blocks else {}
        settings = {**sizes, **(extra or {})}
        if disk_blocks:  # all that the host has goes there, unless ``extra`` says otherwise
            if host_blocks:
                settings.setdefault("disable_disk_offload_filter", True)
            settings |= {
                "disk_cache_override_num_blocks": disk_blocks,
                "disk_cache_dir": str(folder / "disk"),
            }
        if store is not None:
            toy_store.register()
            memory_engine.register()
            settings = {"remote_url": store, "remote_cache_gb": 0, "remote_wait_s": PATIENCE_S, **settings}
        super().__init__(EngineSpec(extra_config=settings, **spec), folder)
        assert isinstance(self.connector, DynamoConnector)
        self.hooks = self.connector.scheduler_side.hooks
        self.wait_for(
            lambda: (
                self.leader.chain.host.capacity_blocks == (host_blocks or self.passing_blocks or disk_blocks)
            )
        )
        if disk_blocks:
            self.wait_for(self._has_its_disk)

    @property
    def leader(self) -> Leader:
        """The leader of this engine."""
        return self.hooks.leader

    def connector_of(self, rank: int) -> DynamoConnector:
        """A rank's."""
        connector = self.ranks[rank].connector
        assert isinstance(connector, DynamoConnector)
        return connector

    def prepare_worker(self, rank: int, connector: KVConnectorBase_V1) -> None:
        """Puts the gate around the executor that this rank will make."""
        assert isinstance(connector, DynamoConnector)
        worker = connector.worker_side.worker

        def wrap(inner: Executor) -> Executor:
            self.executors.append(Gate(inner, worker._finished))
            return self.executors[-1]

        worker.wrap_executor(wrap)

    # ------------------------------------------------------------------ looking

    def metric(self, name: str) -> float:
        """A series of kvbm's own metrics."""
        return self.leader.metrics.snapshot()[name]

    @property
    def disk(self) -> SlottedTier:
        """The leader's disk tier; AssertionError if it has none."""
        tier = self.leader.chain.named("disk")
        assert isinstance(tier, SlottedTier)
        return tier

    def _has_its_disk(self) -> bool:
        """Whether blocks can go to the disk, or none ever will: it comes a moment after the host tier."""
        tier = self.leader.chain.named("disk")
        if not isinstance(tier, SlottedTier) or tier.off_reason is not None:
            return True
        return tier.slots.capacity_blocks > 0

    @property
    def errors(self) -> float:
        """Exceptions that a guard caught, on all sides."""
        states = [self.hooks.guard_state, *(rank.connector.worker_side.guard_state for rank in self.ranks)]
        series = [state.metrics.snapshot() for state in states]
        return sum(value for each in series for name, value in each.items() if "guarded" in name)

    def promised(self, request_id: str) -> list[int | None]:
        """What kvbm answered to each query for this request."""
        return [call.tokens for call in self.record.matches if call.request_id == request_id]

    # ------------------------------------------------------------------ waiting

    def wait_for(self, condition: Any) -> None:
        """Until acknowledgements have arrived that make ``condition`` true; the engine does not step."""

        def holds() -> bool:
            with self.leader.lock:  # its other thread may be between an end and what follows from it
                return bool(condition())

        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "what was waited for did not come"
            self.leader.poll()
            for rank in self.ranks:  # carried by hand, as no step does
                said = rank.connector.build_connector_worker_meta()
                if said is not None:
                    self.hooks.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))

    def settle(self) -> None:
        """Until no copy is under way any more, in the leader's eyes too."""
        leader = self.leader

        def is_quiet() -> bool:
            toy_store.land_all()
            memory_engine.land_all()
            fetching = leader.chain.fetching_blocks
            return leader.pending_jobs == 0 and leader.chain.storing_blocks == 0 == fetching

        self.wait_for(is_quiet)

    def hold(self, direction: Direction) -> None:
        """Holds back copies on all ranks."""
        for executor in self.executors:
            executor.hold(direction)

    def release(self, direction: Direction) -> None:
        """Lets held copies go on all ranks."""
        for executor in self.executors:
            executor.release(direction)

    def forget_device(self) -> None:
        """Empties the device's prefix cache; what comes back after this came from the host."""
        self.settle()
        assert self.reset_device()

    # ------------------------------------------------------------------ the end

    @judges
    def assert_clean(self) -> None:
        """Nothing is left of any request, in vLLM, in the leader, in the hooks or in the workers."""
        self.run()
        self.settle()
        self.assert_idle()
        leader, tier = self.leader, self.leader.chain.host
        with leader.lock:  # the channel's thread may be taking in the last answer
            leader.check_integrity()
        left = {
            "open requests": leader.open_requests,
            "jobs": leader.pending_jobs,
            "leases": tier.live_leases,
            "pending slots": tier.pending_blocks,
            "prefixes being loaded": leader.loading_blocks,
            "leases on blocks of lower tiers": leader.chain.live_leases,
            "pinned device blocks": len(self.hooks._pins),
            "requests in the calendar": len(self.hooks._due),
            "planned jobs": len(self.hooks._step.jobs),
            "promised loads": len(self.hooks._step.announced),
            "held copies": sum(executor.held for executor in self.executors),
        }
        for name, value in vars(self.hooks).items():
            if isinstance(value, dict | list | set) and name != "_roots":
                left[f"scheduler{name}"] = len(value)
        for rank in self.ranks:
            for name, value in vars(rank.connector.worker_side).items():
                if isinstance(value, dict | list | set):
                    left[f"worker{name}"] = len(value)
        assert not {name: count for name, count in left.items() if count}
        assert self.errors == 0


def specs_to_try() -> dict[str, dict[str, Any]]:
    """Kinds of engines on which the basic promises are tested."""
    return {
        "plain": {},
        "async scheduling": {"async_scheduling": True},
        "chunked prefill": {"max_batched_tokens": 12},
        "blocks outermost": {"layout": "BLHNC"},
        "two ranks": {"ranks": 2},
        "hybrid": {"windows": (None, 8, None, 8)},
        "hybrid, async": {"windows": (None, 12), "async_scheduling": True},
        "windows only": {"windows": (8, 8)},
        "blocks of 16": {"block_size_tokens": 16, "num_blocks": 24},
    }
