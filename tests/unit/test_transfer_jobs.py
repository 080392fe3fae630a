"""Jobs end when every rank has answered, once; device blocks are known as read exactly until then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.runtime.request import RequestState
from kvbm_core.runtime.transfer_jobs import JobPart, TransferJob, readers_of, writers_of
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.leader_bench import ONE_GROUP, ROOT
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.transfer import jobs as board_module
from kvbm_core.transfer.jobs import JobBoard
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

STATE = RequestState("r", TokenChain(ROOT, 4), ONE_GROUP)


def table(num_ranks: int = 1) -> JobTable:
    return JobTable(num_ranks, SystemClock())


def start(
    jobs: JobTable, direction: Direction, *moves: GroupMove, ended: list[int] | None = None
) -> TransferJob:
    """``ended`` gets the number of the job each time that it ends."""
    heard = [] if ended is None else ended
    job_id = jobs.new_id()
    job = TransferJob(
        job_id, jobs.all_ranks(), jobs.now_s(), lambda: heard.append(job_id), direction=direction
    )
    jobs.add(job)
    if moves:
        add(job, *moves)
    return job


def move(*device_blocks: int) -> GroupMove:
    return GroupMove(0, device_blocks, tuple(range(len(device_blocks))))


def add(job: TransferJob, *moves: GroupMove) -> None:
    job.add(JobPart(job.job_id, STATE, (), moves))


def ok(job: TransferJob, outcome: Outcome = Outcome.OK, **more: Any) -> JobResult:
    return JobResult(job.job_id, outcome, 1, 0.0, 0.0, **more)


def test_numbers_are_never_used_again() -> None:
    jobs, ended = table(), list[int]()
    made = []
    for _ in range(5):
        job = start(jobs, Direction.OFFLOAD, move(1), ended=ended)
        made.append(job.job_id)
        jobs.acknowledge(0, ok(job))
    assert len(set(made)) == 5 and ended == made and len(jobs) == 0
    assert jobs.next_id == jobs.new_id() == jobs.next_id - 1


def test_a_job_is_over_when_every_rank_has_answered() -> None:
    jobs, ended = table(3), list[int]()
    job = start(jobs, Direction.OFFLOAD, move(1), ended=ended)
    jobs.acknowledge(2, ok(job))
    jobs.acknowledge(0, ok(job))
    assert not ended and job.job_id in jobs and jobs.jobs(TransferJob) == [job]
    jobs.acknowledge(1, ok(job))
    assert ended == [job.job_id] and job.job_id not in jobs and jobs.stale_results_total == 0


def test_a_job_has_left_the_table_when_its_end_is_told() -> None:
    """Whoever is told may make the next job, or ask who still reads a block."""
    jobs = table()
    seen: list[object] = []
    job = start(jobs, Direction.OFFLOAD, move(1))
    job.on_end = lambda: seen.append((job.job_id in jobs, readers_of(jobs, [1]), jobs.new_id()))
    jobs.acknowledge(0, ok(job))
    assert seen == [(False, set(), job.job_id + 1)]


def test_double_and_foreign_answers_change_nothing_and_are_counted() -> None:
    jobs, ended = table(2), list[int]()
    job = start(jobs, Direction.OFFLOAD, move(1), ended=ended)
    jobs.acknowledge(0, ok(job))
    for rank, answer in (
        (0, ok(job)),
        (2, ok(job)),
        (-1, ok(job)),
        (1, JobResult(999, Outcome.OK, 0, 0.0, 0.0)),
    ):
        jobs.acknowledge(rank, answer)
    assert jobs.stale_results_total == 4 and job.waiting_ranks == {1} and not ended
    jobs.acknowledge(1, ok(job))
    jobs.acknowledge(1, ok(job))
    assert jobs.stale_results_total == 5 and ended == [job.job_id]


def test_a_late_answer_ends_nothing_and_the_one_after_it_counts() -> None:
    jobs, ended, late = table(2), list[int](), list[Outcome]()
    job = start(jobs, Direction.ONBOARD, move(1), ended=ended)
    job.on_late = lambda result: late.append(result.outcome)
    jobs.acknowledge(0, ok(job, Outcome.TIMED_OUT, is_late=True))
    jobs.acknowledge(1, ok(job))
    assert late == [Outcome.TIMED_OUT] and job.late_ranks == {0} and not ended and job.waiting_ranks == {0}
    jobs.acknowledge(0, ok(job, Outcome.TIMED_OUT))
    assert ended == [job.job_id] and job.outcome is Outcome.TIMED_OUT and len(late) == 1


@pytest.mark.parametrize("order", [(Outcome.OK, Outcome.CORRUPT), (Outcome.CORRUPT, Outcome.OK)])
def test_one_rank_in_trouble_is_enough(order: tuple[Outcome, Outcome]) -> None:
    jobs = table(2)
    job = start(jobs, Direction.ONBOARD, move(1))
    for rank, outcome in enumerate(order):
        jobs.acknowledge(rank, ok(job, outcome))
    assert job.outcome is Outcome.CORRUPT and job.failures((7, 8)) == {7: Outcome.CORRUPT, 8: Outcome.CORRUPT}


def test_a_block_has_failed_if_it_has_on_one_rank() -> None:
    jobs = table(3)
    job = start(jobs, Direction.ONBOARD, move(1))
    jobs.acknowledge(0, ok(job, Outcome.MISS, failed=((4, Outcome.MISS), (5, Outcome.CORRUPT))))
    jobs.acknowledge(1, ok(job))
    jobs.acknowledge(2, ok(job, Outcome.IO_ERROR, failed=((4, Outcome.IO_ERROR), (6, Outcome.IO_ERROR))))
    failures = job.failures((4, 5, 6, 7))
    assert failures == {4: Outcome.MISS, 5: Outcome.CORRUPT, 6: Outcome.IO_ERROR}


def test_offloads_are_readers_of_their_blocks_until_they_end_and_onboards_never() -> None:
    jobs = table()
    first, second = start(jobs, Direction.OFFLOAD, move(1, 2)), start(jobs, Direction.OFFLOAD, move(2, 3))
    start(jobs, Direction.ONBOARD, move(1, 9))
    assert readers_of(jobs, [2]) == {first.job_id, second.job_id}
    assert readers_of(jobs, [1, 9]) == {first.job_id} and readers_of(jobs, [9, 77]) == set()
    jobs.acknowledge(0, ok(first))
    assert readers_of(jobs, [1, 2]) == {second.job_id}
    jobs.acknowledge(0, ok(second))
    assert readers_of(jobs, [1, 2, 3]) == set()


def test_onboards_are_writers_of_their_blocks_in_their_group_until_they_end() -> None:
    jobs = table()
    job = start(jobs, Direction.ONBOARD, GroupMove(0, (5, 6), (0, 1)), GroupMove(1, (7,), (2,)))
    start(jobs, Direction.OFFLOAD, move(5))
    assert writers_of(jobs, {0: [6, 9]}) == writers_of(jobs, {1: [7]}) == {job.job_id}
    assert writers_of(jobs, {0: [7], 1: [5, 6]}) == writers_of(jobs, {}) == set()
    jobs.acknowledge(0, ok(job))
    assert writers_of(jobs, {0: [5], 1: [7]}) == set()


def test_a_block_that_two_groups_name_is_one_reader() -> None:
    jobs = table()
    job = start(jobs, Direction.OFFLOAD, GroupMove(0, (5,), (0,)), GroupMove(1, (5,), (1,)))
    assert job.device_blocks == {5} and readers_of(jobs, [5]) == {job.job_id}
    jobs.acknowledge(0, ok(job))
    assert readers_of(jobs, [5]) == set()


def test_the_plan_of_several_requests_has_one_move_per_group() -> None:
    jobs = table()
    job = start(jobs, Direction.OFFLOAD)
    add(job, GroupMove(0, (5, 6), (0, 1)), GroupMove(2, (9,), (2,)))
    add(job, GroupMove(1, (7,), (3,)), GroupMove(0, (4,), (4,)))
    assert job.plan() == TransferPlan(
        job.job_id,
        Direction.OFFLOAD,
        (GroupMove(0, (5, 6, 4), (0, 1, 4)), GroupMove(1, (7,), (3,)), GroupMove(2, (9,), (2,))),
    )
    assert readers_of(jobs, [4]) == readers_of(jobs, [9]) == {job.job_id}
    jobs.acknowledge(0, ok(job))
    assert not readers_of(jobs, [4, 5, 6, 7, 9])


# ---------------------------------------------------------------- the board of an executor: wake


Taken = board_module.Job[TransferPlan] | None


class Taker:
    """A thread in ``take``."""

    def __init__(self, board: JobBoard[TransferPlan], waiting: threading.Event) -> None:
        self.taken: list[Taken] = []
        self._thread = threading.Thread(target=lambda: self.taken.append(board.take()))
        self._thread.start()
        assert waiting.wait(LONG_S)
        assert self._thread.is_alive() and not self.taken

    def end(self) -> Taken:
        self._thread.join(LONG_S)
        (taken,) = self.taken
        return taken


def board_and_waiting() -> tuple[JobBoard[TransferPlan], threading.Event]:
    """The event is set when somebody waits for a job, holding the lock: what is done next comes after
    that.
    """
    board: JobBoard[TransferPlan] = JobBoard(SystemClock())
    waiting, wait = threading.Event(), board._changed.wait

    def waits(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    board._changed.wait = waits  # type: ignore[method-assign]
    return board, waiting


@pytest.mark.parametrize("ends", [JobBoard.wake, JobBoard.close])
def test_who_waits_for_a_job_looks_around_when_woken(ends: Callable[[JobBoard[TransferPlan]], None]) -> None:
    board, waiting = board_and_waiting()
    taker = Taker(board, waiting)
    ends(board)
    assert taker.end() is None
    assert board.is_closed == (ends is JobBoard.close)


def test_a_wake_while_nobody_waits_is_kept_for_the_next_and_only_for_him() -> None:
    board, waiting = board_and_waiting()
    board.wake()
    board.wake()
    assert board.take() is None  # without a timeout: it would wait for ever
    assert board.take(timeout_s=0.0) is None
    taker = Taker(board, waiting)  # waits: no wake is left
    board.add(TransferPlan(7, Direction.OFFLOAD, ()), None)
    job = taker.end()
    assert job is not None and job.plan.job_id == 7


def test_a_wake_takes_no_job_away() -> None:
    board, _ = board_and_waiting()
    for job_id in (7, 8):
        board.add(TransferPlan(job_id, Direction.OFFLOAD, ()), None)
    board.wake()
    taken = [board.take(timeout_s=0.0) for _ in range(3)]
    assert [job and job.plan.job_id for job in taken] == [7, 8, None]
