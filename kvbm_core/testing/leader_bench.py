"""A leader without processes: slots at once, answers of workers when the test gives them, time when it says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvbm_core.blocks.slot_tier import BlockTier, Residency
from kvbm_core.clock import Clock, ManualClock
from kvbm_core.control.desk import Desk
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.policy.named import make_policy
from kvbm_core.runtime.handshake import Handshake, RankAnswer, SlotsFound, SlotsReady
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.offload import OnPartEnd
from kvbm_core.runtime.request import BlockTable, RequestState
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.tiers.slotted import SlottedTier, slotted_tier
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TransferPlan
from kvbm_core.types import BlockKey, Tier

ROOT = KeyNamespace("bench").root()
BLOCK_TOKENS = 4
ONE_GROUP = (GroupSpec(0, BLOCK_TOKENS),)


@dataclass(frozen=True, slots=True)
class BenchDisk:
    """A disk tier of ``num_slots`` empty slots, there at once; 0: the test says when with
    ``LeaderBench.disk_found``.

    ``send``: gets the leader's orders to the workers, besides ``LeaderBench.sent``. ``has_host_tier``: see
    Metrics. ``more``: further lower tiers, behind the disk. ``block_bytes``: of a block over all ranks.
    """

    num_slots: int = 16
    make_admission: Callable[[Clock], AdmissionPolicy] = lambda clock: AdmitAll()
    send: Callable[[TierOrder], None] = lambda order: None
    has_host_tier: bool = True
    more: tuple[LowerTierMaker, ...] = ()
    block_bytes: int = 1


class LeaderBench:
    """A leader over ``num_slots`` slots. Requests and device blocks are whatever the test says they are."""

    def __init__(
        self,
        num_slots: int = 16,
        *,
        groups: tuple[GroupSpec, ...] = ONE_GROUP,
        world_size: int = 1,
        options: LeaderOptions | None = None,
        on_offload_end: OnPartEnd = lambda part, committed: None,
        disk: BenchDisk | None = None,
        listener: Residency | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.sent: list[TierOrder] = []
        self._block_bytes = 1 if disk is None else disk.block_bytes
        self._send_on = (lambda order: None) if disk is None else disk.send
        self.world_size = world_size
        metrics = Metrics(has_host_tier=disk is None or disk.has_host_tier, clock=self.clock)
        self.tier = BlockTier(Tier.HOST, make_policy(), self.clock, listener, metrics)
        self.handshake = Handshake(world_size, lambda block_bytes: num_slots, clock=self.clock)
        self.desk = Desk()
        self.leader = Leader(
            groups,
            self.tier,
            self.handshake,
            clock=self.clock,
            metrics=metrics,
            options=options or LeaderOptions(),
            parts=LeaderParts(self._lower(disk), self._send, on_offload_end, desk=self.desk),
        )
        if num_slots:
            self.slots_ready(num_slots)
        if disk is not None and disk.num_slots:
            self.disk_found(disk.num_slots)

    def _lower(self, disk: BenchDisk | None) -> tuple[LowerTierMaker, ...]:
        if disk is None:
            return ()
        return (slotted_tier("disk", Tier.DISK, disk.make_admission(self.clock)), *disk.more)

    def _send(self, order: TierOrder) -> None:
        self.sent.append(order)
        self._send_on(order)

    def slots_ready(self, num_slots: int) -> None:
        """Every rank has slots 0 .. ``num_slots``-1."""
        self.handshake.inbox.append(SlotsReady(num_slots, num_slots, self._block_bytes, 1, "fingerprint"))
        self.leader.poll()

    @property
    def disk(self) -> SlottedTier:
        """The leader's disk tier; AssertionError if it has none."""
        tier = self.leader.chain.named("disk")
        if not isinstance(tier, SlottedTier):
            raise AssertionError("this leader has no disk")
        return tier

    def disk_found(self, end: int, found: Sequence[Found] = (), ranks: Iterable[int] | None = None) -> None:
        """``ranks`` (default: all) have looked at their disk slots below ``end``; the leader has read it."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self.handshake.found.append(SlotsFound("disk", rank, end, list(found)))
        self.leader.catch_up()

    def take_sent(self) -> list[TierOrder]:
        """What the leader has ordered since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def stores(self) -> list[TierOrder]:
        """As ``take_sent``, and there were only orders to store."""
        sent = self.take_sent()
        if any(order.kind is OrderKind.FORGET for order in sent):
            raise AssertionError("the workers were told to forget their disks")
        return [order for order in sent if order.kind is OrderKind.STORE]

    def write_to_disk(self, outcome: Outcome = Outcome.OK, ranks: Iterable[int] | None = None) -> int:
        """``ranks`` (default: all) answer the orders that have come since; how many blocks those were."""
        orders = self.stores()
        for order in orders:
            self.say(order.job_id, outcome, ranks)
        self.leader.poll()
        return sum(len(order.keys) for order in orders)

    def say(self, job_id: int, outcome: Outcome = Outcome.OK, ranks: Iterable[int] | None = None) -> None:
        """Puts answers of ``ranks`` (default: all) into the inbox; the leader has not read them yet."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self.handshake.inbox.append(RankAnswer(rank, JobResult(job_id, outcome, 100, 0.5, 0.25)))

    def answer(
        self, plan: TransferPlan | None, outcome: Outcome = Outcome.OK, ranks: Iterable[int] | None = None
    ) -> None:
        """As ``say``, and the leader reads them."""
        if plan is None:
            raise AssertionError("there is no plan to answer to")
        self.say(plan.job_id, outcome, ranks)
        self.leader.poll()

    def open(self, request_id: str = "r", tenant: Tenant | None = None) -> RequestState:
        """A new request."""
        return self.leader.open(request_id, ROOT, None, tenant=tenant)

    def offload(
        self, state: RequestState, tokens: Sequence[int], first_device_block: int = 1
    ) -> TransferPlan | None:
        """All full blocks of ``tokens``, which lie in neighbouring device blocks."""
        tables = [
            range(first_device_block, first_device_block + len(tokens) // group.block_size_tokens)
            for group in self.leader.groups
        ]
        return self.offload_step(state, tokens, 0, len(tokens), tables)

    def offload_step(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> TransferPlan | None:
        """A step in which nothing else is offloaded."""
        self.leader.offload(state, tokens, computed_tokens, stored_tokens, tables)
        return self.take_offloads()

    def take_offloads(self) -> TransferPlan | None:
        """The plan of all that was gathered."""
        job = self.leader.take_offloads()
        return None if job is None else job.plan()

    def store(self, tokens: Sequence[int], request_id: str = "store") -> None:
        """A request that has come, has been written through and has gone."""
        state = self.open(request_id)
        plan = self.offload(state, tokens)
        if plan is not None:
            self.answer(plan)
        self.leader.finish(state)

    def match(self, state: RequestState, tokens: Sequence[int], computed_tokens: int = 0) -> int | None:
        """As the engine asks: one token is left to compute."""
        return self.leader.match(state, tokens, computed_tokens, len(tokens) - 1)

    def keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        """The keys of ``tokens``' full blocks, one group after the other."""
        chain = TokenChain(ROOT, base_block_tokens(self.leader.groups))
        chain.extend(tokens)
        probe = RequestState("probe", chain, self.leader.groups)
        return [key for g in range(len(self.leader.groups)) for key in probe.keys(g)]

    def resident_blocks(self, tokens: Sequence[int]) -> int:
        """How many leading blocks of ``tokens`` the tier has, all groups together. Holds nothing."""
        chain = TokenChain(ROOT, base_block_tokens(self.leader.groups))
        chain.extend(tokens)
        probe = RequestState("probe", chain, self.leader.groups)
        return sum(self.tier.match_prefix(probe.keys(g)) for g in range(len(self.leader.groups)))

    def metric(self, series: str) -> float:
        """A series of the leader's metrics."""
        return self.leader.metrics.snapshot()[series]

    @judges
    def assert_idle(self) -> None:
        """Nothing is open, pinned, pending or under way, and all books agree."""
        self.leader.check_integrity()
        left = {
            "requests": self.leader.open_requests,
            "jobs": self.leader.pending_jobs,
            "leases": self.tier.live_leases,
            "pending blocks": self.tier.pending_blocks,
            "blocks being loaded": self.leader.loading_blocks,
        }
        left["leases on blocks of lower tiers"] = self.leader.chain.live_leases
        left["blocks being stored"] = self.leader.chain.storing_blocks
        if any(left.values()):
            raise AssertionError(f"something is left: {left}")
