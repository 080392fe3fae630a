"""A DiskMover between a slab and a real block file, for tests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.clock import Clock, ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.storage.disk.recovery import Found, Recovery
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.late import LATE
from kvbm_core.testing.executor_bench import HELD_JOB, LONG_S, Listener
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.movers import disk as disk_module
from kvbm_core.transfer.movers.base import OnBlocks
from kvbm_core.transfer.movers.disk import DiskMover
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey
from tests.faults.doubles import BUFFERED, Choice, HeldIo

NUM_SLOTS = 8
NUM_DISK_SLOTS = 32
SLOT_BYTES = 2 * SECTOR_BYTES
GEOMETRY = Geometry(NUM_DISK_SLOTS, SLOT_BYTES, b"disk mover".ljust(16))
DOWN, UP = OrderKind.STORE, OrderKind.FETCH
FORGET = TierOrder(0, "disk", OrderKind.FORGET, ())
NOT_THERE = (Outcome.MISS, Outcome.CORRUPT)
"""What a slot in which nothing was ever written may answer."""


def order(job_id: int, kind: OrderKind, slots: Sequence[int], disk_slots: Sequence[int]) -> TierOrder:
    """Block n is the one that belongs into disk slot n."""
    keys = tuple(key_of(disk_slot) for disk_slot in disk_slots)
    return TierOrder(job_id, "disk", kind, keys, tuple(slots), tuple(disk_slots))


def touches(disk_slot: int, *, is_write: bool) -> Choice:
    """Chooses the requests of one kind that begin at a disk slot."""
    at = slot_offset_bytes(disk_slot, SLOT_BYTES)
    return lambda transfer, writes: transfer.offset_bytes == at and writes is is_write


class GatedIo(HeldIo):
    """HeldIo that lets go, in the thread that uses it, once ``gate`` is set."""

    def __init__(self, fd: int, chosen: Choice, clock: ManualClock | None, gate: threading.Event) -> None:
        super().__init__(fd, chosen, clock)
        self._gate = gate

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        if self._gate.is_set():
            self.let_go()
        return super().collect(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """See FileIo."""
        if self._gate.is_set():
            self.let_go()
        return super().close(timeout_s)


def late_slots(host: HostSlab) -> list[int]:
    """Those that a request which was given up may still touch."""
    starts = range(host.address, host.address + host.num_slots * host.slot_bytes, host.slot_bytes)
    return [slot for slot, start in enumerate(starts) if LATE.holds([(start, start + host.slot_bytes)])]


class Bench:
    """A DiskMover between a slab and a file."""

    def __init__(
        self,
        path: Path,
        clock: Clock | None = None,
        options: FileOptions = BUFFERED,
        io_deadline_s: float = LONG_S,
    ) -> None:
        self.host = HostSlab(NUM_SLOTS, SLOT_BYTES)
        assert self.host.wait_ready(LONG_S)
        self.listener = Listener()
        self.file = BlockFile(path, GEOMETRY, options)
        self.mover = DiskMover(self.file, self.host, io_deadline_s=io_deadline_s, clock=clock)

    def submit(
        self, submitted: TierOrder, *, deadline_s: float | None = None, on_blocks: OnBlocks | None = None
    ) -> None:
        """Its result goes to the listener."""
        self.mover.submit(submitted, self.listener, deadline_s=deadline_s, on_blocks=on_blocks)

    def forget(self) -> None:
        """An order that is not answered."""
        self.mover.submit(FORGET, self.listener)

    def results(self, job_id: int) -> list[JobResult]:
        """Those of a job so far."""
        return [result for result in self.listener.results if result.job_id == job_id]

    def result(self, job_id: int) -> JobResult:
        """Of a job, once it has ended: exactly one so far."""
        assert self.listener.wait_for(job_id)
        (result,) = self.results(job_id)
        return result

    def last_result(self, job_id: int) -> JobResult:
        """The second of a late job, once it has come: nothing touches its slots any more."""
        assert self.listener.wait_for(job_id, 2)
        first, second = self.results(job_id)
        assert first.is_late and not second.is_late
        return second

    def run(self, submitted: TierOrder) -> JobResult:
        """Runs one job."""
        self.submit(submitted)
        assert self.mover.wait([submitted.job_id], LONG_S)
        return self.result(submitted.job_id)

    def slot(self, slot: int) -> bytes:
        """What is in a slot of the slab."""
        return self.host.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].tobytes()

    def fill(self, rng: random.Random, slots: Sequence[int]) -> list[bytes]:
        """Random bytes into these slots."""
        contents = [rng.randbytes(SLOT_BYTES) for _ in slots]
        for slot, content in zip(slots, contents, strict=True):
            self.host.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytearray(content)
        return contents

    def wipe(self) -> None:
        """Forgets all bytes of the slab."""
        self.host.array[:] = 0

    @contextmanager
    def writer_held(self) -> Iterator[None]:
        """While inside, the writing thread is busy with the result of HELD_JOB and starts nothing."""
        self.submit(order(HELD_JOB, DOWN, [0], [NUM_DISK_SLOTS - 1]))
        assert self.listener.wait_for(HELD_JOB)
        try:
            yield
        finally:
            self.listener.gate.set()

    def close(self) -> None:
        """May be called twice."""
        self.listener.gate.set()
        self.mover.close()
        self.host.close()


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return tmp_path / "x.blocks"


@pytest.fixture(name="bench")
def bench_fixture(path: Path) -> Iterator[Bench]:
    made = Bench(path)
    yield made
    made.close()


@contextmanager
def bench_on(path: Path, make_io: Callable[[int], FileIo], clock: Clock | None = None) -> Iterator[Bench]:
    """A bench whose mover reads and writes by ``make_io``; closed afterwards."""

    def make_file_io(fd: int, *, is_direct: bool) -> FileIo:
        return make_io(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "make_file_io", make_file_io)
        made = Bench(path, clock)
        try:
            yield made
        finally:
            made.close()


def found_in(path: Path) -> set[BlockKey]:
    """What the next process finds."""
    found: list[Found] = []
    file = BlockFile(path, GEOMETRY, BUFFERED)
    recovery = Recovery(file, lambda end, chunk: found.extend(chunk))
    assert recovery.wait(LONG_S)
    recovery.close()
    file.close()
    assert recovery.failure is None
    return {record.key for record in found}
