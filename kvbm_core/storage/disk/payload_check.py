"""Records that were found by their headers, read whole and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.bounce import Bounce, Bounced
from kvbm_core.storage.disk.io import FileIo, TakesMemory
from kvbm_core.storage.disk.lane import Lane, Record
from kvbm_core.storage.disk.record import RecordHeader, record_bytes

IN_FLIGHT_BYTES = 8 << 20
"""Of memory, and at the disk at once: enough for its full speed or nearly so, and little for a load to wait
behind.
"""
STEP_BYTES = 32 << 20
"""Read between two looks at whether to stop."""
STEP_DEADLINE_S = 60.0
NOWHERE = memoryview(b"")


class PayloadCheck:
    """Reads by ``lane``, whose ``io`` this is, into memory of its own. One thread only.

    ``outcomes``: of all records that were read.
    """

    def __init__(self, file: BlockFile, lane: Lane, io: FileIo) -> None:
        self._lane = lane
        self._record_bytes = record_bytes(file.geometry.payload_bytes)
        self._step_records = max(1, STEP_BYTES // self._record_bytes)
        self._bounce = Bounce(file.geometry.payload_bytes, IN_FLIGHT_BYTES)
        if isinstance(io, TakesMemory):
            self._bounce.register(io)
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def read_bytes(self) -> int:
        """Of all records that were read."""
        return self.outcomes.total() * self._record_bytes

    def good_of(self, headers: Sequence[RecordHeader], is_stopping: Callable[[], bool]) -> list[RecordHeader]:
        """Those whose records verify; the first of them alone if it is to stop."""
        good: list[RecordHeader] = []
        for start in range(0, len(headers), self._step_records):
            if is_stopping():
                break
            step = headers[start : start + self._step_records]
            records = [Record(header.key, header.slot, 0) for header in step]
            nowhere = Bounced(self._bounce, [NOWHERE] * len(step), is_write=False)
            outcomes = self._lane.read(records, deadline_s=STEP_DEADLINE_S, bounced=nowhere)
            self.outcomes.update(outcomes)
            good += [header for header, outcome in zip(step, outcomes, strict=True) if outcome is Outcome.OK]
        return good

    def keep_memory(self) -> None:
        """Something may still be read into it."""
        self._bounce.keep()
