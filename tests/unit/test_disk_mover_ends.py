"""What ends a DiskMover's knowledge, and itself: resets that hold, and a close that leaves nothing
behind.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import DiskError, FileOptions
from kvbm_core.storage.disk.io import Transfer
from kvbm_core.testing.executor_bench import HELD_JOB, LONG_S, is_mapped
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.plan import OrderKind, TierOrder
from tests.threads import threads_since
from tests.unit.disk_mover_bench import (
    DOWN,
    NOT_THERE,
    UP,
    Bench,
    GatedIo,
    bench_fixture,  # noqa: F401
    bench_on,
    found_in,
    late_slots,
    order,
    path_fixture,  # noqa: F401
    touches,
)

# ---------------------------------------------------------------- forget_all


def test_what_is_forgotten_is_not_found_again_and_what_comes_after_is(bench: Bench, path: Path) -> None:
    assert bench.run(order(1, DOWN, [0, 1], [0, 1])).outcome is Outcome.OK
    bench.forget()
    assert (
        bench.run(order(2, DOWN, [2], [2])).outcome is Outcome.OK
    )  # comes after the reset in the same thread
    assert bench.run(order(3, UP, [4], [0])).outcome is Outcome.MISS
    assert bench.run(order(4, UP, [4], [2])).outcome is Outcome.OK
    bench.close()
    assert found_in(path) == {key_of(2)}


def test_an_idle_executor_forgets_at_once(bench: Bench, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run(order(1, DOWN, [0], [0])).outcome is Outcome.OK
    done, begin = threading.Event(), bench.file.begin_new_life

    def begin_new_life() -> None:
        begin()
        done.set()

    monkeypatch.setattr(bench.file, "begin_new_life", begin_new_life)
    bench.forget()
    assert done.wait(LONG_S)
    bench.close()
    assert found_in(path) == set()


def test_what_is_erased_is_gone_for_the_next_process_too(bench: Bench, path: Path) -> None:
    assert bench.run(order(1, DOWN, [0, 1, 2], [0, 1, 2])).outcome is Outcome.OK
    keys = (key_of(0), key_of(2))
    erase = TierOrder(2, "disk", OrderKind.ERASE, keys, places=(0, 2))
    bench.submit(erase)
    assert bench.run(order(3, DOWN, [2], [2])).outcome is Outcome.OK  # after it, in the same place
    assert bench.run(order(4, UP, [4], [0])).outcome in NOT_THERE
    assert not bench.results(2)  # nobody waits for it
    bench.close()
    assert found_in(path) == {key_of(1), key_of(2)}


def test_what_waits_to_be_written_is_forgotten_too(bench: Bench, path: Path) -> None:
    """It was handed in before the reset: the next process must not find it."""
    with bench.writer_held():
        bench.submit(order(1, DOWN, [1], [1]))
        bench.forget()
        bench.submit(order(2, DOWN, [2], [2]))
    assert bench.mover.wait(None, LONG_S)
    assert bench.result(1).outcome is Outcome.REJECTED and "reset" in bench.result(1).detail
    assert bench.result(2).outcome is Outcome.OK
    bench.close()
    assert found_in(path) == {key_of(2)}


def test_a_reset_just_before_the_end_is_kept(bench: Bench, path: Path) -> None:
    assert bench.run(order(1, DOWN, [1], [1])).outcome is Outcome.OK
    with bench.writer_held():
        bench.forget()
        bench.submit(order(2, DOWN, [2], [2]))
        closer = threading.Thread(target=bench.mover.close)
        closer.start()
        assert (
            bench.result(2).outcome is Outcome.REJECTED
        )  # the boards are closed, the writing thread is still held
    closer.join(LONG_S)
    assert not closer.is_alive()
    assert found_in(path) == set()


def test_a_reset_that_cannot_be_written_is_said_and_holds_in_this_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fd: int) -> None:
        raise DiskError(errno.EIO, "the disk is gone")

    assert bench.run(order(1, DOWN, [0], [0])).outcome is Outcome.OK
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "kvbm"):
        patch.setattr(os, "fdatasync", fail)
        bench.forget()
        assert bench.run(order(2, DOWN, [1], [1])).outcome is Outcome.OK
    assert [record.levelname for record in caplog.records] == [
        "ERROR"
    ] and "a reset could not be" in caplog.text
    assert bench.run(order(3, UP, [2], [0])).outcome is Outcome.MISS
    assert bench.run(order(4, UP, [2], [1])).outcome is Outcome.OK


# ---------------------------------------------------------------- close


@pytest.fixture(autouse=True)
def _earlier_threads() -> None:
    _EARLIER.clear()
    _EARLIER.update(threading.enumerate())


_EARLIER: set[threading.Thread] = set()


def disk_threads() -> list[str]:
    return threads_since(_EARLIER, "kvbm-disk")


def test_close_rejects_what_waits_and_leaves_nothing(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    bench = Bench(path)
    with bench.writer_held():
        bench.submit(order(1, DOWN, [1], [1]))
        closer = threading.Thread(target=bench.mover.close)
        closer.start()
        assert bench.result(1).outcome is Outcome.REJECTED
    closer.join(LONG_S)
    assert not closer.is_alive() and bench.listener.outcomes()[HELD_JOB] is Outcome.OK
    for job_id, direction in ((2, DOWN), (3, UP)):
        assert bench.run(order(job_id, direction, [1], [1])).outcome is Outcome.REJECTED
    bench.forget()  # does no harm
    bench.mover.close()
    assert bench.file.fd == -1 and disk_threads() == []
    assert set(os.listdir("/proc/self/fd")) <= before
    bench.close()


@pytest.mark.parametrize("states", ["idle", "used"])
def test_close_of_an_idle_executor_leaves_nothing(path: Path, states: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    bench = Bench(path, options=FileOptions())
    if states == "used":
        assert bench.run(order(1, DOWN, [0], [0])).outcome is Outcome.OK
        assert bench.run(order(2, UP, [0], [0])).outcome is Outcome.OK
    for _ in range(2):
        bench.close()
    assert disk_threads() == [] and set(os.listdir("/proc/self/fd")) <= before


def test_close_while_a_read_runs_ends_it_in_its_time(path: Path) -> None:
    gate = threading.Event()
    begun = threading.Event()

    def chosen(transfer: Transfer, is_write: bool) -> bool:
        begun.set()
        return not is_write

    with bench_on(path, lambda fd: GatedIo(fd, chosen, None, gate)) as bench:
        bench.submit(order(1, UP, [0], [0]))
        assert begun.wait(LONG_S)
        bench.submit(order(2, UP, [1], [1]))
        closer = threading.Thread(target=bench.mover.close)
        closer.start()
        assert bench.result(2).outcome is Outcome.REJECTED
        assert 1 not in bench.listener.outcomes()
        gate.set()
        closer.join(LONG_S)
        assert not closer.is_alive()
        assert bench.result(1).outcome in NOT_THERE  # it was let go
        assert bench.file.fd == -1 and disk_threads() == []


def test_close_with_a_late_read_leaves_file_and_memory_to_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "CLOSE_TIMEOUT_S", 0.01)
    gate, clock = threading.Event(), ManualClock()
    with bench_on(path, lambda fd: GatedIo(fd, touches(6, is_write=False), clock, gate), clock) as bench:
        assert bench.run(order(1, DOWN, [0], [6])).outcome is Outcome.OK
        address = bench.host.address
        assert bench.run(order(2, UP, [5], [6])).is_late
        for _ in range(2):
            bench.mover.close()
            bench.host.close()
            gc.collect()
            assert bench.file.fd >= 0 and is_mapped(address) and late_slots(bench.host) == [5]
        bench.mover._memory = None  # as if nobody had the mover any more
        gc.collect()
        assert is_mapped(address)
        gate.set()
        monkeypatch.setattr(disk_module, "CLOSE_TIMEOUT_S", LONG_S)
        bench.mover.close()
        assert bench.file.fd == -1 and disk_threads() == []
        gc.collect()
        assert not is_mapped(address)
