"""Records of one block file read or written, many at a time, straight between memory and disk."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import OFF
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.bounce import BouncedBlocks
from kvbm_core.storage.disk.device_digest import device_digest
from kvbm_core.storage.disk.io import FileIo, TakesMemory, Transfer
from kvbm_core.storage.disk.record import (
    FREE,
    MAX_KEY_BYTES,
    NO_DEVICE_DIGEST,
    SECTOR_BYTES,
    UNREADABLE,
    RecordHeader,
    SlotHeader,
    judge_record,
    judge_slot,
    pack_record_into,
    payload_digest,
    pieces_digest,
    record_bytes,
    slot_offset_bytes,
    unpack_record,
)
from kvbm_core.storage.late import LATE
from kvbm_core.types import BlockKey

REQUEST_BYTES = 1 << 20
"""Records in neighbouring slots travel in one request of about so many bytes."""
WRITES_IN_FLIGHT_BYTES = 64 << 20
READS_IN_FLIGHT_BYTES = 24 << 20
"""Fewer: virtual disks report all that they have been given at once, and then there is to be more to read
meanwhile.
"""
SUBMITTED_BYTES = 1 << 20
"""Handed to the kernel together, while the headers of the next are made; larger requests alone."""
MAX_RECORDS = 512
"""Records in flight at most; each has a cell for its header."""
MAX_REQUEST_RECORDS = 128
MAX_REQUEST_PIECES = 1024
"""Linux takes no more pieces of memory in one request (UIO_MAXIOV)."""
MAX_RECORD_PIECES = MAX_REQUEST_PIECES - 1  # and its header

LOOK_S = 0.1
"""How soon a call that waits for the disk hears that it is to stop."""
SILENT_S = 0.2
PROBE_S = 1.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
"""After a call of at least SILENT_S in which the disk answered nothing, the next one has PROBE_S to hear
anything. If it does not, the disk is left alone: calls fail at once for so long, twice as long each time.
All is well again as soon as the disk answers anything, or what it owes has ended.
"""

MAY_PASS = frozenset({Outcome.IO_ERROR, Outcome.CORRUPT})

log = logging.getLogger("kvbm")

OnEnded = Callable[[Sequence[int], Sequence[Outcome]], None]
"""``on_ended(indices, outcomes)``: how these records of a call ended. Each is told of once."""


class Record(NamedTuple):
    """A block: its key, its slot in the file, and where its bytes are, or go to, in memory.

    ``pieces``: (address, bytes) of each where they are in several, up to MAX_RECORD_PIECES; ``address``: the
    first's.
    """

    key: BlockKey
    slot: int
    address: int
    pieces: tuple[tuple[int, int], ...] = ()


class Places(Protocol):
    """Memory in which blocks are for a while, one in each place."""

    @property
    def num_free(self) -> int:
        """Places that can be taken."""

    def give(self, place: int) -> None:
        """It can be taken again."""


class PlacedBlocks(Protocol):
    """The blocks of one call, which get their places when their turn comes. BouncedBlocks is one."""

    @property
    def bounce(self) -> Places:
        """Where the places are from."""

    def begin(self, index: int) -> int:
        """The place of block ``index``."""

    def end(self, index: int, place: int, outcome: Outcome) -> None:
        """It has been moved, or not; the place is free."""


class DeviceBlocks(PlacedBlocks, Protocol):
    """PlacedBlocks whose places hold whole records, header and all, and can be looked at by a device alone.

    What goes wrong with the device is raised; then nobody knows what became of the call.
    """

    def part(self, indices: Sequence[int]) -> DeviceBlocks:
        """The same for a call of these blocks alone."""

    def look(self, places: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """Of each: the record's first sector, and the device_digest of what follows."""

    def payload_digest(self, place: int) -> bytes:
        """The xxh3_128 of what follows, for which it is copied to host memory."""

    def deliver(self, indices: Sequence[int], places: Sequence[int]) -> None:
        """What was read to these places verifies: brings it where it belongs, before this returns."""


class _Run(NamedTuple):
    """Records (numbers of the call) in neighbouring slots, and the cells of their headers. ``pieces``: see
    Transfer.
    """

    indices: Sequence[int]
    cells: Sequence[int]
    pieces: Sequence[tuple[int, int]] = ()


class _Late(NamedTuple):
    """A request that was given up and is still in flight; ``token``: see LateMemory. ``addresses``: places of
    ``bounced``.
    """

    run: _Run
    token: int
    bounced: PlacedBlocks | None
    addresses: Sequence[int]


class RecordIo:
    """Reads or writes records of one file. One thread only; a file may have one for each direction.

    Memory at ``Record.address``: whole sectors from a sector's boundary on, ``record_bytes - SECTOR_BYTES``
    of them; so is each of several pieces, which together have as many bytes. Or the records' addresses are 0,
    and places come from ``bounced`` when their turn comes. A request that has not ended by its deadline is
    TIMED_OUT and still in flight: its memory is in ``LATE``. ``keep``: what must stay until then, beside
    this. What a disk that does not answer is not even asked for is TIMED_OUT too, and not in flight.
    """

    def __init__(
        self,
        file: BlockFile,
        io: FileIo,
        *,
        first_sequence: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._file = file
        self._io = io
        self._clock = clock or SystemClock()
        self._payload_bytes = file.geometry.payload_bytes
        self._stored_bytes = record_bytes(self._payload_bytes) - SECTOR_BYTES
        self._stamps_for_device = file.options.to_device != OFF and self._stored_bytes == self._payload_bytes
        self._next_sequence = first_sequence
        self._cells = mmap.mmap(-1, MAX_RECORDS * SECTOR_BYTES)
        self._cells_at = ctypes.addressof(ctypes.c_char.from_buffer(self._cells))
        whole = memoryview(self._cells)
        self._sectors = [
            whole[at : at + SECTOR_BYTES] for at in range(0, len(whole), SECTOR_BYTES)
        ]  # one of each cell
        if isinstance(io, TakesMemory):
            io.register(self._cells_at, len(self._cells), SECTOR_BYTES)
        self._payload_type = ctypes.c_char * self._payload_bytes
        self._free_cells = list(range(MAX_RECORDS))
        self._next_tag = 0
        self._late: dict[int, _Late] = {}
        self._stops_at_s = float("inf")
        self._pause_s = FIRST_PAUSE_S
        self._quiet_until_s = float("-inf")
        self._is_suspect = False

    def write(
        self,
        records: Sequence[Record],
        *,
        deadline_s: float,
        bounced: BouncedBlocks | None = None,
        keep: object = None,
    ) -> list[Outcome]:
        """OK: the disk has taken the record (a crash may still lose it).

        ValueError, and nothing is done, for a key that no record holds.
        """
        if wrong := [len(record.key) for record in records if not 0 < len(record.key) <= MAX_KEY_BYTES]:
            raise ValueError(f"a key of {wrong[0]} bytes does not go into a record")
        self._next_sequence += 1
        return _Move(self, records, deadline_s, None, bounced, is_write=True, keep=keep).run()

    def read(
        self,
        records: Sequence[Record],
        *,
        deadline_s: float,
        on_ended: OnEnded | None = None,
        bounced: BouncedBlocks | None = None,
        keep: object = None,
    ) -> list[Outcome]:
        """OK: the memory holds what was written under this key; else it holds garbage.

        MISS: another block is in that slot, or none; INCOMPATIBLE: one of another meaning; CORRUPT: it does
        not verify. What fails, or does not verify, is read once more within the same time: some errors have
        passed by then, of a bus, a driver or a page. ``on_ended`` hears of each record's last try alone.
        """

        def moves(indices: Sequence[int] | None, left_s: float, told: OnEnded | None) -> _Move:
            if indices is None:
                return _Move(self, records, left_s, told, bounced, is_write=False, keep=keep)
            part = None if bounced is None else bounced.part(indices)
            own = [records[i] for i in indices]
            return _Move(self, own, left_s, told, part, is_write=False, keep=keep)

        return self._read_twice(len(records), moves, deadline_s, on_ended)

    def read_to_device(
        self, records: Sequence[Record], blocks: DeviceBlocks, *, deadline_s: float
    ) -> list[Outcome]:
        """As ``read``, of records whose addresses are 0; what is OK has been delivered."""

        def moves(indices: Sequence[int] | None, left_s: float, told: OnEnded | None) -> _Move:
            if indices is None:
                return _DeviceRead(self, records, left_s, told, blocks)
            return _DeviceRead(self, [records[i] for i in indices], left_s, told, blocks.part(indices))

        return self._read_twice(len(records), moves, deadline_s, None)

    def _read_twice(
        self,
        num_records: int,
        moves: Callable[[Sequence[int] | None, float, OnEnded | None], _Move],
        deadline_s: float,
        on_ended: OnEnded | None,
    ) -> list[Outcome]:
        """``moves(indices, deadline_s, on_ended)`` reads these records, or all of them."""
        ends_at_s = self._clock.now_s() + deadline_s
        failed: list[int] = []

        def on_first(indices: Sequence[int], ended: Sequence[Outcome]) -> None:
            if not MAY_PASS.isdisjoint(ended):
                failed.extend(compress(indices, [outcome in MAY_PASS for outcome in ended]))
                is_over = [outcome not in MAY_PASS for outcome in ended]
                indices, ended = list(compress(indices, is_over)), list(compress(ended, is_over))
            if on_ended is not None and indices:
                on_ended(indices, ended)

        outcomes = moves(None, deadline_s, on_first).run()
        left_s = ends_at_s - self._clock.now_s()
        if failed and left_s > 0:  # without time a request would be in flight, and late, at once
            again = moves(failed, left_s, None).run()
            if num_good := again.count(Outcome.OK):  # what stays bad is told by whoever asked
                line = "kvbm: %s: %d of %d blocks read again, %d are good now"
                log.warning(line, self._file.path, len(failed), num_records, num_good)
            for index, outcome in zip(failed, again, strict=True):
                outcomes[index] = outcome
        if failed and on_ended is not None:
            on_ended(failed, [outcomes[index] for index in failed])
        return outcomes

    def headers(self, slots: Sequence[int], *, deadline_s: float) -> list[SlotHeader]:
        """What stands in these slots, of this life of the file."""
        move = _HeaderRead(self, [Record(BlockKey(b""), slot, 0) for slot in slots], deadline_s)
        move.run()
        return move.found

    def reap(self) -> None:
        """Notes which of the requests that were given up have ended."""
        if self._late and self._io.in_flight:
            for tag, _ in self._io.collect(0.0):
                self._forget_late(tag)

    @property
    def late_requests(self) -> int:
        """Requests that were given up and have not ended."""
        return len(self._late)

    def stop(self, within_s: float) -> None:
        """A call under way gives up in so many seconds at the latest, one that is made later at once. Any
        thread.
        """
        self._stops_at_s = min(self._stops_at_s, self._clock.now_s() + within_s)

    def _digest(self, record: Record) -> bytes:
        if record.pieces:
            return pieces_digest(record.pieces)
        return payload_digest(self._payload_type.from_address(record.address))

    def _device_digest(self, record: Record) -> bytes:
        if record.pieces or not self._stamps_for_device:
            return NO_DEVICE_DIGEST
        payload = memoryview(self._payload_type.from_address(record.address))
        return device_digest(np.frombuffer(payload, np.uint8))

    def _is_left_alone(self) -> bool:
        self.reap()
        self._is_suspect &= bool(self._late)
        return self._is_suspect and self._clock.now_s() < self._quiet_until_s

    def _leave_alone(self) -> None:
        self._quiet_until_s = self._clock.now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self, timeout_s: float) -> bool:
        """False if a request is still in flight: then the file has to stay open."""
        if not self._io.close(timeout_s):
            return False
        for tag in list(self._late):
            self._forget_late(tag)
        return True

    def _forget_late(self, tag: int) -> None:
        run, token, bounced, addresses = self._late.pop(tag)
        self._free_cells += run.cells
        if bounced is not None:
            for address in addresses:
                bounced.bounce.give(address)
        LATE.end(token)


class _Move:
    """One call of a RecordIo."""

    joins_neighbours = True

    def __init__(
        self,
        owner: RecordIo,
        records: Sequence[Record],
        deadline_s: float,
        on_ended: OnEnded | None,
        bounced: PlacedBlocks | None = None,
        *,
        is_write: bool,
        keep: object = None,
    ) -> None:
        self._owner = owner
        self._records = list(records)
        self._bounced = bounced
        self._keep = keep
        self._deadline_at_s = owner._clock.now_s() + deadline_s
        self._on_ended = on_ended
        self._is_write = is_write
        self._outcomes: list[Outcome | None] = [None] * len(records)
        self._in_flight: dict[int, _Run] = {}
        self._in_flight_records = 0
        self._num_ended = 0
        self._began_at_s = 0.0
        self._bytes_each = self._piece_bytes()
        self._waiting = deque(self._runs())
        self._most_in_flight_bytes = WRITES_IN_FLIGHT_BYTES if is_write else READS_IN_FLIGHT_BYTES
        if (
            bounced is not None and not is_write
        ):  # half of a small call, so that it too has something to read meanwhile
            half_bytes = max(REQUEST_BYTES, len(records) * self._bytes_each // 2)
            self._most_in_flight_bytes = min(self._most_in_flight_bytes, half_bytes)

    def run(self) -> list[Outcome]:
        """Until all have ended, time is over, or it is to stop."""
        self._began_at_s = self._owner._clock.now_s()
        try:
            if not self._owner._is_left_alone():
                self._move()
        finally:
            self._give_up()
        return [outcome or Outcome.TIMED_OUT for outcome in self._outcomes]

    def _move(self) -> None:
        owner = self._owner
        while self._waiting or self._in_flight:
            ends_at_s = min(self._deadline_at_s, owner._stops_at_s)
            if owner._is_suspect and not self._num_ended:
                ends_at_s = min(ends_at_s, self._began_at_s + PROBE_S)
            left_s = ends_at_s - owner._clock.now_s()
            if left_s <= 0:
                return
            self._start()
            ended = [(self._take_out(tag), moved) for tag, moved in owner._io.collect(min(left_s, LOOK_S))]
            self._start()  # first: the disk is not to wait for checksums
            for run, moved in ended:
                if run is not None:
                    self._end(run, moved)

    def _take_out(self, tag: int) -> _Run | None:
        """The run that has ended; None for one of an earlier call that had been given up."""
        run = self._in_flight.pop(tag, None)
        if run is None:
            self._owner._forget_late(tag)
        else:
            self._in_flight_records -= len(run.indices)
            self._num_ended += 1
        return run

    # ---------------------------------------------------------------- what a subclass does otherwise

    def _piece_bytes(self) -> int:
        return SECTOR_BYTES + self._owner._stored_bytes

    def _pieces(self, run: _Run) -> list[tuple[int, int]]:
        """(address, bytes) of each record's header and payload, ready to be moved."""
        owner, records = self._owner, self._records
        if self._bounced is not None:
            for index in run.indices:
                key, slot, _, _ = records[index]
                records[index] = Record(key, slot, self._bounced.begin(index))
        if self._is_write:
            self._fill_cells(run)
        pieces: list[tuple[int, int]] = []
        for index, cell in zip(run.indices, run.cells, strict=True):
            pieces.append((owner._cells_at + cell * SECTOR_BYTES, SECTOR_BYTES))
            pieces += records[index].pieces or ((records[index].address, owner._stored_bytes),)
        return pieces

    def _judge(self, run: _Run) -> list[Outcome]:
        """How records that were read ended."""
        owner, file, outcomes = self._owner, self._owner._file.header, list[Outcome]()
        for index, cell in zip(run.indices, run.cells, strict=True):
            record, header = self._records[index], unpack_record(owner._sectors[cell])
            outcome = judge_record(header, record.key, record.slot, file)
            if header is not None and outcome is Outcome.OK and owner._digest(record) != header.digest:
                outcome = Outcome.CORRUPT
            outcomes.append(outcome)
        return outcomes

    def _fill_cells(self, run: _Run) -> None:
        """Headers of records that are to be written."""
        owner, life, geometry = self._owner, self._owner._file.life, self._owner._file.geometry
        for index, cell in zip(run.indices, run.cells, strict=True):
            key, slot, _, _ = record = self._records[index]
            digest = owner._digest(record)
            header = RecordHeader(
                *(
                    life,
                    geometry.fingerprint,
                    slot,
                    owner._next_sequence,
                    geometry.payload_bytes,
                    key,
                    digest,
                    owner._device_digest(record),
                )
            )
            pack_record_into(owner._sectors[cell], header)

    # ---------------------------------------------------------------- requests

    def _runs(self) -> list[list[int]]:
        """Neighbours in the file together, up to a request's size; in the order of the slots."""
        most = max(1, min(MAX_REQUEST_RECORDS, REQUEST_BYTES // self._bytes_each))
        runs: list[list[int]] = []
        last_slot, num_pieces = -1, 0
        for index in sorted(range(len(self._records)), key=lambda index: self._records[index].slot):
            slot, more = self._records[index].slot, 1 + (len(self._records[index].pieces) or 1)
            is_next = slot == last_slot + 1 and num_pieces + more <= MAX_REQUEST_PIECES
            if runs and is_next and len(runs[-1]) < most and self.joins_neighbours:
                runs[-1].append(index)
                num_pieces += more
            else:
                runs.append([index])
                num_pieces = more
            last_slot = slot
        return runs

    def _start(self) -> None:
        owner = self._owner
        most = max(1, self._most_in_flight_bytes // self._bytes_each)
        transfers: list[Transfer] = []
        num_bytes = 0
        while self._waiting and self._in_flight_records < most and self._has_room():
            indices = self._waiting.popleft()
            self._in_flight_records += len(indices)
            cells = [owner._free_cells.pop() for _ in indices]
            pieces = self._pieces(_Run(indices, cells))
            offset_bytes = slot_offset_bytes(self._records[indices[0]].slot, owner._payload_bytes)
            self._in_flight[owner._next_tag] = _Run(indices, cells, pieces)
            transfers.append(Transfer(owner._next_tag, offset_bytes, pieces))
            owner._next_tag += 1
            num_bytes += len(indices) * self._bytes_each
            if num_bytes >= SUBMITTED_BYTES:
                owner._io.submit(transfers, is_write=self._is_write)
                transfers, num_bytes = [], 0
        if transfers:
            owner._io.submit(transfers, is_write=self._is_write)

    def _has_room(self) -> bool:
        """Whether the first of those that wait has cells, and places; if there are some, but too few, it is
        cut.
        """
        first = self._waiting[0]
        if self._bounced is not None and 0 < (num_free := self._bounced.bounce.num_free) < len(first):
            self._waiting[0] = first[num_free:]
            self._waiting.appendleft(first := first[:num_free])
        is_placed = self._bounced is None or self._bounced.bounce.num_free > 0
        return is_placed and len(first) <= len(self._owner._free_cells)

    def _end(self, run: _Run, moved: int) -> None:
        is_whole = moved == len(run.indices) * self._bytes_each
        if not is_whole and len(run.indices) > 1:
            # One bad place shall not cost its neighbours: each by itself, once.
            self._waiting.extend([index] for index in run.indices)
            self._leave_places(run.indices, [Outcome.IO_ERROR] * len(run.indices))
        else:
            outcomes = [Outcome.OK if is_whole else self._failure(moved)] * len(run.indices)
            if is_whole and not self._is_write:
                outcomes = self._judge(run)
            self._leave_places(run.indices, outcomes)
            self._finish(run.indices, outcomes)
        self._owner._free_cells += run.cells

    def _failure(self, moved: int) -> Outcome:
        if self._is_write and (moved >= 0 or -moved in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return Outcome.NO_SPACE
        # The file ends before the record does: nothing was ever written there.
        return Outcome.MISS if moved >= 0 else Outcome.IO_ERROR

    def _leave_places(self, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        if self._bounced is not None:
            for index, outcome in zip(indices, outcomes, strict=True):
                self._bounced.end(index, self._records[index].address, outcome)

    def _finish(self, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        for index, outcome in zip(indices, outcomes, strict=True):
            self._outcomes[index] = outcome
        if self._on_ended is not None:
            self._on_ended(indices, outcomes)

    def _give_up(self) -> None:
        owner = self._owner
        if self._num_ended:
            owner._pause_s, owner._is_suspect = FIRST_PAUSE_S, False
        elif self._in_flight and owner._clock.now_s() - self._began_at_s >= SILENT_S:
            if owner._is_suspect:
                owner._leave_alone()
            owner._is_suspect = True
        for tag, run in self._in_flight.items():
            spans = ((address, address + num_bytes) for address, num_bytes in run.pieces)
            token = LATE.add(spans, (owner, self._bounced, self._keep))
            addresses = [self._records[index].address for index in run.indices]
            owner._late[tag] = _Late(run, token, self._bounced, addresses)
        self._in_flight.clear()
        self._in_flight_records = 0
        self._waiting.clear()
        if left := [index for index, outcome in enumerate(self._outcomes) if outcome is None]:
            self._finish(left, [Outcome.TIMED_OUT] * len(left))


class _DeviceRead(_Move):
    """Whole records, to memory of a device."""

    def __init__(
        self,
        owner: RecordIo,
        records: Sequence[Record],
        deadline_s: float,
        on_ended: OnEnded | None,
        blocks: DeviceBlocks,
    ) -> None:
        self._blocks = blocks
        super().__init__(owner, records, deadline_s, on_ended, blocks, is_write=False)

    def _pieces(self, run: _Run) -> list[tuple[int, int]]:
        for index in run.indices:
            key, slot, _, _ = self._records[index]
            self._records[index] = Record(key, slot, self._blocks.begin(index))
        return [(self._records[index].address, self._bytes_each) for index in run.indices]

    def _judge(self, run: _Run) -> list[Outcome]:
        file, outcomes = self._owner._file.header, list[Outcome]()
        records = [self._records[index] for index in run.indices]
        looked = self._blocks.look([record.address for record in records])
        for record, (sector, digest) in zip(records, looked, strict=True):
            header = unpack_record(sector)
            outcome = judge_record(header, record.key, record.slot, file)
            if header is not None and outcome is Outcome.OK:
                is_whole = digest == header.device_digest
                if header.device_digest == NO_DEVICE_DIGEST:  # of a kvbm without it, or with the setting off
                    is_whole = self._blocks.payload_digest(record.address) == header.digest
                outcome = Outcome.OK if is_whole else Outcome.CORRUPT
            outcomes.append(outcome)
        return outcomes

    def _leave_places(self, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        good = [index for index, outcome in zip(indices, outcomes, strict=True) if outcome is Outcome.OK]
        if good:
            self._blocks.deliver(good, [self._records[index].address for index in good])
        super()._leave_places(indices, outcomes)


class _HeaderRead(_Move):
    """Headers alone."""

    joins_neighbours = False  # their payloads lie between them

    def __init__(self, owner: RecordIo, records: Sequence[Record], deadline_s: float) -> None:
        self.found = [FREE] * len(records)
        super().__init__(owner, records, deadline_s, None, is_write=False)

    def _piece_bytes(self) -> int:
        return SECTOR_BYTES

    def _pieces(self, run: _Run) -> list[tuple[int, int]]:
        return [(self._owner._cells_at + cell * SECTOR_BYTES, SECTOR_BYTES) for cell in run.cells]

    def _judge(self, run: _Run) -> list[Outcome]:
        owner, file = self._owner, self._owner._file.header
        for index, cell in zip(run.indices, run.cells, strict=True):
            self.found[index] = judge_slot(owner._sectors[cell], self._records[index].slot, file)
        return [Outcome.OK] * len(run.indices)

    def _finish(self, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        super()._finish(indices, outcomes)
        for index, outcome in zip(indices, outcomes, strict=True):
            if outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT):
                self.found[index] = UNREADABLE
