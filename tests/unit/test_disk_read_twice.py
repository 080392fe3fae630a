"""A block whose read fails is read once more: what passes costs nothing, what stays fails as ever."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.io import FileIo, Transfer
from kvbm_core.storage.disk.record import slot_offset_bytes
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from kvbm_core.transfer.plan import TierOrder
from tests.faults.doubles import FailingIo, SpoilingIo, store_on
from tests.faults.test_requests import NUM_SLOTS, fill, geometry_of
from tests.faults.versions import payload_of, read_all
from tests.unit.disk_mover_bench import DOWN, GEOMETRY, UP, Bench, bench_on, order


class Times:
    """Chooses reads of a slot, so often."""

    def __init__(self, slot: int, payload_bytes: int, times: int) -> None:
        self._start, self._stop = (slot_offset_bytes(number, payload_bytes) for number in (slot, slot + 1))
        self.left = times
        self.asked: list[int] = []

    def __call__(self, transfer: Transfer, is_write: bool) -> bool:
        if is_write:
            return False
        self.asked.append(transfer.num_bytes)
        is_here = (
            transfer.offset_bytes < self._stop and transfer.offset_bytes + transfer.num_bytes > self._start
        )
        self.left -= is_here
        return is_here and self.left >= 0


def failing(choice: Times) -> Callable[[int], FileIo]:
    return lambda fd: FailingIo(fd, choice, -errno.EIO)


def spoiling(choice: Times) -> Callable[[int], FileIo]:
    return lambda fd: SpoilingIo(fd, choice)


KINDS = pytest.mark.parametrize(
    ("make", "outcome"), [(failing, Outcome.IO_ERROR), (spoiling, Outcome.CORRUPT)], ids=["fails", "spoils"]
)
DISK_SLOTS, SLOTS = [4, 9, 6, 20], [3, 4, 5, 6]
"""Not neighbours: a request each."""


def loaded(bench: Bench, rng: Random) -> tuple[Outcome, str, list[tuple[int, Outcome]], bool]:
    """Writes four blocks and reads them elsewhere; the last word: whether the right bytes are there."""
    contents = bench.fill(rng, [0, 1, 2, 7])
    assert bench.run(order(1, DOWN, [0, 1, 2, 7], DISK_SLOTS)).outcome is Outcome.OK
    bench.wipe()
    told: list[tuple[int, Outcome]] = []
    keys = tuple(key_of(slot) for slot in DISK_SLOTS)
    up = TierOrder(2, "disk", UP, keys, tuple(SLOTS), tuple(DISK_SLOTS))
    bench.submit(up, on_blocks=lambda *ended: told.extend(zip(*ended, strict=True)))
    result = bench.result(2)
    return result.outcome, result.detail, sorted(told), [bench.slot(slot) for slot in SLOTS] == contents


@KINDS
def test_a_read_that_fails_once_succeeds(
    tmp_path: Path,
    rng: Random,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Times], Callable[[int], FileIo]],
    outcome: Outcome,
) -> None:
    choice = Times(9, GEOMETRY.payload_bytes, 1)
    with bench_on(tmp_path / "x.blocks", make(choice)) as bench:
        assert loaded(bench, rng) == (Outcome.OK, "", [(number, Outcome.OK) for number in range(4)], True)
    assert len(choice.asked) == 5, "one block alone was read again"
    assert [record.getMessage() for record in caplog.records] == [
        f"kvbm: {tmp_path / 'x.blocks'}: 1 of 4 blocks read again, 1 are good now"
    ]


@KINDS
def test_a_read_that_fails_twice_fails_its_job(
    tmp_path: Path,
    rng: Random,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Times], Callable[[int], FileIo]],
    outcome: Outcome,
) -> None:
    choice = Times(9, GEOMETRY.payload_bytes, 2)
    with bench_on(tmp_path / "x.blocks", make(choice)) as bench:
        how, detail, told, _ = loaded(bench, rng)
        assert (how, told) == (outcome, [(0, Outcome.OK), (1, outcome), (2, Outcome.OK), (3, Outcome.OK)])
        assert detail.startswith(f"1 of 4 blocks: {outcome}")
        assert len(choice.asked) == 5
        assert bench.run(order(3, UP, [0], [9])).outcome is Outcome.OK, "the fault has passed"
    assert "read again" not in caplog.text


def test_what_is_not_there_is_not_read_again(tmp_path: Path) -> None:
    choice = Times(0, GEOMETRY.payload_bytes, 0)
    with bench_on(tmp_path / "x.blocks", failing(choice)) as bench:
        assert bench.run(order(1, DOWN, [0], [9])).outcome is Outcome.OK
        other = TierOrder(2, "disk", UP, (key_of(1),), (1,), (9,))
        assert bench.run(other).outcome is Outcome.MISS
    assert len(choice.asked) == 1


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 1.0])
def test_a_second_try_is_within_the_deadline(tmp_path: Path, left_s: float) -> None:
    clock = ManualClock(100.0)
    choice = Times(9, GEOMETRY.payload_bytes, 1)

    class Slow(FailingIo):
        """What fails takes nearly all the time there is, or a little more."""

        def collect(self, timeout_s: float) -> list[tuple[int, int]]:
            before = self.num_failed
            ended = super().collect(LONG_S)
            if before and choice.left == 0 and clock.now_s() == 100.0:
                clock.advance(LONG_S - left_s)
            return ended

    with bench_on(tmp_path / "x.blocks", lambda fd: Slow(fd, choice, -errno.EIO), clock) as bench:
        assert bench.run(order(1, DOWN, [0], [9])).outcome is Outcome.OK
        told: list[Outcome] = []
        bench.submit(order(2, UP, [1], [9]), on_blocks=lambda numbers, outcomes: told.extend(outcomes))
        result = bench.result(2)
        expected = Outcome.OK if left_s > 0 else Outcome.IO_ERROR
        assert (result.outcome, told, result.is_late) == (expected, [expected], False)
        assert len(choice.asked) == 1 + (left_s > 0)


@KINDS
@pytest.mark.parametrize("payload_bytes", [8192, 5000])
@pytest.mark.parametrize("times", [1, 2])
def test_a_store_reads_again_too(
    tmp_path: Path,
    payload_bytes: int,
    times: int,
    make: Callable[[Times], Callable[[int], FileIo]],
    outcome: Outcome,
) -> None:
    """Straight into the caller's memory, and by a bounce."""
    path = tmp_path / "x.blocks"
    fill(path, payload_bytes)
    asked = [key_of(number) for number in (0, 3)]  # no neighbours
    choice = Times(3, payload_bytes, times)
    with store_on(path, geometry_of(payload_bytes), make(choice)) as store:
        assert store.wait_recovered(LONG_S)
        targets: Sequence[memoryview] = buffers(2, payload_bytes)
        outcomes = store.get_many(asked, targets, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK, Outcome.OK if times == 1 else outcome]
        assert len(choice.asked) == 3
        if times == 1:
            assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1] * NUM_SLOTS
            assert bytes(targets[1]) == bytes(payload_of(3, 1, payload_bytes))
