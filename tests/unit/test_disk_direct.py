"""Blocks from disk straight into the device's memory, by NIXL's POSIX plugin with host tensors for a GPU."""

from __future__ import annotations

import errno
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import nixl_io
from kvbm_core.storage.disk.allocate import OFF, FileOptions
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.storage.late import LATE
from kvbm_core.testing.executor_bench import LONG_S, two_group_memory
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.executors.device_rows import DeviceRows
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.movers import disk_direct as module
from kvbm_core.transfer.movers.device_stage import DeviceStage
from kvbm_core.transfer.movers.disk_direct import DirectReader, MakeIo, why_not
from kvbm_core.transfer.plan import (
    FIRST_DIRECT_SLOT,
    Fetched,
    GroupMove,
    OrderKind,
    TierOrder,
    TransferPlan,
)
from kvbm_core.types import Direction
from tests.faults.doubles import BUFFERED, FailingIo, SpoilingIo
from tests.unit.disk_mover_bench import GatedIo
from tests.unit.test_staged import LOAD, NUM_DISK_SLOTS, SLOT_BYTES, Bench

NO_NIXL = why_no_nixl()
needs_nixl = pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk to device by NIXL: {NO_NIXL}")
TO_DEVICE = replace(BUFFERED, to_device="nixl-posix")
BUFFERED_WITHOUT = replace(TO_DEVICE, to_device=OFF)


class Listener:
    """What a DirectReader says of itself."""

    def __init__(self) -> None:
        self.said: list[bool] = []
        self._news = threading.Condition()

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        assert tier == "disk"
        with self._news:
            self.said.append(is_direct)
            self._news.notify_all()

    def found(self, tier: str, end: int, found: object) -> None:
        """See TierListener."""

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""

    def wait(self, *said: bool) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.said == list(said), LONG_S), self.said


class DirectBench(Bench):
    """Bench with a DirectReader on the same file, and contents of some of its slots."""

    def __init__(
        self, path: Path, make_io: MakeIo | None = None, options: FileOptions = TO_DEVICE, seed: int = 1
    ) -> None:
        super().__init__(path, options=options, io_deadline_s=options.io_deadline_s)
        self.rng = random.Random(seed)
        self.news = Listener()
        if options.to_device != OFF:
            self.reader = DirectReader("disk", self.file, self.memory, self.news, make_io=make_io)
            self.readers["disk"] = self.reader
            self.disk.stop_others = self.reader.close

    def fill(self, places: Sequence[int]) -> dict[int, bytes]:
        """Random bytes in these slots of the disk."""
        contents = {place: self.rng.randbytes(SLOT_BYTES) for place in places}
        self.store(contents)
        return contents

    def size_of(self, group: int) -> int:
        return self.memory.views[group].block_bytes

    def num_late(self) -> int:
        """Places that a request which was given up may still write to."""
        stage = self.reader._stage
        assert stage is not None
        size = stage.place_bytes
        places = range(stage.address, stage.address + stage.num_places * size, size)
        return sum(LATE.holds([(place, place + size)]) for place in places)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        ends_at_s = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < ends_at_s
            threading.Event().wait(0.005)

    def all_on_device(self) -> list[bytes]:
        return [self.on_device(group, block) for group in (0, 1) for block in range(12)]


@contextmanager
def opened(
    path: Path, make_io: MakeIo | None = None, options: FileOptions = TO_DEVICE
) -> Iterator[DirectBench]:
    bench = DirectBench(path / "x.blocks", make_io, options)
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DirectBench]:
    with opened(tmp_path) as made:
        made.news.wait(True)
        yield made


def slots_of(places: Sequence[int]) -> tuple[int, ...]:
    """What blocks that go straight to the device have in place of host slots."""
    return tuple(FIRST_DIRECT_SLOT + place for place in places)


def direct(places: Sequence[int], moves: Sequence[GroupMove] = (), job_id: int = LOAD) -> TransferPlan:
    """Block n of group 0 comes from ``places[n]``, unless ``moves`` says otherwise."""
    slots = slots_of(places)
    own = moves or (GroupMove(0, tuple(range(len(places))), slots),)
    keys = tuple(map(key_of, places))
    order = TierOrder(job_id, "disk", OrderKind.FETCH, keys, slots, tuple(places))
    return TransferPlan(job_id, Direction.ONBOARD, tuple(own), (order,))


# ---------------------------------------------------------------- bytes


@needs_nixl
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_both_groups_come_by_nixl_and_touch_no_host_slot(
    bench: DirectBench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(DeviceStage, "payload_digest", None)  # not asked for: it takes a copy in host memory
    rng = random.Random(seed)
    places = rng.sample(range(NUM_DISK_SLOTS), 20)
    contents = bench.fill(places)
    before, slots = bench.all_on_device(), bench.host.array.tobytes()
    cut = rng.randrange(8, 12)
    owns = places[:cut], places[cut:]
    moves = [
        GroupMove(group, tuple(rng.sample(range(12), len(own))), slots_of(own))
        for group, own in enumerate(owns)
    ]
    result = bench.finish(direct(places, moves))
    assert result.outcome is Outcome.OK and not result.is_late and not result.failed, result.detail
    expected = list(before)
    for move, own in zip(moves, owns, strict=True):
        for block, place in zip(move.device_blocks, own, strict=True):
            expected[12 * move.group + block] = contents[place][: bench.size_of(move.group)]
    assert bench.all_on_device() == expected and bench.host.array.tobytes() == slots
    num_bytes = sum(len(own) * bench.size_of(group) for group, own in enumerate(owns))
    (fetched,) = result.fetched
    assert fetched == Fetched("disk", num_bytes, fetched.seconds, is_direct=True)
    assert (result.num_bytes, result.copy_s) == (num_bytes, 0.0)


@needs_nixl
def test_what_is_in_the_host_and_what_is_on_disk_come_together(bench: DirectBench) -> None:
    """And what comes into the host on its way, as before the ranks had said that they can do otherwise."""
    contents = bench.fill([5, 9, 20, 21])
    bench.slot(3)[:] = b"\3" * SLOT_BYTES
    slots = (3, *slots_of([9, 5]), 6, 7)
    load = direct([5, 9], [GroupMove(0, (1, 2, 3, 4, 5), slots)])
    staged = TierOrder(LOAD, "disk", OrderKind.FETCH, (key_of(20), key_of(21)), (6, 7), (20, 21))
    result = bench.finish(replace(load, reads=(*load.reads, staged)))
    assert result.outcome is Outcome.OK, result.detail
    size = bench.size_of(0)
    wanted = [b"\3" * size, *(contents[place][:size] for place in (9, 5, 20, 21))]
    assert [bench.on_device(0, block) for block in (1, 2, 3, 4, 5)] == wanted
    assert bench.slot(6).tobytes() == contents[20], "what came by way of the host is there too"
    assert {read.is_direct: read.num_bytes for read in result.fetched} == {
        False: 2 * SLOT_BYTES,
        True: 2 * size,
    }
    assert result.num_bytes == 5 * size


@needs_nixl
def test_what_the_engine_does_not_take_is_not_read(bench: DirectBench) -> None:
    contents, before = bench.fill([1, 2]), bench.all_on_device()
    load = direct([1, 2, 3], [GroupMove(0, (7,), slots_of([2]))])  # nothing was ever written in slot 3
    assert bench.finish(load).outcome is Outcome.OK
    expected = list(before)
    expected[7] = contents[2][: bench.size_of(0)]
    assert bench.all_on_device() == expected
    nothing = replace(load, job_id=LOAD + 1, moves=())
    assert bench.finish(nothing).outcome is Outcome.OK and bench.all_on_device() == expected


@needs_nixl
def test_more_blocks_than_there_are_places_and_than_one_call_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PORTION_BYTES", 5 * (SLOT_BYTES + SECTOR_BYTES))
    monkeypatch.setattr(
        module, "DeviceStage", partial(DeviceStage, most_bytes=3 * (SLOT_BYTES + SECTOR_BYTES))
    )
    with opened(tmp_path) as bench:
        bench.news.wait(True)
        contents = bench.fill(range(12))
        assert bench.finish(direct(range(12))).outcome is Outcome.OK
        size = bench.size_of(0)
        assert [bench.on_device(0, n) for n in range(12)] == [contents[n][:size] for n in range(12)]
        stage = bench.reader._stage
        assert stage is not None and stage.num_places == 3 == stage.num_free


@needs_nixl
def test_what_was_written_without_the_setting_is_checked_in_host_memory(tmp_path: Path) -> None:
    """And the other way round: who does not have the setting reads what was written with it."""
    with opened(tmp_path, options=BUFFERED_WITHOUT) as old:
        contents = old.fill(range(6))
    with opened(tmp_path) as bench:
        bench.news.wait(True)
        contents |= bench.fill([6, 7])
        bench.damage(4)
        result = bench.finish(direct(range(8)))
        assert result.failed == ((FIRST_DIRECT_SLOT + 4, Outcome.CORRUPT),), result.detail
        good = [n for n in range(8) if n != 4]
        size = bench.size_of(0)
        assert [bench.on_device(0, n) for n in good] == [contents[n][:size] for n in good]
    with opened(tmp_path, options=BUFFERED_WITHOUT) as old:
        order = TierOrder(7, "disk", OrderKind.FETCH, (key_of(6), key_of(0)), (1, 2), (6, 0))
        old.disk.submit(order, old.listener)
        assert old.listener.wait_for(7) and old.listener.outcomes()[7] is Outcome.OK
        assert [old.slot(slot).tobytes() for slot in (1, 2)] == [contents[6], contents[0]]


# ---------------------------------------------------------------- what is not whole, or another's


def write_at(path: Path, offset_bytes: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(content)


def spoil_header(bench: DirectBench, place: int) -> None:
    write_at(bench.file.path, slot_offset_bytes(place, SLOT_BYTES) + 80, b"\x55")


def tear(bench: DirectBench, place: int) -> None:
    """The second half of the record was never written."""
    at = slot_offset_bytes(place, SLOT_BYTES) + SECTOR_BYTES + SLOT_BYTES // 2
    write_at(bench.file.path, at, bytes(SLOT_BYTES // 2))


def write_another(bench: DirectBench, place: int) -> None:
    """Somebody else's record is in that slot."""
    path, size = bench.file.path, SECTOR_BYTES + SLOT_BYTES
    with path.open("rb") as file:
        file.seek(slot_offset_bytes(place + 1, SLOT_BYTES))
        record = file.read(size)
    write_at(path, slot_offset_bytes(place, SLOT_BYTES), record)


def mix(bench: DirectBench, place: int) -> None:
    """A header that verifies before another block's bytes."""
    path = bench.file.path
    with path.open("rb") as file:
        file.seek(slot_offset_bytes(place + 1, SLOT_BYTES) + SECTOR_BYTES)
        payload = file.read(SLOT_BYTES)
    write_at(path, slot_offset_bytes(place, SLOT_BYTES) + SECTOR_BYTES, payload)


def erase(bench: DirectBench, place: int) -> None:
    write_at(bench.file.path, slot_offset_bytes(place, SLOT_BYTES), bytes(SECTOR_BYTES))


def begin_another_life(bench: DirectBench, place: int) -> None:
    record = place, bench.rng.randbytes(SLOT_BYTES)
    bench.file.life, life = bytes(16), bench.file.life
    bench.store(dict([record]))
    bench.file.life = life


@needs_nixl
@pytest.mark.parametrize(
    ("harm", "outcome"),
    [
        (DirectBench.damage, Outcome.CORRUPT),
        (spoil_header, Outcome.CORRUPT),
        (tear, Outcome.CORRUPT),
        (mix, Outcome.CORRUPT),
        (erase, Outcome.CORRUPT),
        (write_another, Outcome.MISS),
        (begin_another_life, Outcome.MISS),
    ],
)
def test_of_a_record_that_is_not_whole_or_anothers_no_byte_reaches_a_device_block(
    bench: DirectBench, harm: Callable[[DirectBench, int], None], outcome: Outcome
) -> None:
    contents, before = bench.fill(range(6)), bench.all_on_device()
    harm(bench, 2)
    result = bench.finish(direct(range(6)))
    assert (result.outcome, result.failed) == (outcome, ((FIRST_DIRECT_SLOT + 2, outcome),))
    size = bench.size_of(0)
    assert result.num_bytes == 5 * size
    expected = list(before)
    for n in (0, 1, 3, 4, 5):
        expected[n] = contents[n][:size]
    assert bench.all_on_device() == expected
    assert bench.news.said == [True], "a damaged record is no failure of the way"


def test_a_bit_that_was_flipped_on_the_way_is_read_once_more(tmp_path: Path) -> None:
    made: list[SpoilingIo] = []

    def make_io(fd: int, gpu: int | None) -> FileIo:
        made.append(SpoilingIo(fd, lambda transfer, _: transfer.offset_bytes > 0 and not made[0].num_spoiled))
        return made[0]

    with opened(tmp_path, make_io) as bench:
        bench.news.wait(True)
        contents = bench.fill(range(4))
        assert bench.finish(direct(range(4))).outcome is Outcome.OK and made[0].num_spoiled
        size = bench.size_of(0)
        assert [bench.on_device(0, n) for n in range(4)] == [contents[n][:size] for n in range(4)]


@needs_nixl
@pytest.mark.parametrize(
    "change",
    [
        lambda load: replace(load, moves=(GroupMove(0, (12, 1), slots_of([0, 1])),)),
        lambda load: replace(load, moves=(GroupMove(2, (0, 1), slots_of([0, 1])),)),
        lambda load: replace(load, moves=(GroupMove(0, (1, 1), slots_of([0, 1])),)),
        lambda load: replace(load, moves=(GroupMove(0, (1, 2), slots_of([1, 1])),)),
        lambda load: replace(load, direction=Direction.OFFLOAD, compares=True),
        lambda load: replace(load, reads=(replace(load.reads[0], places=(1, 0)),)),
        lambda load: replace(load, reads=(replace(load.reads[0], places=(0,)),)),
        lambda load: replace(
            load,
            moves=(GroupMove(0, (1,), slots_of([NUM_DISK_SLOTS])),),
            reads=(replace(load.reads[0], slots=slots_of([0, NUM_DISK_SLOTS]), places=(0, NUM_DISK_SLOTS)),),
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_rejected(
    bench: DirectBench, change: Callable[[TransferPlan], TransferPlan]
) -> None:
    bench.fill([0, 1])
    before = bench.all_on_device()
    assert bench.finish(change(direct([0, 1]))).outcome is Outcome.REJECTED
    assert bench.all_on_device() == before


# ---------------------------------------------------------------- late, cancelled, closed


class HeldReads:
    """``make_io`` of reads that are held back, but for the file's header, until ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.is_reading = threading.Event()

    def __call__(self, fd: int, gpu: int | None) -> FileIo:
        return GatedIo(fd, self._chooses, None, self.go_on)

    def _chooses(self, transfer: Transfer, is_write: bool) -> bool:
        if transfer.offset_bytes:
            self.is_reading.set()
        return transfer.offset_bytes > 0


def test_a_read_that_is_given_up_writes_to_no_device_block_and_its_place_stays_taken(tmp_path: Path) -> None:
    reads = HeldReads()
    with opened(tmp_path, reads, replace(TO_DEVICE, io_deadline_s=0.2)) as bench:
        bench.news.wait(True)
        bench.fill(range(3))
        before, stage = bench.all_on_device(), bench.reader._stage
        assert stage is not None
        num_free = stage.num_free
        result = bench.finish(direct(range(3)))
        assert (result.outcome, result.is_late) == (Outcome.TIMED_OUT, False), (
            "its blocks can be used at once"
        )
        assert bench.num_late() == 3 and stage.num_free == num_free - 3
        reads.go_on.set()
        bench.wait_until(lambda: stage.num_free == num_free)
        bench.wait_until(lambda: not bench.num_late())
        assert bench.all_on_device() == before
        assert bench.finish(direct(range(3), job_id=LOAD + 1)).outcome is Outcome.OK


def test_a_load_that_is_cancelled_while_the_disk_is_read_is_over_at_once(tmp_path: Path) -> None:
    reads = HeldReads()
    with opened(tmp_path, reads) as bench:
        bench.news.wait(True)
        bench.fill(range(3))
        bench.executor.submit(direct(range(3)))
        assert reads.is_reading.wait(LONG_S)
        bench.executor.submit(direct([2], job_id=LOAD + 1))  # behind it
        assert bench.executor.cancel(LOAD + 1) and bench.executor.cancel(LOAD)
        assert bench.executor.wait([LOAD, LOAD + 1], 0.0)
        for job_id in (LOAD, LOAD + 1):
            assert (result := bench.ended(job_id)).outcome is Outcome.REJECTED and not result.is_late
            assert not bench.executor.cancel(job_id)
        before = bench.all_on_device()
        reads.go_on.set()
        contents = bench.fill([5])
        assert (
            bench.finish(direct([5], job_id=LOAD + 2)).outcome is Outcome.OK
        )  # behind what was read in vain
        assert bench.all_on_device()[1:] == before[1:]
        assert bench.on_device(0, 0) == contents[5][: bench.size_of(0)]


def test_a_load_whose_blocks_are_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread, is_spreading, go_on = DeviceStage.spread, threading.Event(), threading.Event()

    def slow(self: DeviceStage, *arguments: Any) -> None:
        is_spreading.set()
        assert go_on.wait(LONG_S)
        spread(self, *arguments)

    monkeypatch.setattr(DeviceStage, "spread", slow)
    with opened(tmp_path, lambda fd, gpu: ThreadIo(fd, 1)) as bench:
        bench.news.wait(True)
        bench.fill(range(3))
        bench.executor.submit(direct(range(3)))
        assert is_spreading.wait(LONG_S)
        assert not bench.executor.cancel(LOAD) and not bench.executor.wait([LOAD], 0.0)
        go_on.set()
        assert bench.ended(LOAD).outcome is Outcome.REJECTED
        before = bench.all_on_device()
        assert bench.finish(direct([1], [GroupMove(0, (9,), slots_of([1]))], LOAD + 1)).outcome is Outcome.OK
        assert bench.all_on_device()[:9] == before[:9], "nothing of it was written after its end"


class _NoMemory:
    """A piece of all blocks to which no copy can be begun."""

    def index_copy_(self, *_: object) -> None:
        raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("kind", [DeviceRows, DeviceStage])
def test_copies_that_were_begun_are_waited_for_if_the_next_one_cannot_be(kind: type[DeviceRows]) -> None:
    """On a GPU they would be written later, into blocks that may be the engine's again."""
    memory, steps = two_group_memory(1), list[str]()
    stage = DeviceStage(memory, SLOT_BYTES) if kind is DeviceStage else DeviceRows(memory)
    with stage.bound():
        begun = stage._pieces[0][0]
        stage._pieces[0] = [begun, replace(begun, device=_NoMemory())]
        stage._wait = lambda: steps.append("waited")  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            if isinstance(stage, DeviceStage):
                stage.spread(0, [1], [stage.take()], None)
            else:
                stage.scatter(0, [1], None)
    assert steps == ["waited"]


def test_at_the_end_a_read_that_goes_on_keeps_file_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(disk_module, "STOP_TIMEOUT_S", 0.1)
    reads = HeldReads()
    bench = DirectBench(tmp_path / "x.blocks", reads)
    bench.news.wait(True)
    bench.fill(range(2))
    before = bench.all_on_device()
    bench.executor.submit(direct(range(2)))
    bench.executor.submit(direct([1], job_id=LOAD + 1))
    assert reads.is_reading.wait(LONG_S)
    bench.close()
    assert {bench.ended(job_id).outcome for job_id in (LOAD, LOAD + 1)} <= {
        Outcome.REJECTED,
        Outcome.TIMED_OUT,
    }
    (token,) = [token for token, (_, kept) in LATE._requests.items() if kept is bench.reader]
    assert bench.reader._stage is not None and bench.file.fd >= 0
    assert bench.all_on_device() == before
    reads.go_on.set()
    record_io = bench.reader._record_io
    assert record_io is not None and record_io.close(LONG_S)
    LATE.end(token)  # for this test alone: nobody else would
    assert bench.all_on_device() == before
    bench.file.close()


@needs_nixl
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    threads, agents = set(threading.enumerate()), set(nixl_io._OPEN)
    with opened(tmp_path) as bench:
        bench.news.wait(True)
        bench.fill([1])
        assert bench.finish(direct([1])).outcome is Outcome.OK
        assert len(nixl_io._OPEN - agents) == 1
    assert set(threading.enumerate()) <= threads and agents == nixl_io._OPEN
    assert bench.reader._stage is None and bench.file.fd == -1 and bench.reader.close()
    with opened(tmp_path):
        pass  # closed before it is known whether it works


# ---------------------------------------------------------------- when it cannot be had, and when it fails


def test_what_the_setting_needs() -> None:
    assert why_not("nixl-posix", None, is_direct=False) is None
    for kind in ("nixl-gds", "nixl-gds-mt"):
        assert why_not(kind, 0, is_direct=True) is None
        assert "O_DIRECT" in (why_not(kind, 0, is_direct=False) or "")
        assert "not in a GPU's memory" in (why_not(kind, None, is_direct=True) or "")
    assert "does not reach a GPU's memory" in (why_not("nixl-posix", 0, is_direct=True) or "")


def check_refused(
    path: Path,
    caplog: pytest.LogCaptureFixture,
    why: str,
    make_io: MakeIo | None = None,
    kind: str = "nixl-posix",
) -> None:
    """One line with setting, value and reason; and the way through host memory."""
    with (
        caplog.at_level(logging.INFO, "kvbm"),
        opened(path, make_io, replace(TO_DEVICE, to_device=kind)) as bench,
    ):
        bench.reader._thread.join(LONG_S)
        assert bench.news.said == [False]
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.startswith(f"kvbm: KVBM_DISK_TO_DEVICE={kind}: ") and why in line and "\n" not in line
        assert line.endswith("; blocks come from disk by way of host memory")
        assert bench.reader._stage is None
        contents, before = bench.fill([3]), bench.all_on_device()
        assert bench.finish(direct([3])).outcome is Outcome.REJECTED and bench.all_on_device() == before
        order = TierOrder(LOAD + 1, "disk", OrderKind.FETCH, (key_of(3),), (1,), (3,))
        load = TransferPlan(LOAD + 1, Direction.ONBOARD, (GroupMove(0, (4,), (1,)),), (order,))
        assert bench.finish(load).outcome is Outcome.OK
        assert bench.on_device(0, 4) == contents[3][: bench.size_of(0)]


def test_without_nixl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    check_refused(tmp_path, caplog, "NIXL cannot be imported")


@pytest.mark.parametrize("kind", ["nixl-gds", "nixl-gds-mt"])
def test_with_a_cache_in_host_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    check_refused(tmp_path, caplog, "the KV cache is not in a GPU's memory", kind=kind)


@pytest.mark.shows("KVBM_DISK_TO_DEVICE=nixl-gds", "KVBM_DISK_TO_DEVICE=nixl-gds-mt")
@needs_nixl
@pytest.mark.parametrize(("kind", "plugin"), [("nixl-gds", "GDS"), ("nixl-gds-mt", "GDS_MT")])
def test_without_cufile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, plugin: str
) -> None:
    """As on a machine with a GPU and no GPUDirect Storage."""
    monkeypatch.setattr(module, "why_not", lambda kind, gpu, is_direct: None)
    need = f"NIXL cannot load its {plugin} plugin: it needs an NVIDIA GPU, its driver and libcufile"
    check_refused(tmp_path, caplog, need, kind=kind)


def test_memory_that_cannot_be_read_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make_io(fd: int, gpu: int | None) -> FileIo:
        return FailingIo(fd, lambda transfer, is_write: True, -errno.EIO)

    check_refused(tmp_path, caplog, "the file's header does not reach the device's memory", make_io)


def test_memory_that_gets_other_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make_io(fd: int, gpu: int | None) -> FileIo:
        return SpoilingIo(fd, lambda transfer, is_write: True)

    check_refused(tmp_path, caplog, "the file's header does not reach the device's memory", make_io)


def test_a_device_without_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(self: DeviceStage) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(DeviceStage, "_allocate", allocate)
    check_refused(tmp_path, caplog, "RuntimeError: CUDA out of memory;")


@needs_nixl
def test_what_nixl_does_not_take_is_said_in_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NixlIo, ranges: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(NixlIo, "_register", refuse)
    monkeypatch.setattr(NixlIo, "_do_plainly", lambda self, transfer, is_write: self._ended.append((-1, -5)))
    check_refused(tmp_path, caplog, "(RuntimeError: NIXL_ERR_BACKEND)")


@needs_nixl
def test_what_fails_with_memory_of_a_gpu_is_not_tried_by_the_cpu(tmp_path: Path) -> None:
    """Its address means nothing to the kernel."""
    path = tmp_path / "file"
    path.write_bytes(bytes(SECTOR_BYTES))
    with path.open("rb") as file:
        io = NixlIo(file.fileno(), gpu=0)
        io.submit([Transfer(1, 0, [(1 << 40, SECTOR_BYTES)])], is_write=False)
        assert io.collect(LONG_S) == [(1, -errno.EIO)] and io._plain is None and io.failure
        assert io.close(LONG_S)


def test_a_way_that_fails_again_and_again_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    def make_io(fd: int, gpu: int | None) -> FileIo:
        return FailingIo(
            fd, lambda transfer, is_write: broken.is_set() and transfer.offset_bytes > 0, -errno.EIO
        )

    with opened(tmp_path, make_io) as bench:
        bench.news.wait(True)
        bench.fill([1, 2])
        for number, is_broken in enumerate((True, False, True, True)):
            broken.set() if is_broken else broken.clear()
            assert bench.news.said == [True]
            outcome = bench.finish(direct([1, 2], job_id=LOAD + number)).outcome
            assert outcome is (Outcome.IO_ERROR if is_broken else Outcome.OK)
        bench.news.wait(True, False)
        assert bench.finish(direct([1], job_id=LOAD + 9)).outcome is Outcome.REJECTED
        bench.reader._thread.join(LONG_S)
        (line,) = [text for text in caplog.messages if module.SETTING in text]
        assert "2 loads in a row failed; blocks come from disk by way of host memory" in line


def test_a_device_that_fails_ends_the_load_and_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, lambda fd, gpu: ThreadIo(fd, 1)) as bench:
        bench.news.wait(True)
        bench.fill([1])

        def fail(self: DeviceStage, *arguments: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(DeviceStage, "spread", fail)
        assert bench.finish(direct([1])).outcome is Outcome.IO_ERROR
        bench.news.wait(True, False)
        bench.reader._thread.join(LONG_S)
        assert any(
            "RuntimeError: CUDA error: an illegal memory access; blocks come" in t for t in caplog.messages
        )
