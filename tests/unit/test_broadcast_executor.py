"""Onboards that one rank loads and all get: real gloo between ranks that are threads of this process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

from kvbm_core.errors import Outcome
from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import (
    LONG_S,
    NUM_DEVICE_BLOCKS,
    NUM_SLOTS,
    Listener,
    plan,
    two_group_memory,
)
from kvbm_core.transfer.executor import DeviceMemory, StreamMark
from kvbm_core.transfer.executors import broadcast
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor, OnDone
from kvbm_core.transfer.executors.broadcast_group import Group, MeetingPoint
from kvbm_core.transfer.executors.device_rows import DeviceRows
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

torch = pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")


class Loader(MemcpyExecutor):
    """Rank 0's own executor; while ``gate`` is shut no load ends, and those in ``fails`` end as is said
    there.
    """

    def __init__(self, device: DeviceMemory, host: HostSlab, on_done: OnDone) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._is_held = threading.Event()
        self.fails: dict[int, JobResult] = {}
        self.submitted: list[int] = []

        def ended(result: JobResult) -> None:
            if threading.current_thread() is self._thread:  # not one that cancels
                if not self.gate.is_set():
                    self._is_held.set()
                assert self.gate.wait(LONG_S)
            on_done(self.fails.get(result.job_id, result))

        super().__init__(device, host, on_done=ended)

    def wait_held(self) -> None:
        """Until a load has been copied, and its end is held back."""
        assert self._is_held.wait(LONG_S)

    def submit(
        self, plan: TransferPlan, *, deadline_s: float | None = None, after: StreamMark = None
    ) -> None:
        self.submitted.append(plan.job_id)
        super().submit(plan, deadline_s=deadline_s)


@dataclass
class Rank:
    device: DeviceMemory
    executor: BroadcastExecutor
    listener: Listener
    broken: list[str]

    def content(self, group: int, block: int) -> bytes:
        return content(self.device, group, block)

    def result(self, job_id: int) -> JobResult:
        assert self.executor.wait([job_id], LONG_S)
        (result,) = [result for result in self.listener.results if result.job_id == job_id]
        return result


def connected(groups: Sequence[Group]) -> list[Group]:
    """Ranks of one process, which have met."""
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: group.connect(torch.device("cpu")), groups))
    return list(groups)


class Ranks:
    """``devices[0]`` is rank 0's; the others are filled from there."""

    def __init__(
        self,
        devices: list[DeviceMemory],
        *,
        timeout_s: float = LONG_S,
        chunk_bytes: int = 4096,
        verifies: bool = False,
    ) -> None:
        """``chunk_bytes``: small, so that a load is several of them."""
        self.host = HostSlab(NUM_SLOTS, max(view.block_bytes for view in devices[0].views))
        assert self.host.wait_ready(LONG_S)
        point = MeetingPoint()
        self.ranks: list[Rank] = []
        numbers = range(len(devices))
        groups = connected(
            [
                Group(
                    number,
                    numbers,
                    point.address,
                    None if number else point,
                    timeout_s=timeout_s,
                    load_timeout_s=timeout_s,
                )
                for number in numbers
            ]
        )
        for number, (device, group) in enumerate(zip(devices, groups, strict=True)):
            listener = Listener()
            broken: list[str] = []
            with mock.patch.object(broadcast, "CHUNK_BYTES", chunk_bytes):
                executor = BroadcastExecutor(
                    device,
                    group,
                    listener,
                    make_loader=None if number else self._make_loader(device),
                    on_broken=broken.append,
                    verifies=verifies and not number,
                )
            self.ranks.append(Rank(device, executor, listener, broken))

    def _make_loader(self, device: DeviceMemory) -> Callable[[OnDone], Loader]:
        def make(on_done: OnDone) -> Loader:
            self.loader = Loader(device, self.host, on_done)
            return self.loader

        return make

    def submit(self, submitted: TransferPlan) -> None:
        for rank in self.ranks:
            rank.executor.submit(submitted)

    def run(self, submitted: TransferPlan) -> list[Outcome]:
        self.submit(submitted)
        return self.outcomes(submitted.job_id)

    def outcomes(self, job_id: int) -> list[Outcome]:
        return [rank.result(job_id).outcome for rank in self.ranks]

    def wipe(self) -> None:
        for rank in self.ranks:
            for storage in rank.device.storages:
                storage[:] = 0

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(lambda rank: rank.executor.close(), self.ranks))
        self.host.close()


def content(device: DeviceMemory, group: int, block: int) -> bytes:
    regions = device.views[group].regions(block)
    return b"".join(device.storages[s][o : o + n].tobytes() for s, o, n in regions)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks([two_group_memory(seed) for seed in range(request.param)])
    yield made
    made.close()


def test_every_rank_gets_what_rank_0_stored(ranks: Ranks) -> None:
    blocks, targets, slots = (9, 4, 5, 6, 11), (0, 11, 10, 3, 4), (7, 3, 4, 5, 6)
    moves = (GroupMove(0, blocks, slots), GroupMove(1, blocks[:2], (0, 1)))
    first = ranks.ranks[0]
    expected = [first.content(0, block) for block in blocks] + [
        first.content(1, block) for block in blocks[:2]
    ]
    assert set(ranks.run(TransferPlan(1, Direction.OFFLOAD, moves))) == {Outcome.OK}
    ranks.wipe()
    moves = (GroupMove(0, targets, slots), GroupMove(1, targets[:2], (0, 1)))
    assert set(ranks.run(TransferPlan(2, Direction.ONBOARD, moves))) == {Outcome.OK}
    for rank in ranks.ranks:
        got = [rank.content(0, block) for block in targets] + [
            rank.content(1, block) for block in targets[:2]
        ]
        assert got == expected
        for group, touched in ((0, targets), (1, targets[:2])):
            assert not any(any(rank.content(group, b)) for b in set(range(NUM_DEVICE_BLOCKS)) - set(touched))
    num_bytes = sum(len(m.slots) * first.device.views[m.group].block_bytes for m in moves)
    assert [rank.result(1).num_bytes for rank in ranks.ranks] == [num_bytes] + [0] * (len(ranks.ranks) - 1)
    assert [rank.result(2).num_bytes for rank in ranks.ranks] == [num_bytes] + [0] * (len(ranks.ranks) - 1)
    assert not any(rank.broken for rank in ranks.ranks)


def test_many_loads_end_in_the_order_of_their_submission(ranks: Ranks) -> None:
    assert set(ranks.run(plan(1, Direction.OFFLOAD, range(8), range(8)))) == {Outcome.OK}
    ranks.loader.gate.clear()
    for job_id in range(10, 40):
        ranks.submit(plan(job_id, Direction.ONBOARD, [job_id % NUM_DEVICE_BLOCKS], [job_id % NUM_SLOTS]))
    assert not any(rank.executor.wait([39], 0.0) or rank.executor.wait(None, 0.0) for rank in ranks.ranks)
    ranks.loader.gate.set()
    for rank in ranks.ranks:
        assert rank.executor.wait(None, LONG_S)
        assert rank.listener.ids() == [1, *range(10, 40)]
        assert set(rank.listener.outcomes().values()) == {Outcome.OK}


def random_view(draw: random.Random, sizes: list[int], unit_bytes: int) -> tuple[BlockView, list[int]]:
    """Segments of these sizes, each somewhere else: interleaved in a storage or in rows, with gaps; storage
    sizes.
    """
    segments, storage_bytes = [], []
    at = 0
    while at < len(sizes):
        group = sizes[at : at + draw.randint(1, 4)]
        start = draw.randrange(4) * unit_bytes
        if draw.random() < 0.5:
            gaps = [draw.randrange(3) * unit_bytes for _ in group]
            stride = sum(group) + sum(gaps)
            for size, gap in zip(group, gaps, strict=True):
                segments.append(Segment(len(storage_bytes), start, stride, size))
                start += size + gap
            end = start + NUM_DEVICE_BLOCKS * stride
        else:
            for size in group:
                stride = size + draw.randrange(3) * unit_bytes
                segments.append(Segment(len(storage_bytes), start, stride, size))
                start += NUM_DEVICE_BLOCKS * stride
            end = start
        storage_bytes.append(end + draw.randrange(9))
        at += len(group)
    return BlockView(NUM_DEVICE_BLOCKS, tuple(segments)), storage_bytes


@pytest.mark.parametrize("unit_bytes", [1, 8])
def test_rows_are_the_content_of_blocks_wherever_they_lie(seed: int, unit_bytes: int) -> None:
    """Two layouts of the same content, against BlockView.regions."""
    draw = random.Random(seed)
    bits = np.random.default_rng(seed)
    for _ in range(60):
        sizes = [draw.choice((1, 3, 3, 5)) * unit_bytes for _ in range(draw.randint(1, 9))]
        devices = []
        for _ in range(2):
            view, storage_bytes = random_view(draw, sizes, unit_bytes)
            storages = [bits.integers(0, 256, size, dtype=np.uint8) for size in storage_bytes]
            devices.append(DeviceMemory((view,), storages))
        source, target = (DeviceRows(device, chunk_bytes=64) for device in devices)
        blocks = draw.sample(range(NUM_DEVICE_BLOCKS), draw.randint(1, NUM_DEVICE_BLOCKS))
        targets = draw.sample(range(NUM_DEVICE_BLOCKS), len(blocks))
        naive = [storage.copy() for storage in devices[1].storages]
        chunks = source.chunks(plan(1, Direction.ONBOARD, blocks, range(len(blocks))))
        assert [block for _, chunk in chunks for block in chunk] == blocks
        done = 0
        with source.bound(), target.bound():
            for group, chunk in chunks:
                rows = source.gather(group, chunk)
                assert rows.numpy().tobytes() == b"".join(content(devices[0], 0, block) for block in chunk)
                target.staged(group, len(chunk)).copy_(rows)
                target.scatter(group, targets[done : done + len(chunk)], target.mark())
                done += len(chunk)
        for block, other in zip(blocks, targets, strict=True):
            row = content(devices[0], 0, block)
            for storage, offset, nbytes in devices[1].views[0].regions(other):
                naive[storage][offset : offset + nbytes] = np.frombuffer(row[:nbytes], np.uint8)
                row = row[nbytes:]
        assert all((a == b).all() for a, b in zip(devices[1].storages, naive, strict=True))


def test_a_cancelled_load_leaves_the_blocks_of_every_rank_alone(ranks: Ranks) -> None:
    """Also where the ranks wait for rank 0 at that moment; they stay in step."""
    assert set(ranks.run(plan(1, Direction.OFFLOAD, range(8), range(8)))) == {Outcome.OK}
    first, *others = ranks.ranks
    ranks.loader.gate.clear()
    for job_id in (2, 3):  # rank 0 has copied the first, and begun nothing of the second
        ranks.submit(plan(job_id, Direction.ONBOARD, [job_id + 6], [job_id]))
    ranks.loader.wait_held()
    assert not first.executor.cancel(2) and not first.executor.wait([2], 0.0)
    assert all(rank.executor.cancel(2) for rank in others)
    assert all(rank.executor.cancel(3) for rank in ranks.ranks)
    assert ranks.outcomes(3) == [Outcome.REJECTED] * len(ranks.ranks)
    assert {rank.result(2).outcome for rank in others} == {Outcome.REJECTED}
    for rank in others:
        for storage in rank.device.storages:
            storage[:] = 9
    ranks.loader.gate.set()
    assert first.result(2).outcome is Outcome.REJECTED
    assert ranks.run(plan(4, Direction.ONBOARD, [11], [5])) == [Outcome.OK] * len(ranks.ranks)
    assert len({rank.content(0, 11) for rank in ranks.ranks}) == 1
    for rank in others:
        assert {byte for block in (8, 9) for byte in rank.content(0, block)} == {9}


def test_a_load_that_is_being_written_is_awaited_and_its_rest_left_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one block; the second rank is cancelled while it writes the first of them."""
    assert set(ranks.run(plan(1, Direction.OFFLOAD, range(8), range(8)))) == {Outcome.OK}
    second, is_writing, go_on = ranks.ranks[1], threading.Event(), threading.Event()
    scatter, rows = DeviceRows.scatter, second.executor._rows
    monkeypatch.setattr(rows, "_chunk_bytes", 1)
    monkeypatch.setattr(ranks.ranks[0].executor._rows, "_chunk_bytes", 1)
    for rank in ranks.ranks[2:]:
        monkeypatch.setattr(rank.executor._rows, "_chunk_bytes", 1)

    def slow_scatter(self: DeviceRows, *arguments: object) -> None:
        if self is rows:
            is_writing.set()
            assert go_on.wait(LONG_S)
        scatter(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceRows, "scatter", slow_scatter)
    before = second.content(0, 9)
    ranks.submit(plan(2, Direction.ONBOARD, [8, 9], [2, 3]))
    assert is_writing.wait(LONG_S)
    assert not second.executor.cancel(2) and not second.executor.wait([2], 0.0)
    go_on.set()
    assert second.result(2).outcome is Outcome.REJECTED
    assert ranks.ranks[0].result(2).outcome is Outcome.OK
    assert ranks.run(plan(3, Direction.ONBOARD, [11], [5])) == [Outcome.OK] * len(ranks.ranks)
    assert second.content(0, 8) == ranks.ranks[0].content(0, 8) and second.content(0, 9) == before


def test_a_turn_that_a_rank_skips_keeps_the_ranks_in_step(ranks: Ranks) -> None:
    """What the first rank skips fails on all; what another one skips comes to all but it."""
    assert set(ranks.run(plan(1, Direction.OFFLOAD, range(8), range(8)))) == {Outcome.OK}
    first, *others = ranks.ranks
    last = others.pop()
    ranks.wipe()
    dropped, wanted = plan(2, Direction.ONBOARD, [0, 1], [2, 3]), plan(2, Direction.ONBOARD, [8, 9], [2, 3])
    for rank in (first, *others):
        rank.executor.submit(wanted)
    last.executor.skip(dropped)
    missing = plan(3, Direction.ONBOARD, [10], [4])
    first.executor.skip(plan(3, Direction.ONBOARD, [], []))
    for rank in (*others, last):
        rank.executor.submit(missing)
    assert ranks.run(plan(4, Direction.ONBOARD, [11], [5])) == [Outcome.OK] * len(ranks.ranks)
    assert [rank.result(2).outcome for rank in (first, *others)] == [Outcome.OK] * (len(others) + 1)
    assert [rank.result(3).outcome for rank in (*others, last)] == [Outcome.REJECTED] * (len(others) + 1)
    assert (first.listener.ids(), last.listener.ids()) == ([1, 2, 4], [1, 3, 4])
    assert not any(any(last.content(0, block)) for block in range(11)), "what it skipped is nowhere"
    assert len({rank.content(0, 11) for rank in ranks.ranks}) == 1 and any(first.content(0, 11))


@pytest.mark.parametrize("verifies", [True, False])
def test_other_bytes_on_another_rank_are_seen_if_the_first_one_verifies(
    verifies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks([two_group_memory(seed) for seed in range(3)], verifies=verifies)
    try:
        assert set(ranks.run(plan(1, Direction.OFFLOAD, range(8), range(8)))) == {Outcome.OK}
        assert ranks.run(plan(2, Direction.ONBOARD, [8, 9], [2, 3])) == [Outcome.OK] * 3
        scatter, wrong = DeviceRows.scatter, ranks.ranks[1]

        def damage(rows: DeviceRows, group: int, blocks: Sequence[int], mark: object) -> None:
            scatter(rows, group, blocks, mark)
            if rows is wrong.executor._rows:
                ((storage, offset, _), *_) = wrong.device.views[group].regions(blocks[-1])
                wrong.device.storages[storage][offset] ^= 1

        monkeypatch.setattr(DeviceRows, "scatter", damage)
        second = Outcome.CORRUPT if verifies else Outcome.OK
        assert ranks.run(plan(3, Direction.ONBOARD, [8, 9], [2, 3])) == [Outcome.OK, second, Outcome.OK]
        monkeypatch.undo()
        assert ranks.run(plan(4, Direction.ONBOARD, [8, 9], [2, 3])) == [Outcome.OK] * 3
    finally:
        ranks.close()
