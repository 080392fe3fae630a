"""The numbers of one leader. No global state: a second instance in the same process has its own."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.observe.labels import (
    FAILURE_KINDS,
    DropReason,
    EvictReason,
    MissReason,
    PeerTrouble,
    UncachedReason,
)
from kvbm_core.observe.traces import Traces
from kvbm_core.observe.why import WhyBook
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
AGE_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
SLOWEST_WINDOW_S = 60.0
"""The slowest transfers are those of this window and of the one before."""
MAX_LABEL_CHARS = 200
FEW = 8
"""Numbers that are put into a histogram one by one, as an array would take longer."""
_TIERS = tuple(tier.name.lower() for tier in Tier)
_HIT_TIERS = ("host", "disk", "remote")
_LOWER, _SLOTTED = ("disk", "remote"), ("host", "disk")
_DIRECTIONS = tuple(str(direction) for direction in Direction)
# Which way bytes go. They pass host memory, also where there is no host tier; but for what is read straight
# into the device's memory.
_HOPS = (
    ("device", "host"),
    ("host", "disk"),
    ("host", "remote"),
    ("remote", "host"),
    ("disk", "host"),
    ("disk", "device"),
    ("host", "device"),
)

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
    (Tier.REMOTE, Tier.HOST): "kvbm_onboard_blocks_o2d",
    (Tier.REMOTE, Tier.DEVICE): "kvbm_onboard_blocks_o2d",
}


class _Spec(NamedTuple):
    """A counter or gauge; ``series``: all values that its labels may have."""

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)


def _spec(kind: str, name: str, doc: str, label: str = "", values: Iterable[str] = ()) -> _Spec:
    if not label:
        return _Spec(name, kind, doc)
    return _Spec(name, kind, doc, (label,), tuple((str(value),) for value in values))


_counter, _gauge = partial(_spec, "counter"), partial(_spec, "gauge")


_EVICTED = {
    (tier, reason): (tier.name.lower(), str(reason))
    for tier in (Tier.HOST, Tier.DISK)
    for reason in EvictReason
}


_AUDITS = ("equal", "wrong", "not_compared", _OTHER)
_EVENTS = ("stored", "removed", "cleared", _OTHER)
_GUARDED = "kvbm_guarded_errors_total"

# KVBM's names first, as its dashboards query them; then ours.
_SPECS = (
    _counter("kvbm_matched_tokens", "Tokens found beyond the device's own prefix cache, once per request"),
    _counter("kvbm_offload_blocks_d2h", "Blocks offloaded from device to host"),
    _counter("kvbm_offload_blocks_h2d", "Blocks offloaded from host to disk"),
    _counter("kvbm_offload_blocks_d2d", "Blocks offloaded from device to disk, where there is no host tier"),
    _counter("kvbm_offload_blocks_d2o", "Blocks stored in the remote tier"),
    _counter("kvbm_onboard_blocks_h2d", "Blocks onboarded from host to device"),
    _counter("kvbm_onboard_blocks_d2d", "Blocks onboarded from disk to device"),
    _counter("kvbm_onboard_blocks_o2d", "Blocks fetched from the remote tier into host memory"),
    _counter("kvbm_object_read_failures", "Blocks that could not be fetched from the remote tier"),
    _counter("kvbm_object_write_failures", "Blocks that could not be stored in the remote tier"),
    _counter("kvbm_remote_too_slow_requests_total", "Requests computed faster than the remote tier loads"),
    _counter("kvbm_peer_fetched_blocks_total", "Blocks fetched from other instances; also among o2d"),
    _counter("kvbm_peer_lent_blocks_total", "Blocks copied for other instances, each rank's counted"),
    _counter("kvbm_peer_unserved_total", "What other instances were not given", "reason", PeerTrouble),
    _counter("kvbm_bytes_total", "Bytes of completed transfers", "direction", _DIRECTIONS),
    _Spec(
        "kvbm_tier_transfer_bytes_total",
        "counter",
        "Bytes moved between device, host memory, disk and remote tier",
        ("from", "to"),
        _HOPS,
    ),
    _counter(
        "kvbm_read_again_bytes_total",
        "Bytes that this process wrote to a tier and read there later, each counted once",
        "tier",
        _LOWER,
    ),
    _counter("kvbm_hit_tokens_total", "Matched tokens, by the tier they came from", "tier", _HIT_TIERS),
    _counter("kvbm_ttft_saved_seconds_total", "Estimate: computing time of what was loaded, less the load's"),
    _counter("kvbm_ttft_lost_seconds_total", "Estimate: what loads took longer than computing would have"),
    _Spec(
        "kvbm_evicted_blocks_total",
        "counter",
        "Blocks that left a tier",
        ("tier", "reason"),
        tuple(_EVICTED.values()),
    ),
    _counter("kvbm_dropped_blocks_total", "Full blocks that were not kept", "reason", DropReason),
    _counter("kvbm_failures_total", "Failures outside kvbm's control, by kind", "kind", FAILURE_KINDS),
    _counter(_GUARDED, "Errors of kvbm kept from the engine, by seam", "seam", (_OTHER,)),
    _counter("kvbm_uncached_requests_total", "Requests served without the cache", "reason", UncachedReason),
    _counter(
        "kvbm_missed_requests_total", "Requests that computed what could be cached", "reason", MissReason
    ),
    _counter("kvbm_missed_tokens_total", "Tokens computed that could have been loaded", "reason", MissReason),
    _counter("kvbm_audited_blocks_total", "Blocks computed again to be compared", "result", _AUDITS),
    _counter("kvbm_events_total", "KV events published, in blocks", "event", _EVENTS),
    _counter("kvbm_event_batches_dropped_total", "Batches of KV events that the NATS server did not take"),
    _gauge("kvbm_pending_jobs", "Transfers submitted and not yet acknowledged by every worker"),
    _gauge("kvbm_waiting_blocks", "Blocks on their way to a lower tier, or waiting for that", "tier", _LOWER),
    # Where it is known: see headless_blocks.
    _Spec("kvbm_headless_blocks", "gauge", "Blocks behind one that is not there any more", ("tier",), ()),
    _gauge("kvbm_state_blocks", "Blocks in use that are states of a hybrid model, not KV", "tier", _SLOTTED),
    _gauge("kvbm_live_leases", "Leases that pin blocks"),
    _gauge("kvbm_pins", "Prompts that operators have pinned"),
    _gauge("kvbm_pinned_blocks", "Blocks in host memory that stay as long as these pins do"),
    _gauge("kvbm_quotas", "Quotas that operators have set"),
    _gauge("kvbm_silent_ranks", "Ranks that do not answer; nothing is loaded or stored meanwhile"),
    _gauge("kvbm_held_blocks", "Blocks whose slots are not used again before silent ranks answer"),
)

# The library writes "_total" after the name of every counter; KVBM's counters have none.
_BARE_NAMES = [spec.name for spec in _SPECS if spec.kind == "counter" and not spec.name.endswith("_total")]
_HEADER_OF_BARE = re.compile(rf"^(# (?:HELP|TYPE) (?:{'|'.join(_BARE_NAMES)}))_total ", re.MULTILINE)


class _Histogram:
    """One for each of its label values."""

    def __init__(
        self,
        name: str,
        doc: str,
        labels: tuple[str, ...],
        series: Iterable[tuple[str, ...]],
        bounds: tuple[float, ...] = _BUCKETS_S,
    ) -> None:
        self.name, self._doc, self._labels, self._bounds = name, doc, labels, bounds
        # One place more than there are buckets: what is above the last one.
        self._counts = {values: [0] * (len(bounds) + 1) for values in series}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def add(self, values: tuple[str, ...], number: float) -> None:
        """One more; of label values that it does not have, nothing."""
        if number >= 0 and values in self._counts:
            self._counts[values][bisect_left(self._bounds, number)] += 1
            self._sums[values] += number

    def add_all(self, values: tuple[str, ...], numbers: npt.NDArray[np.float32]) -> None:
        """Many, which are not negative but for rounding; for label values that it has."""
        counts = self._counts[values]
        if len(numbers) <= FEW:
            for number in numbers.tolist():
                counts[bisect_left(self._bounds, number)] += 1
                self._sums[values] += max(0.0, number)
            return
        first = bisect_left(self._bounds, float(numbers.min()))
        if first == bisect_left(self._bounds, float(numbers.max())):  # what was stored together, as a rule
            counts[first] += len(numbers)
        else:
            for bucket, count in enumerate(np.bincount(np.searchsorted(self._bounds, numbers)).tolist()):
                counts[bucket] += count
        self._sums[values] += max(0.0, float(numbers.sum()))

    def metric(self) -> Metric:
        """As of now."""
        metric = Metric(self.name, self._doc, "histogram")
        for values, counts in self._counts.items():
            labels, total = dict(zip(self._labels, values, strict=True)), 0
            for bound, count in zip((*map(repr, self._bounds), "+Inf"), counts, strict=True):
                total += count
                metric.add_sample(f"{self.name}_bucket", {**labels, "le": bound}, total)
            metric.add_sample(f"{self.name}_sum", labels, self._sums[values])
            metric.add_sample(f"{self.name}_count", labels, total)
        return metric


class _Slowest:
    """The slowest transfer of each way in the present window of time and in the one before."""

    def __init__(self) -> None:
        self._now: dict[tuple[str, ...], tuple[float, int]] = {}
        self._before: dict[tuple[str, ...], tuple[float, int]] = {}
        self._since_s = 0.0

    def add(self, hop: tuple[str, ...], seconds: float, n_bytes: int, now_s: float) -> None:
        """One has ended."""
        self._turn(now_s)
        if seconds > self._now.get(hop, (0.0, 0))[0]:
            self._now[hop] = (seconds, n_bytes)

    def _turn(self, now_s: float) -> None:
        age_s = now_s - self._since_s
        if age_s >= SLOWEST_WINDOW_S:
            self._before = self._now if age_s < 2 * SLOWEST_WINDOW_S else {}
            self._now, self._since_s = {}, now_s

    def metrics(self, now_s: float) -> list[Metric]:
        """As of now; 0 where nothing has moved."""
        self._turn(now_s)
        seconds = Metric("kvbm_slowest_transfer_seconds", "Slowest transfer of the last minutes", "gauge")
        sizes = Metric("kvbm_slowest_transfer_bytes", "What that one moved", "gauge")
        for hop in _HOPS:
            slowest = max(self._now.get(hop, (0.0, 0)), self._before.get(hop, (0.0, 0)))
            for metric, value in zip((seconds, sizes), slowest, strict=True):
                metric.add_sample(metric.name, dict(zip(("from", "to"), hop, strict=True)), value)
        return [seconds, sizes]


class HitWindow(NamedTuple):
    """Sums over the last requests, in blocks beyond the device's own hit."""

    host_hit_blocks: int
    disk_hit_blocks: int
    object_hit_blocks: int
    queried_blocks: int

    def rate(self, hit_blocks: int) -> float:
        """0 to 1; 0 while nothing was queried."""
        return hit_blocks / self.queried_blocks if self.queried_blocks else 0.0


_NO_HITS = HitWindow(0, 0, 0, 0)


class Metrics(Collector):
    """
    Counters, gauges and the hit window. ``has_host_tier`` False: blocks only pass host memory on their way to
    the disk, and are counted as if they went straight. Bytes are counted as they go. ``seams``: the hooks of
    the engine whose guarded errors have a series each. ``why_requests``: so many are remembered in ``why``.

    Every method may be called from any thread, takes one short lock, and does not raise: amounts of 0 or less
    count nothing, an unknown reason, kind or seam counts as "other".
    """

    def __init__(
        self,
        window_requests: int = 1000,
        *,
        has_host_tier: bool = True,
        seams: Iterable[str] = (),
        clock: Clock | None = None,
        why_requests: int = 0,
    ) -> None:
        self.has_host_tier = has_host_tier
        self._clock = clock or SystemClock()
        self.why = WhyBook(why_requests)
        self.traces: Traces | None = None
        """Where spans go, if they are asked for."""
        self.on_look: Callable[[], None] = lambda: None
        """Called before numbers are read, by who reads them: sets those that are of now."""
        self.on_page: Callable[[], None] = lambda: None
        """Called before the page is made: sets those that take longer."""
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            spec.name: dict.fromkeys(spec.series, 0.0) for spec in _SPECS
        }
        self._values[_GUARDED] = {**{(seam,): 0.0 for seam in seams}, (_OTHER,): 0.0}
        self._tiers: dict[str, tuple[int, int]] = {name: (0, 0) for name in _TIERS}
        self._about: dict[str, str] = {}
        self._slowest = _Slowest()
        self._evicted_age = _Histogram(
            "kvbm_evicted_age_seconds",
            "How long ago blocks had been used that were evicted to make room",
            ("tier",),
            dict.fromkeys(labels[:1] for labels in _EVICTED.values()),
            AGE_BUCKETS_S,
        )
        self._transfer_seconds = _Histogram(
            "kvbm_transfer_seconds",
            "Seconds of completed transfers",
            ("direction",),
            [(direction,) for direction in _DIRECTIONS],
        )
        self._hop_seconds = _Histogram(
            "kvbm_tier_transfer_seconds",
            "Seconds that bytes took between device, host memory, disk and remote tier, without waiting",
            ("from", "to"),
            _HOPS,
        )
        self._window: deque[HitWindow] = deque(maxlen=max(1, window_requests))
        self._window_sum = _NO_HITS

    def _add(self, name: str, amount: float, *labels: str) -> None:
        if amount > 0:
            with self._lock:
                values = self._values[name]
                values[labels if labels in values else (*labels[:-1], _OTHER)] += amount

    def _set(self, *labels: str, **gauges: float) -> None:
        with self._lock:
            for name, value in gauges.items():
                self._values[name][labels] = value

    def describe(self, *, engine: str, model: str, name: str, rank: int, version: str) -> None:
        """Whose numbers these are; ``name``: that of the instance."""
        about = {"engine": engine, "model": model, "name": name, "rank": str(rank), "version": version}
        with self._lock:
            self._about = {label: value[:MAX_LABEL_CHARS] for label, value in about.items()}

    def about(self) -> dict[str, str]:
        """What ``describe`` was told, by label."""
        return dict(self._about)

    def matched_tokens(self, n_tokens: int, *, disk_tokens: int = 0, remote_tokens: int = 0) -> None:
        """Tokens promised to a request beyond the device's own hit; call once per request, not per query.
        Those that did not come from the disk or the remote tier came from the host.
        """
        self._add("kvbm_matched_tokens", n_tokens)
        host_tokens = n_tokens - disk_tokens - remote_tokens
        if not self.has_host_tier:
            host_tokens, disk_tokens = 0, host_tokens + disk_tokens
        for tier, tokens in zip(_HIT_TIERS, (host_tokens, disk_tokens, remote_tokens), strict=True):
            self._add("kvbm_hit_tokens_total", tokens, tier)

    def ttft_saved(self, seconds: float) -> None:
        """An estimate of how much sooner a request's first token came, as its prefix was loaded and not
        computed; negative: later.
        """
        self._add("kvbm_ttft_saved_seconds_total", seconds)
        self._add("kvbm_ttft_lost_seconds_total", -seconds)

    def offloaded_blocks(
        self, n_blocks: int, from_tier: Tier = Tier.DEVICE, to_tier: Tier = Tier.HOST
    ) -> None:
        """Blocks whose offload every worker acknowledged. A pair that KVBM has no name for is not counted."""
        if not self.has_host_tier:
            if to_tier is Tier.HOST:
                return
            from_tier = Tier.DEVICE
        name = _OFFLOADS.get((from_tier, to_tier))
        if name is not None:
            self._add(name, n_blocks)

    def onboarded_blocks(
        self, n_blocks: int, from_tier: Tier = Tier.HOST, to_tier: Tier = Tier.DEVICE
    ) -> None:
        """Blocks whose onboard every worker acknowledged. A pair that KVBM has no name for is not counted."""
        if from_tier is Tier.HOST and not self.has_host_tier:
            from_tier = Tier.DISK
        name = _ONBOARDS.get((from_tier, to_tier))
        if name is not None:
            self._add(name, n_blocks)

    def request_hits(
        self, host_hit_blocks: int, disk_hit_blocks: int, queried_blocks: int, object_hit_blocks: int = 0
    ) -> None:
        """One finished request, for the hit rates over the last requests. ``object_hit_blocks``: brought from
        the remote tier, and used for the first time.
        """
        if not self.has_host_tier:
            host_hit_blocks, disk_hit_blocks = 0, host_hit_blocks + disk_hit_blocks
        new = HitWindow(host_hit_blocks, disk_hit_blocks, object_hit_blocks, queried_blocks)
        with self._lock:
            gone = self._window[0] if len(self._window) == self._window.maxlen else _NO_HITS
            self._window.append(new)
            sums = zip(self._window_sum, new, gone, strict=True)
            self._window_sum = HitWindow(*(before + come - left for before, come, left in sums))

    def hit_window(self) -> HitWindow:
        """The sums behind the hit rates."""
        with self._lock:
            return self._window_sum

    def bytes_moved(self, direction: Direction, n_bytes: int) -> None:
        """Bytes of a completed transfer, over all ranks."""
        self._add("kvbm_bytes_total", n_bytes, str(direction))

    def transfer_seconds(self, direction: Direction, seconds: float) -> None:
        """Seconds of one completed transfer, from its start to the last acknowledgement."""
        with self._lock:
            self._transfer_seconds.add((str(direction),), seconds)

    def tier_transfer(self, source: Tier, target: Tier, n_bytes: int, seconds: float) -> None:
        """Bytes, over all ranks, that went straight from one tier's memory to the other's; ``seconds`` of the
        slowest rank, without the time in a queue. Nothing is counted of what moved no byte.
        """
        hop = (source.name.lower(), target.name.lower())
        if hop in _HOPS and n_bytes > 0:
            self._add("kvbm_tier_transfer_bytes_total", n_bytes, *hop)
            with self._lock:
                self._hop_seconds.add(hop, seconds)
                self._slowest.add(hop, seconds, n_bytes, self._clock.now_s())
            if self.traces is not None:
                self.traces.transfer(*hop, n_bytes, seconds)

    def read_again(self, tier: Tier, n_bytes: int) -> None:
        """Bytes, over all ranks, that were written to a lower tier here and have been read for the first
        time.
        """
        self._add("kvbm_read_again_bytes_total", n_bytes, tier.name.lower())

    def headless_blocks(self, tier: Tier, n_blocks: int) -> None:
        """Blocks of a tier that lie behind one that it does not have. There is no series before."""
        self._set(tier.name.lower(), kvbm_headless_blocks=n_blocks)

    def tier_usage(self, tier: Tier, used_blocks: int, capacity_blocks: int) -> None:
        """How full a tier is now."""
        if not self._has_blocks(tier):
            return
        with self._lock:
            self._tiers[tier.name.lower()] = (used_blocks, capacity_blocks)

    def state_blocks(self, tier: Tier, n_blocks: int) -> None:
        """How many blocks of a tier are states now."""
        if self._has_blocks(tier):
            self._set(tier.name.lower(), kvbm_state_blocks=n_blocks)

    def tiers(self) -> dict[str, tuple[int, int]]:
        """Blocks in use, and in all, by tier."""
        self.on_look()
        with self._lock:
            return dict(self._tiers)

    def waiting_blocks(self, tier: Tier, n_blocks: int) -> None:
        """Blocks on their way to a lower tier, or waiting for that."""
        self._set(tier.name.lower(), kvbm_waiting_blocks=n_blocks)

    def evicted(
        self,
        tier: Tier,
        n_blocks: int,
        reason: EvictReason = EvictReason.ROOM,
        ages_s: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Blocks that have left ``tier``. ``ages_s``: how long ago each of them had been used."""
        labels = _EVICTED.get((tier, reason))
        if labels is None or n_blocks <= 0 or not self._has_blocks(tier):
            return
        with self._lock:
            self._values["kvbm_evicted_blocks_total"][labels] += n_blocks
            if ages_s is not None:
                self._evicted_age.add_all(labels[:1], ages_s)

    def _has_blocks(self, tier: Tier) -> bool:
        return tier is not Tier.HOST or self.has_host_tier

    def dropped(self, reason: str, n_blocks: int = 1) -> None:
        """Full blocks that were computed and not kept; ``reason`` is a DropReason."""
        self._add("kvbm_dropped_blocks_total", n_blocks, reason)

    def event(self, event: str, n_blocks: int) -> None:
        """KV events that were published: stored, removed, or cleared, which counts as one."""
        self._add("kvbm_events_total", n_blocks, event)

    def event_batches_dropped(self, n_batches: int) -> None:
        """Batches of KV events that are lost; who listens sees it by their numbers."""
        self._add("kvbm_event_batches_dropped_total", n_batches)

    def failure(self, kind: str, n: int = 1) -> None:
        """Something outside our control failed; ``kind`` is one of FAILURE_KINDS."""
        self._add("kvbm_failures_total", n, kind)

    def remote_failures(self, n_blocks: int, *, is_write: bool) -> None:
        """Blocks that the remote tier did not take, or give."""
        self._add("kvbm_object_write_failures" if is_write else "kvbm_object_read_failures", n_blocks)

    def computed_instead(self) -> None:
        """A request that does not wait for the remote tier, as computing is faster."""
        self._add("kvbm_remote_too_slow_requests_total", 1)

    def fetched_from_peers(self, n_blocks: int) -> None:
        """Blocks that have come from another instance."""
        self._add("kvbm_peer_fetched_blocks_total", n_blocks)

    def lent_blocks(self, n_blocks: int) -> None:
        """Blocks that one rank has copied for another instance."""
        self._add("kvbm_peer_lent_blocks_total", n_blocks)

    def unserved_peers(self, reason: str, n: int) -> None:
        """Questions, connections or messages of other instances; ``reason`` is a PeerTrouble."""
        self._add("kvbm_peer_unserved_total", n, reason)

    def guarded_error(self, seam: str) -> None:
        """A guard kept an error from the engine; ``seam``: the hook that it called."""
        self._add(_GUARDED, 1, seam)

    def audited_blocks(self, result: str, n_blocks: int) -> None:
        """Blocks of one audit; ``result``: equal, wrong or not_compared."""
        self._add("kvbm_audited_blocks_total", n_blocks, result)

    def uncached_request(self, reason: str) -> None:
        """A request is served without the cache; ``reason`` is an UncachedReason."""
        self._add("kvbm_uncached_requests_total", 1, reason)

    def missed(self, reason: str, n_tokens: int) -> None:
        """One finished request that has computed so many tokens that could be cached; ``reason`` is a
        MissReason.
        """
        self._add("kvbm_missed_requests_total", 1, reason)
        self._add("kvbm_missed_tokens_total", n_tokens, reason)

    def set_pending_jobs(self, n: int) -> None:
        """Transfers submitted and not yet acknowledged."""
        self._set(kvbm_pending_jobs=n)

    def pending_jobs(self) -> int:
        """See ``set_pending_jobs``."""
        self.on_look()
        with self._lock:
            return int(self._values["kvbm_pending_jobs"][()])

    def set_live_leases(self, n: int) -> None:
        """Leases that pin blocks now."""
        self._set(kvbm_live_leases=n)

    def set_ordered(self, n_pins: int, n_pinned_blocks: int, n_quotas: int) -> None:
        """What operators have ordered that holds now."""
        self._set(kvbm_pins=n_pins, kvbm_pinned_blocks=n_pinned_blocks, kvbm_quotas=n_quotas)

    def set_silent_ranks(self, n_ranks: int, n_held_blocks: int) -> None:
        """Ranks that do not answer, and blocks of the transfers that they have not answered."""
        self._set(kvbm_silent_ranks=n_ranks, kvbm_held_blocks=n_held_blocks)

    def collect(self) -> list[Metric]:
        """All numbers as of one moment, as prometheus_client has them."""
        self.on_look()
        with self._lock:
            metrics = [_metric_of(spec, self._values[spec.name]) for spec in _SPECS]
            return [
                *metrics,
                *_hit_rates(self._window_sum),
                _tier_blocks(self._tiers),
                self._evicted_age.metric(),
                self._transfer_seconds.metric(),
                self._hop_seconds.metric(),
                *self._slowest.metrics(self._clock.now_s()),
                _info(self._about),
            ]

    def snapshot(self) -> dict[str, float]:
        """Series as KVBM's pages write them to their values."""
        samples = [sample for metric in self.collect() for sample in metric.samples]
        return {series(sample.name, sample.labels): sample.value for sample in samples}

    def exposition(self) -> str:
        """The text that Prometheus scrapes: format 0.0.4, with each counter under the name it has here."""
        self.on_page()
        return _HEADER_OF_BARE.sub(r"\1 ", generate_latest(self).decode())


def series(name: str, labels: Mapping[str, str]) -> str:
    """A series as people write it, such as ``kvbm_bytes_total{direction="offload"}``."""
    written = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{written}}}" if written else name


def _metric_of(spec: _Spec, values: Mapping[tuple[str, ...], float]) -> Metric:
    metric = Metric(spec.name.removesuffix("_total"), spec.doc, spec.kind)
    for label_values, number in values.items():
        metric.add_sample(spec.name, dict(zip(spec.labels, label_values, strict=True)), number)
    return metric


def _hit_rates(window: HitWindow) -> list[Metric]:
    rates = (
        ("host", window.rate(window.host_hit_blocks)),
        ("disk", window.rate(window.disk_hit_blocks)),
        ("object", window.rate(window.object_hit_blocks)),
    )
    metrics = []
    for tier, rate in rates:
        doc = f"Share of queried blocks found in the {tier} tier, over the last requests (0 to 1)"
        metrics.append(Metric(f"kvbm_{tier}_cache_hit_rate", doc, "gauge"))
        metrics[-1].add_sample(metrics[-1].name, {}, rate)
    return metrics


def _info(about: Mapping[str, str]) -> Metric:
    metric = Metric("kvbm_info", "Whose numbers these are; always 1", "gauge")
    if about:
        metric.add_sample(metric.name, dict(about), 1)
    return metric


def _tier_blocks(tiers: Mapping[str, tuple[int, int]]) -> Metric:
    metric = Metric("kvbm_tier_blocks", "Blocks of a tier, in use and in all", "gauge")
    for tier, numbers in tiers.items():
        for state, number in zip(("used", "capacity"), numbers, strict=True):
            metric.add_sample(metric.name, {"tier": tier, "state": state}, number)
    return metric
