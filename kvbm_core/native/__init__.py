"""The loops that Python is too slow for, in C (_kvbm.c): optional, built with the package where there is a compiler.

``native`` is None where the module was not built, or ``KVBM_NATIVE=0`` stood in the environment when this was
imported. Whoever uses it has the same function in plain Python beside it, and both pass the same tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbm_core.types import SequenceHash

VARIABLE = "KVBM_NATIVE"

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class Native(Protocol):
    """What the C module offers. Safe to call from any thread."""

    def chain(
        self, parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
    ) -> list[SequenceHash]:
        """``parent = sha256(header + parent + block)`` for each ``step`` bytes of ``tokens``: all the parents.

        ValueError for a parent that has not 32 bytes or tokens that are not whole blocks. The GIL is given away
        for long inputs.
        """

    def chain_portable(
        self, parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
    ) -> list[SequenceHash]:
        """``chain`` as on a CPU without SHA instructions; here for the tests."""

    def copy_blocks(self, dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None:
        """Copies block ``src_ids[i]`` to block ``dst_ids[i]``, all pieces of it; the GIL is not held meanwhile.

        ``dst`` and ``src`` are ``[piece, block, byte]``; the bytes of a piece are neighbours, pieces and blocks may
        have any stride. ``dst_ids`` differ from each other, and a byte that is read and written belongs to one
        pair. ValueError for arrays that do not fit each other or cannot be written, IndexError for a block that is
        not there, and nothing has been copied.
        """

    def pack_u32(self, tokens: Sequence[int], /) -> bytes:
        """The tokens as little-endian 32 bit numbers. OverflowError or TypeError for one that is none."""


def _load() -> Native | None:
    if os.environ.get(VARIABLE) == "0":
        return None
    try:
        from kvbm_core.native import _kvbm
    except ImportError:
        return None
    return _kvbm


native = _load()
