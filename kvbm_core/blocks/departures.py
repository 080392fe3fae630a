"""Which blocks have left a tier, when and why: a bounded memory for who asks why a block is not there.

Direct-mapped: a key has one place, and the newest key that has it stays. Of N blocks that left after it, a
key survives with probability exp(-N / PLACES). No object per block, and no search.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_core.clock import Clock
from kvbm_core.native import native
from kvbm_core.types import BlockKey

PLACES = 1 << 18
"""Of 16 bytes: 4 MB for a tier that has evicted so many blocks, nothing before."""
_NAME = np.uint64(2**64 - PLACES)  # a name without what its place tells: there the reason is kept
_NAME_BYTES = 8


class Leave(IntEnum):
    """Why a block left a tier, or never came to be there."""

    EVICTED = 1
    RESET = 2
    FAILED = 3
    NO_SPACE = 4
    PREEMPTED = 5
    QUOTA = 6
    OVER_QUOTA = 7


class Departure(NamedTuple):
    """``ago_s``: how long ago. ``idle_s``: from its last use to then; 0 for what never came."""

    why: Leave
    ago_s: float
    idle_s: float


class Departures:
    """Of one tier. One thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at_s = clock.now_s()
        # Name and reason; when, and after how many seconds without use, as two numbers of 32 bits. One row,
        # as each is somewhere else in memory. For zeros that nobody has written to the system gives none.
        self._rows = np.zeros((PLACES, 2), np.uint64)
        self._note = note_in_python if native is None else native.note_departures

    def note(
        self, keys: Sequence[BlockKey], why: Leave, idle_s: npt.NDArray[np.float32] | float = 0.0
    ) -> None:
        """``keys`` have left just now, or did not come."""
        if not keys:
            return
        at_s = self._clock.now_s() - self._began_at_s
        self._note(self._rows, keys, why, at_s, _each(idle_s, len(keys)))

    def find(self, key: BlockKey) -> Departure | None:
        """How ``key`` has left, the last time; None if nobody knows."""
        name = int.from_bytes(key[-_NAME_BYTES:], sys.byteorder)
        row = self._rows[name & (PLACES - 1)]
        found = int(row[0])
        why = found & (PLACES - 1)
        if not why or found - why != name & int(_NAME):
            return None
        _, _, at_s, idle_s = row.view(np.float32).tolist()
        return Departure(Leave(why), self._clock.now_s() - self._began_at_s - at_s, idle_s)


def _each(idle_s: npt.NDArray[np.float32] | float, count: int) -> npt.NDArray[np.float32]:
    return np.full(count, idle_s, np.float32) if isinstance(idle_s, float) else idle_s


def note_in_python(
    rows: npt.NDArray[np.uint64],
    keys: Sequence[BlockKey],
    why: int,
    at_s: float,
    idle_s: npt.NDArray[np.float32],
) -> None:
    """Fills the ``rows`` of these keys. Of two keys with one place the last one stays."""
    ends = np.frombuffer(b"".join([key[-_NAME_BYTES:] for key in keys]), np.uint64)
    place = np.uint64(len(rows) - 1)
    new = np.empty((len(keys), 2), np.uint64)
    new[:, 0] = (ends & ~place) | np.uint64(why)
    new.view(np.float32)[:, 2] = at_s
    new.view(np.float32)[:, 3] = idle_s
    # numpy scatters numbers of 16 bytes seven times as fast as rows of two.
    rows.view(np.complex128)[:, 0][(ends & place).astype(np.intp)] = new.view(np.complex128)[:, 0]
