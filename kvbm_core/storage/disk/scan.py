"""All that is in a block file, read and checked: for a start, and for ``kvbm disk``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.bounce import BounceBuffers, BouncedBlocks
from kvbm_core.storage.disk.io import FileIo, TakesMemory
from kvbm_core.storage.disk.record import RecordHeader, SlotHeader, record_bytes
from kvbm_core.storage.disk.record_io import Record, RecordIo

CHUNK_SLOTS = 4096
"""Whose headers are read together."""
IN_FLIGHT_BYTES = 8 << 20
"""Of memory, and at the disk at once: enough for its full speed or nearly so, and little for a load to wait
behind.
"""
STEP_BYTES = 32 << 20
"""Of whole records that are read together."""
DEADLINE_S = 60.0
"""Of each of these."""
SCAN_DEPTH = 128
"""Requests that ``io`` should take at once."""
NOWHERE = memoryview(b"")


class RecordScan:
    """Reads by ``io``, which it closes. One thread only, but for ``stop``."""

    def __init__(self, file: BlockFile, io: FileIo, clock: Clock | None = None) -> None:
        self._io = io
        self._record_io = RecordIo(file, io, clock=clock)
        self._num_slots = file.geometry.num_slots
        self._payload_bytes = file.geometry.payload_bytes
        self.record_bytes = record_bytes(self._payload_bytes)
        self._bounce: BounceBuffers | None = None

    def chunks(self) -> Iterator[tuple[range, list[SlotHeader]]]:
        """All slots in ascending order, CHUNK_SLOTS at a time, and what stands in them."""
        for start in range(0, self._num_slots, CHUNK_SLOTS):
            slots = range(start, min(start + CHUNK_SLOTS, self._num_slots))
            yield slots, self.headers(slots)

    def headers(self, slots: Sequence[int]) -> list[SlotHeader]:
        """What stands in these slots; only their headers are read."""
        return self._record_io.headers(slots, deadline_s=DEADLINE_S)

    def check(self, headers: Sequence[RecordHeader]) -> Iterator[tuple[RecordHeader, Outcome]]:
        """Reads these records whole, a few at a time; see RecordIo.read for the outcomes."""
        if self._bounce is None:
            self._bounce = BounceBuffers(self._payload_bytes, IN_FLIGHT_BYTES)
            if isinstance(self._io, TakesMemory):
                self._bounce.register(self._io)
        step_records = max(1, STEP_BYTES // self.record_bytes)
        for start in range(0, len(headers), step_records):
            step = headers[start : start + step_records]
            records = [Record(header.key, header.slot, 0) for header in step]
            nowhere = BouncedBlocks(self._bounce, [NOWHERE] * len(step), is_write=False)
            outcomes = self._record_io.read(records, deadline_s=DEADLINE_S, bounced=nowhere)
            yield from zip(step, outcomes, strict=True)

    def stop(self, within_s: float) -> None:
        """What is under way ends in so many seconds at the latest. Any thread."""
        self._record_io.stop(within_s)

    def close(self, timeout_s: float) -> bool:
        """False if something may still be read by the file's number: the file has to stay open."""
        return self._record_io.close(timeout_s)
