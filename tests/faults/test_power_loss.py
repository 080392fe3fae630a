"""Power goes at any moment, and the disk keeps what it likes of what was not synced: no wrong byte is
answered.

``KVBM_FAULT_STATES`` says how many disks are looked at.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import block_io, recovery
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.record import SECTOR_BYTES, whole_sectors
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.storage.disk.recovery import Found, Recovery
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.file_io_contract import memory_of
from kvbm_core.testing.store_contract import LONG_S
from kvbm_core.testing.torn_disk import DEVICE_SECTOR_BYTES, HARSH, MILD, UNEVEN, PowerLoss, TornDisk, TornIo
from tests.effort import tries
from tests.faults.versions import put_versions, read_all

NUM_STATES = int(os.environ.get("KVBM_FAULT_STATES") or tries(400, nightly=2000))
STATES_OF_A_HISTORY = 100
ON_A_FILE_EVERY = 20
"""One state in so many is written to a real file, and read from it."""
NUM_SLOTS, NUM_KEYS = 8, 12
BUFFERED = FileOptions(is_direct=False)


class Moment(NamedTuple):
    """After ``num_events`` of the disk: versions to ``newest`` were put, those to ``cleared`` forgotten for
    good.
    """

    num_events: int
    newest: int
    cleared: int


class History(NamedTuple):
    """What was written to a store, and when."""

    disk: TornDisk
    moments: list[Moment]
    geometry: Geometry

    def allowed_at(self, num_events: int) -> tuple[int, int]:
        """(oldest, newest) versions that may be there if power goes after so many events; 1-based."""
        passed = [moment for moment in self.moments if moment.num_events <= num_events]
        newest = next((moment.newest for moment in self.moments if moment.num_events >= num_events), 0)
        return max((moment.cleared for moment in passed), default=0) + 1, newest


@contextmanager
def on_disk(disk: TornDisk) -> Iterator[None]:
    """Stores opened meanwhile read and write ``disk``; only the file's own header is in a file too."""

    def make_io(fd: int, *, is_direct: bool, depth: int = 0) -> FileIo:
        return TornIo(disk)

    write_header, begin_new_life = BlockFile._write_header, BlockFile.begin_new_life

    def recorded_header(file: BlockFile) -> None:
        write_header(file)
        disk.write(0, os.pread(file.fd, SECTOR_BYTES, 0))

    def recorded_life(file: BlockFile) -> None:
        begin_new_life(file)
        disk.sync()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_io, "make_file_io", make_io)
        patch.setattr(recovery, "make_file_io", make_io)
        patch.setattr(BlockFile, "_write_header", recorded_header)
        patch.setattr(BlockFile, "begin_new_life", recorded_life)
        yield


def make_history(path: Path, payload_bytes: int, rng: Random) -> History:
    """Puts, evictions, removals, some forgetting of everything, and a restart or two."""
    geometry = Geometry(NUM_SLOTS, payload_bytes, b"power loss".ljust(16))
    disk = TornDisk(bytes(geometry.file_bytes))
    moments, version, cleared = [Moment(0, 0, 0)], 0, 0
    path.unlink(missing_ok=True)
    with on_disk(disk):
        store = DiskStore(path, geometry, BUFFERED)
        for _ in range(30):
            what = rng.random()
            if what < 0.06:
                store.clear()
                cleared = version
            elif what < 0.12:
                store.close()
                store = DiskStore(path, geometry, BUFFERED)
            assert store.wait_recovered(LONG_S)
            version += 1
            put_versions(
                store, dict.fromkeys(rng.sample(range(NUM_KEYS), rng.randrange(1, 5)), version), payload_bytes
            )
            moments.append(Moment(disk.num_events, version, cleared))
        store.close()
    return History(disk, moments, geometry)


def check_state(
    history: History, state: bytes, allowed: tuple[int, int], path: Path, *, from_file: bool
) -> list[Outcome]:
    """Opens what is left, reads everything, and goes on writing."""
    payload_bytes = history.geometry.payload_bytes
    path.write_bytes(state if from_file else state[:SECTOR_BYTES])
    disk = TornDisk(state)
    with on_disk(disk), pytest.MonkeyPatch.context() as patch:
        if from_file:
            patch.setattr(block_io, "make_file_io", make_file_io)
            patch.setattr(recovery, "make_file_io", make_file_io)
        store = DiskStore(path, history.geometry, BUFFERED)
        try:
            assert store.wait_recovered(LONG_S)
            outcomes, versions = read_all(store, NUM_KEYS, payload_bytes)
            oldest, newest = allowed
            assert all(oldest <= version <= newest for version in versions if version is not None), (
                versions,
                allowed,
            )
            assert put_versions(store, {0: 1 << 40, 1: 1 << 40}, payload_bytes) == [Outcome.OK] * 2
            _, versions = read_all(store, 2, payload_bytes)
            assert versions == [1 << 40] * 2, "the file can be used again"
        finally:
            store.close()
    return outcomes


@pytest.mark.timeout(300 + NUM_STATES // 10)
def test_no_loss_of_power_costs_a_byte(tmp_path: Path, rng: Random, tell: Callable[[str], None]) -> None:
    started_s = time.monotonic()
    counts: dict[PowerLoss, Counter[Outcome]] = {loss: Counter() for loss in (MILD, UNEVEN, HARSH)}
    history = None
    for number in range(NUM_STATES):
        if history is None or number % STATES_OF_A_HISTORY == 0:
            history = make_history(tmp_path / "history.blocks", rng.choice((8192, 5000)), rng)
        loss = rng.choice((MILD, MILD, UNEVEN, HARSH))
        num_events = rng.randrange(history.disk.num_events + 1)
        state = history.disk.after_loss(rng, loss, num_events)
        from_file = number % ON_A_FILE_EVERY == 0
        allowed = history.allowed_at(num_events)
        counts[loss].update(
            check_state(history, state, allowed, tmp_path / "state.blocks", from_file=from_file)
        )
    took_s = time.monotonic() - started_s
    total = sum(counts.values(), Counter[Outcome]())
    told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(total.items()))
    tell(f"{NUM_STATES} states after a loss of power in {took_s:.1f} s, no wrong byte; reads: {told}")
    assert set(total) <= {Outcome.OK, Outcome.MISS, Outcome.CORRUPT}
    assert counts[MILD][Outcome.OK] > counts[MILD][Outcome.CORRUPT] > 0, (
        "both are seen, or this test sees nothing"
    )
    assert counts[UNEVEN][Outcome.OK] > 0 and counts[HARSH][Outcome.CORRUPT] > 0


def readable(file: BlockFile, disk: TornDisk, found: list[Found]) -> list[Found]:
    """Those that a load would get, each read by itself and by nothing that recovery uses of its own."""
    record_io, memory = RecordIo(file, TornIo(disk)), memory_of(whole_sectors(file.geometry.payload_bytes))
    records = [Record(each.key, each.slot, memory.ctypes.data) for each in found]
    good = [record_io.read([record], deadline_s=LONG_S) == [Outcome.OK] for record in records]
    assert record_io.close(LONG_S)
    return [each for each, is_good in zip(found, good, strict=True) if is_good]


def found_on(file: BlockFile, disk: TornDisk, *, checks: bool) -> list[Found]:
    """What a restart finds."""
    found: list[Found] = []
    file.options = replace(file.options, check_at_start=checks)
    looking = Recovery(file, lambda end, new: found.extend(new), make_io=lambda: TornIo(disk))
    assert looking.wait(LONG_S)
    looking.close()
    assert looking.failure is None
    return found


@pytest.mark.timeout(300 + NUM_STATES // 10)
def test_what_a_checked_recovery_finds_can_be_loaded(tmp_path: Path, rng: Random) -> None:
    """After any loss of power, and nothing that could be is missing; headers alone would have promised
    more.
    """
    num_found, num_left_out, history = 0, 0, None
    path = tmp_path / "state.blocks"
    for number in range(-(-NUM_STATES // 2)):
        if history is None or number % STATES_OF_A_HISTORY == 0:
            history = make_history(tmp_path / "history.blocks", rng.choice((8192, 5000)), rng)
        num_events = rng.randrange(history.disk.num_events + 1)
        state = history.disk.after_loss(rng, rng.choice((MILD, MILD, UNEVEN, HARSH)), num_events)
        path.write_bytes(state[:SECTOR_BYTES])
        disk = TornDisk(state)
        file = BlockFile(path, history.geometry, BUFFERED)
        try:
            by_header = found_on(file, disk, checks=False)
            expected = readable(file, disk, by_header)
            assert found_on(file, disk, checks=True) == expected
        finally:
            file.close()
        num_found += len(expected)
        num_left_out += len(by_header) - len(expected)
    assert num_found > num_left_out > 0, "both are seen, or this test sees nothing"


# ---------------------------------------------------------------- the model itself


def test_what_was_synced_stays_and_what_was_not_may_be_anything(rng: Random) -> None:
    size = 8 * DEVICE_SECTOR_BYTES
    old, synced, new = (bytes([value]) * size for value in b"osn")
    disk = TornDisk(old)
    disk.write(0, synced)
    disk.sync()
    disk.write(DEVICE_SECTOR_BYTES, new[: 6 * DEVICE_SECTOR_BYTES])
    assert disk.image == synced[:512] + new[: 6 * 512] + synced[:512]
    seen: set[int] = set()
    for _ in range(200):
        state = disk.after_loss(rng, HARSH, disk.num_events)
        assert state[:512] == state[-512:] == synced[:512]
        seen |= set(state)
    assert seen == {*b"sn", 0}, "kept, dropped and zeroed, and nothing from before the sync"
    assert disk.after_loss(rng, HARSH, 0) == old, "nothing was given yet"
    assert disk.after_loss(rng, HARSH, 2) == synced
    mixed = {disk.after_loss(rng, PowerLoss(0, 0, 1, 0), 3)[512:1024] for _ in range(50)}
    assert any(set(sector) == set(b"sn") for sector in mixed), "torn within a sector"


def test_a_store_without_checksums_would_be_caught(
    tmp_path: Path, rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are bad enough: with payloads that are not checked, wrong bytes come out."""
    from kvbm_core.storage.disk import record_io

    monkeypatch.setattr(record_io, "payload_digest", lambda payload: bytes(16))
    history = make_history(tmp_path / "history.blocks", 8192, rng)
    with pytest.raises(AssertionError, match="wrong bytes"):
        for _ in range(300):
            num_events = rng.randrange(history.disk.num_events + 1)
            state = history.disk.after_loss(rng, MILD, num_events)
            allowed = history.allowed_at(num_events)
            check_state(history, state, allowed, tmp_path / "state.blocks", from_file=False)
