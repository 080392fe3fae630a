"""A shared store kept within a size: what was used longest ago is removed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.inspection import OnCount, StoreInspection
from kvbm_core.storage.names import ObjectInfo

LOW_MARK = 0.9
"""Of the limit: a sweep that removes anything removes down to it."""
CANDIDATES = 200_000
"""Names that are held at once; where more have to go, the store is listed again."""
LISTING_S = 600.0
"""Removal goes by one listing for so long at most. Then the store is listed anew, as objects have been used
meanwhile.
"""
REMOVED_TOGETHER = 256
ATTEMPTS = 3


class SweepLimits(NamedTuple):
    """``grace_s``: an object that was used within so many seconds, as the listing says, is never removed."""

    max_bytes: int
    grace_s: float = 3600.0
    candidates: int = CANDIDATES


@dataclass(slots=True)
class Swept:
    """What a sweep found and did. ``records``, ``num_bytes``: in the store before it. ``oldest_s``: the last
    use of the object that had not been used for longest. ``trouble``: for people, why the sweep ended too
    soon.
    """

    records: int = 0
    num_bytes: int = 0
    removed: int = 0
    removed_bytes: int = 0
    oldest_s: float | None = None
    trouble: str = ""

    @property
    def left_bytes(self) -> int:
        """What is there now."""
        return self.num_bytes - self.removed_bytes


class _Listing(NamedTuple):
    """``oldest``: those used longest ago of what may be removed, in this order."""

    records: int
    num_bytes: int
    oldest: list[ObjectInfo]


class Sweeper:
    """Sweeps one store. It takes no lock: two sweepers at once choose the same records, and each counts as
    removed what the other one has removed. ``models``: the models whose records are bounded together; empty
    for all.

    ``now_s``: the time in seconds since 1970, as in the store's listing.
    """

    def __init__(
        self,
        store: StoreInspection,
        limits: SweepLimits,
        models: Sequence[str],
        now_s: Callable[[], float],
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._limits = limits
        self._models = models
        self._now_s = now_s
        self._clock = clock or SystemClock()

    def sweep(self, on_listed: OnCount, on_removed: OnCount, *, is_dry: bool = False) -> Swept:
        """Down to LOW_MARK of the limit, if there is more than the limit. ``on_listed`` counts records,
        ``on_removed`` bytes. OSError if the store cannot be listed the first time.
        """
        listing = self._list(on_listed)
        swept = Swept(listing.records, listing.num_bytes)
        if listing.num_bytes <= self._limits.max_bytes:
            return swept
        low_bytes = int(LOW_MARK * self._limits.max_bytes)
        while listing.num_bytes > low_bytes and listing.oldest and not swept.trouble:
            swept.num_bytes = listing.num_bytes + swept.removed_bytes
            excess_bytes = listing.num_bytes - low_bytes
            if is_dry:
                chosen = list(_first(listing.oldest, excess_bytes))
                _note(swept, chosen)
                return swept
            left_bytes = self._remove(listing.oldest, excess_bytes, swept, on_removed)
            if left_bytes <= 0 or swept.trouble:
                break
            try:
                listing = self._list(on_listed)
            except OSError as error:
                swept.trouble = str(error)
        return swept

    def _list(self, on_listed: OnCount) -> _Listing:
        last_used_s = self._now_s() - self._limits.grace_s
        records = num_bytes = 0

        def old() -> Iterator[tuple[float, str, int]]:
            nonlocal records, num_bytes
            for info in self._store.objects(self._models):
                records, num_bytes = records + 1, num_bytes + info.num_bytes
                on_listed(records, None)
                if info.changed_s < last_used_s:
                    yield info.changed_s, info.name, info.num_bytes

        found = heapq.nsmallest(self._limits.candidates, old())
        oldest = [ObjectInfo(name, size, changed_s) for changed_s, name, size in found]
        return _Listing(records, num_bytes, oldest)

    def _remove(
        self, oldest: Sequence[ObjectInfo], excess_bytes: int, swept: Swept, on_removed: OnCount
    ) -> int:
        """Removes what is chosen; how many bytes are still too much."""
        chosen = list(_first(oldest, excess_bytes))
        ends_at_s, left_bytes = self._clock.now_s() + LISTING_S, excess_bytes
        for start in range(0, len(chosen), REMOVED_TOGETHER):
            some = chosen[start : start + REMOVED_TOGETHER]
            gone, failure = self._remove_some(some)
            _note(swept, gone)
            left_bytes -= sum(info.num_bytes for info in gone)
            on_removed(excess_bytes - left_bytes, excess_bytes)
            if not gone:
                swept.trouble = f"nothing more can be removed: {failure}"
            if swept.trouble or self._clock.now_s() > ends_at_s:
                break
        return left_bytes

    def _remove_some(self, some: Sequence[ObjectInfo]) -> tuple[list[ObjectInfo], Outcome]:
        """The objects that are gone now, and the outcome of those that are not."""
        gone, left, failure = list[ObjectInfo](), list(some), Outcome.OK
        for _ in range(ATTEMPTS):
            outcomes = self._store.remove([info.name for info in left])
            failed = []
            for info, outcome in zip(left, outcomes, strict=True):
                if outcome in (Outcome.OK, Outcome.MISS):
                    gone.append(info)
                else:
                    failed.append(info)
                    failure = outcome
            left = failed
            if not left:
                break
        return gone, failure


def _first(oldest: Sequence[ObjectInfo], excess_bytes: int) -> Iterator[ObjectInfo]:
    """As many of them as are needed."""
    for info in oldest:
        if excess_bytes <= 0:
            return
        yield info
        excess_bytes -= info.num_bytes


def _note(swept: Swept, gone: Sequence[ObjectInfo]) -> None:
    swept.removed += len(gone)
    swept.removed_bytes += sum(info.num_bytes for info in gone)
    ages = [info.changed_s for info in gone]
    swept.oldest_s = min([*ages, *filter(None, [swept.oldest_s])], default=None)
