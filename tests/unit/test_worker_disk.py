"""Workers with a block file each, and a leader: refused, late and closed; and one WorkerDisk by itself."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime import channel
from kvbm_core.runtime import worker_disk as module
from kvbm_core.runtime.messages import (
    Acks,
    DiskFound,
    DiskRefused,
    DiskShare,
    ForgetDisk,
    Message,
    Store,
)
from kvbm_core.runtime.worker_disk import WorkerDisk, WorkerDiskOptions
from kvbm_core.storage.disk.allocate import DirectoryBusyError, FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer.executors import disk as disk_module
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction
from tests.faults.doubles import BUFFERED
from tests.unit.disk_executor_bench import GatedIo
from tests.unit.test_worker import LONG_S, NUM_SLOTS, PROMPT
from tests.unit.worker_disk_engine import DISK_SLOTS, ELSEWHERE, NUM_TOKENS, DiskEngine

# ---------------------------------------------------------------- refusals


def check_host_tier_works(engine: DiskEngine) -> None:
    engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
    engine.offload_prompt()
    plan = engine.onboard_prompt()
    assert plan is not None and plan.reads is None and engine.on_devices() == engine.expected()
    assert engine.leader.disabled_reason is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_directory_that_cannot_be_used_leaves_the_host_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    (tmp_path / "blocks").write_text("a file")
    with caplog.at_level(logging.ERROR, "kvbm"):
        engine = DiskEngine(tmp_path, ranks)
        try:
            engine.wait_for(lambda: engine.disk.off_reason is not None)
            reason = engine.disk.off_reason or ""
            assert reason.startswith("worker ") and "DYN_KVBM_DISK_CACHE_DIR" in reason and "\n" not in reason
            check_host_tier_works(engine)
            assert engine.disk.storing_blocks == 0
            # Orders that were under way are answered.
            engine.tell_all(Store(10**6, [b"x" * 32], [0], [0]))
            engine.tell_all(ForgetDisk())
            engine.wait_for(lambda: engine.leader.stale_acks_total == ranks)
        finally:
            engine.close()
    assert (tmp_path / "blocks").read_text() == "a file"


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_file_that_another_engine_has_joins_when_that_gives_it_up(tmp_path: Path, is_reset: bool) -> None:
    """However long that takes; what is in it is found then, unless it was to be forgotten meanwhile."""
    first = DiskEngine(tmp_path)
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    first.wait_ready()
    first.store_prompt()
    (second_folder / "blocks").symlink_to(first.folder)
    second = DiskEngine(second_folder)
    try:
        second.wait_for(lambda: second.tier.capacity_blocks == NUM_SLOTS)
        assert second.onboard_prompt() is None and second.disk.off_reason is None
        disk = second.workers[0]._disk
        assert disk is not None and disk.is_busy
        if is_reset:
            second.leader.reset()
            while not disk._is_forgotten:
                threading.Event().wait(0.001)
        assert first.disk.off_reason is None and first.onboard_prompt() is not None
        first.close()
        second.wait_ready()
        assert not disk.is_busy
        plan = second.onboard_prompt()
        if is_reset:
            assert plan is None
            second.store_prompt()
        else:
            assert plan is not None and plan.reads is not None
            assert second.on_devices() == second.expected()
        second.leader.check_integrity()
    finally:
        first.close()
        second.close()


def test_an_engine_may_end_while_its_file_is_another_ones(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    (tmp_path / "blocks").mkdir()
    holder = BlockFile(
        tmp_path / "blocks" / "rank-0-of-1.blocks", Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED
    )
    engine = DiskEngine(tmp_path)
    check_host_tier_works(engine)
    engine.close()
    holder.close()
    assert set(threading.enumerate()) == threads and set(os.listdir("/proc/self/fd")) <= files


def test_a_disk_that_turns_out_not_to_be_had_later_is_told(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    path = tmp_path / "blocks" / "rank-0-of-1.blocks"
    holder = BlockFile(path, Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED)
    engine = DiskEngine(tmp_path)
    try:
        check_host_tier_works(engine)
        assert engine.disk.off_reason is None
        with path.open("r+b") as file:  # by another version, which has just written its first block
            file.write(b"KVBMFILE\x07\x00")
        holder.close()
        engine.wait_for(lambda: engine.disk.off_reason is not None)
        assert "of format 7" in (engine.disk.off_reason or "")
        assert engine.leader.disabled_reason is None
    finally:
        engine.close()


class Ends:
    """What a WorkerDisk says."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.news = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self.news:
            self.messages.append(message)
            self.news.notify_all()

    def wait_for(self, kind: type[Message], count: int = 1) -> list[Message]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.of(kind)) >= count, LONG_S)
        return self.of(kind)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.messages if isinstance(message, kind)]


def test_a_file_that_is_given_up_later_is_taken_then(tmp_path: Path) -> None:
    """The engine before was killed, and its worker needs a while."""
    path = tmp_path / "rank-1-of-2.blocks"
    holder, is_open = BlockFile(path, Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED), threading.Event()
    ends = Ends()
    disk = WorkerDisk(1, 2, WorkerDiskOptions(BUFFERED), ends)
    assert not disk.open(DiskShare(str(tmp_path), 4), SECTOR_BYTES, "layout") and disk.is_busy
    disk.open_later(is_open.set)
    holder.close()
    assert is_open.wait(LONG_S) and not disk.is_busy and ends.messages == []
    assert disk._file is not None
    with pytest.raises(DirectoryBusyError):
        BlockFile(path, Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED)
    disk.close()
    disk._file.close()


def test_the_end_does_not_wait_for_a_file_that_hangs_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(4, SECTOR_BYTES, bytes(16))
    holder = BlockFile(tmp_path / "rank-1-of-2.blocks", geometry, BUFFERED)
    disk = WorkerDisk(1, 2, WorkerDiskOptions(BUFFERED), Ends())
    assert not disk.open(DiskShare(str(tmp_path), 4), SECTOR_BYTES, "layout") and disk.is_busy
    holder.close()
    gate, begun, opened = threading.Event(), threading.Event(), list[BlockFile]()

    def hang(path: Path, geometry: Geometry, options: FileOptions) -> BlockFile:
        begun.set()
        assert gate.wait(LONG_S)
        opened.append(BlockFile(path, geometry, options))
        return opened[0]

    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "BlockFile", hang)
    disk.open_later(lambda: None)
    assert begun.wait(LONG_S)
    disk.close()
    opener = disk._opener
    assert opener is not None and opener.is_alive(), "it still hangs"
    gate.set()
    opener.join(LONG_S)
    assert opened[0].fd == -1, "nobody wants it any more"


def test_nothing_works_before_its_turn(tmp_path: Path) -> None:
    ends = Ends()
    disk = WorkerDisk(0, 1, WorkerDiskOptions(BUFFERED), ends)
    host = HostSlab(1, SECTOR_BYTES)
    with pytest.raises(ValueError, match="not open"):
        disk.start(host, lambda result: None, lambda job_id: None)
    disk.forget_all()
    disk.store(Store(5, [b"k" * 32], [0], [0]), deadline_s=1.0)
    (acks,) = ends.of(Acks)
    assert isinstance(acks, Acks) and [ack.outcome for ack in acks.acks] == [Outcome.REJECTED]
    assert not disk.is_store(5)
    disk.close()
    host.close()


@pytest.mark.parametrize("changed", ["fingerprint", "slot bytes"])
def test_a_file_of_another_meaning_is_begun_anew(tmp_path: Path, changed: str) -> None:
    def life(fingerprint: str, size: int) -> int:
        """How many blocks it finds; leaves one."""
        ends, host = Ends(), HostSlab(2, size)
        assert host.wait_ready(LONG_S)
        disk = WorkerDisk(0, 1, WorkerDiskOptions(BUFFERED), ends)
        assert disk.open(DiskShare(str(tmp_path), 4), size, fingerprint)
        executor = disk.start(host, disk.stored, lambda job_id: None)
        (found,) = ends.wait_for(DiskFound)
        disk.store(Store(5, [b"k" * 32], [0], [3]), deadline_s=LONG_S)
        assert disk.is_store(5) or ends.of(Acks)
        (acks,) = ends.wait_for(Acks)
        disk.close()
        executor.close()
        host.close()
        assert isinstance(acks, Acks) and [ack.outcome for ack in acks.acks] == [Outcome.OK]
        assert isinstance(found, DiskFound) and found.end == 4 and not ends.of(DiskRefused)
        return len(found.keys)

    assert [life("layout", SECTOR_BYTES), life("layout", SECTOR_BYTES)] == [0, 1]
    other = ("other", SECTOR_BYTES) if changed == "fingerprint" else ("layout", 2 * SECTOR_BYTES)
    assert [life(*other), life(*other), life("layout", SECTOR_BYTES)] == [0, 1, 0]


def test_what_is_written_after_a_restart_is_newer(tmp_path: Path) -> None:
    """So that the least recent is evicted first, whenever it was written."""
    for disk_slot in (3, 1, 2):  # a life each
        ends, host = Ends(), HostSlab(1, SECTOR_BYTES)
        assert host.wait_ready(LONG_S)
        disk = WorkerDisk(0, 1, WorkerDiskOptions(BUFFERED), ends)
        assert disk.open(DiskShare(str(tmp_path), 4), SECTOR_BYTES, "layout")
        executor = disk.start(host, disk.stored, lambda job_id: None)
        (found,) = ends.wait_for(DiskFound)
        disk.store(Store(5, [bytes([disk_slot]) * 32], [0], [disk_slot]), deadline_s=LONG_S)
        ends.wait_for(Acks)
        disk.close()
        executor.close()
        host.close()
    assert isinstance(found, DiskFound)
    written_at = dict(zip(found.slots, found.sequences, strict=True))
    assert list(written_at) == [1, 3] and written_at[3] < written_at[1]


def test_close_waits_for_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def make_file_io(fd: int, *, is_direct: bool, depth: int) -> GatedIo:
        return GatedIo(fd, lambda transfer, is_write: True, None, gate)

    engine = DiskEngine(tmp_path)
    engine.wait_ready()
    engine.close()
    monkeypatch.setattr("kvbm_core.storage.disk.recovery.make_file_io", make_file_io)
    again = DiskEngine(tmp_path)
    again.wait_for(lambda: again.tier.capacity_blocks == NUM_SLOTS)
    worker_disk = again.workers[0]._disk
    assert worker_disk is not None and worker_disk._recovery is not None
    assert again.disk.tier.capacity_blocks == 0  # the host tier does not wait for it
    again.offload_prompt()
    closer = threading.Thread(target=again.close)
    closer.start()
    assert worker_disk._recovery._stopping.wait(LONG_S) and worker_disk._recovery._thread.is_alive()
    gate.set()
    closer.join(LONG_S)
    assert not closer.is_alive() and not worker_disk._recovery._thread.is_alive()


# ---------------------------------------------------------------- late, close


def test_the_leader_hears_of_a_late_load_when_its_slots_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def make_file_io(fd: int, *, is_direct: bool) -> GatedIo:
        return GatedIo(fd, lambda transfer, is_write: not is_write, None, gate)

    engine = DiskEngine(tmp_path)
    engine.wait_ready()
    engine.store_prompt()
    engine.close()
    monkeypatch.setattr(disk_module, "make_file_io", make_file_io)
    again = DiskEngine(tmp_path, io_deadline_s=0.05)
    try:
        again.wait_ready()
        worker, reader = again.workers[0], again.leader.open("reader", ROOT, None)
        assert again.leader.match(reader, PROMPT, 0, NUM_TOKENS) == NUM_TOKENS
        plan = again.submit(again.leader.onboard(reader, NUM_TOKENS, ELSEWHERE))
        assert worker.wait([plan.job_id], LONG_S)
        assert [result.outcome for result in worker.take()] == [Outcome.TIMED_OUT]  # the engine need not wait
        worker.submit(TransferPlan(10**6, Direction.OFFLOAD, ()))
        again.wait_for(lambda: again.leader.stale_acks_total == 1)  # what came after has been heard of
        assert again.leader.pending_jobs == 1 and again.leader.is_pending(plan.job_id)
        gate.set()
        again.settle()
        again.leader.finish(reader)
        assert again.leader.metrics.snapshot()['kvbm_failures_total{kind="onboard_timed_out"}'] == 1
        again.leader.check_integrity()
    finally:
        gate.set()
        again.close()


def test_a_late_store_is_answered_at_once_and_again_when_its_slots_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def make_file_io(fd: int, *, is_direct: bool) -> GatedIo:
        return GatedIo(fd, lambda transfer, is_write: is_write, None, gate)

    monkeypatch.setattr(disk_module, "make_file_io", make_file_io)
    ends, host = Ends(), HostSlab(1, SECTOR_BYTES)
    assert host.wait_ready(LONG_S)
    disk = WorkerDisk(0, 1, WorkerDiskOptions(BUFFERED, 0.05), ends)
    assert disk.open(DiskShare(str(tmp_path), 4), SECTOR_BYTES, "layout")
    executor = disk.start(host, disk.stored, disk.released)
    try:
        disk.store(Store(5, [b"k" * 32], [0], [3]), deadline_s=LONG_S)
        (first,) = ends.wait_for(Acks)
        assert isinstance(first, Acks) and [(ack.outcome, ack.is_late) for ack in first.acks] == [
            (Outcome.TIMED_OUT, True)
        ]
        assert disk.is_store(5)
        gate.set()
        _, second = ends.wait_for(Acks, 2)
        assert isinstance(second, Acks) and [
            (ack.job_id, ack.outcome, ack.is_late) for ack in second.acks
        ] == [(5, Outcome.TIMED_OUT, False)]
        assert not disk.is_store(5)
    finally:
        gate.set()
        disk.close()
        executor.close()
        host.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_close_in_the_middle_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    engine = DiskEngine(tmp_path, ranks)
    engine.wait_ready()
    engine.offload_prompt()  # its way to the disk has just begun
    for _ in range(2):
        engine.close()
    assert set(threading.enumerate()) == threads and set(os.listdir("/proc/self/fd")) <= files
    assert sorted(path.name for path in engine.folder.iterdir()) == [
        f"rank-{r}-of-{ranks}.blocks" for r in range(ranks)
    ]
    again = DiskEngine(tmp_path, ranks)
    try:
        again.wait_ready()  # no lock is left
        plan = again.onboard_prompt()  # whatever got there verifies
        num_blocks = 0 if plan is None else len(plan.moves[0].slots)
        assert num_blocks <= again.disk.tier.resident_blocks // 2
        for found, expected in zip(again.on_devices(), again.expected(), strict=True):
            assert (
                found[:num_blocks] == expected[:num_blocks]
                and found[5:][:num_blocks] == expected[5:][:num_blocks]
            )
        assert not again.leader.metrics.snapshot().get('kvbm_failures_total{kind="onboard_miss"}')
    finally:
        again.close()


def test_close_while_it_is_being_configured_leaves_nothing(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    for _ in range(10):
        DiskEngine(tmp_path).close()
    assert set(threading.enumerate()) == threads and set(os.listdir("/proc/self/fd")) <= files


def test_an_executor_that_cannot_be_made_leaves_the_file_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_executor(*args: object, **kwargs: object) -> None:
        raise ValueError("no way to copy")

    monkeypatch.setattr("kvbm_core.runtime.worker.make_executor", no_executor)
    engine = DiskEngine(tmp_path)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert "no way to copy" in (engine.leader.disabled_reason or "")
        geometry = Geometry(DISK_SLOTS, engine.slot_bytes, bytes(16))
        BlockFile(engine.rank_file(), geometry, BUFFERED).close()  # DirectoryBusyError if it were still held
    finally:
        engine.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvbm-")] == []


def test_a_worker_closed_while_its_file_is_being_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where space must be filled with zeros: it takes longer than close waits for the channel's thread."""
    begun, gate = threading.Event(), threading.Event()

    def slow(path: Path, geometry: Geometry, options: FileOptions) -> BlockFile:
        begun.set()
        assert gate.wait(LONG_S)
        return BlockFile(path, geometry, options)

    monkeypatch.setattr(module, "BlockFile", slow)
    monkeypatch.setattr(channel, "CLOSE_TIMEOUT_S", 0.05)
    engine = DiskEngine(tmp_path)
    assert begun.wait(LONG_S)
    engine.close()
    gate.set()
    worker = engine.workers[0]
    worker._channel._loop._thread.join(LONG_S)
    try:
        assert worker._executor is None
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvbm-")] == []
    finally:
        worker._channel._loop.socket.close(linger=0)
        worker._channel._loop._context.term()
        os.close(worker._channel._loop._wake_fd)
        worker.close()
