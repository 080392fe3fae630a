"""The loops that Python is too slow for, in C (_kvbm.c, _copy.c, _index.c, _aio.c, _names.c): optional,
built where there is a compiler.

``native`` is None where the module was not built, or ``KVBM_NATIVE`` was 0, false, off or no in the
environment when this was imported. Whoever uses it has the same function in plain Python beside it, and both
pass the same tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvbm_core.types import BlockKey, SequenceHash

if TYPE_CHECKING:
    from kvbm_core.native._kvbm import Aio, Index

VARIABLE = "KVBM_NATIVE"
FALSE = frozenset({"0", "false", "off", "no"})
"""As a setting's."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.uint64]
Seconds = npt.NDArray[np.float32]


class Native(Protocol):
    """What the C module offers. Its functions are safe to call from any thread."""

    def Aio(self, fd: int, depth: int, /) -> Aio:
        """With at most ``depth`` requests in the kernel. OSError if it has no AIO, or not for so many.

        Not there where the module was compiled without Linux' headers, or for 32 bits.
        """

    def Index(self, seed: int, /) -> Index:
        """An empty index; ``seed`` (64 bits) is what nobody outside shall know of its hash function."""

    def chain(
        self, parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
    ) -> list[SequenceHash]:
        """``parent = sha256(header + parent + block)`` for each ``step`` bytes of ``tokens``: all the
        parents.

        ValueError for a parent that has not 32 bytes or tokens that are not whole blocks. The GIL is given
        away for long inputs.
        """

    def chain_portable(
        self, parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
    ) -> list[SequenceHash]:
        """``chain`` as on a CPU without SHA instructions; here for the tests."""

    def copy_blocks(self, dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None:
        """Copies block ``src_ids[i]`` to block ``dst_ids[i]``, all pieces of it; the GIL is not held
        meanwhile.

        ``dst`` and ``src`` are ``[piece, block, byte]``; the bytes of a piece are neighbours, pieces and
        blocks may have any stride. ``dst_ids`` differ from each other, and a byte that is read and written
        belongs to one pair. ValueError for arrays that do not fit each other or cannot be written, IndexError
        for a block that is not there, and nothing has been copied.
        """

    def copy_blocks_plain(self, dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None:
        """``copy_blocks`` as on CPUs where memmove is best; here for the tests."""

    def copy_blocks_streaming(self, dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None:
        """``copy_blocks`` as on CPUs where stores that bypass the caches are best; here for the tests."""

    def note_departures(
        self, rows: Numbers, keys: Sequence[BlockKey], why: int, at_s: float, idle_s: Seconds, /
    ) -> None:
        """``note_in_python`` of blocks/departures.py, for rows of any power of two and as many ``idle_s`` as
        keys: else ValueError. TypeError for a key that is not 8 bytes at least; others may be noted then.
        """

    def pack_u32(self, tokens: Sequence[int], /) -> bytes:
        """The tokens as little-endian 32 bit numbers. OverflowError or TypeError for one that is none."""

    def record_names(self, keys: Sequence[BlockKey], folder: str, num_blocks: int, /) -> list[str]:
        """``plain_names`` of storage/remote/names.py. ValueError for a key of another length, or a folder
        that is not ASCII; TypeError for a key that is not bytes.
        """


def _load() -> Native | None:
    if os.environ.get(VARIABLE, "").strip().lower() in FALSE:
        return None
    try:
        from kvbm_core.native import _kvbm
    except ImportError:
        return None
    return _kvbm


native = _load()
