"""Admission policies that are not in the product, and stand between those that are."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.clock import Clock
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.policy.frequency import ADMITTED_FROM, MAX_ENTRIES, FrequencyFilter
from kvbm_core.replay.machine import POLICIES, Policy
from kvbm_core.types import BlockKey


class HitsAlone(FrequencyFilter):
    """AdmissionPolicy: as FrequencyFilter, but a further offer changes nothing. So the KVBM guides describe
    theirs.
    """

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that have been hit."""
        step = self._step()
        counts = [max(1, self._count(key, step)) for key in keys]
        for key, count in zip(keys, counts, strict=True):
            self._set(key, count, step)
        return [key for key, count in zip(keys, counts, strict=True) if count >= ADMITTED_FROM]


class RejectFirst:
    """AdmissionPolicy: a block comes in from its second offer, or its first hit, on. Time makes no
    difference.

    At most ``max_entries`` are remembered: the one longest without an offer or a hit goes first.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._seen: dict[BlockKey, None] = {}

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that were offered or hit before."""
        known = [key for key in keys if key in self._seen]
        self.hit(keys)
        return known

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """See AdmissionPolicy."""
        for key in keys:
            self._seen.pop(key, None)
            self._seen[key] = None
            if len(self._seen) > self._max_entries:
                del self._seen[next(iter(self._seen))]


def _reject_first(clock: Clock) -> AdmissionPolicy:
    return RejectFirst()


CANDIDATES = (
    Policy("hits alone", HitsAlone, is_candidate=True),
    Policy("reject first", _reject_first, is_candidate=True),
)
COMPARED = (*POLICIES, *CANDIDATES)
