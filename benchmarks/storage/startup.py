"""From opening a block file of 100 GB to knowing all that is in it, as after a restart of the server."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.suite import expect
from benchmarks.timing import timed
from kvbm_core.storage.disk import allocate
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import (
    DIGEST_BYTES,
    SECTOR_BYTES,
    RecordHeader,
    pack_record_into,
    slot_offset_bytes,
)
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.types import SequenceHash, block_key

STORED_BYTES = 100 * 10**9
BLOCKS_BYTES = (256 << 10, 2 << 20)
FINGERPRINT = b"benchmark of a s"
DEADLINE_S = 600.0
THREADS = 8
BLOCKS_PER_CALL = 16
"""Written together, as a prompt's blocks are."""

log = logging.getLogger("kvbm")


def _goal(block_bytes: int) -> Goal:
    size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
    return Goal(f"start-up: all records of 100 GB known, blocks of {size}", "s", 10.0, "lower", LIMIT)


GOALS = tuple(map(_goal, BLOCKS_BYTES))


def measure(
    folder: Path, rounds: int, told: Callable[[str], None], stored_bytes: int = STORED_BYTES
) -> list[Figure]:
    """A figure per size of block. WrongAnswer if a record is not found again."""
    figures = []
    for goal, block_bytes in zip(GOALS, BLOCKS_BYTES, strict=True):
        told(f"storage: {goal.name}")
        geometry = Geometry(stored_bytes // block_bytes, block_bytes, FINGERPRINT)
        path = folder / "startup.blocks"
        with _sparse_files():
            try:
                fill(path, geometry)
                seconds = [opened_in_s(path, geometry) for _ in range(rounds)]
            finally:
                path.unlink(missing_ok=True)
        figures.append(Figure(goal, tuple(seconds)))
    return figures


def fill(path: Path, geometry: Geometry) -> None:
    """A file whose slots all hold a record; the blocks' own bytes, which nobody looks at here, are holes."""
    file = BlockFile(path, geometry)
    try:
        parts = [range(part, geometry.num_slots, THREADS) for part in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda slots: _write_headers(file, slots), parts))
        os.fsync(file.fd)
    finally:
        file.close()


def opened_in_s(path: Path, geometry: Geometry) -> float:
    """Seconds until a store on ``path`` knows every block."""
    opened: list[DiskStore] = []

    def open_and_wait() -> bool:
        opened.append(DiskStore(path, geometry))
        return opened[0].wait_recovered(DEADLINE_S)

    try:
        seconds, is_over = timed(open_and_wait)
        expect(is_over, f"not all of the file was looked at in {DEADLINE_S:.0f} s")
        found = opened[0].resident_blocks
        expect(found == geometry.num_slots, f"{found} of {geometry.num_slots} records were found again")
        return seconds
    finally:
        for store in opened:
            store.close()


def _write_headers(file: BlockFile, slots: range) -> None:
    geometry = file.geometry
    with mmap.mmap(-1, SECTOR_BYTES) as sector, memoryview(sector) as view:
        for slot in slots:
            key = block_key(SequenceHash(hashlib.sha256(slot.to_bytes(8, "big")).digest()), 0)
            digest = bytes(DIGEST_BYTES)
            header = RecordHeader(
                file.life,
                geometry.fingerprint,
                slot,
                1 + slot // BLOCKS_PER_CALL,
                geometry.payload_bytes,
                key,
                digest,
            )
            pack_record_into(view, header)
            os.pwritev(file.fd, [view], slot_offset_bytes(slot, geometry.payload_bytes))


@contextmanager
def _sparse_files() -> Iterator[None]:
    """Space is not reserved: the disk needs to hold the headers only."""
    level = log.level
    log.setLevel(logging.ERROR)  # that the file is sparse is meant here
    try:
        with patch.object(allocate, "_fallocate", lambda fd, num_bytes: False):
            yield
    finally:
        log.setLevel(level)
