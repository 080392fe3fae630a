"""Jobs end when every rank has answered, once; device blocks are known as read exactly until then."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.runtime.jobs import Job, JobBook, Share
from kvbm_core.runtime.messages import JobAck
from kvbm_core.runtime.request import RequestState
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.leader_bench import ONE_GROUP, ROOT
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.transfer import jobs as board_module
from kvbm_core.transfer.jobs import JobBoard
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import Direction

STATE = RequestState("r", TokenChain(ROOT, 4), ONE_GROUP)


def start(book: JobBook, direction: Direction, *device_blocks: int) -> Job:
    job = book.start(direction)
    add(book, job, GroupMove(0, device_blocks, tuple(range(len(device_blocks)))))
    return job


def add(book: JobBook, job: Job, *moves: GroupMove) -> None:
    book.add(job, Share(job.job_id, STATE, (), moves))


def ack(job: Job, outcome: Outcome = Outcome.OK) -> JobAck:
    return JobAck(job.job_id, outcome, 1, 0.0, 0.0)


def test_ids_are_never_used_again() -> None:
    book = JobBook(1, SystemClock())
    ids = set()
    for _ in range(5):
        job = start(book, Direction.OFFLOAD, 1)
        ids.add(job.job_id)
        assert book.acknowledge(0, ack(job)) is job
    assert len(ids) == 5 and len(book) == 0


def test_a_job_is_over_when_every_rank_has_answered() -> None:
    book = JobBook(3, SystemClock())
    job = start(book, Direction.OFFLOAD, 1)
    assert book.acknowledge(2, ack(job)) is None and book.acknowledge(0, ack(job)) is None
    assert job.job_id in book and book.jobs() == [job]
    assert book.acknowledge(1, ack(job)) is job
    assert job.job_id not in book and book.stale_acks_total == 0


def test_late_double_and_foreign_answers_change_nothing_and_are_counted() -> None:
    book = JobBook(2, SystemClock())
    job = start(book, Direction.OFFLOAD, 1)
    book.acknowledge(0, ack(job))
    for rank, answer in (
        (0, ack(job)),
        (2, ack(job)),
        (-1, ack(job)),
        (1, JobAck(999, Outcome.OK, 0, 0.0, 0.0)),
    ):
        assert book.acknowledge(rank, answer) is None
    assert book.stale_acks_total == 4 and job.waiting_ranks == {1}
    assert book.acknowledge(1, ack(job)) is job
    assert book.acknowledge(1, ack(job)) is None
    assert book.stale_acks_total == 5


@pytest.mark.parametrize("order", [(Outcome.OK, Outcome.CORRUPT), (Outcome.CORRUPT, Outcome.OK)])
def test_one_rank_in_trouble_is_enough(order: tuple[Outcome, Outcome]) -> None:
    book = JobBook(2, SystemClock())
    job = start(book, Direction.ONBOARD, 1)
    for rank, outcome in enumerate(order):
        book.acknowledge(rank, ack(job, outcome))
    assert job.outcome is Outcome.CORRUPT


def test_offloads_are_readers_of_their_blocks_until_they_end_and_onboards_never() -> None:
    book = JobBook(1, SystemClock())
    first, second = start(book, Direction.OFFLOAD, 1, 2), start(book, Direction.OFFLOAD, 2, 3)
    start(book, Direction.ONBOARD, 1, 9)
    assert book.readers_of([2]) == {first.job_id, second.job_id}
    assert book.readers_of([1, 9]) == {first.job_id} and book.readers_of([9, 77]) == set()
    book.acknowledge(0, ack(first))
    assert book.readers_of([1, 2]) == {second.job_id}
    book.acknowledge(0, ack(second))
    assert book.readers_of([1, 2, 3]) == set()


def test_onboards_are_writers_of_their_blocks_in_their_group_until_they_end() -> None:
    book = JobBook(1, SystemClock())
    job = book.start(Direction.ONBOARD)
    add(book, job, GroupMove(0, (5, 6), (0, 1)), GroupMove(1, (7,), (2,)))
    start(book, Direction.OFFLOAD, 5)
    assert book.writers_of({0: [6, 9]}) == book.writers_of({1: [7]}) == {job.job_id}
    assert book.writers_of({0: [7], 1: [5, 6]}) == book.writers_of({}) == set()
    book.acknowledge(0, ack(job))
    assert book.writers_of({0: [5], 1: [7]}) == set()


def test_a_block_that_two_groups_name_is_one_reader() -> None:
    book = JobBook(1, SystemClock())
    job = book.start(Direction.OFFLOAD)
    add(book, job, GroupMove(0, (5,), (0,)), GroupMove(1, (5,), (1,)))
    assert job.device_blocks == {5} and book.readers_of([5]) == {job.job_id}
    assert book.acknowledge(0, ack(job)) is job


def test_the_plan_of_several_requests_has_one_move_per_group() -> None:
    book = JobBook(1, SystemClock())
    job = book.start(Direction.OFFLOAD)
    add(book, job, GroupMove(0, (5, 6), (0, 1)), GroupMove(2, (9,), (2,)))
    add(book, job, GroupMove(1, (7,), (3,)), GroupMove(0, (4,), (4,)))
    assert job.plan() == TransferPlan(
        job.job_id,
        Direction.OFFLOAD,
        (GroupMove(0, (5, 6, 4), (0, 1, 4)), GroupMove(1, (7,), (3,)), GroupMove(2, (9,), (2,))),
    )
    assert book.readers_of([4]) == book.readers_of([9]) == {job.job_id}
    assert book.acknowledge(0, ack(job)) is job
    assert not book.readers_of([4, 5, 6, 7, 9])


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
    board: JobBoard[TransferPlan] = JobBoard(SystemClock(), None)
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
