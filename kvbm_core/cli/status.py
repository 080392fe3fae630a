"""What a running kvbm says about itself: its /metrics page, read and put into rows for a person."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from prometheus_client.parser import text_string_to_metric_families

from kvbm_core.errors import KvbmError

MAX_PAGE_BYTES = 4 << 20
Samples = dict[str, list[tuple[dict[str, str], float]]]
Row = tuple[str, str, str]


class StatusError(KvbmError):
    """The engine's metrics cannot be read; one line with the remedy."""


def fetch_samples(host: str, port: int, timeout_s: float) -> Samples:
    """The samples of http://host:port/metrics by name. Raises StatusError if that is no kvbm's page."""
    url = f"http://{host}:{port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - always http://
            page = answer.read(MAX_PAGE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise StatusError(
            f"cannot read {url} ({reason}): start the engine with DYN_KVBM_METRICS=true, "
            "or name its DYN_KVBM_METRICS_PORT with --port"
        ) from None
    samples = parse_samples(page)
    if not any(name.startswith("kvbm_") for name in samples):
        raise StatusError(f"{url} is not kvbm's: name the engine's DYN_KVBM_METRICS_PORT with --port")
    return samples


def parse_samples(page: str) -> Samples:
    """The samples of a page in Prometheus text format. Raises StatusError if it is not one."""
    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    except (ValueError, KeyError, IndexError):
        raise StatusError("the page is not in Prometheus text format: is this kvbm's port?") from None
    return samples


def status_rows(samples: Samples) -> Iterator[Row]:
    """(section, what, value) in the order a person reads them; series that never moved are left out."""
    yield "hits", "host hit rate", _percent(samples, "kvbm_host_cache_hit_rate")
    if _total(samples, "kvbm_disk_cache_hit_rate"):
        yield "hits", "disk hit rate", _percent(samples, "kvbm_disk_cache_hit_rate")
    yield "hits", "tokens matched", _count(_total(samples, "kvbm_matched_tokens"))
    yield "offloaded", "device to host", _blocks(samples, "kvbm_offload_blocks_d2h")
    yield "onboarded", "host to device", _blocks(samples, "kvbm_onboard_blocks_h2d")
    for name, labels, value in _labelled(samples, "kvbm_tier_"):
        yield "tiers", name, f"{' '.join(labels.values())} {_count(value)}".strip()
    yield from _counters(samples, "moved", "_bytes", format_bytes)
    yield from _counters(samples, "evicted", "evict", _count)
    for word in ("drop", "fail", "error"):
        yield from _counters(samples, "failures", word, _count)


def _counters(samples: Samples, section: str, word: str, show: Callable[[float], str]) -> Iterator[Row]:
    return iter(())


def _labelled(samples: Samples, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    return iter(())


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()))


def _percent(samples: Samples, name: str) -> str:
    return f"{100 * _total(samples, name):.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _blocks(samples: Samples, name: str) -> str:
    return f"{_count(_total(samples, name))} blocks"


def format_bytes(value: float) -> str:
    """Bytes for a person, in decimal units as the settings have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
