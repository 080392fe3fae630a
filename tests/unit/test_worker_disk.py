"""Workers with a block file each, and a leader: refused, late and closed; and one RankFile by itself."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime import channel
from kvbm_core.runtime.messages import Message, Results
from kvbm_core.storage.disk.allocate import DirectoryBusyError, FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer import rank as rank_module
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.movers import disk_file as module
from kvbm_core.transfer.movers.disk_file import RankFile
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TransferPlan, rejected
from kvbm_core.types import BlockKey, Direction
from tests.faults.doubles import BUFFERED
from tests.threads import threads_since
from tests.unit.disk_mover_bench import GatedIo, late_slots
from tests.unit.test_worker import LONG_S, NUM_SLOTS, PROMPT
from tests.unit.worker_disk_engine import DISK_SLOTS, ELSEWHERE, FORGET, NUM_TOKENS, STRAY, DiskEngine

# ---------------------------------------------------------------- refusals


def check_host_tier_works(engine: DiskEngine) -> None:
    engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
    engine.offload_prompt()
    plan = engine.onboard_prompt()
    assert plan is not None and not plan.reads and engine.on_devices() == engine.expected()
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
            engine.tell_all(STRAY)
            engine.tell_all(FORGET)
            engine.wait_for(lambda: engine.leader.stale_results_total == ranks)
        finally:
            engine.close()
    assert (tmp_path / "blocks").read_text() == "a file"


def test_a_store_that_fails_is_one_line_however_often_it_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails is one a minute, with the file."""
    engine = DiskEngine(tmp_path, store_url=f"file://{tmp_path}/none")
    try:
        engine.wait_ready()
        for number in range(5):
            job_id = 10**6 + number  # of no job of the leader's
            engine.tell_all(TierOrder(job_id, "store", OrderKind.STORE, STRAY.keys, STRAY.slots))
        engine.wait_for(lambda: engine.leader.stale_results_total == 5)
        (line,) = [text for text in caplog.messages if "cannot be used" in text]
        assert line.startswith(f"kvbm: KVBM_REMOTE_URL: {tmp_path}/none cannot be used: No such file")
        caplog.clear()
        for _ in range(3):
            engine.workers[0]._order_ended(STRAY, rejected(0, "io_error in a file", Outcome.IO_ERROR))
        assert caplog.messages == ["kvbm: rank 0: the disk: io_error in a file"]
    finally:
        engine.close()


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
        memory = second.workers[0]._memory
        assert memory is not None
        (disk,) = memory._site.files.values()
        assert disk.is_busy
        if is_reset:
            second.leader.reset()
            while "disk" not in memory._forgotten:
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
            assert plan is not None and plan.reads
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
    assert set(threading.enumerate()) <= threads and set(os.listdir("/proc/self/fd")) <= files


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
    """What a RankFile says, and its mover."""

    def __init__(self) -> None:
        self.finds: list[tuple[int, list[Found]]] = []
        self.reasons: list[str] = []
        self.results: list[JobResult] = []
        self.news = threading.Condition()

    def found(self, tier: str, end: int, found: list[Found]) -> None:
        """See TierListener."""
        assert tier == "disk"
        with self.news:
            self.finds.append((end, found))
            self.news.notify_all()

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""
        assert tier == "disk"
        with self.news:
            self.reasons.append(reason)
            self.news.notify_all()

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        raise AssertionError("nobody asked for that")

    def ended(self, result: JobResult) -> None:
        with self.news:
            self.results.append(result)
            self.news.notify_all()

    def wait_found(self) -> tuple[int, list[Found]]:
        """The first that was found."""
        with self.news:
            assert self.news.wait_for(lambda: bool(self.finds), LONG_S)
        return self.finds[0]

    def wait_results(self, count: int = 1) -> list[JobResult]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.results) >= count, LONG_S)
        return self.results


class OneFile:
    """A RankFile by itself: of 4 slots, whose slab has 2."""

    def __init__(
        self, folder: Path, options: FileOptions, slot_bytes: int = SECTOR_BYTES, meaning: str = "layout"
    ) -> None:
        self.ends, self.host = Ends(), HostSlab(2, slot_bytes)
        assert self.host.wait_ready(LONG_S)
        self.file = RankFile("disk", options, self.ends)
        assert self.file.open(folder / "rank.blocks", 4, slot_bytes, meaning)
        self.mover = self.file.start(self.host)
        self.file.look()

    def store(self, disk_slot: int) -> None:
        """Its key is known from the slot."""
        keys = (BlockKey(bytes([disk_slot]) * 32),)
        order = TierOrder(5, "disk", OrderKind.STORE, keys, (0,), (disk_slot,))
        self.mover.submit(order, self.ends.ended, deadline_s=LONG_S)

    def close(self) -> None:
        self.file.close()
        self.mover.close()
        self.host.close()


def test_a_file_that_is_given_up_later_is_taken_then(tmp_path: Path) -> None:
    """The engine before was killed, and its worker needs a while."""
    path = tmp_path / "rank-1-of-2.blocks"
    holder, is_open = BlockFile(path, Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED), threading.Event()
    ends = Ends()
    disk = RankFile("disk", BUFFERED, ends)
    assert not disk.open(path, 4, SECTOR_BYTES, "layout") and disk.is_busy
    disk.open_later(is_open.set)
    holder.close()
    assert is_open.wait(LONG_S) and not disk.is_busy and not ends.finds and not ends.reasons
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
    disk = RankFile("disk", BUFFERED, Ends())
    path = tmp_path / "rank-1-of-2.blocks"
    assert not disk.open(path, 4, SECTOR_BYTES, "layout") and disk.is_busy
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
    disk = RankFile("disk", BUFFERED, Ends())
    host = HostSlab(1, SECTOR_BYTES)
    with pytest.raises(ValueError, match="not open"):
        disk.start(host)
    with pytest.raises(ValueError, match="not open"):
        disk.look()
    disk.close()
    host.close()


@pytest.mark.parametrize("changed", ["fingerprint", "slot bytes"])
def test_a_file_of_another_meaning_is_begun_anew(tmp_path: Path, changed: str) -> None:
    def life(fingerprint: str, size: int) -> int:
        """How many blocks it finds; leaves one."""
        one = OneFile(tmp_path, BUFFERED, size, fingerprint)
        end, found = one.ends.wait_found()
        one.store(3)
        (result,) = one.ends.wait_results()
        one.close()
        assert result.outcome is Outcome.OK and end == 4 and not one.ends.reasons
        return len(found)

    assert [life("layout", SECTOR_BYTES), life("layout", SECTOR_BYTES)] == [0, 1]
    other = ("other", SECTOR_BYTES) if changed == "fingerprint" else ("layout", 2 * SECTOR_BYTES)
    assert [life(*other), life(*other), life("layout", SECTOR_BYTES)] == [0, 1, 0]


def test_what_is_written_after_a_restart_is_newer(tmp_path: Path) -> None:
    """So that the least recent is evicted first, whenever it was written."""
    for disk_slot in (3, 1, 2):  # a life each
        one = OneFile(tmp_path, BUFFERED)
        _, found = one.ends.wait_found()
        one.store(disk_slot)
        one.ends.wait_results()
        one.close()
    written_at = {record.slot: record.sequence for record in found}
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
    memory = again.workers[0]._memory
    assert memory is not None
    (worker_disk,) = memory._site.files.values()
    assert worker_disk._recovery is not None
    assert again.disk.slots.capacity_blocks == 0  # the host tier does not wait for it
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
        again.wait_for(lambda: again.leader.stale_results_total == 1)  # what came after has been heard of
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
    one = OneFile(tmp_path, replace(BUFFERED, io_deadline_s=0.05))
    try:
        one.store(3)
        (first,) = one.ends.wait_results()
        assert (first.outcome, first.is_late) == (Outcome.TIMED_OUT, True)
        assert late_slots(one.host) == [0]
        gate.set()
        _, second = one.ends.wait_results(2)
        assert (second.job_id, second.outcome, second.is_late) == (5, Outcome.TIMED_OUT, False)
        assert late_slots(one.host) == []
    finally:
        gate.set()
        one.close()


def test_a_late_store_is_told_to_the_leader_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots, in memory and in the file, are nobody's in between."""
    gate = threading.Event()

    def make_file_io(fd: int, *, is_direct: bool) -> GatedIo:
        return GatedIo(fd, lambda transfer, is_write: is_write, None, gate)

    monkeypatch.setattr(disk_module, "make_file_io", make_file_io)
    engine = DiskEngine(tmp_path, io_deadline_s=0.05)
    try:
        engine.wait_ready()
        heard: list[JobResult] = []
        take = engine.handshake.on_message

        def listen(identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
            if isinstance(message, Results):
                heard.extend(message.results)
            return take(identity, message)

        monkeypatch.setattr(engine.handshake, "on_message", listen)
        engine.tell_all(STRAY)
        engine.wait_for(lambda: len(heard) == 1)
        engine.tell_all(STRAY)  # it is still under way: not begun again, and not answered once more
        last = replace(STRAY, job_id=STRAY.job_id + 1)
        engine.tell_all(last)  # behind all that was sent before
        gate.set()
        both = {STRAY.job_id, last.job_id}
        engine.wait_for(lambda: {result.job_id for result in heard if not result.is_late} == both)
        strays = [(result.outcome, result.is_late) for result in heard if result.job_id == STRAY.job_id]
        assert strays == [(Outcome.TIMED_OUT, True), (Outcome.TIMED_OUT, False)]
    finally:
        gate.set()
        engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_close_in_the_middle_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    engine = DiskEngine(tmp_path, ranks)
    engine.wait_ready()
    engine.offload_prompt()  # its way to the disk has just begun
    for _ in range(2):
        engine.close()
    assert set(threading.enumerate()) <= threads and set(os.listdir("/proc/self/fd")) <= files
    assert sorted(path.name for path in engine.folder.iterdir()) == [
        f"rank-{r}-of-{ranks}.blocks" for r in range(ranks)
    ]
    again = DiskEngine(tmp_path, ranks)
    try:
        again.wait_ready()  # no lock is left
        plan = again.onboard_prompt()  # whatever got there verifies
        num_blocks = 0 if plan is None else len(plan.moves[0].slots)
        assert num_blocks <= again.disk.slots.resident_blocks // 2
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
    assert set(threading.enumerate()) <= threads and set(os.listdir("/proc/self/fd")) <= files


def test_an_executor_that_cannot_be_made_leaves_the_file_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_executor(*args: object, **kwargs: object) -> None:
        raise ValueError("no way to copy")

    monkeypatch.setattr(rank_module, "make_executor", no_executor)
    before = set(threading.enumerate())
    engine = DiskEngine(tmp_path)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert "no way to copy" in (engine.leader.disabled_reason or "")
        geometry = Geometry(DISK_SLOTS, engine.slot_bytes, bytes(16))
        BlockFile(engine.rank_file(), geometry, BUFFERED).close()  # DirectoryBusyError if it were still held
    finally:
        engine.close()
    assert not threads_since(before)


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
    before = set(threading.enumerate())
    engine = DiskEngine(tmp_path)
    assert begun.wait(LONG_S)
    engine.close()
    gate.set()
    worker = engine.workers[0]
    worker._channel._loop._thread.join(LONG_S)
    try:
        assert worker._executor is None
        assert not threads_since(before)
    finally:
        worker._channel._loop.socket.close(linger=0)
        worker._channel._loop._context.term()
        os.close(worker._channel._loop._wake_fd)
        worker.close()
