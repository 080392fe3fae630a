"""Pins with an owner and an expiry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError
from kvbm_core.types import BlockKey


@dataclass(frozen=True, slots=True)
class Lease:
    """``owner`` holds ``keys[i]`` in ``slots[i]`` until released, or ``expires_at_s`` on the clock."""

    lease_id: int
    owner: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    expires_at_s: float


class LeaseBook:
    """The leases of one tier. Each ends exactly once: by a release that is True, or by ``expire``.

    The book pins nothing itself: who grants, pins; who is told of an end, unpins. One thread only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[int, Lease] = {}
        # (expires_at_s, lease_id), earliest first; a released lease stays until its time, or until _compact.
        self._by_expiry: list[tuple[float, int]] = []
        self._last_id = 0

    def grant(self, owner: str, keys: Sequence[BlockKey], slots: Sequence[int], ttl_s: float) -> Lease:
        """A lease of ``ttl_s`` seconds from now. ValueError if not positive, or if the lengths differ."""
        if not ttl_s > 0:
            raise ValueError(f"a lease lasts more than {ttl_s} s")
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys do not go with {len(slots)} slots")
        self._last_id += 1
        lease = Lease(self._last_id, owner, tuple(keys), tuple(slots), self._clock.now_s() + ttl_s)
        self._live[lease.lease_id] = lease
        heappush(self._by_expiry, (lease.expires_at_s, lease.lease_id))
        return lease

    def release(self, lease: Lease) -> bool:
        """Ends ``lease``. False if it has ended before, by release or by expire."""
        if not self.is_live(lease):
            return False
        del self._live[lease.lease_id]
        if len(self._by_expiry) > 2 * len(self._live) + 64:
            self._compact()
        return True

    def expire(self) -> list[Lease]:
        """Ends the leases whose time has come and returns them, earliest first. Cost grows with those."""
        now_s = self._clock.now_s()
        expired: list[Lease] = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            _, lease_id = heappop(self._by_expiry)
            lease = self._live.pop(lease_id, None)
            if lease is not None:
                expired.append(lease)
        return expired

    def is_live(self, lease: Lease) -> bool:
        """Whether ``lease`` has not ended. One past its time lives, and its pins hold, until ``expire``."""
        return self._live.get(lease.lease_id) is lease

    @property
    def live_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._live)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a live lease could never expire. Cost grows with the leases."""
        queued = set(self._by_expiry)
        for lease_id, lease in self._live.items():
            if lease.lease_id != lease_id or (lease.expires_at_s, lease_id) not in queued:
                raise IntegrityError(f"lease {lease_id} of {lease.owner} would never expire")

    def _compact(self) -> None:
        self._by_expiry = [(lease.expires_at_s, lease.lease_id) for lease in self._live.values()]
        heapify(self._by_expiry)
