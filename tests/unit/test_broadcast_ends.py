"""When a load fails, a rank is gone, late or out of step: every onboard ends, soon, and nothing is
written.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.testing.executor_bench import LONG_S, Listener, plan, two_group_memory
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor, OnDone
from kvbm_core.transfer.executors.broadcast_group import (
    MAX_STRANGERS,
    Group,
    GroupError,
    MeetingPoint,
)
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction
from tests.unit.test_broadcast_executor import Ranks, connected

torch = pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 0.5


@pytest.fixture
def ranks(caplog: pytest.LogCaptureFixture) -> Iterator[Ranks]:
    with caplog.at_level(logging.ERROR, "kvbm"):
        made = Ranks([two_group_memory(seed) for seed in range(3)])
        yield made
        made.close()


@pytest.fixture
def hasty(caplog: pytest.LogCaptureFixture) -> Iterator[Ranks]:
    """Ranks that do not wait for each other for long; they are connected."""
    with caplog.at_level(logging.ERROR, "kvbm"):
        made = Ranks([two_group_memory(seed) for seed in range(2)], timeout_s=SHORT_S)
        assert made.run(plan(1, Direction.ONBOARD, [1], [1])) == [Outcome.OK] * 2
        yield made
        made.close()


def onboard(job_id: int, block: int = 5, slot: int = 0) -> TransferPlan:
    return plan(job_id, Direction.ONBOARD, [block], [slot])


def check_broken(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Later loads fail at once, nothing is written for them; offloads go on; each rank has said so once."""
    before = [storage.copy() for rank in ranks.ranks for storage in rank.device.storages]
    submitted = list(ranks.loader.submitted)
    assert ranks.run(onboard(900)) == [Outcome.IO_ERROR] * len(ranks.ranks)
    assert ranks.loader.submitted == submitted
    after = [storage for rank in ranks.ranks for storage in rank.device.storages]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert ranks.run(plan(901, Direction.OFFLOAD, [5], [0])) == [Outcome.OK] * len(ranks.ranks)
    lines = [record.getMessage() for record in caplog.records if "is broken" in record.getMessage()]
    assert len(lines) == len(ranks.ranks) and not any("\n" in line for line in lines)
    assert [len(rank.broken) for rank in ranks.ranks] == [1] * len(ranks.ranks)


# ---------------------------------------------------------------- failed loads


def test_what_rank_0_cannot_load_fails_alike_everywhere_and_the_next_one_works(ranks: Ranks) -> None:
    ranks.loader.fails[2] = JobResult(2, Outcome.CORRUPT, 0, 0.0, 0.0, "wrong bytes")
    before = [rank.content(0, 5) for rank in ranks.ranks[1:]]
    ranks.submit(onboard(2))
    ranks.submit(onboard(3, block=6))
    assert ranks.outcomes(2) == [Outcome.CORRUPT] * 3 and ranks.outcomes(3) == [Outcome.OK] * 3
    assert [rank.content(0, 5) for rank in ranks.ranks[1:]] == before
    assert len({rank.content(0, 6) for rank in ranks.ranks}) == 1
    assert all(rank.result(2).detail for rank in ranks.ranks)


@pytest.mark.parametrize(
    "unusable",
    [
        onboard(2, block=12),
        plan(2, Direction.ONBOARD, [1, 1], [3, 4]),
        plan(2, Direction.ONBOARD, [1], [1], group=2),
    ],
    ids=["no such block", "twice", "no such group"],
)
def test_a_plan_that_cannot_be_is_refused_everywhere(ranks: Ranks, unusable: TransferPlan) -> None:
    assert ranks.run(unusable) == [Outcome.REJECTED] * 3
    assert ranks.run(onboard(3)) == [Outcome.OK] * 3


class ManualLoader:
    """An executor whose jobs end when the test says so."""

    def __init__(self, on_done: OnDone) -> None:
        self.on_done = on_done
        self.refuses = False

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        if self.refuses:
            raise OSError("no memory")

    def end(self, job_id: int, outcome: Outcome, *, is_late: bool = False) -> None:
        self.on_done(JobResult(job_id, outcome, 0, 0.0, 0.0, is_late=is_late))

    def cancel(self, job_id: int) -> bool:
        return False

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """What runs is not ended by this."""


class Pair:
    """Rank 0 with a manual loader, and another rank."""

    def __init__(self, timeout_s: float = LONG_S) -> None:
        point = MeetingPoint()
        self.listeners = [Listener(), Listener()]
        self.broken: list[str] = []
        first, second = connected(
            [
                Group(0, (0, 1), point.address, point, timeout_s=timeout_s),
                Group(1, (0, 1), point.address, timeout_s=timeout_s, load_timeout_s=timeout_s),
            ]
        )
        self.first = BroadcastExecutor(
            two_group_memory(1),
            first,
            self.listeners[0],
            make_loader=self._make,
            on_broken=self.broken.append,
        )
        self.second = BroadcastExecutor(
            two_group_memory(2),
            second,
            self.listeners[1],
        )

    def _make(self, on_done: OnDone) -> ManualLoader:
        self.loader = ManualLoader(on_done)
        return self.loader

    def submit(self, submitted: TransferPlan) -> None:
        self.first.submit(submitted)
        self.second.submit(submitted)

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_failed_load_ends_at_once_on_rank_0_and_in_turn_elsewhere(pair: Pair) -> None:
    """Its end, late as it may be, comes before the executor below says that its slots are free."""
    pair.submit(onboard(1))
    pair.submit(onboard(2))
    pair.loader.end(2, Outcome.TIMED_OUT, is_late=True)
    assert pair.listeners[0].outcomes() == {2: Outcome.TIMED_OUT} and pair.listeners[0].results[0].is_late
    assert pair.listeners[1].ids() == []
    pair.loader.end(1, Outcome.OK)
    assert pair.second.wait(None, LONG_S) and pair.first.wait(None, LONG_S)
    assert pair.listeners[1].ids() == [1, 2]
    assert pair.listeners[1].outcomes() == {1: Outcome.OK, 2: Outcome.TIMED_OUT}
    assert not pair.listeners[1].results[1].is_late  # there are no slots there


def test_a_load_that_cannot_be_submitted_fails_everywhere(pair: Pair) -> None:
    pair.loader.refuses = True
    pair.submit(onboard(1))
    assert pair.second.wait(None, LONG_S)
    for listener in pair.listeners:
        assert listener.outcomes() == {1: Outcome.IO_ERROR}
    assert "no memory" in pair.listeners[0].results[0].detail


def test_what_is_still_loaded_when_the_group_breaks_ends_when_that_is_over(pair: Pair) -> None:
    pair.submit(onboard(1))
    pair.loader.end(1, Outcome.OK)
    assert pair.first.wait(None, LONG_S) and pair.second.wait(None, LONG_S)
    pair.first.submit(onboard(2))
    pair.second.submit(onboard(77))
    pair.first.submit(onboard(3))
    pair.loader.end(2, Outcome.OK)
    assert pair.first.wait([2], LONG_S)
    assert pair.listeners[0].outcomes()[2] is Outcome.IO_ERROR and len(pair.broken) == 1
    assert not pair.first.wait([3], 0.0)  # its device blocks are still written to
    pair.loader.end(3, Outcome.OK)
    assert pair.listeners[0].outcomes()[3] is Outcome.IO_ERROR


def test_a_job_id_in_flight_is_not_taken_again(pair: Pair) -> None:
    pair.submit(onboard(1))
    for executor in (pair.first, pair.second):
        with pytest.raises(ValueError, match="already in flight"):
            executor.submit(onboard(1))
    pair.loader.end(1, Outcome.OK)
    assert pair.second.wait(None, LONG_S)


# ---------------------------------------------------------------- a broken group


def test_ranks_that_are_out_of_step_write_nothing(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    before = [rank.content(0, block) for rank in ranks.ranks[1:] for block in (5, 6)]
    first, second, third = (rank.executor for rank in ranks.ranks)
    first.submit(onboard(2))
    second.submit(onboard(2))
    third.submit(onboard(3, block=6))
    assert ranks.ranks[0].result(2).outcome is Outcome.IO_ERROR
    assert ranks.ranks[1].result(2).outcome is Outcome.IO_ERROR
    assert ranks.ranks[2].result(3).outcome is Outcome.IO_ERROR
    assert [rank.content(0, block) for rank in ranks.ranks[1:] for block in (5, 6)] == before
    check_broken(ranks, caplog)


def test_the_same_job_of_another_size_is_out_of_step(hasty: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    hasty.ranks[0].executor.submit(onboard(2))
    hasty.ranks[1].executor.submit(plan(2, Direction.ONBOARD, [5, 6], [0, 1]))
    assert hasty.outcomes(2) == [Outcome.IO_ERROR] * 2
    check_broken(hasty, caplog)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_submits_is_not_waited_for_for_ever(
    hasty: Ranks, caplog: pytest.LogCaptureFixture, silent: int
) -> None:
    waiting = hasty.ranks[1 - silent]
    waiting.executor.submit(onboard(2))
    assert waiting.result(2).outcome is Outcome.IO_ERROR
    hasty.ranks[silent].executor.submit(onboard(2))
    assert hasty.ranks[silent].result(2).outcome is Outcome.IO_ERROR
    check_broken(hasty, caplog)


def test_a_rank_whose_memory_cannot_be_written_breaks_the_group(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(group: int, blocks: Collection[int], mark: object) -> None:
        raise RuntimeError("CUDA error 700\nwith a second line")

    monkeypatch.setattr(ranks.ranks[2].executor._rows, "scatter", fail)
    ranks.submit(TransferPlan(2, Direction.ONBOARD, (GroupMove(0, (5, 6), (0, 1)),)))
    assert ranks.ranks[2].result(2).outcome is Outcome.IO_ERROR
    assert "CUDA error 700" in ranks.ranks[2].broken[0]
    ranks.submit(onboard(3))
    assert ranks.outcomes(3) == [Outcome.IO_ERROR] * 3
    check_broken(ranks, caplog)


def test_ranks_that_never_meet_are_named() -> None:
    point = MeetingPoint()
    group = Group(3, (3, 4, 7), point.address, point, timeout_s=SHORT_S)
    with pytest.raises(GroupError, match=r"of ranks \[3, 4, 7\] \[4, 7\] did not come within 0.5 s"):
        group.connect(torch.device("cpu"))
    group.close()
    group.discard()


def test_nobody_joins_without_the_token() -> None:
    point = MeetingPoint()
    port = int(point.address.partition("/")[0])
    groups = [Group(0, (0, 1), point.address, point), Group(1, (0, 1), point.address)]
    frames = [b"x" * 34, b"x" * 32 + b"\x01\x00", point.token.encode() + b"\x02\x00"]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in frames]
    for stranger, frame in zip(strangers, frames, strict=True):
        stranger.sendall(frame)
    connected(groups)
    assert [stranger.recv(1) for stranger in strangers] == [b"", b"", b""]
    for end in (*strangers, *groups):
        end.close()
    for group in groups:
        group.discard()


def test_who_says_nothing_or_half_a_word_holds_up_nobody() -> None:
    """As many as anybody on this machine may open."""
    point = MeetingPoint()
    port = int(point.address.partition("/")[0])
    groups = [Group(0, (0, 1), point.address, point, timeout_s=5.0), Group(1, (0, 1), point.address)]
    strangers: list[socket.socket] = []
    threads = set(threading.enumerate())
    door = threading.Thread(target=groups[0].connect, args=(torch.device("cpu"),))
    door.start()
    for number in range(3 * MAX_STRANGERS):
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(point.token.encode()[: number % 32])
    groups[1].connect(torch.device("cpu"))
    door.join(LONG_S)
    for stranger in strangers:
        stranger.settimeout(LONG_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert set(threading.enumerate()) <= threads
    for stranger in strangers:
        stranger.close()
    for group in groups:
        group.close()
        group.discard()


def test_bytes_that_nobody_takes_are_given_up() -> None:
    point = MeetingPoint()
    groups = [
        Group(0, (0, 1), point.address, point, timeout_s=SHORT_S),
        Group(1, (0, 1), point.address, timeout_s=SHORT_S),
    ]
    connected(groups)
    with pytest.raises((GroupError, RuntimeError)):
        groups[0].share(torch.zeros(64 << 20, dtype=torch.uint8))
    for group in groups:
        group.close()
        group.discard()


def test_a_rank_that_gives_up_while_bytes_come_is_noticed_at_once() -> None:
    point = MeetingPoint()
    groups = [Group(0, (0, 1), point.address, point), Group(1, (0, 1), point.address)]
    connected(groups)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(groups[0].share, torch.zeros(64 << 20, dtype=torch.uint8))
        groups[1].close()
        with pytest.raises(GroupError, match="a rank is gone or has given up"):
            sent.result(LONG_S)
    for group in reversed(groups):  # what rank 0 still sends ends with the other end
        group.close()
        group.discard()


# ---------------------------------------------------------------- a rank that ends


@pytest.mark.parametrize("closing", [0, 1])
def test_a_rank_that_closes_while_others_load_is_noticed_at_once(ranks: Ranks, closing: int) -> None:
    """The ranks would wait for half a minute else."""
    assert ranks.run(onboard(1)) == [Outcome.OK] * 3
    ranks.loader.gate.clear()
    ranks.submit(onboard(2))
    closer = threading.Thread(target=ranks.ranks[closing].executor.close)
    closer.start()
    if closing:
        closer.join(LONG_S)
    ranks.loader.gate.set()
    closer.join(LONG_S)
    assert not closer.is_alive()
    outcomes = ranks.outcomes(2)
    assert outcomes.pop(closing) is Outcome.REJECTED
    assert outcomes == [Outcome.IO_ERROR] * 2 and ranks.ranks[closing].broken == []


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Ranks([two_group_memory(seed) for seed in range(2)]).close()  # what torch keeps for good
    threads, before = set(threading.enumerate()), descriptors()
    for loads in (0, 1):
        ranks = Ranks([two_group_memory(seed) for seed in range(2)])
        for job_id in range(loads):
            assert ranks.run(onboard(job_id)) == [Outcome.OK] * 2
        ranks.close()
        ranks.close()
        assert set(threading.enumerate()) <= threads and descriptors() <= before
        ranks.submit(onboard(9))
        assert ranks.outcomes(9) == [Outcome.REJECTED] * 2


CHILD = """
import sys
import torch
from kvbm_core.testing.executor_bench import plan, two_group_memory
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group
say = lambda result: print(result.outcome, flush=True)
group = Group(1, (0, 1), sys.argv[1])
group.connect(torch.device("cpu"))
executor = BroadcastExecutor(two_group_memory(2), group, say)
executor.submit(plan(1, "onboard", [5], [0]))
executor.submit(plan(2, "onboard", [5], [0]))
sys.stdin.read()
"""


def test_a_rank_that_is_killed_is_noticed() -> None:
    pair = Pair.__new__(Pair)
    point = MeetingPoint()
    listener, broken = Listener(), []
    group = Group(0, (0, 1), point.address, point, timeout_s=2 * LONG_S)
    command = [sys.executable, "-c", CHILD, point.address]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        connected([group])
        first = BroadcastExecutor(
            two_group_memory(1), group, listener, make_loader=pair._make, on_broken=broken.append
        )
        first.submit(onboard(1))
        pair.loader.end(1, Outcome.OK)
        assert child.stdout is not None
        assert any(line.strip() == "ok" for line in child.stdout)
        child.send_signal(signal.SIGKILL)
    assert first.wait(None, LONG_S) and listener.outcomes() == {1: Outcome.OK} and broken == []
    first.submit(onboard(2))
    pair.loader.end(2, Outcome.OK)
    assert first.wait(None, LONG_S) and listener.outcomes()[2] is Outcome.IO_ERROR and len(broken) == 1
    first.close()
