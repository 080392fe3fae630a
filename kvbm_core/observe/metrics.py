"""The numbers of one leader. No global state: a second instance in the same process has its own."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvbm_core.observe.exposition import Family, Sample, render
from kvbm_core.observe.labels import FAILURE_KINDS, DropReason, Seam, UncachedReason
from kvbm_core.types import Direction, Tier

_OTHER = "other"
_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_TIERS = tuple(tier.name.lower() for tier in Tier)
_DIRECTIONS = tuple(str(direction) for direction in Direction)

_OFFLOADS = {
    (Tier.DEVICE, Tier.HOST): "kvbm_offload_blocks_d2h",
    (Tier.HOST, Tier.DISK): "kvbm_offload_blocks_h2d",
    (Tier.DEVICE, Tier.DISK): "kvbm_offload_blocks_d2d",
    (Tier.DEVICE, Tier.REMOTE): "kvbm_offload_blocks_d2o",
    (Tier.HOST, Tier.REMOTE): "kvbm_offload_blocks_d2o",
}
_ONBOARDS = {
    (Tier.HOST, Tier.DEVICE): "kvbm_onboard_blocks_h2d",
    (Tier.DISK, Tier.DEVICE): "kvbm_onboard_blocks_d2d",
    (Tier.REMOTE, Tier.DEVICE): "kvbm_onboard_blocks_o2d",
}


class _Spec(NamedTuple):
    """A counter or gauge: with a label, ``values`` are all it may have; without one, ``values`` is ("",)."""

    name: str
    kind: str
    doc: str
    label: str = ""
    values: tuple[str, ...] = ("",)


def _counter(name: str, doc: str, label: str = "", values: Iterable[str] = ("",)) -> _Spec:
    return _Spec(name, "counter", doc, label, tuple(str(value) for value in values))


# KVBM's names first, as its dashboards query them; then ours.
_SPECS = (
    _counter("kvbm_matched_tokens", "Tokens found beyond the device's own prefix cache, once per request"),
    _counter("kvbm_offload_blocks_d2h", "Blocks offloaded from device to host"),
    _counter("kvbm_offload_blocks_h2d", "Blocks offloaded from host to disk"),
    _counter("kvbm_offload_blocks_d2d", "Blocks offloaded from device to disk, past the host"),
    _counter("kvbm_offload_blocks_d2o", "Blocks offloaded to the object store"),
    _counter("kvbm_onboard_blocks_h2d", "Blocks onboarded from host to device"),
    _counter("kvbm_onboard_blocks_d2d", "Blocks onboarded from disk to device"),
    _counter("kvbm_onboard_blocks_o2d", "Blocks onboarded from the object store to device"),
    _counter("kvbm_object_read_failures", "Failed reads of the object store"),
    _counter("kvbm_object_write_failures", "Failed writes to the object store"),
    _counter("kvbm_bytes_total", "Bytes of completed transfers", "direction", _DIRECTIONS),
    _counter("kvbm_evicted_blocks_total", "Blocks evicted to make room", "tier", _TIERS),
    _counter("kvbm_dropped_blocks_total", "Full blocks that were not kept", "reason", DropReason),
    _counter("kvbm_failures_total", "Failures outside kvbm's control, by kind", "kind", FAILURE_KINDS),
    _counter("kvbm_guarded_errors_total", "Errors of kvbm kept from the engine, by seam", "seam", Seam),
    _counter("kvbm_uncached_requests_total", "Requests served without the cache", "reason", UncachedReason),
    _Spec("kvbm_pending_jobs", "gauge", "Transfers submitted and not yet acknowledged by every worker"),
    _Spec("kvbm_live_leases", "gauge", "Leases that pin blocks"),
    _Spec("kvbm_silent_ranks", "gauge", "Ranks that do not answer; nothing is loaded or stored meanwhile"),
    _Spec("kvbm_held_blocks", "gauge", "Blocks whose slots are not used again before silent ranks answer"),
)


class HitWindow(NamedTuple):
    """Sums over the last requests, in blocks beyond the device's own hit."""

    host_hit_blocks: int
    disk_hit_blocks: int
    queried_blocks: int

    def rate(self, hit_blocks: int) -> float:
        """0 to 1; 0 while nothing was queried."""
        return hit_blocks / self.queried_blocks if self.queried_blocks else 0.0


_NO_HITS = HitWindow(0, 0, 0)


class Metrics:
    """
    Counters, gauges and the hit window. Every method may be called from any thread, takes one short lock, and
    does not raise: amounts of 0 or less count nothing, an unknown reason, kind or seam counts as "other".
    """

    def __init__(self, window_requests: int = 1000) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {
            spec.name: dict.fromkeys(spec.values, 0.0) for spec in _SPECS
        }
        self._tiers: dict[str, tuple[int, int]] = {name: (0, 0) for name in _TIERS}
        # One place more than there are buckets: what is above the last one.
        self._seconds: dict[str, list[int]] = {name: [0] * (len(_BUCKETS_S) + 1) for name in _DIRECTIONS}
        self._seconds_sum: dict[str, float] = dict.fromkeys(_DIRECTIONS, 0.0)
        self._window: deque[HitWindow] = deque(maxlen=max(1, window_requests))
        self._window_sum = _NO_HITS

    def _add(self, name: str, amount: float, label_value: str = "") -> None:
        if amount > 0:
            with self._lock:
                values = self._values[name]
                values[label_value if label_value in values else _OTHER] += amount

    def matched_tokens(self, n_tokens: int) -> None:
        """Tokens promised to a request beyond the device's own hit; call once per request, not per query."""
        self._add("kvbm_matched_tokens", n_tokens)

    def offloaded_blocks(
        self, n_blocks: int, from_tier: Tier = Tier.DEVICE, to_tier: Tier = Tier.HOST
    ) -> None:
        """Blocks whose offload every worker acknowledged. A pair that KVBM has no name for is not counted."""
        name = _OFFLOADS.get((from_tier, to_tier))
        if name is not None:
            self._add(name, n_blocks)

    def onboarded_blocks(
        self, n_blocks: int, from_tier: Tier = Tier.HOST, to_tier: Tier = Tier.DEVICE
    ) -> None:
        """Blocks whose onboard every worker acknowledged. A pair that KVBM has no name for is not counted."""
        name = _ONBOARDS.get((from_tier, to_tier))
        if name is not None:
            self._add(name, n_blocks)

    def request_hits(self, host_hit_blocks: int, disk_hit_blocks: int, queried_blocks: int) -> None:
        """One finished request, for the hit rates over the last requests."""
        entry = HitWindow(host_hit_blocks, disk_hit_blocks, queried_blocks)
        with self._lock:
            gone_host, gone_disk, gone_queried = (
                self._window[0] if len(self._window) == self._window.maxlen else _NO_HITS
            )
            self._window.append(entry)
            host, disk, queried = self._window_sum
            self._window_sum = HitWindow(
                host + host_hit_blocks - gone_host,
                disk + disk_hit_blocks - gone_disk,
                queried + queried_blocks - gone_queried,
            )

    def hit_window(self) -> HitWindow:
        """The sums behind the hit rates."""
        with self._lock:
            return self._window_sum

    def bytes_moved(self, direction: Direction, n_bytes: int) -> None:
        """Bytes of a completed transfer, over all ranks."""
        self._add("kvbm_bytes_total", n_bytes, direction)

    def transfer_seconds(self, direction: Direction, seconds: float) -> None:
        """Seconds of one completed transfer, from its start to the last acknowledgement."""
        if seconds >= 0:
            with self._lock:
                self._seconds[direction][bisect_left(_BUCKETS_S, seconds)] += 1
                self._seconds_sum[direction] += seconds

    def tier_usage(self, tier: Tier, used_blocks: int, capacity_blocks: int) -> None:
        """How full a tier is now."""
        with self._lock:
            self._tiers[tier.name.lower()] = (used_blocks, capacity_blocks)

    def evicted(self, tier: Tier, n_blocks: int) -> None:
        """Blocks evicted from ``tier`` to make room."""
        self._add("kvbm_evicted_blocks_total", n_blocks, tier.name.lower())

    def dropped(self, reason: str, n_blocks: int = 1) -> None:
        """Full blocks that were computed and not kept; ``reason`` is a DropReason."""
        self._add("kvbm_dropped_blocks_total", n_blocks, reason)

    def failure(self, kind: str, n: int = 1) -> None:
        """Something outside our control failed; ``kind`` is one of FAILURE_KINDS."""
        self._add("kvbm_failures_total", n, kind)

    def guarded_error(self, seam: str) -> None:
        """A guard kept an error from the engine; ``seam`` is a Seam."""
        self._add("kvbm_guarded_errors_total", 1, seam)

    def uncached_request(self, reason: str) -> None:
        """A request is served without the cache; ``reason`` is an UncachedReason."""
        self._add("kvbm_uncached_requests_total", 1, reason)

    def set_pending_jobs(self, n: int) -> None:
        """Transfers submitted and not yet acknowledged."""
        with self._lock:
            self._values["kvbm_pending_jobs"][""] = n

    def set_live_leases(self, n: int) -> None:
        """Leases that pin blocks now."""
        with self._lock:
            self._values["kvbm_live_leases"][""] = n

    def set_silent_ranks(self, n_ranks: int, n_held_blocks: int) -> None:
        """Ranks that do not answer, and blocks of the transfers that they have not answered."""
        with self._lock:
            self._values["kvbm_silent_ranks"][""] = n_ranks
            self._values["kvbm_held_blocks"][""] = n_held_blocks

    def families(self) -> list[Family]:
        """All numbers as of one moment."""
        with self._lock:
            values = {name: dict(by_label) for name, by_label in self._values.items()}
            tiers = dict(self._tiers)
            seconds = {name: tuple(counts) for name, counts in self._seconds.items()}
            sums = dict(self._seconds_sum)
            window = self._window_sum
        result = [_simple_family(spec, values[spec.name]) for spec in _SPECS]
        return [*result, *_hit_rate_families(window), _tier_family(tiers), _seconds_family(seconds, sums)]

    def snapshot(self) -> dict[str, float]:
        """Series as written in the exposition to their values."""
        return {sample.series(): sample.value for family in self.families() for sample in family.samples}

    def exposition(self) -> str:
        """The text that Prometheus scrapes."""
        return render(self.families())


def _simple_family(spec: _Spec, values: dict[str, float]) -> Family:
    samples = tuple(
        Sample(spec.name, ((spec.label, value),) if spec.label else (), number)
        for value, number in values.items()
    )
    return Family(spec.name, spec.kind, spec.doc, samples)


def _hit_rate_families(window: HitWindow) -> list[Family]:
    rates = (
        ("host", window.rate(window.host_hit_blocks)),
        ("disk", window.rate(window.disk_hit_blocks)),
        ("object", 0.0),
    )
    return [
        Family(
            name := f"kvbm_{tier}_cache_hit_rate",
            "gauge",
            f"Share of queried blocks found in the {tier} tier, over the last requests (0 to 1)",
            (Sample(name, (), rate),),
        )
        for tier, rate in rates
    ]


def _tier_family(tiers: dict[str, tuple[int, int]]) -> Family:
    name = "kvbm_tier_blocks"
    samples = tuple(
        Sample(name, (("tier", tier), ("state", state)), number)
        for tier, numbers in tiers.items()
        for state, number in zip(("used", "capacity"), numbers, strict=True)
    )
    return Family(name, "gauge", "Blocks of a tier, in use and in all", samples)


def _seconds_family(seconds: dict[str, tuple[int, ...]], sums: dict[str, float]) -> Family:
    name = "kvbm_transfer_seconds"
    samples: list[Sample] = []
    for direction, counts in seconds.items():
        label, total = ("direction", direction), 0
        for bound, count in zip((*map(repr, _BUCKETS_S), "+Inf"), counts, strict=True):
            total += count
            samples.append(Sample(f"{name}_bucket", (label, ("le", bound)), total))
        samples.append(Sample(f"{name}_sum", (label,), sums[direction]))
        samples.append(Sample(f"{name}_count", (label,), total))
    return Family(name, "histogram", "Seconds of completed transfers", tuple(samples))
