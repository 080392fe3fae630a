"""Copies of blocks on their way to other instances, in memory of their own: bounded, and used again.

A copy is made while its block is held, and sent afterwards. So neither a slot nor a disk place waits for a
network, and what is sent is what was hashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Tracker(Protocol):
    """Of a message that is being sent from memory of ours."""

    @property
    def done(self) -> bool:
        """Whether nobody reads that memory any more."""


@dataclass(slots=True)
class _Sent:
    asker: bytes
    copy: Bytes
    tracker: Tracker


class Copies:
    """Memory for copies of ``block_bytes``: ``max_bytes`` of them at once, of which one connection has a
    quarter at most; at least one block. One thread only. ``in_one``: all of it is in ``whole``.
    """

    def __init__(self, block_bytes: int, max_bytes: int, *, in_one: bool = False) -> None:
        self.block_bytes = block_bytes
        self._most = max(1, max_bytes // block_bytes)
        self._most_each = max(1, self._most // 4)
        self.whole: Bytes = np.zeros((self._most if in_one else 0, block_bytes), np.uint8)
        self._free: list[Bytes] = list(self.whole)
        self._sent: list[_Sent] = []
        self._num_taken = 0
        self._of_asker: dict[bytes, int] = {}

    @property
    def taken_blocks(self) -> int:
        """Being copied, or being sent."""
        return self._num_taken

    def take(self, asker: bytes, count: int) -> int:
        """Sets memory for so many blocks aside, or for fewer if that would be too much now; how many."""
        self.sweep()
        own = self._of_asker.get(asker, 0)
        granted = max(0, min(count, self._most - self._num_taken, self._most_each - own))
        if granted:
            self._num_taken += granted
            self._of_asker[asker] = own + granted
        return granted

    def memory(self) -> Bytes:
        """For one of the blocks that were taken."""
        return self._free.pop() if self._free else np.empty(self.block_bytes, np.uint8)

    def unused(self, asker: bytes, count: int) -> None:
        """So many of what was taken are not needed after all, and have no memory."""
        if not count:
            return
        self._num_taken -= count
        self._of_asker[asker] -= count
        if not self._of_asker[asker]:
            del self._of_asker[asker]

    def back(self, asker: bytes, copy: Bytes) -> None:
        """A copy that is not sent."""
        self._keep(copy)
        self.unused(asker, 1)

    def sent(self, asker: bytes, copy: Bytes, tracker: Tracker) -> None:
        """It is being sent: free when ``tracker`` says so."""
        self._sent.append(_Sent(asker, copy, tracker))

    def sweep(self) -> None:
        """Takes back what has been sent."""
        if not self._sent:
            return
        left = []
        for one in self._sent:
            if one.tracker.done:
                self.back(one.asker, one.copy)
            else:
                left.append(one)
        self._sent = left

    def _keep(self, copy: Bytes) -> None:
        if len(self._free) < self._most:
            self._free.append(copy)
