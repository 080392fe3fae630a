"""What moved between SGLang's host pools and the stores below: in kvbm's metrics, and for SGLang's own."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.tiers.written import Unread
from kvbm_core.types import Direction, Tier

MAX_KEPT = 1024
"""Batches remembered for SGLang; where nobody asks for them the oldest go."""
MAX_UNREAD = 100_000
"""Pages remembered that were written and not read."""


class Batch(NamedTuple):
    """A call that moved pages."""

    pages: int
    gb_per_s: float


class Stats:
    """Safe to call from any thread."""

    def __init__(self, metrics: Metrics, *, keeps_batches: bool) -> None:
        self.metrics = metrics
        self._keeps_batches = keeps_batches
        self._lock = threading.Lock()
        self._evicted_seen = 0
        self._unread = Unread[Hashable](MAX_UNREAD)
        self._batches: dict[Direction, list[Batch]] = {direction: [] for direction in Direction}

    def moved(
        self,
        direction: Direction,
        outcomes: Sequence[Outcome],
        page_bytes: int,
        seconds: float,
        names: Sequence[Hashable] = (),
    ) -> None:
        """A call has ended. ``names``: of the pages that went to the disk or came from there; others came
        from the remote store, which counts what it moves.
        """
        metrics, pages = self.metrics, outcomes.count(Outcome.OK)
        for outcome in set(outcomes) - {Outcome.OK, Outcome.MISS}:
            metrics.failure(f"{direction}_{outcome}", outcomes.count(outcome))
        if not pages:
            return
        disk_pages = len(names)
        if direction is Direction.OFFLOAD:
            source, target = Tier.HOST, Tier.DISK
            metrics.offloaded_blocks(disk_pages, source, target)
            with self._lock:
                self._unread.wrote([(name, page_bytes) for name in names])
        else:
            source, target = Tier.DISK, Tier.HOST
            metrics.onboarded_blocks(disk_pages, Tier.DISK, Tier.DEVICE)
            with self._lock:
                read_again = self._unread.read(names)
            metrics.read_again(Tier.DISK, read_again)
        metrics.bytes_moved(direction, pages * page_bytes)
        metrics.transfer_seconds(direction, seconds)
        metrics.tier_transfer(source, target, disk_pages * page_bytes, seconds * disk_pages / pages)
        if self._keeps_batches:
            batch = Batch(pages, pages * page_bytes / max(seconds, 1e-9) / 1e9)
            with self._lock:
                kept = self._batches[direction]
                kept.append(batch)
                del kept[:-MAX_KEPT]

    def disk_tier(self, used_pages: int, capacity_pages: int, evicted_pages: int) -> None:
        """How full it is; ``evicted_pages``: so far, in all."""
        self.metrics.tier_usage(Tier.DISK, used_pages, capacity_pages)
        with self._lock:
            new, self._evicted_seen = evicted_pages - self._evicted_seen, evicted_pages
        self.metrics.evicted(Tier.DISK, new)

    def queried(self, page_tokens: int, hits: Sequence[Tier | None], queried_pages: int) -> None:
        """A prefix was looked for; ``hits``: where each page of what was found is."""
        remote_pages = hits.count(Tier.REMOTE)
        self.metrics.matched_tokens(
            len(hits) * page_tokens,
            disk_tokens=(len(hits) - remote_pages) * page_tokens,
            remote_tokens=remote_pages * page_tokens,
        )
        self.metrics.request_hits(0, len(hits) - remote_pages, queried_pages, remote_pages)

    def take(self) -> dict[Direction, list[Batch]] | None:
        """The batches since the last call; None for none, which is cheap."""
        if not any(self._batches.values()):
            return None
        with self._lock:
            taken = self._batches
            self._batches = {direction: [] for direction in Direction}
        return taken
