"""The loops that Python is too slow for, in C (_kvbm.c, _copy.c, _index.c, _aio.c, _names.c): optional,
built where there is a compiler.

``native`` is None where the module was not built, or ``KVBM_NATIVE`` was 0, false, off or no in the
environment when this was imported. Whoever uses it has the same function in plain Python beside it, and both
pass the same tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbm_core.types import BlockKey, SequenceHash

VARIABLE = "KVBM_NATIVE"
FALSE = frozenset({"0", "false", "off", "no"})
"""As a setting's."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.uint64]
Seconds = npt.NDArray[np.float32]


class Index(Protocol):
    """Which block is in which slot: BlockRegistry with arrays in place of results.

    The methods that have a namesake in kvbm_core/blocks/registry.py do the same; ``slots`` that are filled
    are at least as long as ``keys``. ``in`` and ``len`` are about resident blocks. TypeError for a key that
    is not bytes, ValueError for one of another length than a BlockKey's. A call that raises has changed
    nothing, and leaves what it was to fill undefined. One thread only.
    """

    def grow(self, capacity_slots: int, /) -> None:
        """As the registry's. MemoryError, or ValueError for more than 2 ** 30 slots."""

    def new_of(self, keys: Sequence[BlockKey], /) -> tuple[BlockKey, ...]:
        """As the registry's."""

    def reserve(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's."""

    def commit(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's; fills ``slots``."""

    def cancel(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's; fills ``slots``."""

    def drop(self, slots: Slots, /) -> list[BlockKey]:
        """As the registry's."""

    def find(self, keys: Sequence[BlockKey], slots: Slots, /) -> int:
        """Fills in the slots of the leading resident ``keys``; returns how many."""

    def slots_of(self, keys: Sequence[BlockKey], slots: Slots, /) -> int:
        """Fills in the slots of those of ``keys`` that are resident; returns how many."""

    def keys_in(self, slots: Slots, /) -> list[BlockKey | None]:
        """As the registry's."""

    def is_pending(self, key: BlockKey, /) -> bool:
        """As the registry's."""

    def pending_blocks(self) -> int:
        """As the registry's."""

    def check(self) -> str | None:
        """What is wrong with the index; None if nothing is."""

    def __contains__(self, key: BlockKey, /) -> bool: ...

    def __len__(self) -> int: ...


class Aio(Protocol):
    """Requests to one open file by Linux AIO, which takes and ends them asynchronously with O_DIRECT only.

    Without O_DIRECT ``submit`` waits for the data. ``fd`` stays open until ``close`` has answered True, and
    memory that is in flight stays where it is. One thread only: RuntimeError for a call while another one is
    under way.
    """

    def submit(self, is_write: bool, tags: Ids, offsets: Ids, counts: Slots, pieces: Numbers, /) -> None:
        """Starts requests, as many as ``depth`` allows; the others as those end that are collected.

        Request ``i`` has ``counts[i]`` of ``pieces``, which are pairs of address and bytes, and follow each
        other as the requests do. What the kernel refuses ends as any other. ValueError for arrays that do not
        fit each other, or after ``close``, and nothing has been started. The GIL is not held while the kernel
        works.
        """

    def collect(self, timeout_s: float, /) -> list[tuple[int, int]]:
        """(tag, bytes moved or -errno) of those that have ended, at least one unless ``timeout_s`` goes by.

        Waits only if something is in flight, and without the GIL. What a signal's handler raises comes out of
        here, and nothing is lost.
        """

    @property
    def in_flight(self) -> int:
        """How many were submitted and not collected."""

    def close(self, timeout_s: float, /) -> bool:
        """Collects until nothing is in flight, and gives everything back; False if time was over before that.

        Then, what the kernel still works on stays in memory for good, unless a later call finds it ended.
        """


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
