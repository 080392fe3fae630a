"""``kvbm status``: what running instances have done, from their metrics pages, in rows for a person."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvbm_core.errors import KvbmError

Sample = tuple[dict[str, str], float]
Samples = dict[str, list[Sample]]
Row = tuple[str, str, str]

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
HOST, DISK, REMOTE = "host", "disk", "remote"
TIERS = (HOST, DISK, REMOTE)
HIT_RATES = {
    HOST: "kvbm_host_cache_hit_rate",
    DISK: "kvbm_disk_cache_hit_rate",
    REMOTE: "kvbm_object_cache_hit_rate",
}
# section, what, the tier that has it, and the series whose sum it is
_WAYS = (
    ("offloaded", "device to host", HOST, ("kvbm_offload_blocks_d2h",)),
    ("offloaded", "to disk", DISK, ("kvbm_offload_blocks_h2d", "kvbm_offload_blocks_d2d")),
    ("offloaded", "to remote", REMOTE, ("kvbm_offload_blocks_d2o",)),
    ("onboarded", "host to device", HOST, ("kvbm_onboard_blocks_h2d",)),
    ("onboarded", "disk to device", DISK, ("kvbm_onboard_blocks_d2d",)),
    ("onboarded", "from remote", REMOTE, ("kvbm_onboard_blocks_o2d",)),
)
_UNLABELLED = {
    "kvbm_object_read_failures": "blocks not fetched from remote",
    "kvbm_object_write_failures": "blocks not stored in remote",
}
EVICTED = "evicted"
_TROUBLE = {
    EVICTED: ("kvbm_evicted_blocks_total",),
    "not kept": ("kvbm_dropped_blocks_total",),
    "failures": ("kvbm_failures_total", *_UNLABELLED),
    "guarded errors": ("kvbm_guarded_errors_total",),
    "served uncached": ("kvbm_uncached_requests_total",),
}


class StatusError(KvbmError):
    """Metrics cannot be read; one line, which says why."""


def parse_samples(page: str) -> Samples:
    """The samples of a page in Prometheus text format 0.0.4. Raises StatusError if it is not one.

    Read here because prometheus_client renames counters that do not end in ``_total``, and KVBM's do not.
    """
    samples: Samples = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        try:
            name, labels, value = found.groups() if found else ("", "", line)
            samples.setdefault(name, []).append((_labels(labels or ""), float(value)))
        except ValueError:
            raise StatusError("the page is not in Prometheus text format") from None
    return samples


def _labels(text: str) -> dict[str, str]:
    def plain(value: str) -> str:
        return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value)

    return {name: plain(value) for name, value in _LABEL.findall(text)}


def status_rows(samples: Samples) -> Iterator[Row]:
    """(section, what, value) in the order a person reads them; of the labelled series, those that moved."""
    tiers = _tiers_there(samples)
    yield from _hit_rows(samples, tiers)
    for section, what, tier, names in _WAYS:
        if tier in tiers:
            yield section, what, _blocks(sum(total(samples, name) for name in names))
    for labels, value in samples.get("kvbm_bytes_total", ()):
        direction = labels.get("direction", "")
        mean = _mean_ms(samples, direction)
        yield f"{direction}ed", "bytes", f"{format_bytes(value)}{mean}"
    for labels, value in moved(samples, "kvbm_tier_transfer_bytes_total"):
        seconds = total(samples, "kvbm_tier_transfer_seconds_sum", **labels)
        rate = f" at {format_bytes(value / seconds)}/s on average" if seconds else ""
        yield "moved", f"{labels.get('from')} to {labels.get('to')}", f"{format_bytes(value)}{rate}"
    yield from _written_rows(samples)
    yield from _tier_rows(samples)
    yield from _flight_rows(samples)
    for labels, value in moved(samples, "kvbm_audited_blocks_total"):
        yield "audited", labels.get("result", "").replace("_", " "), _blocks(value)
    yield from _trouble_rows(samples)


def _hit_rows(samples: Samples, tiers: set[str]) -> Iterator[Row]:
    for tier, name in HIT_RATES.items():
        if tier in tiers:
            yield "hits", f"{tier} hit rate (recent requests)", f"{100 * total(samples, name):.1f} %"
    yield "hits", "tokens matched", _count(total(samples, "kvbm_matched_tokens"))
    for labels, value in moved(samples, "kvbm_hit_tokens_total"):
        yield "hits", f"tokens from {labels.get('tier')}", _count(value)
    for name, what in (("saved", "time to first token saved"), ("lost", "time to first token lost")):
        seconds = total(samples, f"kvbm_ttft_{name}_seconds_total")
        if seconds:
            yield "hits", f"{what} (estimate)", f"{seconds:,.1f} s"


def _written_rows(samples: Samples) -> Iterator[Row]:
    for tier in (DISK, REMOTE):
        num_bytes = total(samples, "kvbm_tier_transfer_bytes_total", to=tier)
        again_bytes = total(samples, "kvbm_read_again_bytes_total", tier=tier)
        if num_bytes:
            share = f"{format_bytes(again_bytes)} ({100 * again_bytes / num_bytes:.0f} %)"
            yield "written", f"to {tier}", f"{format_bytes(num_bytes)}, {share} of them read again"
    for labels, value in samples.get("kvbm_headless_blocks", ()):
        yield "written", f"{labels.get('tier')} without what comes before", _blocks(value)


def _flight_rows(samples: Samples) -> Iterator[Row]:
    yield "in flight", "transfers", _count(total(samples, "kvbm_pending_jobs"))
    for labels, value in moved(samples, "kvbm_waiting_blocks"):
        yield "in flight", f"waiting for {labels.get('tier')}", _blocks(value)
    yield "in flight", "leases", _count(total(samples, "kvbm_live_leases"))
    silent_ranks = total(samples, "kvbm_silent_ranks")
    if silent_ranks:
        yield "in flight", "ranks that do not answer", _count(silent_ranks)


def _trouble_rows(samples: Samples) -> Iterator[Row]:
    found = list(troubles(samples))
    for section in _TROUBLE:
        counts = [(what, _count(value)) for of, what, value in found if of == section]
        for what, count in counts or [("none", "0")]:
            yield section, what, count


def troubles(samples: Samples) -> Iterator[tuple[str, str, float]]:
    """(section, what, how much in all) of what was evicted, or went wrong."""
    for section, names in _TROUBLE.items():
        for name in names:
            for labels, value in moved(samples, name):
                yield section, " ".join(labels.values()) or _UNLABELLED.get(name, name), value


def _tiers_there(samples: Samples) -> set[str]:
    """Tiers that have room, or were used: a remote one says nowhere how large it is. The host where there is
    no other: its room is told when its first slots can be used.
    """
    there = {
        labels.get("tier", "")
        for labels, _ in moved(samples, "kvbm_tier_blocks")
        if labels.get("state") == "capacity"
    }
    used = [
        *HIT_RATES.items(),
        *((tier, name) for _, _, tier, names in _WAYS for name in names),
        *((REMOTE, name) for name in _UNLABELLED),
    ]
    there |= {tier for tier, name in used if total(samples, name)}
    return there or {HOST}


def _tier_rows(samples: Samples) -> Iterator[Row]:
    tiers: dict[str, dict[str, float]] = {}
    for labels, value in samples.get("kvbm_tier_blocks", ()):
        tiers.setdefault(labels.get("tier", ""), {})[labels.get("state", "")] = value
    for tier, numbers in tiers.items():
        used, capacity = numbers.get("used", 0.0), numbers.get("capacity", 0.0)
        if capacity:
            share = f"{100 * used / capacity:.0f} %"
            found = total(samples, "kvbm_state_blocks", tier=tier)
            states = f", {_count(found)} of them states" if found else ""  # of a hybrid model
            yield "tiers", tier, f"{_count(used)} of {_count(capacity)} blocks ({share}){states}"


def _mean_ms(samples: Samples, direction: str) -> str:
    count = total(samples, "kvbm_transfer_seconds_count", direction=direction)
    if not count:
        return ""
    mean_ms = 1000 * total(samples, "kvbm_transfer_seconds_sum", direction=direction) / count
    plural = "s" if count > 1 else ""
    return f" in {_count(count)} transfer{plural} of {mean_ms:.1f} ms on average"


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the series that have these labels."""
    return sum(value for found, value in samples.get(name, ()) if labels.items() <= found.items())


def moved(samples: Samples, name: str) -> Iterator[Sample]:
    """The series that are not 0."""
    return ((labels, value) for labels, value in samples.get(name, ()) if value)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _blocks(value: float) -> str:
    return f"{_count(value)} blocks"


def format_bytes(value: float) -> str:
    """Bytes for a person, in decimal units as the settings have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
