"""A small engine around a real leader, driven by one seed: anything may happen, and bytes must stay right.

Requests part prefixes, are preempted and aborted in every state; device blocks are reused as soon as they
are free; copies end in any order, fail, or are cancelled; acknowledgements come late, in any order and twice;
resets strike. Hits are audited as the options say: what is stored is what is computed.

A group with states has one where a step ends, and hands some of them off that are at the end of a block; the
blocks that a step passes over hold what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from random import Random

from kvbm_core.control.desk import Report
from kvbm_core.control.messages import Order, Result, Verb
from kvbm_core.errors import Outcome
from kvbm_core.runtime.handshake import RankAnswer
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import NULL_BLOCK, RequestState, StateOnDevice
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.testing.heard import Heard
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.testing.sim_worker import SimWorker, oracle
from kvbm_core.testing.verdicts import Wrong
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens, needed_blocks
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import BlockKey

VOCABULARY = 3
ADAPTERS = ("", "a")
MAX_TOKENS = 24
MAX_REQUESTS = 6
MOST_ROUNDS = 20_000
"""So many turns of all workers, at most, until nothing is left to do."""


class Stage(Enum):
    """Where a request is."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


@dataclass
class SimRequest:
    """One request. ``tables``: what the connector was told; ``held``: the device blocks that are the
    request's now.
    """

    request_id: str
    tokens: list[int]
    state: RequestState
    stage: Stage = Stage.WAITING
    computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    load: int = 0
    loaded_tokens: int = 0
    prompt_tokens: int = 0


@dataclass
class SimShape:
    """What one simulation is like."""

    groups: tuple[GroupSpec, ...]
    num_slots: int
    num_device_blocks: int
    world_size: int
    failure_rate: float
    options: LeaderOptions


class LeaderSim:
    """Call ``step`` as often as wanted, then ``end``. AssertionError says what went wrong."""

    def __init__(self, shape: SimShape, random: Random) -> None:
        self.shape = shape
        self.random = random
        self.loads_ok = 0
        self.states_loaded = self.states_handed_off = 0
        self.audits_ok = 0
        self.bench = self._make_bench()
        self.leader = self.bench.leader
        self.workers = self._make_workers()
        self.requests: list[SimRequest] = []
        self.free_blocks = list(range(1, shape.num_device_blocks))
        # Blocks of requests that are gone, until these jobs have ended on every rank.
        self.kept: list[tuple[set[int], list[int]]] = []
        self._prefix_of: dict[BlockKey, tuple[int, tuple[int, ...]]] = {}
        self._last_job_before_reset = 0
        self._last_job = 0
        # After each reset by an operator: how many blocks there were, and whether something was loaded.
        self._after_orders: list[tuple[int, bool]] = []
        # The job that gathers what is offloaded, if there is one.
        self._open_jobs: set[int] = set()
        # Comparisons that were planned and not sent yet; and jobs of those that were sent.
        self._open_audits: list[TransferPlan] = []
        self._audits: set[int] = set()
        self._prompts: list[list[int]] = []
        self.clears = 0
        self._count = 0

    def _make_bench(self, disk: BenchDisk | None = None) -> LeaderBench:
        self._heard = Heard()
        return LeaderBench(
            self.shape.num_slots,
            groups=self.shape.groups,
            world_size=self.shape.world_size,
            options=self.shape.options,
            on_offload_end=self._on_offload_end,
            disk=disk,
            listener=self._heard,
        )

    def _make_workers(self) -> Sequence[SimWorker]:
        shape = self.shape
        return [
            SimWorker(rank, shape.num_device_blocks, shape.num_slots, self.random, shape.failure_rate)
            for rank in range(shape.world_size)
        ]

    # ---------------------------------------------------------------- driving

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        """What may happen, and how often."""
        return [
            (self._arrive, 3),
            (self._schedule, 10),
            (self._work, 10),
            (self._hear, 10),
            (self._abort, 0.5),
            (self._preempt, 0.7),
            (self._reset, 0.1),
            (self._order, 0.3),
            (self._order_of_somebody, 0.3),
            (self._time_passes, 1),
        ]

    def step(self) -> None:
        """Something happens, somewhere."""
        actions = self._actions()
        action = self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
        # Engines send what one step has gathered before anything else happens to its requests.
        if action != self._schedule or self.random.random() < 0.5:
            self._send_offloads()
        action()
        self._release_kept()
        expect(not any(map(any, self._after_orders)), "an operator's reset left a block, or struck a load")

    def end(self) -> None:
        """Everything ends by itself; nothing may be left."""
        while self.requests:
            self._finish(self.requests[-1])
        self._send_offloads()
        rounds = 0
        while any(worker.acks or not worker.is_idle for worker in self.workers):
            self._work()
            self._hear()
            rounds += 1
            expect(rounds < MOST_ROUNDS, "nobody asks for anything, and the work has no end")
        self._release_kept()
        self.bench.assert_idle()
        self.check_bytes()
        self._look_at_audits()  # those that were abandoned have no answer
        expect(not self._audits, "an audit never ended")
        expect(
            not self.kept and len(self.free_blocks) == self.shape.num_device_blocks - 1,
            "device blocks leaked",
        )

    def check_bytes(self) -> None:
        """Each block that could be matched now has the right bytes in its slot, on every rank; and whoever
        listens was told of these and of no other.
        """
        self.leader.check_integrity()
        for tier in self.leader.chain.books:
            expect(
                self._heard.here[tier.tier] == set(tier.keys()), f"other blocks of {tier.tier.name} were told"
            )
        for key, (group, prefix) in self._prefix_of.items():
            lease = self.bench.tier.lease("check", [key], 1.0)
            if lease is not None:
                for worker in self.workers:
                    expect(
                        worker.in_slot(lease.slots[0]) == oracle(worker.rank, group, prefix),
                        f"slot of {prefix}",
                    )
                self.bench.tier.release(lease)

    # ---------------------------------------------------------------- requests

    def _arrive(self) -> None:
        if len(self.requests) >= MAX_REQUESTS:
            return
        base = self.random.choice(self._prompts) if self._prompts and self.random.random() < 0.9 else []
        shared = base[: self.random.randint(len(base) // 2, len(base))]
        tokens = shared + [self.random.randrange(VOCABULARY) for _ in range(MAX_TOKENS)]
        tokens = tokens[: self.random.randint(2, MAX_TOKENS)]
        self._prompts = [*self._prompts[-8:], tokens]
        self._count += 1
        # A few names are used again and again, also while an old request's copies are still under way.
        names = {request.request_id for request in self.requests}
        request_id = next(
            name for name in (f"r{self._count % 5}", f"r{self._count + 5}") if name not in names
        )
        state = self.bench.open(request_id, Tenant(self.random.choice(ADAPTERS)))
        request = SimRequest(request_id, tokens, state)
        if any(group.is_state for group in self.shape.groups):
            request.prompt_tokens = self.random.randint(1, len(tokens))
        request.state.chain.extend(tokens)
        for position, group in enumerate(self.shape.groups):
            for block, key in enumerate(request.state.keys(position)):
                self._prefix_of[key] = (group.index, tuple(tokens[: (block + 1) * group.block_size_tokens]))
        self.requests.append(request)

    def _schedule(self) -> None:
        if not self.requests:
            return
        self.leader.poll()
        request = self.random.choice(self.requests)
        if request.stage is Stage.WAITING:
            self._admit(request)
        elif request.stage is Stage.LOADING:
            self._look_at_load(request)
        else:
            self._run(request)

    def _admit(self, request: SimRequest) -> None:
        align = alignment_tokens(self.shape.groups)
        on_device = self.random.choice([0, 0, align, 2 * align])
        on_device = on_device if on_device < len(request.tokens) else 0
        matched = self.leader.match(request.state, request.tokens, on_device, len(request.tokens) - 1)
        if matched is None or self.random.random() < 0.1:
            return  # asked again later, or no room in the batch
        if not self._allocate(request, on_device, on_device + matched):
            self.leader.decline(request.state)
            return
        request.computed_tokens = on_device
        request.stage = Stage.RUNNING
        if matched:
            plan = self.leader.onboard(request.state, matched, request.held)
            if plan is not None:
                self._last_job = max(self._last_job, plan.job_id)
                self._look_at_plan(plan)
                if self.random.random() < 0.05:
                    self.leader.abandon(plan.job_id)
                    return
                request.stage, request.load, request.loaded_tokens = (
                    Stage.LOADING,
                    plan.job_id,
                    on_device + matched,
                )
                for worker in self.workers:
                    worker.submit(plan)

    def _look_at_plan(self, plan: TransferPlan) -> None:
        plan.check(self.shape.num_device_blocks, self.shape.num_slots)

    def _allocate(self, request: SimRequest, on_device: int, prefix: int) -> bool:
        tables: list[list[int]] = []
        taken: list[int] = []
        for group in self.shape.groups:
            num_blocks = -(-len(request.tokens) // group.block_size_tokens)
            skipped = min(group.first_needed_block(prefix), num_blocks)
            if len(self.free_blocks) - len(taken) < num_blocks - skipped:
                return False
            blocks = self.random.sample(sorted({*self.free_blocks} - {*taken}), num_blocks - skipped)
            taken += blocks
            tables.append([NULL_BLOCK] * skipped + blocks)
        self.free_blocks = [block for block in self.free_blocks if block not in taken]
        self._fence(taken)
        request.held = tables
        request.tables = [list(table) for table in tables]
        self._compute(request, 0, on_device)
        return True

    def _fence(self, device_blocks: list[int]) -> None:
        job_ids = self.leader.readers_of(device_blocks)
        for worker in self.workers:
            worker.fence(job_ids, times_out=self.random.random() < 0.3)

    def _compute(self, request: SimRequest, start: int, stop: int) -> None:
        """Writes the blocks that tokens ``start`` .. ``stop``-1 touch; an unfinished one holds something
        else.
        """
        for group, table in zip(self.shape.groups, request.held, strict=True):
            size = group.block_size_tokens
            first = start // size
            if group.is_state:  # one state, after the last token
                first = max(first, (stop - 1) // size)
            for block in range(first, -(-stop // size)):
                if table[block] != NULL_BLOCK:
                    prefix = request.tokens[: min(stop, (block + 1) * size)]
                    for worker in self.workers:
                        worker.write(table[block], oracle(worker.rank, group.index, prefix))

    def _look_at_load(self, request: SimRequest) -> None:
        outcomes = [worker.outcome(request.load) for worker in self.workers]
        if None in outcomes:
            return
        request.stage = Stage.RUNNING
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._check_load(request)
            request.computed_tokens = request.loaded_tokens
            self.loads_ok += 1
        elif self.random.random() < 0.5:
            self._give_back(request)  # the engine starts it over, and asks again
        else:
            # It recomputes at once in the blocks it has; those it skipped it must get now.
            self._give_back(request)
            if self._allocate(request, 0, 0):
                request.stage = Stage.RUNNING

    def _check_load(self, request: SimRequest) -> None:
        for group, table in zip(self.shape.groups, request.held, strict=True):
            needed = needed_blocks(group, 0, request.loaded_tokens)
            expect(
                table[needed.stop - 1] != NULL_BLOCK or not needed, "the engine has no block to go on from"
            )
            for block in range(request.loaded_tokens // group.block_size_tokens):
                prefix = request.tokens[: (block + 1) * group.block_size_tokens]
                for worker in self.workers:
                    if table[block] != NULL_BLOCK:
                        self.states_loaded += group.is_state
                        right = worker.on_device(table[block]) == oracle(worker.rank, group.index, prefix)
                        expect(right, f"{request.request_id} was given wrong bytes for {prefix}")

    def _run(self, request: SimRequest) -> None:
        if request.state.offload_jobs & {*self._open_jobs, *(plan.job_id for plan in self._open_audits)}:
            self._send_offloads()  # no request runs twice in one step
        before = request.computed_tokens
        for group, table in zip(self.shape.groups, request.held, strict=True):
            for block in range(min(group.first_needed_block(before), len(table))):
                if (
                    table[block] != NULL_BLOCK
                ):  # out of the window: the engine gives it up, and does not say so
                    self.free_blocks.append(table[block])
                    table[block] = NULL_BLOCK
        after = min(len(request.tokens), before + self.random.randint(1, 9))
        if request.prompt_tokens and self.random.random() < 0.7:  # most steps end where a state is of use
            align = alignment_tokens(self.shape.groups)
            after = max(after // align * align, min(before + 1, after))
        self._compute(request, before, after)
        request.computed_tokens = after
        job_id = self.leader.offload(request.state, request.tokens, before, after, request.tables)
        for one in (job_id, self._hand_off(request, after)):
            if one is not None:
                self._last_job = max(self._last_job, one)
                self._open_jobs = {one}
        self._open_audits += [job.plan() for job in self.leader.take_audits()]
        if after == len(request.tokens):
            self._finish(request)

    def _hand_off(self, request: SimRequest, after: int) -> int | None:
        """The engine says where states are; sometimes not of all groups, or twice."""
        handed = [
            StateOnDevice(position, table[(after - 1) // group.block_size_tokens], after)
            for position, (group, table) in enumerate(zip(self.shape.groups, request.held, strict=True))
            if group.is_state and after % group.block_size_tokens == 0
        ]
        if not handed or self.random.random() < 0.1:
            return None
        if self.random.random() < 0.1:
            handed.pop()
        self.states_handed_off += len(handed)
        handed += handed[: self.random.choice([0, 0, 1])]
        return self.leader.offload_states(request.state, request.tokens, handed, request.prompt_tokens)

    def _send_audits(self) -> None:
        audits, self._open_audits = self._open_audits, []
        for plan in audits:
            self._look_at_plan(plan)
            self._audits.add(plan.job_id)
            if self.random.random() < 0.02:
                self.leader.abandon(plan.job_id)
            for worker in self.workers:
                if self.leader.is_pending(plan.job_id):
                    worker.submit(plan)
                else:
                    worker.drop(plan.job_id)

    def _look_at_audits(self) -> None:
        for job_id in [job_id for job_id in self._audits if not self.leader.is_pending(job_id)]:
            self._audits.remove(job_id)
            outcomes = {worker.outcome(job_id) for worker in self.workers}
            expect(Outcome.CORRUPT not in outcomes, "an audit took what is right for wrong")
            self.audits_ok += outcomes == {Outcome.OK}

    def _send_offloads(self) -> None:
        self._send_audits()
        open_jobs, self._open_jobs = self._open_jobs, set()
        plan = self.bench.take_offloads()
        if plan is None:
            for worker in self.workers:
                for job_id in open_jobs:
                    worker.drop(job_id)
            return
        plan.check(self.shape.num_device_blocks, self.shape.num_slots)
        if self.random.random() < 0.02:
            self.leader.abandon(plan.job_id)
            for worker in self.workers:
                worker.drop(plan.job_id)
            return
        for worker in self.workers:
            worker.submit(plan)

    # ---------------------------------------------------------------- ends

    def _finish(self, request: SimRequest) -> None:
        self.requests.remove(request)
        jobs = set(self.leader.finish(request.state))
        if request.stage is Stage.LOADING:
            jobs.add(request.load)
        held = [block for table in request.held for block in table if block != NULL_BLOCK]
        self.kept.append((jobs, held))
        self._release_kept()

    def _give_back(self, request: SimRequest) -> None:
        """At once, whatever still reads the blocks: who writes them next puts up a fence."""
        self.free_blocks += [block for table in request.held for block in table if block != NULL_BLOCK]
        request.held, request.tables, request.computed_tokens = [], [], 0
        request.stage = Stage.WAITING

    def _release_kept(self) -> None:
        still = []
        for jobs, blocks in self.kept:
            if all(worker.outcome(job_id) is not None for job_id in jobs for worker in self.workers):
                self.free_blocks += blocks
            else:
                still.append((jobs, blocks))
        self.kept = still

    def _abort(self) -> None:
        if self.requests:
            self._finish(self.random.choice(self.requests))

    def _preempt(self) -> None:
        running = [request for request in self.requests if request.stage is Stage.RUNNING]
        if running:
            self._give_back(self.random.choice(running))

    def _reset(self) -> None:
        self.leader.reset()
        self._last_job_before_reset = self._last_job
        expect(self.bench.tier.resident_blocks == 0, "a block survived the reset")

    def _order(self) -> None:
        """An operator's; it is carried out at some later ``poll``."""
        verb = self.random.choices([Verb.RESET, Verb.DRAIN, Verb.RESUME], [1, 1, 4])[0]
        order = Order(verb=verb, tier=self.random.choice(["all", "host", "disk"]))
        self.bench.desk.submit(order).add_done_callback(partial(self._carried_out, order))

    def _order_of_somebody(self) -> None:
        """As ``_order``, of an adapter or a prompt."""
        random, adapter = self.random, self.random.choice(ADAPTERS)
        tokens = tuple(random.choice(self._prompts)) if self._prompts else (1, 2, 3)
        name = random.choice(["p", "q"])
        few = random.choice([None, 0, 2, 5])
        order = random.choice(
            [
                Order(verb=Verb.RESET, adapter=adapter, tier=random.choice(["all", "host", "disk"])),
                Order(verb=Verb.RESET, adapter=adapter, tokens=tokens),
                Order(
                    verb=Verb.PIN, pin=name, adapter=adapter, tokens=tokens, ttl_s=random.choice([1.0, 9.0])
                ),
                Order(verb=Verb.UNPIN, pin=name),
                Order(verb=Verb.QUOTA, adapter=adapter, host_blocks=few, disk_blocks=few),
                Order(verb=Verb.QUOTA, adapter=adapter),
            ]
        )
        self.bench.desk.submit(order).add_done_callback(partial(self._carried_out, order))

    def _carried_out(self, order: Order, end: Future[Report]) -> None:
        if end.result().result is not Result.DONE or order.verb not in (Verb.RESET, Verb.QUOTA):
            return
        if order.verb is Verb.QUOTA:
            self._was_cleared()  # what a load brings up now may be more than the new quota, and goes again
        elif order.adapter is None:
            self._was_reset(order.tier)
        else:
            keys, chain = self.bench.keys(order.tokens), self.leader.chain
            left = [key for slots in chain.books for key in slots.resident_of(keys)]
            expect(not left, "a block of a prompt that was cleared can be found")
            self.clears += 1
            self._was_cleared()

    def _was_cleared(self) -> None:
        """Some blocks have been forgotten, or are when the load that brings them up has ended."""

    def _was_reset(self, tier: str) -> None:
        left = 0
        if tier != "disk":
            self._last_job_before_reset = self._last_job
            left = self.bench.tier.resident_blocks
        self._after_orders.append((left, self.leader.has_loads))

    # ---------------------------------------------------------------- the rest of the world

    def _work(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.random.choice(self.workers).step()

    def _hear(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.acks:
            ack = worker.acks.pop(self.random.randrange(len(worker.acks)))
            copies = 2 if self.random.random() < 0.1 else 1
            self.bench.handshake.inbox.extend([RankAnswer(worker.rank, ack)] * copies)
            self.leader.poll()
            self._look_at_audits()

    def _time_passes(self) -> None:
        self.bench.clock.advance(self.random.choice([0.1, 1.0, 3.0]))
        self.leader.poll()

    def _on_offload_end(self, part: JobPart, committed: bool) -> None:
        expect(
            not (committed and part.job_id <= self._last_job_before_reset),
            "a block came back after the reset",
        )


def expect(is_true: bool, promise: str) -> None:
    """Wrong with ``promise`` unless it is kept."""
    if not is_true:
        raise Wrong(promise)
