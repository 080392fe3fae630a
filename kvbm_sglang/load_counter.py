"""When the pages of a batch are there: what SGLang's forward waits for, layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvbm_core.errors import StuckCopyError

COPY_TIMEOUT_S = 60.0
"""What has been given up and still copies waits for memory alone, and takes far less."""


class _Batch:
    """Loads of one batch: ended when none is left, landed when all ended well."""

    def __init__(self, index: int, num_loads: int) -> None:
        self.index = index
        self.num_left = num_loads
        self.has_landed = True
        self.ended = threading.Event()


class LoadCounter:
    """SGLang's layer_done_counter. All layers of a batch are there at the same time: pages are loaded whole.

    A batch that takes longer than ``timeout_s`` is given up, as the engine must not hang: ``give_up(index)``
    has to end its loads, and they count as failed. StuckCopyError if one copies on for COPY_TIMEOUT_S: its
    pages may be given to nobody.
    """

    def __init__(self, num_layers: int, timeout_s: float) -> None:
        self.give_up: Callable[[int], None] = lambda index: None
        self.num_layers = num_layers
        self.consumer_index = -1
        self._timeout_s = timeout_s
        self._next = 0
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}

    def begin(self, num_loads: int) -> int:
        """A batch of so many loads, at least one; its index."""
        index, self._next = self._next, self._next + 1
        with self._lock:
            self._batches[index] = _Batch(index, num_loads)
        return index

    def end_load(self, index: int, *, has_landed: bool) -> None:
        """One load of the batch is over, and writes no more. From any thread."""
        with self._lock:
            batch = self._batches.get(index)
            if batch is None:  # forgotten
                return
            batch.num_left -= 1
            batch.has_landed &= has_landed
            if not batch.num_left:
                batch.ended.set()

    def set_consumer(self, index: int) -> None:
        """The batch whose forward is about to run; -1 for one without loads."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Waits until the current batch has ended, well or not; ``finish`` says which."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None and not batch.ended.is_set():
            self._wait(batch)

    def finish(self, index: int) -> bool:
        """Waits until the batch has ended; True if all of it landed. A batch that is not known has not."""
        batch = self._batches.get(index)
        if batch is None:
            return False
        self._wait(batch)
        with self._lock:
            del self._batches[index]
        return batch.has_landed

    def reset(self) -> None:
        """Forgets all batches."""
        with self._lock:
            self._batches.clear()
        self.consumer_index = -1

    def _wait(self, batch: _Batch) -> None:
        if batch.ended.wait(self._timeout_s):
            return
        self.give_up(batch.index)
        if not batch.ended.wait(COPY_TIMEOUT_S):
            raise StuckCopyError(
                f"kvbm: a load of pages has been copying for {COPY_TIMEOUT_S:.0f} s, and they must not be "
                "used: look for errors of the GPU or its driver, and start SGLang again"
            )
