"""A disk that answers nothing any more: loads fail together, and no end of an engine waits for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import recovery as recovery_module
from kvbm_core.storage.disk import store as disk_store
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import slot_offset_bytes
from kvbm_core.storage.disk.record_io import FIRST_PAUSE_S, PROBE_S
from kvbm_core.storage.disk.recovery import Recovery
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.executor_bench import LONG_S, is_mapped
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.testing.store_contract import buffers, key_of
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.movers.disk_file import RankFile
from kvbm_core.transfer.plan import OrderKind
from tests.faults.doubles import BUFFERED, store_on
from tests.unit.disk_mover_bench import (
    DOWN,
    GEOMETRY,
    NOT_THERE,
    SLOT_BYTES,
    UP,
    Bench,
    GatedIo,
    bench_on,
    late_slots,
    order,
)
from tests.unit.test_worker import NUM_SLOTS, PROMPT
from tests.unit.worker_disk_engine import ELSEWHERE, NUM_TOKENS, DiskEngine

BURST = 8
A_FEW_SECONDS = 60.0
"""Many times what an end may take, as a machine may be busy; it was two minutes."""


# ---------------------------------------------------------------- a burst of loads


@pytest.mark.parametrize("kind", [UP, DOWN])
def test_a_burst_on_a_dead_disk_fails_together(tmp_path: Path, kind: OrderKind) -> None:
    """Not one after the other, each in its time; and none of them keeps its slots but the first."""
    gate, clock = threading.Event(), ManualClock()
    is_write = kind is DOWN
    with bench_on(
        tmp_path / "x.blocks",
        lambda fd: GatedIo(fd, lambda _, writes: writes is is_write, clock, gate),
        clock,
    ) as bench:
        for number in range(BURST):
            bench.submit(order(number, kind, [number], [number]))
        results = [bench.result(number) for number in range(BURST)]
        assert {result.outcome for result in results} == {Outcome.TIMED_OUT}
        assert [result.is_late for result in results] == [True] * 2 + [False] * (BURST - 2)
        assert LONG_S <= clock.now_s() < LONG_S + 2 * PROBE_S, "the time of one of them, and a last try"
        # It is tried again after a pause; whoever tries waits again, and the pause is longer then.
        clock.advance(FIRST_PAUSE_S)
        began_s = clock.now_s()
        for number in range(BURST, 2 * BURST):
            bench.submit(order(number, kind, [1], [number]))
            assert bench.result(number).outcome is Outcome.TIMED_OUT
        assert PROBE_S <= clock.now_s() - began_s < 2 * PROBE_S
        clock.advance(FIRST_PAUSE_S)
        began_s = clock.now_s()
        assert bench.run(order(100, kind, [3], [3])).outcome is Outcome.TIMED_OUT
        assert clock.now_s() == began_s
        gate.set()


def test_a_disk_that_answers_again_is_used_at_once(tmp_path: Path) -> None:
    gate, clock = threading.Event(), ManualClock()
    with bench_on(
        tmp_path / "x.blocks", lambda fd: GatedIo(fd, lambda _, writes: not writes, clock, gate), clock
    ) as bench:
        assert bench.run(order(1, DOWN, [2], [2])).outcome is Outcome.OK
        assert bench.run(order(2, UP, [3], [2])).is_late
        assert bench.run(order(4, UP, [1], [2])).is_late  # and now it is left alone
        assert bench.run(order(5, UP, [0], [2])).outcome is Outcome.TIMED_OUT
        gate.set()
        assert bench.last_result(2).outcome is bench.last_result(4).outcome is Outcome.TIMED_OUT
        assert bench.run(order(3, UP, [4], [2])).outcome is Outcome.OK
        assert bench.slot(4) == bench.slot(2)


def test_a_call_of_which_a_part_is_answered_does_not_mean_a_dead_disk(tmp_path: Path) -> None:
    """One request that is lost, as by a broken plugin, costs itself alone."""
    gate, clock = threading.Event(), ManualClock()
    lost = slot_at(5)
    with bench_on(
        tmp_path / "x.blocks",
        lambda fd: GatedIo(fd, lambda transfer, _: transfer.offset_bytes == lost, clock, gate),
        clock,
    ) as bench:
        assert bench.run(order(1, UP, [0, 1, 2], [1, 3, 5])).is_late
        assert bench.run(order(2, UP, [3], [7])).outcome in NOT_THERE
        gate.set()


def slot_at(slot: int) -> int:
    return slot_offset_bytes(slot, SLOT_BYTES)


def test_a_store_on_a_dead_disk_fails_at_once_after_the_first(tmp_path: Path) -> None:
    """As SGLang's HiCache uses it: each call had its whole time."""
    gate, clock = threading.Event(), ManualClock()
    geometry = Geometry(8, 8192, bytes(16))
    keys = [key_of(number) for number in range(8)]
    with store_on(
        tmp_path / "x.blocks", geometry, lambda fd: GatedIo(fd, lambda _, w: not w, clock, gate), clock=clock
    ) as store:
        assert store.wait_recovered(LONG_S)
        assert store.put_many(keys, buffers(8, 8192), deadline_s=LONG_S) == [Outcome.OK] * 8
        for key in keys:
            assert store.get_many([key], buffers(1, 8192), deadline_s=4.0) == [Outcome.TIMED_OUT]
        assert 4.0 <= clock.now_s() < 4.0 + 2 * PROBE_S
        gate.set()


# ---------------------------------------------------------------- the end


def test_the_end_of_a_mover_does_not_wait_for_a_dead_disk(tmp_path: Path) -> None:
    """Late reads may still land: their memory stays, and so does the file's number."""
    gate = threading.Event()
    with bench_on(tmp_path / "x.blocks", lambda fd: GatedIo(fd, lambda *_: True, None, gate)) as bench:
        address = bench.host.address
        bench.submit(order(1, UP, [0], [0]))
        bench.submit(order(2, DOWN, [1], [1]))
        while not all(record_io._io.in_flight for record_io in bench.mover._record_ios):
            threading.Event().wait(0.001)
        began_s = time.monotonic()
        bench.mover.close()
        bench.host.close()
        assert time.monotonic() - began_s < A_FEW_SECONDS
        assert bench.result(1).outcome is bench.result(2).outcome is Outcome.TIMED_OUT
        assert bench.file.fd >= 0 and is_mapped(address) and late_slots(bench.host) == [0, 1]
        with pytest.raises(OSError, match="another process"):
            BlockFile(bench.file.path, GEOMETRY, BUFFERED)
        gate.set()
        bench.mover.close()
        assert bench.file.fd == -1


def test_the_end_of_a_mover_does_not_wait_for_a_reset_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "STOP_TIMEOUT_S", 0.1)
    gate, begun = threading.Event(), threading.Event()
    bench = Bench(tmp_path / "x.blocks")

    def hang(fd: int) -> None:
        begun.set()
        assert gate.wait(LONG_S)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", hang)
        bench.forget()
        assert begun.wait(LONG_S)
        bench.mover.close()
        assert bench.file.fd >= 0, "it is still used"
        gate.set()
        for thread in bench.mover._threads:
            thread.join(LONG_S)
    bench.close()
    assert bench.file.fd == -1


def held_engine(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, *, scan: bool
) -> DiskEngine:
    """The second life of an engine, whose disk answers nothing: not to the search, or not to loads."""
    engine = DiskEngine(tmp_path)
    engine.wait_ready()
    engine.store_prompt()
    engine.close()

    def make_file_io(fd: int, *, is_direct: bool, depth: int = 0) -> GatedIo:
        return GatedIo(fd, lambda *_: True, None, gate)

    monkeypatch.setattr(recovery_module if scan else disk_module, "make_file_io", make_file_io)
    again = DiskEngine(tmp_path, io_deadline_s=LONG_S)
    if scan:
        again.wait_for(lambda: again.tier.capacity_blocks == NUM_SLOTS)
        disk = file_of(again)
        while disk._recovery is None or not is_reading(disk._recovery):
            threading.Event().wait(0.001)
    return again


def file_of(engine: DiskEngine) -> RankFile:
    """The block file of its first rank."""
    memory = engine.workers[0]._memory
    assert memory is not None
    return memory._site.files["disk"]


def let_go(recovery: Recovery, gate: threading.Event) -> None:
    """What was left behind ends after all."""
    gate.set()
    assert recovery._scan is not None and recovery._scan.close(LONG_S)


def is_reading(recovery: Recovery) -> bool:
    return recovery._scan is not None and recovery._scan._io.in_flight > 0


def test_an_engine_on_a_dead_disk_ends_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    engine = held_engine(tmp_path, gate, monkeypatch, scan=False)
    engine.wait_ready()
    reader = engine.leader.open("reader", ROOT, None)
    assert engine.leader.match(reader, PROMPT, 0, NUM_TOKENS) == NUM_TOKENS
    plan = engine.submit(engine.leader.onboard(reader, NUM_TOKENS, ELSEWHERE))
    memory = engine.workers[0]._memory
    assert memory is not None
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < A_FEW_SECONDS
    assert [result.job_id for result in engine.workers[0].take()] == [plan.job_id]
    gate.set()
    memory.close_lower()


def test_an_engine_whose_search_hangs_ends_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    engine = held_engine(tmp_path, gate, monkeypatch, scan=True)
    disk = file_of(engine)
    assert disk._recovery is not None and disk._file is not None
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < A_FEW_SECONDS
    assert not disk._recovery._thread.is_alive()
    assert disk._file.fd >= 0, "something may still be read by this number"
    let_go(disk._recovery, gate)
    disk._file.close()


def test_a_store_whose_search_and_reads_hang_ends_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(8, 8192, bytes(16))
    DiskStore(tmp_path / "x.blocks", geometry, BUFFERED).close()
    gate = threading.Event()
    with store_on(
        tmp_path / "x.blocks", geometry, lambda fd: GatedIo(fd, lambda *_: True, None, gate), scans=True
    ) as store:
        while not is_reading(store._recovery):
            threading.Event().wait(0.001)
        began_s = time.monotonic()
        store.close()
        assert time.monotonic() - began_s < A_FEW_SECONDS
        assert store._file.fd >= 0
        let_go(store._recovery, gate)
    store._file.close()
    assert disk_store.CLOSE_TIMEOUT_S <= 2.0


# ---------------------------------------------------------------- a tier that cannot be made
def test_a_call_that_hangs_gives_up_when_its_store_ends(tmp_path: Path) -> None:
    gate, clock = threading.Event(), ManualClock()
    geometry = Geometry(8, 8192, bytes(16))
    ends: list[threading.Thread] = []

    class EndsMeanwhile(GatedIo):
        def collect(self, timeout_s: float) -> list[tuple[int, int]]:
            record_io = store._reader.record_io
            if self is record_io._io and not ends:
                ends.append(threading.Thread(target=store.close))
                ends[0].start()
                while record_io._stops_at_s == float("inf"):
                    threading.Event().wait(0.001)
            return super().collect(timeout_s)

    with store_on(
        tmp_path / "x.blocks",
        geometry,
        lambda fd: EndsMeanwhile(fd, lambda _, w: not w, clock, gate),
        clock=clock,
    ) as store:
        assert store.wait_recovered(LONG_S)
        assert store.put_many([key_of(1)], buffers(1, 8192), deadline_s=LONG_S) == [Outcome.OK]
        began_s = clock.now_s()
        outcomes = store.get_many([key_of(1)], buffers(1, 8192), deadline_s=100 * A_FEW_SECONDS)
        assert outcomes == [Outcome.TIMED_OUT] and ends
        assert clock.now_s() - began_s < A_FEW_SECONDS
        gate.set()
        ends[0].join(LONG_S)
        assert store._reader.close(LONG_S)  # on a busy machine its end came before the gate was open
        store._file.close()


# ---------------------------------------------------------------- a device that cannot be made


def test_nothing_is_read_by_a_number_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is in the middle of the file when the rest of the rank's memory cannot be made."""
    engine = DiskEngine(tmp_path)
    engine.wait_ready()
    engine.close()
    gate, reading, stopped = threading.Event(), threading.Event(), []

    class Watched(GatedIo):
        def collect(self, timeout_s: float) -> list[tuple[int, int]]:
            reading.set()
            os.fstat(self._fd)  # OSError once it is closed
            return super().collect(timeout_s)

    def make_file_io(fd: int, *, is_direct: bool, depth: int = 0) -> GatedIo:
        return Watched(fd, lambda *_: True, None, gate)

    real_look = RankFile.look

    def look(file: RankFile) -> None:
        real_look(file)
        assert reading.wait(LONG_S)
        raise ValueError("no way to go on")

    real, searches = Recovery.close, []

    def close(recovery: Recovery) -> bool:
        stopped.append(recovery._file.fd)
        searches.append(recovery)
        return real(recovery)

    monkeypatch.setattr(recovery_module, "make_file_io", make_file_io)
    monkeypatch.setattr(Recovery, "close", close)
    monkeypatch.setattr(RankFile, "look", look)
    again = DiskEngine(tmp_path)
    try:
        again.wait_for(lambda: again.disk.off_reason is not None)
    finally:
        again.close()
        let_go(searches[0], gate)
    assert stopped and stopped[0] >= 0, "the search ends before the file is closed"
