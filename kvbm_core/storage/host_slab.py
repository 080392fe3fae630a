"""The host tier's memory: one big anonymous mapping, made ready in the background."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.storage.huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, advise

_PAGE_BYTES = mmap.PAGESIZE
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; python's mmap module does not name it and would hold the GIL

logger = logging.getLogger(__name__)


class HostSlab:
    """``num_slots`` slots of ``slot_bytes`` bytes, slot s at ``s * slot_bytes``.

    Address space is reserved at once; a daemon thread gives it memory chunk by chunk, calls
    ``prepare(address, nbytes)`` (to pin it) and then ``on_ready(ready_slots)`` with the slots usable so
    far, both in that thread. ``prepare`` may return what undoes it, to be called at close. If preparing
    fails the slab stays as large as it is and ``failure`` says why.

    ``cpus``: where that thread runs, which is where the memory comes from (``numa.cpus_near``); empty:
    anywhere.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        prepare: Callable[[int, int], Callable[[], None] | None] | None = None,
        on_ready: Callable[[int], None] | None = None,
        cpus: Collection[int] = (),
        chunk_bytes: int = 256 << 20,
    ) -> None:
        if num_slots < 1 or slot_bytes < 1 or chunk_bytes < 1:
            raise ValueError(f"a slab needs slots and bytes: {num_slots} x {slot_bytes} by {chunk_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.chunk_bytes = -(-chunk_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.failure: str | None = None
        self._prepare, self._on_ready, self._cpus = prepare, on_ready, cpus
        self._undo: list[Callable[[], None]] = []
        self._ready_slots = 0
        self._state = threading.Condition()
        self._stopping = False
        nbytes = num_slots * slot_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
        self._mapping: mmap.mmap | None = mapping
        whole: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        skip = -int(whole.ctypes.data) % HUGE_PAGE_BYTES
        self._array: npt.NDArray[np.uint8] | None = whole[skip : skip + nbytes]
        self.address = int(self._array.ctypes.data)
        self._thread = threading.Thread(target=self._make_ready, name="kvbm-host-slab", daemon=True)
        self._thread.start()

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, ready or not. ValueError after close."""
        if self._array is None:
            raise ValueError("the host slab is closed")
        return self._array

    @property
    def ready_slots(self) -> int:
        """Slots ``0 .. ready_slots-1`` have memory and are prepared."""
        return self._ready_slots

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until all slots are ready; False after ``timeout_s`` or a failure."""
        with self._state:
            self._state.wait_for(self._done, timeout_s)
            return self._ready_slots == self.num_slots

    def _done(self) -> bool:
        return self._ready_slots == self.num_slots or self.failure is not None or self._stopping

    def view(self, block_bytes: int | None = None) -> BlockView:
        """The slots as blocks of one segment: the whole slot or its first ``block_bytes`` bytes."""
        nbytes = self.slot_bytes if block_bytes is None else block_bytes
        if not 0 < nbytes <= self.slot_bytes:
            raise ValueError(f"{nbytes} bytes do not fit a slot of {self.slot_bytes}")
        return BlockView(self.num_slots, (Segment(0, 0, self.slot_bytes, nbytes),))

    def close(self) -> None:
        """Stops preparing, undoes it and gives the memory back; idempotent.

        Memory that someone still holds an array of is given back with that array.
        """
        with self._state:
            self._stopping = True
            self._state.notify_all()
        self._thread.join()
        while self._undo:
            self._undo.pop()()
        self._array = None
        mapping, self._mapping = self._mapping, None
        try:
            if mapping is not None:
                mapping.close()
        except BufferError:
            logger.debug("host slab still in use at close; its memory goes with the last array")

    def _make_ready(self) -> None:
        _run_on(self._cpus)
        total_bytes = self.num_slots * self.slot_bytes
        advise(self.address, total_bytes, MADV_HUGEPAGE)
        advise(self.address, total_bytes, _MADV_DONTFORK)  # a fork would turn pinned pages into copies
        for start in range(0, total_bytes, self.chunk_bytes):
            if self._stopping:
                return
            nbytes = min(self.chunk_bytes, total_bytes - start)
            try:
                self._make_chunk_ready(start, nbytes)
            except Exception as error:  # the tier works with what it has; the reason must not get lost
                logger.warning("kvbm host memory stays at %d slots: %s", self._ready_slots, error)
                with self._state:
                    self.failure = f"{type(error).__name__}: {error}"
                    self._state.notify_all()
                return

    def _make_chunk_ready(self, start: int, nbytes: int) -> None:
        if not advise(self.address + start, nbytes, _MADV_POPULATE_WRITE):
            self.array[start : start + nbytes : _PAGE_BYTES] = 0
        if self._prepare is not None:
            undo = self._prepare(self.address + start, nbytes)
            if undo is not None:
                self._undo.append(undo)
        ready_slots = (start + nbytes) // self.slot_bytes
        with self._state:
            self._ready_slots = ready_slots
            self._state.notify_all()
        if self._on_ready is not None:
            self._on_ready(ready_slots)


def _run_on(cpus: Collection[int]) -> None:
    """Keeps the calling thread on ``cpus``: the kernel takes the pages that it touches from their NUMA
    node.
    """
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # slower copies, not wrong ones
        logger.info("kvbm: host memory is not bound to a NUMA node: %s", error)
