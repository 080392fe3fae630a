"""A leader without processes: slots at once, answers of workers when the test gives them, time when it says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.handshake import Handshake, RankAck, SlotsReady
from kvbm_core.runtime.leader import Leader, LeaderOptions
from kvbm_core.runtime.messages import JobAck
from kvbm_core.runtime.offload import OnShareEnd
from kvbm_core.runtime.request import BlockTable, RequestState
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import BlockKey, Tier

ROOT = KeyNamespace("bench").root()
BLOCK_TOKENS = 4
ONE_GROUP = (GroupSpec(0, BLOCK_TOKENS),)


class LeaderBench:
    """A leader over ``num_slots`` slots. Requests and device blocks are whatever the test says they are."""

    def __init__(
        self,
        num_slots: int = 16,
        *,
        groups: tuple[GroupSpec, ...] = ONE_GROUP,
        world_size: int = 1,
        options: LeaderOptions | None = None,
        on_offload_end: OnShareEnd = lambda share, committed: None,
    ) -> None:
        self.clock = ManualClock()
        self.evicted: list[BlockKey] = []
        self.world_size = world_size
        self.tier = BlockTier(Tier.HOST, LruPolicy(), self.clock, on_evict=self.evicted.extend)
        self.handshake = Handshake(world_size, lambda block_bytes: num_slots)
        self.leader = Leader(
            groups,
            self.tier,
            self.handshake,
            world_size,
            self.clock,
            Metrics(),
            options or LeaderOptions(),
            on_offload_end,
        )
        if num_slots:
            self.slots_ready(num_slots)

    def slots_ready(self, num_slots: int) -> None:
        """Every rank has slots 0 .. ``num_slots``-1."""
        self.handshake.inbox.append(SlotsReady(num_slots, num_slots, 1, 1, "fingerprint"))
        self.leader.poll()

    def say(self, job_id: int, outcome: Outcome = Outcome.OK, ranks: Iterable[int] | None = None) -> None:
        """Puts answers of ``ranks`` (default: all) into the inbox; the leader has not read them yet."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self.handshake.inbox.append(RankAck(rank, JobAck(job_id, outcome, 100, 0.5, 0.25)))

    def answer(
        self, plan: TransferPlan | None, outcome: Outcome = Outcome.OK, ranks: Iterable[int] | None = None
    ) -> None:
        """As ``say``, and the leader reads them."""
        if plan is None:
            raise AssertionError("there is no plan to answer to")
        self.say(plan.job_id, outcome, ranks)
        self.leader.poll()

    def open(self, request_id: str = "r") -> RequestState:
        """A new request."""
        return self.leader.open(request_id, ROOT, None)

    def offload(self, state: RequestState, tokens: Sequence[int], first_device_block: int = 1) -> TransferPlan | None:
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

    def resident_blocks(self, tokens: Sequence[int]) -> int:
        """How many leading blocks of ``tokens`` the tier has, all groups together. Holds nothing."""
        chain = TokenChain(ROOT, base_block_tokens(self.leader.groups))
        chain.extend(tokens)
        probe = RequestState("probe", chain, self.leader.groups)
        return sum(self.tier.match_prefix(probe.keys(g)) for g in range(len(self.leader.groups)))

    def metric(self, series: str) -> float:
        """A series of the leader's metrics."""
        return self.leader.metrics.snapshot()[series]

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
        if any(left.values()):
            raise AssertionError(f"something is left: {left}")
