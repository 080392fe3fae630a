"""A rank's side of one lower tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.transfer.plan import JobResult, TierOrder

OnResult = Callable[[JobResult], None]
"""Hears how an order ended, from any thread. Twice if the first result ``is_late``."""
OnBlocks = Callable[[Sequence[int], Sequence[Outcome]], None]
"""``on_blocks(numbers, outcomes)``: how these blocks of an order ended, before the order has. Each is told of
once.
"""


class TierListener(Protocol):
    """Hears of a rank's lower tiers, from any thread."""

    def found(self, tier: str, end: int, found: list[Found]) -> None:
        """Slots below ``end`` can be used; ``found``: what the newest of them hold."""

    def refused(self, tier: str, reason: str) -> None:
        """The rank serves without this tier; ``reason`` is one line."""

    def direct(self, tier: str, is_direct: bool) -> None:
        """Whether the rank reads blocks of this tier straight into its device's memory from now on."""


class Mover(Protocol):
    """Executes TierOrders between host slots and one lower tier. Safe to call from any thread; never raises
    for what happens to an order.
    """

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        """Queues an order and returns at once. One that has not started ``deadline_s`` seconds from now is
        TIMED_OUT. FORGET and ERASE have no result.
        """

    def cancel(self, job_id: int) -> bool:
        """True if it was a FETCH that had not begun; its result is then REJECTED."""

    def close(self) -> None:
        """Rejects what waits, gives what runs some seconds, ends all threads; idempotent. Memory that the
        tier may still touch stays for good.
        """
