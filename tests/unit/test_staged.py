"""Loads from disk and host together: bytes on the device, in any mixture; failures; ends that meet."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import LONG_S, NUM_DEVICE_BLOCKS, Listener, two_group_memory
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer import staged as module
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.factory import make_executor
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.movers.disk import DiskMover
from kvbm_core.transfer.movers.disk_direct import DirectReader
from kvbm_core.transfer.plan import GroupMove, JobResult, OrderKind, TierOrder, TransferPlan
from kvbm_core.transfer.staged import OnDone, StagedExecutor
from kvbm_core.types import BlockKey, Direction
from tests.faults.doubles import BUFFERED
from tests.unit.disk_mover_bench import GatedIo

NUM_SLOTS = 2 * NUM_DEVICE_BLOCKS
NUM_DISK_SLOTS = 64
SLOT_BYTES = SECTOR_BYTES
GEOMETRY = Geometry(NUM_DISK_SLOTS, SLOT_BYTES, b"staged".ljust(16))
LOAD = 50


class Bench:
    """A StagedExecutor over real memory of a CPU engine and a real file; chunks of ``chunk_blocks``."""

    def __init__(
        self,
        path: Path,
        chunk_blocks: int = 2,
        *,
        verify: bool = False,
        io_deadline_s: float = LONG_S,
        options: FileOptions = BUFFERED,
    ):
        self.memory = two_group_memory()
        self.host = HostSlab(NUM_SLOTS, SLOT_BYTES)
        assert self.host.wait_ready(LONG_S)
        self.file = BlockFile(path, GEOMETRY, options)
        self.listener = Listener()
        self.next_job = 1
        digests = SlotDigests() if verify else None

        def make_copier(on_done: OnDone) -> MemcpyExecutor:
            device = make_executor(
                self.memory, self.host, max_batch_blocks=4, on_done=on_done, digests=digests
            )
            assert isinstance(device, MemcpyExecutor)
            return device

        self.readers: dict[str, DirectReader] = {}
        self.disk = DiskMover(self.file, self.host, io_deadline_s=io_deadline_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK_BYTES", chunk_blocks * SLOT_BYTES)
            movers = {"disk": self.disk}
            self.executor = StagedExecutor(
                make_copier, movers, SLOT_BYTES, self.listener, digests, readers=self.readers
            )

    def slot(self, slot: int) -> memoryview:
        return self.host.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].data

    def on_device(self, group: int, block: int) -> bytes:
        regions = self.memory.views[group].regions(block)
        return b"".join(self.memory.storages[s][o : o + n].tobytes() for s, o, n in regions)

    def finish(self, plan: TransferPlan) -> JobResult:
        self.executor.submit(plan)
        return self.ended(plan.job_id)

    def ended(self, job_id: int) -> JobResult:
        assert self.executor.wait([job_id], LONG_S) and self.listener.wait_for(job_id)
        (result,) = [result for result in self.listener.results if result.job_id == job_id]
        return result

    def store(self, contents: dict[int, bytes], slot: int = NUM_SLOTS - 1) -> None:
        """``key_of(disk slot)`` with these bytes into each disk slot, by way of a host slot."""
        for disk_slot, content in contents.items():
            self.next_job += 1
            self.slot(slot)[:] = content
            keys, slots, places = (key_of(disk_slot),), (slot,), (disk_slot,)
            self.disk.submit(
                TierOrder(self.next_job, "disk", OrderKind.STORE, keys, slots, places), self.listener
            )
            assert self.listener.wait_for(self.next_job)
            assert self.listener.outcomes()[self.next_job] is Outcome.OK
        self.slot(slot)[:] = bytes(SLOT_BYTES)

    def damage(self, disk_slot: int) -> None:
        """One bit of the record's payload."""
        with self.file.path.open("r+b") as file:
            file.seek(slot_offset_bytes(disk_slot, SLOT_BYTES) + SECTOR_BYTES + 100)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))

    def close(self) -> None:
        self.listener.gate.set()
        self.disk.close()
        self.executor.close()
        self.host.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "x.blocks")
    yield made
    made.close()


def load_of(job_id: int, moves: Sequence[GroupMove], reads: Sequence[tuple[int, int]]) -> TransferPlan:
    """``reads``: (slot, disk slot)."""
    keys: tuple[BlockKey, ...] = tuple(key_of(disk_slot) for _, disk_slot in reads)
    slots, disk_slots = tuple(slot for slot, _ in reads), tuple(disk_slot for _, disk_slot in reads)
    read = TierOrder(job_id, "disk", OrderKind.FETCH, keys, slots, disk_slots)
    return TransferPlan(job_id, Direction.ONBOARD, tuple(moves), (read,))


def simple_load(bench: Bench, rng: random.Random, num_reads: int = 6, job_id: int = LOAD) -> TransferPlan:
    """Disk slots 10, 11, ... by slots 0, 1, ... to device blocks 0, 1, ..., and three blocks that are
    resident.
    """
    bench.store({10 + i: rng.randbytes(SLOT_BYTES) for i in range(num_reads)})
    blocks = tuple(range(num_reads + 3))
    return load_of(job_id, [GroupMove(0, blocks, blocks)], [(i, 10 + i) for i in range(num_reads)])


# ---------------------------------------------------------------- any mixture


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[TransferPlan, dict[tuple[int, int], int]]:
    """A load, and which slot each (group, device block) must be equal to in the end."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    slots = iter(rng.sample(range(NUM_SLOTS - 1), NUM_SLOTS - 1))
    moves, wanted, read = [], {}, []
    for group in (0, 1):
        is_on_disk = draw(st.lists(st.booleans(), max_size=8))
        blocks, own = rng.sample(range(NUM_DEVICE_BLOCKS), len(is_on_disk)), [next(slots) for _ in is_on_disk]
        read += [slot for slot, is_read in zip(own, is_on_disk, strict=True) if is_read]
        cut = draw(st.integers(0, len(blocks)))
        for part in (slice(0, cut), slice(cut, None)):  # a group may have several moves
            if blocks[part]:
                moves.append(GroupMove(group, tuple(blocks[part]), tuple(own[part])))
        wanted.update({(group, block): slot for block, slot in zip(blocks, own, strict=True)})
    read += [next(slots) for _ in range(draw(st.integers(0, 2)))]  # read for the host tier alone
    rng.shuffle(read)
    rng.shuffle(moves)
    disk_slots = rng.sample(range(NUM_DISK_SLOTS), len(read))
    return load_of(LOAD, moves, list(zip(read, disk_slots, strict=True))), wanted


@settings(max_examples=80)
@given(mixtures(), st.integers(1, 5), st.integers(0, 2**32))
def test_any_mixture_of_places_ends_with_the_right_bytes(
    mixture: tuple[TransferPlan, dict[tuple[int, int], int]], chunk_blocks: int, seed: int
) -> None:
    (plan, wanted), rng = mixture, random.Random(seed)
    (read,) = plan.reads
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "x.blocks", chunk_blocks)
        try:
            content = {slot: rng.randbytes(SLOT_BYTES) for slot in range(NUM_SLOTS)}
            bench.store({at: content[slot] for slot, at in zip(read.slots, read.places, strict=True)})
            for slot in range(NUM_SLOTS):
                bench.slot(slot)[:] = rng.randbytes(SLOT_BYTES) if slot in read.slots else content[slot]
            before = {(g, b): bench.on_device(g, b) for g in (0, 1) for b in range(NUM_DEVICE_BLOCKS)}
            result = bench.finish(plan)
            sizes = [bench.memory.views[group].block_bytes for group in (0, 1)]
            assert result.outcome is Outcome.OK and result.num_bytes == sum(
                sizes[group] for group, _ in wanted
            )
            for place, old in before.items():
                source = wanted.get(place)
                expected = old if source is None else content[source][: sizes[place[0]]]
                assert bench.on_device(*place) == expected
            for slot in read.slots:  # they are in the host tier now
                assert bench.slot(slot) == content[slot]
            assert bench.executor.wait(None, LONG_S) and bench.listener.ids().count(LOAD) == 1
        finally:
            bench.close()


def test_a_block_that_goes_to_two_places_is_read_once(bench: Bench, rng: random.Random) -> None:
    bench.store({7: rng.randbytes(SLOT_BYTES)})
    assert bench.finish(load_of(LOAD, [GroupMove(0, (1, 2), (5, 5))], [(5, 7)])).outcome is Outcome.OK
    assert (
        bench.on_device(0, 1) == bench.on_device(0, 2) == bytes(bench.slot(5)[: len(bench.on_device(0, 1))])
    )


def test_a_chunk_goes_up_while_the_next_is_read(tmp_path: Path, rng: random.Random) -> None:
    """The first chunk's blocks are on the device before the disk has answered for the last one."""
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=15) as bench:
        plan = simple_load(bench, rng)
        bench.memory.storages[0][:] = 0
        copied = copies_seen(bench, 4)
        bench.executor.submit(plan)
        assert copied.wait(LONG_S) and LOAD not in bench.listener.ids()
        size = len(bench.on_device(0, 0))
        for block in (0, 1, 2, 3):  # two chunks of two
            assert bench.on_device(0, block) == bytes(bench.slot(block)[:size]) != bytes(size)
        assert not any(bench.on_device(0, 4)) and not any(bench.on_device(0, 5))
        gate.set()
        assert bench.ended(LOAD).outcome is Outcome.OK
        assert bench.on_device(0, 5) == bytes(bench.slot(5)[:size]) != bytes(size)


def copies_seen(bench: Bench, num_blocks: int) -> threading.Event:
    """Set when all of the first ``num_blocks`` read blocks, and the resident ones, have been copied."""
    seen, counted, copied = threading.Event(), [0], bench.executor._copied

    def count(load: Any, part: TransferPlan, result: JobResult) -> None:
        counted[0] += result.num_bytes // bench.memory.views[0].block_bytes
        copied(load, part, result)
        if counted[0] >= num_blocks + 3:
            seen.set()

    bench.executor._copied = count  # type: ignore[method-assign]
    return seen


@contextmanager
def held_reads(path: Path, gate: threading.Event, *, only: int) -> Iterator[Bench]:
    """A bench whose read of one disk slot does not end before ``gate``; requests are one record each."""
    offset_bytes = slot_offset_bytes(only, SLOT_BYTES)

    def make_file_io(fd: int, *, is_direct: bool) -> GatedIo:
        return GatedIo(
            fd, lambda transfer, is_write: not is_write and transfer.offset_bytes == offset_bytes, None, gate
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "make_file_io", make_file_io)
        patch.setattr("kvbm_core.storage.disk.record_io.MAX_REQUEST_RECORDS", 1)
        made = Bench(path)
        try:
            yield made
        finally:
            gate.set()
            made.close()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4, 100])
@pytest.mark.parametrize("bad", range(6))
def test_a_lost_block_in_any_place_costs_no_other(
    tmp_path: Path, rng: random.Random, bad: int, chunk_blocks: int
) -> None:
    bench = Bench(tmp_path / "x.blocks", chunk_blocks)
    try:
        plan = simple_load(bench, rng)
        bench.damage(10 + bad)
        before, size = bench.on_device(0, bad), bench.memory.views[0].block_bytes
        failed = bench.finish(plan)
        assert (failed.outcome, failed.num_bytes, failed.is_late) == (Outcome.CORRUPT, 8 * size, False)
        assert failed.failed == ((bad, Outcome.CORRUPT),) and "1 of 6 blocks" in failed.detail
        assert bench.on_device(0, bad) == before  # nothing was copied there
        for block in set(range(9)) - {bad}:
            assert bench.on_device(0, block) == bytes(bench.slot(block)[:size])
        assert [(fetched.tier, fetched.num_bytes) for fetched in failed.fetched] == [("disk", 5 * SLOT_BYTES)]
        assert bench.executor.wait(None, LONG_S)
        again = simple_load(bench, rng, job_id=LOAD + 1)
        assert bench.finish(again).outcome is Outcome.OK
        assert bench.on_device(0, bad) == bytes(bench.slot(bad)[: len(bench.on_device(0, bad))])
        assert bench.listener.ids().count(LOAD) == 1
    finally:
        bench.close()


@pytest.mark.parametrize("num_reads", [0, 6], ids=["only resident parts fail", "chunks fail"])
def test_a_failing_copy_is_the_outcome_of_all(bench: Bench, rng: random.Random, num_reads: int) -> None:
    plan = simple_load(bench, rng, num_reads)
    device = bench.executor._copier
    assert isinstance(device, MemcpyExecutor)
    pieces = [piece for group in device._pieces for piece in group]
    for piece in pieces:
        piece.device.flags.writeable = False
    failed = bench.finish(plan)
    assert failed.outcome is Outcome.IO_ERROR and failed.detail and failed.num_bytes == 0
    assert failed.failures(range(num_reads + 3)) == dict.fromkeys(range(num_reads + 3), Outcome.IO_ERROR)
    for piece in pieces:
        piece.device.flags.writeable = True
    assert bench.executor.wait(None, LONG_S)
    assert bench.finish(simple_load(bench, rng, num_reads, LOAD + 1)).outcome is Outcome.OK
    assert bench.listener.ids().count(LOAD) == 1


@pytest.mark.parametrize(
    ("moves", "reads"),
    [
        ([GroupMove(0, (1, 2), (1,))], [(1, 1)]),
        ([GroupMove(0, (1,), (NUM_SLOTS,))], [(1, 1)]),
        ([GroupMove(0, (NUM_DEVICE_BLOCKS,), (1,))], [(1, 1)]),
        ([GroupMove(2, (1,), (1,))], [(1, 1)]),
        ([GroupMove(0, (1,), (1,))], [(1, 1), (1, 2)]),
        ([GroupMove(0, (1,), (1,))], [(1, NUM_DISK_SLOTS)]),
        ([GroupMove(0, (1,), (NUM_SLOTS,))], [(NUM_SLOTS, 1)]),
    ],
    ids=["lengths", "slot", "device block", "group", "slot twice", "disk slot", "read slot"],
)
def test_an_unusable_load_is_rejected(
    bench: Bench, rng: random.Random, moves: list[GroupMove], reads: list[tuple[int, int]]
) -> None:
    bench.store({1: rng.randbytes(SLOT_BYTES), 2: rng.randbytes(SLOT_BYTES)})
    result = bench.finish(load_of(LOAD, moves, reads))
    assert result.outcome is Outcome.REJECTED and result.detail
    assert bench.executor.wait(None, LONG_S)
    assert bench.finish(simple_load(bench, rng, job_id=LOAD + 1)).outcome is Outcome.OK


def test_verify_is_not_confused_by_slots_that_were_read_into(tmp_path: Path, rng: random.Random) -> None:
    bench = Bench(tmp_path / "x.blocks", verify=True)
    try:
        move = GroupMove(0, (1, 2), (1, 2))
        bench.store({5: rng.randbytes(SLOT_BYTES)})
        assert bench.finish(TransferPlan(30, Direction.OFFLOAD, (move,))).outcome is Outcome.OK
        assert bench.finish(load_of(LOAD, [GroupMove(0, (3, 4), (1, 2))], [(1, 5)])).outcome is Outcome.OK
        assert bench.on_device(0, 4) == bench.on_device(0, 2) and bench.on_device(0, 3) != bench.on_device(
            0, 1
        )
        assert bench.finish(TransferPlan(31, Direction.ONBOARD, (move,))).outcome is Outcome.OK
        bench.slot(2)[0] ^= 1  # what was not read into is judged as before
        assert bench.finish(TransferPlan(32, Direction.ONBOARD, (move,))).outcome is Outcome.CORRUPT
    finally:
        bench.close()


def test_a_damaged_record_is_not_what_a_comparison_found(bench: Bench, rng: random.Random) -> None:
    plan = simple_load(bench, rng)
    assert bench.finish(plan).outcome is Outcome.OK

    def audit(job_id: int) -> TransferPlan:
        reads = tuple(replace(order, job_id=job_id) for order in plan.reads)
        return replace(plan, job_id=job_id, direction=Direction.OFFLOAD, compares=True, reads=reads)

    assert bench.finish(audit(LOAD + 1)).outcome is Outcome.OK
    bench.damage(12)
    assert bench.finish(audit(LOAD + 2)).outcome is Outcome.MISS
