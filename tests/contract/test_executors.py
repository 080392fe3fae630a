"""Every executor keeps the executor contract; what is special to one is below it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm_core.errors import Outcome, UnsupportedError
from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.native import Ids, native
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.storage.host_slab import HUGE_PAGE_BYTES, HostSlab
from kvbm_core.testing.cuda_double import CudaDouble, DoubleEvent
from kvbm_core.testing.executor_bench import LONG_S, NUM_SLOTS, Bench, Listener, plan, two_group_memory
from kvbm_core.testing.executor_contract import ExecutorContract, OnDone, Setup, forbid_writes
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.executor import Copier, DeviceMemory, Executor
from kvbm_core.transfer.executors import memcpy
from kvbm_core.transfer.executors.cuda import CudaExecutor
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor, PiecePairs, copy_in_python, copy_natively
from kvbm_core.transfer.factory import make_executor, slab_preparation
from kvbm_core.transfer.movers.disk import DiskMover
from kvbm_core.transfer.movers.disk_direct import DirectReader
from kvbm_core.transfer.pieces import PieceTable
from kvbm_core.transfer.plan import FIRST_DIRECT_SLOT, OrderKind, TierOrder, TransferPlan
from kvbm_core.transfer.staged import StagedExecutor
from kvbm_core.types import Direction
from tests.faults.doubles import BUFFERED
from tests.unit.disk_mover_bench import GatedIo


class TestMemcpyExecutor(ExecutorContract):
    """The executor for CPU engines, copying with numpy."""

    copy_pieces = staticmethod(copy_in_python)

    @pytest.fixture(autouse=True)
    def _copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memcpy, "copy_pieces", self.copy_pieces)

    def make_executor(self, setup: Setup) -> Executor:
        return setup.copier(setup.on_done)

    def break_copies(self, bench: Bench, broken: bool) -> None:
        forbid_writes(bench.executor, broken)

    def test_an_onboard_does_not_wait_for_the_rest_of_an_offload(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The listener cannot hold a job that is under way, so the copies themselves are held."""
        first_batch, go_on = threading.Event(), threading.Event()
        copy = MemcpyExecutor._copy

        def held_copy(
            executor: MemcpyExecutor, group: int, device_blocks: Ids, slots: Ids, is_offload: bool
        ) -> None:
            copy(executor, group, device_blocks, slots, is_offload)
            if is_offload and not first_batch.is_set():
                first_batch.set()
                assert go_on.wait(LONG_S)

        monkeypatch.setattr(MemcpyExecutor, "_copy", held_copy)
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            bench.executor.submit(plan(1, Direction.OFFLOAD, range(6), range(6)))
            assert first_batch.wait(LONG_S)
            assert not bench.executor.cancel(1)
            bench.executor.submit(plan(2, Direction.OFFLOAD, [6], [6]))
            bench.executor.submit(plan(3, Direction.ONBOARD, [8], [0]))
            go_on.set()
            assert bench.executor.wait(None, LONG_S)
            assert listener.ids() == [3, 1, 2]


@pytest.mark.skipif(
    native is None,
    reason="NOT RUN: the native module (no C compiler when kvbm was installed, or KVBM_NATIVE=0)",
)
class TestNativeMemcpyExecutor(TestMemcpyExecutor):
    """The executor for CPU engines, copying with the native module."""

    @staticmethod
    def copy_pieces(pieces: PiecePairs, dst_ids: Ids, src_ids: Ids) -> None:
        assert native is not None
        copy_natively(native, pieces, dst_ids, src_ids)


class TestCudaExecutor(ExecutorContract):
    """The executor for GPUs, on a double of the CUDA runtime (see CudaDouble)."""

    @pytest.fixture(autouse=True)
    def _double(self) -> Iterator[None]:
        self.cuda, self.max_concurrent = CudaDouble(), 1
        yield
        self.cuda.close()

    def make_executor(self, setup: Setup) -> Executor:
        return setup.cuda_copier(self.cuda, setup.on_done, self.max_concurrent)

    def break_copies(self, bench: Bench, broken: bool) -> None:
        self.cuda.refuse_copies = broken

    def test_an_offload_starts_after_the_forward_and_submit_does_not_wait(self) -> None:
        with self.bench() as bench:
            self.cuda.hold(self.cuda.compute, True)
            self.cuda.compute_calls(lambda: bench.device.storages[0].fill(9))
            bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [1]))
            self.cuda.compute_calls(lambda: None)
            assert not bench.executor.wait([1], 0.05)
            assert not bench.slot(1).any()
            self.cuda.hold(self.cuda.compute, False)
            assert bench.executor.wait([1], LONG_S)
            assert (bench.slot(1)[: bench.device.views[0].block_bytes] == 9).all()

    def test_an_offload_does_not_wait_for_work_given_later(self) -> None:
        """Otherwise each offload would end a forward pass late."""
        with self.bench() as bench:
            bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [1]))
            self.cuda.wait_event(self.cuda.compute, DoubleEvent())  # a forward that never ends
            assert bench.executor.wait([1], LONG_S)
            assert bench.slot(1).tobytes() == bench.content(0, 1)

    def test_an_onboard_overtakes_an_offload_in_flight(self) -> None:
        self.max_concurrent = 2
        with self.bench() as bench:
            onboard_stream, offload_stream = self.cuda.streams[-2:]
            assert (onboard_stream.high_priority, offload_stream.high_priority) == (True, False)
            self.cuda.hold(offload_stream, True)
            bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [1]))
            bench.executor.submit(plan(2, Direction.ONBOARD, [2], [0]))
            assert bench.executor.wait([2], LONG_S)
            assert not bench.executor.wait([1], 0.0)
            self.cuda.hold(offload_stream, False)
            assert bench.executor.wait(None, LONG_S)

    @pytest.mark.shows("DYN_KVBM_MAX_CONCURRENT_TRANSFERS")
    def test_no_more_than_the_allowed_jobs_are_in_flight(self) -> None:
        with self.bench() as bench:
            self.cuda.hold(self.cuda.compute, True)
            for job_id in (1, 2, 3):
                bench.executor.submit(plan(job_id, Direction.OFFLOAD, [job_id], [job_id]))
            assert self.cuda.wait_batches(1, LONG_S)
            assert not self.cuda.wait_batches(2, 0.05)
            assert bench.executor.cancel(3)
            self.cuda.hold(self.cuda.compute, False)
            assert bench.executor.wait(None, LONG_S)

    def test_a_failure_of_the_gpu_is_an_outcome(self) -> None:
        with self.bench() as bench:
            self.cuda.fail_copies = True
            result = self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1]))
            assert result.outcome is Outcome.IO_ERROR and "700" in result.detail

    @pytest.mark.parametrize("direction", [Direction.OFFLOAD, Direction.ONBOARD])
    def test_a_job_whose_copies_have_no_event_is_over_when_they_are(self, direction: Direction) -> None:
        self.max_concurrent = 2
        with self.bench() as bench:
            stream = self.cuda.streams[-2 if direction is Direction.ONBOARD else -1]
            self.cuda.hold(stream, True)
            self.cuda.refuse_records = True
            bench.executor.submit(plan(1, direction, [1], [1]))
            assert self.cuda.wait_batches(1, LONG_S)
            assert not bench.executor.wait([1], 0.05), "its blocks may still change"
            bench.executor.submit(plan(2, Direction.OFFLOAD, [2], [2]))
            assert not self.cuda.wait_batches(2, 0.05)
            self.cuda.hold(stream, False)
            assert bench.executor.wait(None, LONG_S)
            first, second = bench.poll()
            assert first.job_id == 1 and first.outcome is Outcome.IO_ERROR and "error 2" in first.detail
            assert second.outcome is Outcome.IO_ERROR
            self.cuda.refuse_records = False
            assert self.finish(bench, plan(3, Direction.OFFLOAD, [3], [3])).outcome is Outcome.OK

    def test_a_broken_gpu_that_records_no_event_is_an_outcome(self) -> None:
        with self.bench() as bench:
            self.cuda.refuse_records = self.cuda.fail_copies = True
            result = self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1]))
            assert result.outcome is Outcome.IO_ERROR and "error 2" in result.detail

    @pytest.mark.shows("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE")
    def test_a_batch_has_the_allowed_blocks(self) -> None:
        with self.bench() as bench:
            assert self.finish(bench, plan(1, Direction.OFFLOAD, range(6), range(6))).outcome is Outcome.OK
            block_bytes = bench.device.views[0].block_bytes
            assert [sum(sizes) // block_bytes for _, _, sizes in self.cuda.batches] == [4, 2]


def fetch(job_id: int, *slots: int) -> TierOrder:
    """From the places of the same numbers."""
    return TierOrder(job_id, "disk", OrderKind.FETCH, tuple(map(key_of, slots)), slots, slots)


class OverDisk(StagedExecutor):
    """Whose mover is closed with it, as a rank's memory does."""

    def close(self) -> None:
        """See Executor."""
        for mover in self._movers.values():
            mover.close()
        super().close()


class TestStagedExecutor(ExecutorContract):
    """A device with a disk beside it: plans without reads are not to notice."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "contract.blocks"
        self.disk_goes_on = threading.Event()
        self.disk_goes_on.set()

    def make_executor(self, setup: Setup) -> Executor:
        geometry = Geometry(NUM_SLOTS, setup.host.slot_bytes, b"contract".ljust(16))
        file = BlockFile(self.path, geometry, BUFFERED)
        self.is_reading = threading.Event()

        def is_read(transfer: Transfer, is_write: bool) -> bool:
            self.is_reading.set()
            return True

        reads = GatedIo(file.fd, is_read, None, self.disk_goes_on)
        self.disk = DiskMover(file, setup.host, clock=setup.clock, ios=[reads, ThreadIo(file.fd, 2)])
        return self.over_disk(setup, {})

    def over_disk(self, setup: Setup, readers: dict[str, DirectReader]) -> Executor:
        assert setup.on_done is not None
        return OverDisk(
            lambda done: self.make_copier(setup, done),
            {"disk": self.disk},
            setup.host.slot_bytes,
            setup.on_done,
            setup.digests,
            readers=readers,
        )

    def make_copier(self, setup: Setup, on_done: OnDone) -> Copier:
        return setup.copier(on_done)

    def break_copies(self, bench: Bench, broken: bool) -> None:
        assert isinstance(bench.executor, StagedExecutor)
        forbid_writes(bench.executor._copier, broken)

    def make_slot_bytes(self, device: DeviceMemory) -> int:
        return whole_sectors(super().make_slot_bytes(device))

    def store(self, bench: Bench, listener: Listener, *slots: int) -> None:
        """Each slot's bytes into the disk's slot of the same number; what is in the slot is forgotten."""
        keys = tuple(map(key_of, slots))
        self.disk.submit(TierOrder(500, "disk", OrderKind.STORE, keys, slots, slots), listener)
        assert listener.wait_for(500) and listener.outcomes()[500] is Outcome.OK
        for slot in slots:
            bench.slot(slot)[:] = 0

    @contextmanager
    def stalled(self, bench: Bench, listener: Listener, load: TransferPlan) -> Iterator[None]:
        """By a disk that does not answer."""
        slots = load.moves[0].slots
        self.store(bench, listener, *slots)
        self.disk_goes_on.clear()
        bench.executor.submit(replace(load, reads=(fetch(load.job_id, *slots),)))
        assert self.is_reading.wait(LONG_S)
        yield
        late = {result.job_id: result.is_late for result in listener.results}
        assert late[load.job_id]  # the kernel may still write into its slots
        self.disk_goes_on.set()
        assert self.disk.wait([load.job_id], LONG_S)

    def test_a_load_that_waits_for_its_turn_at_the_disk_is_over_at_once(self) -> None:
        """What the disk has not begun has no slots to keep."""
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            load = plan(1, Direction.ONBOARD, [3], [2])
            with self.stalled(bench, listener, load):
                bench.executor.submit(replace(plan(2, Direction.ONBOARD, [4], [4]), reads=(fetch(2, 4),)))
                assert bench.executor.cancel(2) and bench.executor.cancel(1)
            (result,) = [result for result in listener.results if result.job_id == 2]
            assert (result.outcome, result.is_late) == (Outcome.REJECTED, False)


class TestCudaStagedExecutor(TestStagedExecutor):
    """The same with a GPU (see CudaDouble): its copies are queued by the thread that reads the disk."""

    @pytest.fixture(autouse=True)
    def _double(self) -> Iterator[None]:
        self.cuda = CudaDouble()
        yield
        self.cuda.close()

    def make_copier(self, setup: Setup, on_done: OnDone) -> Copier:
        return setup.cuda_copier(self.cuda, on_done)

    def break_copies(self, bench: Bench, broken: bool) -> None:
        self.cuda.refuse_copies = broken

    def test_a_load_from_the_disk_lands_after_what_the_engine_computed_before(self) -> None:
        """A block is given away while the forward pass of its former owner is still on the GPU."""
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            bench.slot(2)[:] = 7
            load = plan(1, Direction.ONBOARD, [3], [2])
            self.store(bench, listener, 2)
            self.cuda.compute_calls(lambda: bench.device.storages[0].fill(9))
            bench.executor.submit(replace(load, reads=(fetch(1, 2),)))
            assert listener.wait_for(1) and listener.outcomes()[1] is Outcome.OK
            self.cuda.synchronize()
            assert set(bench.content(0, 3)) == {7}

    def test_a_load_does_not_wait_for_what_is_computed_after_it(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            bench.slot(2)[:] = 7
            self.store(bench, listener, 2)
            self.disk_goes_on.clear()
            bench.executor.submit(replace(plan(1, Direction.ONBOARD, [3], [2]), reads=(fetch(1, 2),)))
            self.cuda.wait_event(self.cuda.compute, DoubleEvent())  # a forward that never ends
            self.disk_goes_on.set()
            assert listener.wait_for(1) and set(bench.content(0, 3)) == {7}


class TestDirectExecutor(TestStagedExecutor):
    """A device with a disk beside it that is read straight into its memory. Host tensors stand for a GPU's,
    so this holds NIXL's POSIX plugin to the contract, and says nothing of GPUDirect Storage.
    """

    def make_executor(self, setup: Setup) -> Executor:
        if reason := why_no_nixl():
            pytest.skip(f"NOT RUN: disk to device by NIXL: {reason}")
        geometry = Geometry(NUM_SLOTS, setup.host.slot_bytes, b"contract".ljust(16))
        file = BlockFile(self.path, geometry, replace(BUFFERED, to_device="nixl-posix"))
        self.is_reading, self.is_on = threading.Event(), threading.Event()
        self.disk = DiskMover(file, setup.host, clock=setup.clock)
        self.reader = DirectReader("disk", file, setup.device, self, make_io=self.make_io)
        self.disk.stop_others = self.reader.close
        assert self.is_on.wait(LONG_S)
        return self.over_disk(setup, {"disk": self.reader})

    def make_io(self, fd: int, gpu: int | None) -> FileIo:
        return _Stalling(NixlIo(fd, gpu=gpu), self.disk_goes_on, self.is_reading)

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        assert is_direct
        self.is_on.set()

    def found(self, tier: str, end: int, found: object) -> None:
        """See TierListener."""

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""

    @contextmanager
    def stalled(self, bench: Bench, listener: Listener, load: TransferPlan) -> Iterator[None]:
        """By a disk that does not answer."""
        slots = load.moves[0].slots
        self.store(bench, listener, *slots)
        self.disk_goes_on.clear()
        bench.executor.submit(straight(load))
        assert self.is_reading.wait(LONG_S)
        yield
        assert not any(result.is_late for result in listener.results), "it has no slots to keep"
        self.disk_goes_on.set()

    def test_a_load_that_waits_for_its_turn_at_the_disk_is_over_at_once(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.stalled(bench, listener, plan(1, Direction.ONBOARD, [3], [2])):
                bench.executor.submit(straight(plan(2, Direction.ONBOARD, [4], [2])))
                assert bench.executor.cancel(2) and bench.executor.cancel(1)
                assert bench.executor.wait(None, 0.0)
            assert listener.outcomes()[1] is listener.outcomes()[2] is Outcome.REJECTED

    def test_a_load_that_comes_straight_brings_the_bytes_that_were_stored(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener, verify=True) as bench:
            for slot in (2, 5):
                bench.slot(slot)[:] = slot
            self.store(bench, listener, 2, 5)
            bench.executor.submit(straight(plan(1, Direction.ONBOARD, [3, 7], [5, 2])))
            assert bench.executor.wait([1], LONG_S) and listener.outcomes()[1] is Outcome.OK
            assert (set(bench.content(0, 3)), set(bench.content(0, 7))) == ({5}, {2})


def straight(load: TransferPlan) -> TransferPlan:
    """The same blocks, from places of the disk with the numbers of the slots."""
    (move,) = load.moves
    slots = tuple(FIRST_DIRECT_SLOT + slot for slot in move.slots)
    order = fetch(load.job_id, *move.slots)
    return replace(load, moves=(move._replace(slots=slots),), reads=(replace(order, slots=slots),))


class _Stalling:
    """NixlIo that tells of no read but of the file's header while ``goes_on`` is not set."""

    def __init__(self, io: NixlIo, goes_on: threading.Event, is_reading: threading.Event) -> None:
        self._io, self._goes_on, self._is_reading = io, goes_on, is_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        self._io.submit(transfers, is_write=is_write)
        if any(transfer.offset_bytes for transfer in transfers):
            self._is_reading.set()

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        return self._io.collect(timeout_s) if self._goes_on.wait(timeout_s) else []

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return self._io.in_flight

    def close(self, timeout_s: float) -> bool:
        """See FileIo."""
        return self._io.close(timeout_s)


def naive_copies(
    pairs: Sequence[tuple[Segment, Segment]],
    bases: Sequence[int],
    blocks: Sequence[int],
    slots: Sequence[int],
) -> dict[int, int]:
    """Which device byte goes with which host byte."""
    return {
        HOST_BASE + b.offset_bytes + slot * b.block_stride_bytes + i: bases[a.storage]
        + a.offset_bytes
        + block * a.block_stride_bytes
        + i
        for block, slot in zip(blocks, slots, strict=True)
        for a, b in pairs
        for i in range(a.nbytes)
    }


HOST_BASE = 5000


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
@pytest.mark.parametrize("gap_bytes", [0, 3])
def test_the_pieces_of_blocks_are_found_byte_by_byte(gap_bytes: int, chunk_bytes: int) -> None:
    sizes = (10, 4, 6)  # the first two are dense on the device if there is no gap, and never in the slab
    segments = [Segment(storage, 2 * storage, size + gap_bytes, size) for storage, size in enumerate(sizes)]
    starts = (0, 10, 14)
    interleaved = [Segment(0, start, 20, size) for start, size in zip(starts, sizes, strict=True)]
    in_rows = [Segment(0, 200 * i, size, size) for i, size in enumerate(sizes)]
    bases = [1 << 12, 1 << 16, 1 << 20]
    blocks, slots = [3, 4, 5, 1, 9], [6, 7, 8, 0, 2]
    for host in (interleaved, in_rows, [*interleaved[:1], *in_rows[1:]]):
        pairs = list(zip(segments, host, strict=True))
        table = PieceTable(pairs, bases, HOST_BASE, chunk_bytes)
        targets, sources, nbytes = table.arrays(blocks, slots, to_host=True)
        found = {
            target + i: source + i
            for target, source, size in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True)
            for i in range(size)
        }
        assert found == naive_copies(pairs, bases, blocks, slots) and sum(nbytes) == len(found)
        assert (
            (targets - HOST_BASE) // chunk_bytes == (targets - HOST_BASE + nbytes - 1) // chunk_bytes
        ).all()
        onboard = table.arrays(blocks, slots, to_host=False)
        assert [column.tolist() for column in onboard] == [
            sources.tolist(),
            targets.tolist(),
            nbytes.tolist(),
        ]


def test_neighbouring_blocks_are_one_copy_where_both_sides_are_dense() -> None:
    segment = Segment(0, 16, 100, 100)
    table = PieceTable(((segment, segment),), [1000], HOST_BASE, 1 << 20)
    arrays = table.arrays([2, 3, 4, 9], [4, 5, 6, 0], to_host=False)
    assert [column.tolist() for column in arrays] == [[1216, 1916], [5416, 5016], [300, 100]]


def test_slots_across_chunks_come_back_exactly() -> None:
    """Slots of 768 KiB do not divide chunks of 2 MiB."""
    slot_bytes = 768 << 10
    view = BlockView(6, (Segment(0, 0, slot_bytes, slot_bytes),))
    content = np.random.default_rng(3).integers(0, 256, 6 * slot_bytes, dtype=np.uint8)
    device = DeviceMemory((view,), [content.copy()])
    host = HostSlab(6, slot_bytes, chunk_bytes=HUGE_PAGE_BYTES)
    assert host.wait_ready(LONG_S)
    cuda = CudaDouble()
    executor = CudaExecutor(device, host, cuda, on_done=Listener())
    executor.submit(plan(1, Direction.OFFLOAD, range(6), range(6)))
    assert executor.wait(None, LONG_S) and (host.array == content).all()
    assert len(cuda.batches[0][0]) == 3
    executor.close()
    cuda.close()
    host.close()


def test_memory_of_no_known_kind_is_refused() -> None:
    class Alien:
        nbytes = 1 << 20
        is_cuda = False

    device = two_group_memory()
    assert slab_preparation(device) is None
    device.storages = [Alien(), Alien()]
    host = HostSlab(1, 4096)
    with pytest.raises(UnsupportedError, match="Alien"):
        make_executor(device, host, on_done=Listener())
    host.close()


def test_each_thread_of_the_double_has_a_current_stream_of_its_own() -> None:
    """As in CUDA: what a thread of ours is given is not behind the stream on which the engine computes."""
    cuda, streams = CudaDouble(), list[object]()

    def note() -> None:
        streams.append(cuda.record_on_current_stream().stream)

    note()
    thread = threading.Thread(target=note)
    thread.start()
    thread.join(LONG_S)
    cuda.close()
    assert streams == [cuda.compute, cuda.default]
