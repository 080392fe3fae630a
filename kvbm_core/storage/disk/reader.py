"""A block file that another process writes, as a BlockStore to read from."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, ReadsAlone, check_blocks, check_targets
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFileView, Geometry
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.storage.disk.slot_log import LogFollower, LogHeader
from kvbm_core.storage.disk.store import CLOSE_TIMEOUT_S, STOP_TIMEOUT_S
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.types import BlockKey

SCAN_DEADLINE_S = 10.0
_NOT_WHAT_IT_WAS = (Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE)


class DiskReader(ReadsAlone):
    """Reads what a DiskStore of another process that ``shares`` has in the same file. Safe to call from any
    thread.

    It takes no lock of the writer's and may be there before it, and after it. What the writer has put is
    found from then on; what it removed, until the slot is used again. All checks are those of a DiskStore's
    reads, but a block that does not pass them is a MISS here: that the writer is just putting another one in
    its slot looks the same. ``geometry``: as the writer has it, where ``num_slots`` does not matter.
    ``reads_straight``: see DiskStore.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        options: FileOptions | None = None,
        *,
        clock: Clock | None = None,
        reads_straight: bool = True,
    ) -> None:
        self._path = path
        self._geometry = geometry
        self._options = options
        self._clock = clock or SystemClock()
        self._reads_straight = reads_straight
        self._books = threading.Lock()
        self._log = LogFollower(path, geometry)
        self._followed: LogHeader | None = None
        self._places = _Places()
        self._closed = False
        self._reading = threading.Lock()  # in place of the locks of all of them
        self._opened: _Opened | None = None
        self._opened_for: LogHeader | None = None
        self._left: list[_Opened] = []

    def holds(self, target: Memory) -> bool:
        """Whether a late read may still write into it."""
        with self._reading:
            for file in self._files():
                file.block_io.record_io.reap()
        return LATE.holds(ranges_of(target))

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore; no I/O but for what the writer has appended to its log."""
        self._follow(self._clock.now_s() + deadline_s)
        with self._books:
            if self._closed:
                return [Outcome.REJECTED] * len(keys)
            return [Outcome.MISS if self._places.of(key) is None else Outcome.OK for key in keys]

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. A block that does not verify is a MISS, and forgotten until the writer puts it
        again.
        """
        check_blocks(keys, targets, self._geometry.payload_bytes)
        check_targets(targets)
        deadline_at_s = self._clock.now_s() + deadline_s
        if not self._reading.acquire(timeout=max(0.0, deadline_s)):
            return [Outcome.BUSY] * len(keys)
        try:
            self._follow(deadline_at_s)
            with self._books:
                if self._closed:
                    return [Outcome.REJECTED] * len(keys)
                found = [
                    (i, place) for i, key in enumerate(keys) if (place := self._places.of(key)) is not None
                ]
                header = self._followed
            outcomes = [Outcome.MISS] * len(keys)
            if found and header is not None:
                blocks = [(keys[i], place.slot) for i, place in found]
                read = self._read(blocks, [targets[i] for i, _ in found], header, deadline_at_s)
                for (i, _), outcome in zip(found, read, strict=True):
                    outcomes[i] = Outcome.MISS if outcome in _NOT_WHAT_IT_WAS else outcome
                with self._books:
                    for i, place in found:
                        if outcomes[i] is Outcome.MISS:
                            self._places.forget(keys[i], place)
            return outcomes
        finally:
            self._reading.release()

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore."""
        self._follow(self._clock.now_s() + SCAN_DEADLINE_S)
        with self._books:
            return iter(self._places.keys())

    def close(self) -> None:
        """See BlockStore; as DiskStore's, some seconds at most."""
        opened = self._opened
        if opened is not None:
            opened.block_io.record_io.stop(STOP_TIMEOUT_S)
        with self._reading, self._books:
            self._closed = True
            self._log.close()
            for file in self._files():
                file.close()
            self._opened, self._left = None, []

    # ---------------------------------------------------------------- inside

    def _follow(self, deadline_at_s: float) -> None:
        """Takes in what the writer has appended; at least some of it, whatever the time."""
        while True:
            with self._books:
                if self._closed:
                    return
                blocks = self._log.read_on()
                self._turn_to(self._log.header)
                if blocks is None:
                    return
                for key, slot in blocks:
                    self._places.take(key, slot)
            if self._clock.now_s() >= deadline_at_s:
                return

    def _turn_to(self, header: LogHeader | None) -> None:
        """Another log of the same life says all that counts again; without one, or in a new life, nothing
        does.
        """
        last, self._followed = self._followed, header
        if header is None or last is None or (header.life, header.num_slots) != (last.life, last.num_slots):
            self._places.clear()

    def _read(
        self,
        blocks: Sequence[tuple[BlockKey, int]],
        targets: Sequence[Memory],
        header: LogHeader,
        deadline_at_s: float,
    ) -> list[Outcome]:
        try:
            opened = self._open_for(header)
        except FileNotFoundError:
            return [Outcome.MISS] * len(blocks)
        except OSError:
            return [Outcome.IO_ERROR] * len(blocks)
        opened.view.life = header.life
        return opened.block_io.transfer(blocks, targets, deadline_s=deadline_at_s - self._clock.now_s())

    def _open_for(self, header: LogHeader) -> _Opened:
        """The file that this log is of. A writer that makes a new one begins a new log after it."""
        if self._opened is not None and self._opened_for is not header:
            status = os.stat(self._path)
            if not os.path.samestat(status, os.fstat(self._opened.view.fd)):
                self._leave_files()
        if self._opened is None:
            view = BlockFileView(self._path, self._geometry, self._options)
            try:
                is_straight = self._reads_straight
                block_io = BlockIo(view, self._clock, is_write=False, is_straight=is_straight)
            except BaseException:
                view.close()
                raise
            self._opened = _Opened(view, block_io)
        self._opened_for = header
        return self._opened

    def _files(self) -> list[_Opened]:
        return [*self._left, self._opened] if self._opened is not None else self._left

    def _leave_files(self) -> None:
        """Closes them all, but those that a late read still needs."""
        files, self._opened, self._left = self._files(), None, []
        for file in files:
            file.block_io.record_io.reap()
            if file.block_io.record_io.late_requests:
                self._left.append(file)
            else:
                file.close()


class _Opened(NamedTuple):
    view: BlockFileView
    block_io: BlockIo

    def close(self) -> None:
        if self.block_io.close(CLOSE_TIMEOUT_S):
            self.view.close()


class _Place(NamedTuple):
    """By what one entry of the log says; another entry is another object, also if it says the same."""

    slot: int


class _Places:
    """Keys and slots, one to one: the last that was heard of each."""

    def __init__(self) -> None:
        self._place_of: dict[BlockKey, _Place] = {}
        self._key_in: dict[int, BlockKey] = {}

    def of(self, key: BlockKey) -> _Place | None:
        return self._place_of.get(key)

    def keys(self) -> list[BlockKey]:
        return list(self._place_of)

    def take(self, key: BlockKey, slot: int) -> None:
        """The block is in this slot now, in no other, and nothing else is in it."""
        last_key, last_place = self._key_in.get(slot), self._place_of.get(key)
        if last_key is not None:
            del self._place_of[last_key]
        if last_place is not None:
            del self._key_in[last_place.slot]
        self._place_of[key], self._key_in[slot] = _Place(slot), key

    def forget(self, key: BlockKey, place: _Place) -> None:
        """Unless something newer was heard of it."""
        if self._place_of.get(key) is place:
            del self._place_of[key], self._key_in[place.slot]

    def clear(self) -> None:
        self._place_of.clear()
        self._key_in.clear()
