"""A rank that does not answer: nobody waits for it, nothing that it may touch is used again, and all is well
when it is back.
"""

from __future__ import annotations

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.observe.readiness import Readiness
from kvbm_core.runtime.handshake import ANSWER_WITHIN_S, RankReplaced, SlotsReady
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import PROTOCOL_VERSION, Ask, Hello, Here, Message, Ready
from kvbm_core.runtime.rank_watch import ASK_AFTER_S, LOOK_EVERY_S
from kvbm_core.runtime.transfer_jobs import TransferJob
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.transfer.plan import JobResult, TransferPlan

PROMPT = list(range(100, 120))  # five blocks
TABLE = [[11, 12, 13, 14, 15]]
JOB_DEADLINE_S = 120.0


class Ranks:
    """A leader and two ranks; those in ``silent`` hear nothing, and answer neither Asks nor jobs."""

    def __init__(self, num_slots: int = 64, disk: BenchDisk | None = None) -> None:
        options = LeaderOptions(share_wait_s=1.0, job_deadline_s=JOB_DEADLINE_S)
        self.bench = LeaderBench(num_slots, world_size=2, options=options, disk=disk)
        self.silent: set[int] = set()
        self.asked: list[tuple[int, Ask]] = []
        self.unanswered: list[TransferPlan] = []
        handshake = self.bench.handshake
        for rank in range(2):
            hello = Hello(PROTOCOL_VERSION, rank, 2, 1, 1, f"layout{rank}")
            handshake.on_message(bytes([rank]), hello)
        for rank in range(2):
            handshake.on_message(bytes([rank]), Ready(rank, num_slots))
        handshake.connect(self._hear)
        self.bench.leader.poll()

    def _hear(self, identity: bytes, message: Message) -> None:
        (rank,) = identity
        assert isinstance(message, Ask)
        self.asked.append((rank, message))
        if rank not in self.silent:
            self.bench.handshake.on_message(identity, Here(rank))

    def answer(self, plan: TransferPlan) -> None:
        """As ranks do that are not silent."""
        self.bench.answer(plan, ranks={0, 1} - self.silent)
        if self.silent:
            self.unanswered.append(plan)

    def come_back(self, outcome: Outcome = Outcome.OK) -> None:
        """The silent ranks say what they have not said, to jobs and to the Asks that waited for them."""
        silent, self.silent = self.silent, set()
        for plan in self.unanswered:
            self.bench.answer(plan, outcome, ranks=silent)
        self.unanswered = []
        for rank in silent:
            self.bench.handshake.on_message(bytes([rank]), Here(rank))
        self.pass_time(LOOK_EVERY_S)

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.bench.clock.advance(step_s)
            self.bench.leader.poll()

    def serve(self, request_id: str, tokens: list[int]) -> int | None:
        """One request from its start to its end; what it was promised."""
        leader, state = self.bench.leader, self.bench.open(request_id)
        matched = self.bench.match(state, tokens)
        if matched:
            plan = leader.onboard(state, matched, TABLE)
            assert plan is not None
            self.answer(plan)
        stored = self.bench.offload(state, tokens)
        if stored is not None:
            self.answer(stored)
        leader.finish(state)
        return matched

    @property
    def is_in_service(self) -> bool:
        assert self.bench.leader.readiness().is_ready == self.bench.leader.is_ready
        return self.bench.leader.is_ready

    def metric(self, series: str) -> float:
        return self.bench.metric(series)


def own_prompt(number: int) -> list[int]:
    return [1000 + 20 * number + i for i in range(20)]


def test_a_rank_that_is_silent_for_forty_requests_holds_little_and_delays_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks()
    bench = ranks.bench
    assert ranks.serve("first", PROMPT) == 0
    ranks.silent = {1}
    held, waits = [], 0
    for number in range(40):
        ranks.pass_time(0.5)
        # A prompt that all share, and one of its own.
        waits += ranks.serve(f"shared {number}", PROMPT) is None
        assert ranks.serve(f"own {number}", own_prompt(number)) == 0
        held.append((bench.tier.pending_blocks, bench.leader.pending_jobs, bench.leader.open_requests))
    assert len(set(held[22:])) == 1  # 11 s after its last word, and from then on nothing is added
    assert waits <= 22 and all(
        ranks.serve(f"late {number}", PROMPT) == 0 for number in range(10)
    )  # at once, as a miss
    assert bench.leader.readiness() == Readiness(False, "no answer from rank 1") and not ranks.is_in_service
    assert ranks.metric("kvbm_silent_ranks") == 1 and ranks.metric("kvbm_held_blocks") == held[-1][0] + 4
    assert ranks.metric('kvbm_failures_total{kind="worker_lost"}') == 1
    assert [r.levelname for r in caplog.records if "rank 1 has not answered" in r.getMessage()] == ["ERROR"]
    # What it may still read or write is nobody else's.
    bench.leader.check_integrity()
    reading = {job.job_id for job in bench.leader._jobs.jobs(TransferJob)}
    assert bench.leader.readers_of(range(1000)) | bench.leader.writers_of({0: range(1000)}) == reading

    ranks.come_back()
    assert ranks.is_in_service and "rank 1 answers again" in caplog.text
    bench.assert_idle()
    assert ranks.metric("kvbm_silent_ranks") == 0 == ranks.metric("kvbm_held_blocks")
    assert ranks.serve("after", PROMPT) == 16 and ranks.serve("own after", own_prompt(0)) == 16
    assert ranks.serve("new", own_prompt(50)) == 0 and ranks.serve("new again", own_prompt(50)) == 16
    bench.assert_idle()


def test_slots_of_a_silent_rank_are_not_used_again_however_long_it_takes() -> None:
    ranks = Ranks(num_slots=8)
    bench = ranks.bench
    ranks.serve("first", PROMPT)
    state = bench.open("loader")
    assert bench.match(state, PROMPT) == 16
    load = bench.leader.onboard(state, 16, TABLE)
    assert load is not None
    ranks.silent = {1}
    ranks.answer(load)
    store = bench.offload(bench.open("writer"), own_prompt(1))
    assert store is not None
    ranks.answer(store)
    taken = {slot for plan in (load, store) for move in plan.moves for slot in move.slots}
    for _ in range(5):
        ranks.pass_time(300.0, step_s=10.0)
        for number in range(2, 5):
            assert ranks.serve(f"other {number}", own_prompt(number)) == 0
        in_use = bench.tier.capacity_blocks - bench.tier._pool.free_slots
        assert in_use >= len(taken) and bench.tier.live_leases == 1
    assert not any(slot in taken for slot in bench.tier._pool.allocate(bench.tier._pool.free_slots).tolist())


def test_a_rank_that_is_slow_and_alive_stays_in_service_until_a_job_is_past_its_deadline() -> None:
    ranks = Ranks()
    bench = ranks.bench
    plan = bench.offload(bench.open("r"), PROMPT)
    assert plan is not None
    bench.answer(plan, ranks=[0])
    ranks.pass_time(4.5)
    assert ranks.asked == []  # most jobs are answered long before
    for _ in range(11):
        ranks.pass_time(10.0)
        assert ranks.is_in_service
        assert {rank for rank, _ in ranks.asked} == {1} and not any(ask.is_last for _, ask in ranks.asked)
    assert len(ranks.asked) <= 23  # every 5 s
    ranks.pass_time(10.0)  # past the deadline: its copy hangs, and so would the next one
    assert not ranks.is_in_service and ranks.asked[-1] == (1, Ask([plan.job_id], is_last=True))
    bench.answer(plan, Outcome.IO_ERROR, ranks=[1])
    ranks.pass_time(LOOK_EVERY_S)
    assert ranks.is_in_service
    bench.leader.finish(bench.leader.request("r"))
    bench.assert_idle()


def test_an_engine_that_was_idle_for_an_hour_is_in_service_at_once() -> None:
    """It carries acknowledgements in its steps: there were none."""
    ranks = Ranks()
    bench = ranks.bench
    plan = bench.offload(bench.open("r"), PROMPT)
    bench.clock.advance(3600.0)
    bench.leader.poll()
    assert ranks.is_in_service and [ask.is_last for _, ask in ranks.asked] == [True, True]
    bench.answer(plan)  # what waited for the step; see Worker
    ranks.pass_time(10.0)
    assert ranks.is_in_service and len(ranks.asked) == 2
    assert ranks.serve("again", PROMPT) == 16


def test_what_the_engine_brings_of_a_rank_is_an_answer_too() -> None:
    ranks = Ranks()
    bench = ranks.bench
    plan = bench.offload(bench.open("r"), PROMPT)
    assert plan is not None
    bench.answer(plan, ranks=[0])
    ranks.silent = {1}
    for _ in range(40):
        ranks.pass_time(1.0)
        bench.leader.acknowledge(1, [])
        assert ranks.is_in_service
    ranks.pass_time(12.0)
    assert not ranks.is_in_service


def test_a_rank_without_a_channel_is_not_blamed_for_not_being_asked() -> None:
    bench = LeaderBench(world_size=2)
    plan = bench.offload(bench.open("r"), PROMPT)
    bench.answer(plan, ranks=[0])
    for _ in range(100):
        bench.clock.advance(5.0)
        bench.leader.poll()
    assert bench.leader.is_ready


def test_a_rank_that_is_silent_about_the_disk_is_away_too() -> None:
    ranks = Ranks(disk=BenchDisk())
    bench = ranks.bench
    assert ranks.serve("first", PROMPT) == 0
    (order,) = bench.stores()
    ranks.silent = {1}
    bench.say(order.job_id, ranks=[0])
    ranks.pass_time(20.0)
    assert not ranks.is_in_service
    assert ranks.asked[-1] == (1, Ask([order.job_id], is_last=False))
    ranks.silent = set()
    bench.say(order.job_id, ranks=[1])
    ranks.pass_time(LOOK_EVERY_S)
    assert ranks.is_in_service
    bench.assert_idle()


def late(job_id: int) -> JobResult:
    return JobResult(job_id, Outcome.TIMED_OUT, 0, 0.0, 0.0, is_late=True)


def test_a_load_that_was_given_up_delays_nobody_while_the_kernel_still_has_its_slots() -> None:
    ranks = Ranks()
    bench = ranks.bench
    ranks.serve("first", PROMPT)
    state = bench.open("loader")
    assert bench.match(state, PROMPT) == 16
    load = bench.leader.onboard(state, 16, TABLE)
    assert load is not None
    second = bench.open("second")
    assert bench.match(second, PROMPT) is None  # it may be there in a moment
    bench.answer(load, ranks=[0])
    bench.leader.acknowledge(1, [late(load.job_id)])
    assert bench.match(second, PROMPT) == 16
    bench.leader.decline(second)
    ranks.pass_time(600.0, step_s=2.0)
    assert ranks.is_in_service and ranks.asked == []  # it has answered; what is left is the kernel's
    assert bench.tier.live_leases == 1 and bench.leader.pending_jobs == 1
    bench.answer(load, Outcome.TIMED_OUT, ranks=[1])
    for request in (state, second):
        bench.leader.finish(request)
    bench.assert_idle()


def test_a_rank_whose_write_the_kernel_still_has_is_not_asked_for_it() -> None:
    ranks = Ranks(disk=BenchDisk())
    bench = ranks.bench
    assert ranks.serve("first", PROMPT) == 0
    (order,) = bench.stores()
    bench.say(order.job_id, ranks=[0])
    bench.leader.acknowledge(1, [late(order.job_id)])
    ranks.pass_time(600.0, step_s=2.0)
    assert ranks.is_in_service and ranks.asked == []
    assert bench.leader.is_pending(order.job_id), "its slots are the kernel's"
    bench.say(order.job_id, Outcome.TIMED_OUT, ranks=[1])
    bench.leader.poll()
    assert not bench.leader.is_pending(order.job_id)
    bench.assert_idle()


def test_a_new_process_in_a_ranks_place_starts_empty_and_what_the_old_one_owed_is_over() -> None:
    ranks = Ranks(num_slots=16, disk=BenchDisk())
    bench = ranks.bench
    ranks.serve("first", PROMPT)
    (order,) = bench.stores()
    state = bench.open("loader")
    assert bench.match(state, PROMPT) == 16
    load = bench.leader.onboard(state, 16, TABLE)
    store = bench.offload(bench.open("writer"), own_prompt(1))
    assert load is not None and store is not None
    for job_id in (order.job_id, load.job_id, store.job_id):
        bench.say(job_id, ranks=[0])
    first_of_new = bench.handshake.next_job_id()
    assert first_of_new > store.job_id
    newer = bench.offload(bench.open("newer"), own_prompt(2))  # sent before the leader has heard the news
    assert newer is not None
    bench.say(newer.job_id, ranks=[0])
    bench.handshake.inbox.append(RankReplaced(1, first_of_new))
    bench.leader.poll()
    assert not bench.leader.is_ready and bench.tier.resident_blocks == 0
    assert bench.leader.pending_jobs == 1 and bench.tier.pending_blocks == newer.num_blocks
    assert bench.disk.storing_blocks == 0
    for slots in (4, 15):  # its memory becomes ready bit by bit
        bench.handshake.inbox.append(SlotsReady(slots, 16, 1, 1, "fingerprint"))
        bench.leader.poll()
        assert not bench.leader.is_ready
    bench.handshake.inbox.append(SlotsReady(16, 16, 1, 1, "fingerprint"))
    bench.answer(newer, ranks=[1])
    assert bench.leader.is_ready and bench.resident_blocks(PROMPT) == 0
    assert bench.resident_blocks(own_prompt(2)) == 0  # of before: the other rank's half is in another slot
    for name in ("loader", "writer", "newer"):
        bench.leader.finish(bench.leader.request(name))
    assert ranks.serve("again", PROMPT) == 0 and ranks.serve("and again", PROMPT) == 16


def test_the_time_a_silent_rank_has_is_what_its_process_may_take_to_answer() -> None:
    ranks = Ranks()
    bench = ranks.bench
    plan = bench.offload(bench.open("r"), PROMPT)
    assert plan is not None
    ranks.silent = {0, 1}
    ranks.pass_time(ASK_AFTER_S + ANSWER_WITHIN_S - LOOK_EVERY_S)
    assert ranks.is_in_service
    ranks.pass_time(2 * LOOK_EVERY_S)
    assert not ranks.is_in_service
    assert bench.leader.readiness().reason == "no answer from rank 0, 1"
    ranks.unanswered = [plan]
    ranks.come_back()
    assert ranks.is_in_service


def test_a_tier_that_the_leader_itself_has_turned_off_says_so() -> None:
    ranks = Ranks()
    ranks.bench.leader.disable("its bytes are not to be trusted")
    assert not ranks.is_in_service
    assert "not to be trusted" in ranks.bench.leader.readiness().reason
