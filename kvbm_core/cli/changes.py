"""What has happened between two readings of an instance's metrics page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_core.cli.instances import Reading
from kvbm_core.cli.status import EVICTED, HIT_RATES, TIERS, Sample, moved, total, troubles


@dataclass(frozen=True)
class Change:
    """From ``before`` to ``after``. Without ``before`` there are no rates yet; they are 0."""

    after: Reading
    before: Reading | None = None
    _old: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, found in (self.before.samples if self.before else {}).items():
            self._old.update({(name, frozenset(labels.items())): value for labels, value in found})

    @property
    def seconds(self) -> float:
        """Between the two; 0 without the first."""
        return self.after.read_at_s - self.before.read_at_s if self.before else 0.0

    def now(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        return total(self.after.samples, name, **labels)

    def more(self, name: str, **labels: str) -> float:
        """By how much those have grown. A counter that is smaller than before has begun anew."""
        grown = 0.0
        for found, value in self.after.samples.get(name, ()) if self._old else ():
            if labels.items() <= found.items():
                old = self._old.get((name, frozenset(found.items())), 0.0)
                grown += value - old if value >= old else value
        return grown

    def rate(self, name: str, **labels: str) -> float:
        """Per second."""
        return self.more(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def labels_of(self, name: str) -> Iterator[Sample]:
        """The series that are not 0."""
        return moved(self.after.samples, name)

    def median(self, name: str, **labels: str) -> float | None:
        """Of a histogram: the bucket's bound below which half of what was new is; of all if nothing was."""
        for count in (self.more, self.now):
            total = count(f"{name}_count", **labels)
            bounds = {found["le"] for found, _ in self.after.samples.get(f"{name}_bucket", ())}
            for le in sorted(bounds, key=float):
                if total and 2 * count(f"{name}_bucket", le=le, **labels) >= total:
                    return float(le)
        return None

    def troubles(self) -> Iterator[tuple[str, str, float]]:
        """(section, what, how much in all), of what was not 0."""
        return (found for found in troubles(self.after.samples) if found[0] != EVICTED)

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "name": self.after.name,
            "where": self.after.where,
            "about": self.after.about,
            "trouble": self.after.trouble,
            "seconds": round(self.seconds, 3),
            "hit_rates": {tier: self.now(name) for tier, name in HIT_RATES.items()},
            "hit_tokens_per_s": {tier: self.rate("kvbm_hit_tokens_total", tier=tier) for tier in TIERS},
            "ttft_saved_s": self.now("kvbm_ttft_saved_seconds_total"),
            "ttft_lost_s": self.now("kvbm_ttft_lost_seconds_total"),
            "tiers": {
                tier: {state: self.now("kvbm_tier_blocks", tier=tier, state=state) for state in _STATES}
                for tier in TIERS
            },
            "transfers": [
                {
                    **labels,
                    "bytes_per_s": self.rate("kvbm_tier_transfer_bytes_total", **labels),
                    "bytes": value,
                    "slowest_s": self.now("kvbm_slowest_transfer_seconds", **labels),
                    "slowest_bytes": self.now("kvbm_slowest_transfer_bytes", **labels),
                }
                for labels, value in self.labels_of("kvbm_tier_transfer_bytes_total")
            ],
            "pending_transfers": self.now("kvbm_pending_jobs"),
            "leases": self.now("kvbm_live_leases"),
            "waiting_blocks": {tier: self.now("kvbm_waiting_blocks", tier=tier) for tier in TIERS[1:]},
            "evicted": [
                {**labels, "blocks_per_s": self.rate("kvbm_evicted_blocks_total", **labels), "blocks": value}
                for labels, value in self.labels_of("kvbm_evicted_blocks_total")
            ],
            "troubles": [
                {"kind": section, "what": what, "count": count} for section, what, count in self.troubles()
            ],
        }


_STATES = ("used", "capacity")


def age_words(seconds: float | None) -> str:
    """A bound of an age, for people."""
    if seconds is None:
        return ""
    if math.isinf(seconds):
        return "over a week"
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"under {seconds / unit_s:g} {unit}"
    return f"under {seconds:g} s"
