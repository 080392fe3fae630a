"""kvbm's counters as vLLM's KV connector stats: in vLLM's log line and on its own /metrics as
``vllm:kvbm_*``.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvbm_core.clock import Clock
from kvbm_core.observe.metrics import Metrics

# Series of kvbm's own exposition -> name in the stats. All of them only ever rise.
COUNTERS = {
    "kvbm_matched_tokens": "matched_tokens",
    "kvbm_offload_blocks_d2h": "offloaded_blocks",
    "kvbm_onboard_blocks_h2d": "onboarded_blocks",
    "kvbm_offload_blocks_h2d": "stored_on_disk_blocks",
    "kvbm_offload_blocks_d2d": "offloaded_to_disk_blocks",
    "kvbm_onboard_blocks_d2d": "onboarded_from_disk_blocks",
    "kvbm_offload_blocks_d2o": "stored_in_remote_blocks",
    "kvbm_onboard_blocks_o2d": "fetched_from_remote_blocks",
    "kvbm_object_read_failures": "not_fetched_from_remote_blocks",
    "kvbm_object_write_failures": "not_stored_in_remote_blocks",
    'kvbm_bytes_total{direction="offload"}': "offloaded_bytes",
    'kvbm_bytes_total{direction="onboard"}': "onboarded_bytes",
    'kvbm_tier_transfer_bytes_total{from="host",to="disk"}': "written_to_disk_bytes",
    'kvbm_tier_transfer_bytes_total{from="disk",to="host"}': "read_from_disk_bytes",
    'kvbm_tier_transfer_bytes_total{from="host",to="remote"}': "written_to_remote_bytes",
    'kvbm_tier_transfer_bytes_total{from="remote",to="host"}': "read_from_remote_bytes",
}
REPORT_INTERVAL_S = 1.0


class KvbmStats(KVConnectorStats):
    """Increments since the last report, by name."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the increments of ``other`` to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class StatsReporter:
    """Turns the totals of ``metrics`` into increments, at most once per REPORT_INTERVAL_S."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._next_s = clock.now_s()
        self._last = dict.fromkeys(COUNTERS, 0.0)

    def take(self) -> KvbmStats | None:
        """Increments since the last report; None if there are none or it is too early."""
        now_s = self._clock.now_s()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + REPORT_INTERVAL_S
        totals = self._metrics.snapshot()
        data = {name: totals[series] - self._last[series] for series, name in COUNTERS.items()}
        self._last = {series: totals[series] for series in COUNTERS}
        stats = KvbmStats(data={name: amount for name, amount in data.items() if amount})
        return None if stats.is_empty() else stats


class KvbmPromMetrics(KVConnectorPromMetrics):
    """The same increments on vLLM's own metrics endpoint."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name in COUNTERS.values():
            counter = self._counter_cls(
                name=f"vllm:kvbm_{name}",
                documentation=f"kvbm: {name.replace('_', ' ')}",
                labelnames=labelnames,
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
