"""A lower tier below a host, without a leader: its orders are collected, and answered as the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.lower import LowerTier, Surroundings
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.plan import JobResult, TierOrder
from kvbm_core.types import BlockKey, Tier

TierT = TypeVar("TierT", bound=LowerTier)


class TierBench(Generic[TierT]):
    """``sent``: all orders so far."""

    def __init__(
        self, make: Callable[[Surroundings], TierT], num_slots: int = 64, num_ranks: int = 1
    ) -> None:
        self.clock, self.metrics = ManualClock(), Metrics()
        self.host = BlockTier(Tier.HOST, LruPolicy(), self.clock)
        self.host.grow(num_slots)
        self.jobs = JobTable(num_ranks, self.clock)
        self.sent: list[TierOrder] = []
        self.tier = make(Surroundings(self.host, self.jobs, self.sent.append, self.clock, self.metrics))

    def in_host(self, keys: Sequence[BlockKey]) -> None:
        """They are in the host from now on."""
        self.host.commit(self.host.reserve(keys, protect_nothing))

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """They are new in the host."""
        self.tier.offer([run_of(keys)])

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """They were loaded."""
        self.tier.hit([run_of(keys)])

    def take_sent(self) -> list[TierOrder]:
        """The orders since the last call."""
        sent = list(self.sent)
        self.sent.clear()
        return sent

    def answer(
        self,
        order: TierOrder,
        outcome: Outcome = Outcome.OK,
        *,
        failed: Mapping[int, Outcome] | None = None,
        ranks: Iterable[int] | None = None,
        is_late: bool = False,
    ) -> None:
        """``ranks`` (default: all that are waited for) say how the order ended: ``outcome`` for all of it; or
        ``failed``, by the key's place in the order.
        """
        job = self.jobs._jobs.get(order.job_id)
        assert job is not None, "nobody waits for an answer to this order"
        places = order.slots or range(len(order.keys))
        bad = tuple((places[i], how) for i, how in (failed or {}).items())
        first = bad[0][1] if bad else outcome
        result = JobResult(order.job_id, first, 100, 0.5, 0.25, is_late=is_late, failed=bad)
        for rank in sorted(job.waiting_ranks) if ranks is None else ranks:
            self.jobs.acknowledge(rank, result)
        self.check()

    def check(self) -> None:
        """All books agree."""
        self.host.check_integrity()
        self.tier.check_integrity()

    @judges
    def assert_idle(self) -> None:
        """Nothing is held, pending or under way."""
        self.check()
        assert not len(self.jobs) and not self.host.live_leases and not self.host.pending_blocks
        assert not self.tier.storing_blocks
        assert not isinstance(self.tier, SlottedTier) or not self.tier.slots.live_leases
