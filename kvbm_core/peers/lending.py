"""The owner's leader: which blocks others may copy now, held where they lie while a rank copies them.

A rank copies a block to memory of its own, gives it back, and sends the copy only if it was held all the
time. So a block is held for milliseconds, however slow the asker is, and for LONGEST_S at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock
from kvbm_core.observe.metrics import Metrics
from kvbm_core.tiers.chain import TierChain
from kvbm_core.transfer.plan import NO_SLOT
from kvbm_core.types import BlockKey

LONGEST_S = 10.0
MAX_LOANS = 256
"""At once, over all ranks."""


class Loan(NamedTuple):
    """Where the blocks of a question lie, in its order. ``slots``: in the host; ``places``: in the lower tier
    ``tier``. NO_SLOT: not there. ``is_refused``: too many are held; then nothing is.
    """

    slots: tuple[int, ...]
    places: tuple[int, ...]
    tier: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    leases: tuple[tuple[BlockTier, Lease], ...]
    ends_at_s: float
    num_blocks: int


class Lender:
    """Any thread. ``lock``: whoever uses ``chain`` holds it. ``is_current()``, under the lock: what its books
    say of every rank's memory is so; a rank's process may have been replaced by one whose memory is empty.
    """

    def __init__(
        self,
        chain: TierChain,
        lock: AbstractContextManager[object],
        clock: Clock,
        metrics: Metrics,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._chain = chain
        self._lock = lock
        self._clock = clock
        self._metrics = metrics
        self._is_current = is_current
        self._held: dict[tuple[int, int], _Held] = {}

    @property
    def num_loans(self) -> int:
        """Of those that were not given back."""
        return len(self._held)

    def find(self, keys: Sequence[BlockKey]) -> Loan:
        """Where they lie; nothing is held."""
        with self._lock:
            return self._look(keys, [])

    def lend(self, rank: int, number: int, keys: Sequence[BlockKey], ttl_s: float) -> Loan:
        """Holds those of ``keys`` that are there for ``ttl_s``, or until ``take_back`` with the same numbers.
        A second loan of one number is refused.
        """
        nowhere = (NO_SLOT,) * len(keys)
        with self._lock:
            self._expire()
            is_taken = len(self._held) >= MAX_LOANS or (rank, number) in self._held
            if is_taken or not ttl_s > 0 or not self._is_current():
                return Loan(nowhere, nowhere, is_refused=True)
            leases: list[tuple[BlockTier, Lease]] = []
            ttl_s = min(ttl_s, LONGEST_S)
            loan = self._look(keys, leases, ttl_s)
            if leases:
                num_blocks = sum(len(lease.keys) for _, lease in leases)
                ends_at_s = self._clock.now_s() + ttl_s
                self._held[rank, number] = _Held(tuple(leases), ends_at_s, num_blocks)
            return loan

    def take_back(self, rank: int, number: int) -> bool:
        """The rank has copied them. Whether they were held until now; if not, the copies may be of others."""
        with self._lock:
            held = self._held.pop((rank, number), None)
            if held is None:
                return False
            # Nor forgotten since: a load may have found out that they are damaged.
            is_good = self._is_current() and all(
                tier.is_live(lease) and tier.match_prefix(lease.keys) == len(lease.keys)
                for tier, lease in held.leases
            )
            self._release(held)
            if is_good:
                self._metrics.lent_blocks(held.num_blocks)
            return is_good

    def expire(self) -> None:
        """Time has passed: what was not given back is held no more."""
        if self._held:
            with self._lock:
                self._expire()

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for name, held in list(self._held.items()):
            if held.ends_at_s <= now_s:
                self._release(self._held.pop(name))

    def _release(self, held: _Held) -> None:
        for tier, lease in held.leases:
            tier.release(lease)

    def _look(
        self, keys: Sequence[BlockKey], leases: list[tuple[BlockTier, Lease]], ttl_s: float = 0.0
    ) -> Loan:
        """``ttl_s`` 0: holds nothing."""
        chain, slot_of, place_of, name = self._chain, dict[BlockKey, int](), dict[BlockKey, int](), ""
        here = chain.host.resident_of(keys)
        self._take(chain.host, here, ttl_s, slot_of, leases)
        left = [key for key in keys if key not in slot_of]
        lower = next((tier for tier in chain.lower if tier.slots is not None), None)
        if left and lower is not None and lower.slots is not None:
            name = lower.name
            self._take(lower.slots, lower.resident_of(left), ttl_s, place_of, leases)
        slots = tuple(slot_of.get(key, NO_SLOT) for key in keys)
        return Loan(slots, tuple(place_of.get(key, NO_SLOT) for key in keys), name)

    @staticmethod
    def _take(
        tier: BlockTier,
        keys: Sequence[BlockKey],
        ttl_s: float,
        slot_of: dict[BlockKey, int],
        leases: list[tuple[BlockTier, Lease]],
    ) -> None:
        if not keys:
            return
        if not ttl_s:
            slot_of.update(dict.fromkeys(keys, 0))
            return
        lease = tier.lease("peers", keys, ttl_s)
        if lease is not None:
            leases.append((tier, lease))
            slot_of.update(zip(lease.keys, lease.slots, strict=True))
