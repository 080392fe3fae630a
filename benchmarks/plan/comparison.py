"""Predicted and reached: the same sizes and policies by ``kvbm plan``'s arithmetic and by the real leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_core.replay.machine import POLICIES, Policy, Sizes, replay
from kvbm_core.replay.trace import Trace
from kvbm_core.sizing.reuse import Reuse

LIMIT_POINTS = 2.0
"""By which a prediction may be off, in % of all prompt tokens."""
NUM_SIZES = 6


@dataclass(frozen=True, slots=True)
class Pair:
    """One size under one policy. Rates are shares of all prompt tokens."""

    trace: str
    sizes: Sizes
    policy: Policy
    predicted: float
    reached: float
    predicted_written_blocks: int
    written_blocks: int
    predicted_s: float
    reached_s: float

    @property
    def off_points(self) -> float:
        """How far the prediction is off."""
        return 100 * abs(self.predicted - self.reached)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "trace": self.trace,
            **self.sizes._asdict(),
            "policy": self.policy.name,
            "predicted": self.predicted,
            "reached": self.reached,
            "off_points": self.off_points,
            "predicted_written_blocks": self.predicted_written_blocks,
            "written_blocks": self.written_blocks,
            "predicted_s": self.predicted_s,
            "reached_s": self.reached_s,
        }


def six_sizes(trace: Trace) -> list[Sizes]:
    """From where little is found to where most of what there is: shares of all different blocks."""
    whole = trace.distinct_blocks
    device = max(1, whole // 200)
    hosts = (1, 4, 16)
    sizes = [Sizes(device, host * device, 4 * host * device) for host in hosts]
    return [
        *sizes,
        Sizes(device, 2 * device, 32 * device),
        Sizes(device, 8 * device, 0),
        Sizes(0, 32 * device, 0),
    ]


def compare(trace: Trace, told: Callable[[str], None] = lambda text: None) -> list[Pair]:
    """Six sizes, each with both policies where there is a disk."""
    began_s = time.perf_counter()
    reuse = Reuse(trace)
    share_s = (time.perf_counter() - began_s) / NUM_SIZES
    pairs = []
    for sizes in six_sizes(trace):
        policies: Sequence[Policy] = POLICIES if sizes.disk_blocks else POLICIES[:1]
        for policy in policies:
            began_s = time.perf_counter()
            found = reuse.found(sizes, policy)
            predicted_s = time.perf_counter() - began_s + share_s / len(policies)
            told(f"{trace.name}: {sizes}, {policy.name}")
            began_s = time.perf_counter()
            tally = replay(trace, sizes, policy)
            reached_s = time.perf_counter() - began_s
            pairs.append(
                Pair(
                    trace.name,
                    sizes,
                    policy,
                    reuse.hit_rate(found),
                    tally.hit_rate,
                    found.written_blocks,
                    tally.written_blocks,
                    predicted_s,
                    reached_s,
                )
            )
    return pairs
