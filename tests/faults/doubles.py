"""FileIo doubles that fail, hold back or spoil what real ones do, and stores on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.clock import Clock, ManualClock
from kvbm_core.storage.disk import block_io, recovery
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S

BUFFERED = FileOptions(is_direct=False)
Choice = Callable[[Transfer, bool], bool]
"""``chosen(transfer, is_write)``."""


class FailingIo(ThreadIo):
    """Requests that are chosen end with ``result`` instead of being done."""

    def __init__(self, fd: int, chosen: Choice, result: int) -> None:
        super().__init__(fd, num_threads=2)
        self.chosen = chosen
        self._result = result
        self.num_failed = 0

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        failing = [transfer for transfer in transfers if self.chosen(transfer, is_write)]
        self.num_failed += len(failing)
        super().submit([transfer for transfer in transfers if transfer not in failing], is_write=is_write)
        for transfer in failing:
            self._tags.add(transfer.tag)
            self._ended.put((transfer.tag, self._result))


class SpoilingIo(ThreadIo):
    """Reads that are chosen come back with a bit flipped in the last piece of their memory."""

    def __init__(self, fd: int, chosen: Choice) -> None:
        super().__init__(fd, num_threads=2)
        self.chosen = chosen
        self._to_spoil: dict[int, int] = {}
        self.num_spoiled = 0

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        for transfer in transfers:
            if not is_write and self.chosen(transfer, is_write):
                self._to_spoil[transfer.tag] = transfer.pieces[-1][0]
        super().submit(transfers, is_write=is_write)

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        ended = super().collect(timeout_s)
        for tag, _ in ended:
            if tag in self._to_spoil:
                ctypes.c_uint8.from_address(self._to_spoil.pop(tag)).value ^= 1
                self.num_spoiled += 1
        return ended


class HeldIo(ThreadIo):
    """Requests that are chosen do not end, nor begin, until ``let_go``.

    With a ManualClock a wait in which nothing ends takes all of its time on that clock, and none on the
    wall's.
    """

    def __init__(self, fd: int, chosen: Choice, clock: ManualClock | None = None) -> None:
        super().__init__(fd, num_threads=2)
        self.chosen = chosen
        self._clock = clock
        self.held: list[tuple[Transfer, bool]] = []
        self._others: set[int] = set()

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        for transfer in transfers:
            if self.chosen(transfer, is_write):
                assert transfer.tag not in self._tags
                self.held.append((transfer, is_write))
            else:
                self._others.add(transfer.tag)
                super().submit([transfer], is_write=is_write)

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        only_held = not self._others
        ended = super().collect(0.0 if only_held else LONG_S if self._clock else timeout_s)
        self._others.difference_update(tag for tag, _ in ended)
        if not ended and self._clock is not None and timeout_s > 0:
            self._clock.advance(timeout_s)
        return ended

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return len(self._tags) + len(self.held)

    def let_go(self) -> None:
        """Does what was held back, in the order in which it came; it is collected later."""
        for transfer, is_write in self.held:
            self._others.add(transfer.tag)
            super().submit([transfer], is_write=is_write)
        self.held = []
        self.chosen = lambda transfer, is_write: False

    def close(self, timeout_s: float) -> bool:
        """See FileIo."""
        return not self.held and super().close(timeout_s)


@contextmanager
def store_on(
    path: Path,
    geometry: Geometry,
    make_io: Callable[[int], FileIo],
    *,
    clock: Clock | None = None,
    scans: bool = False,
) -> Iterator[DiskStore]:
    """A buffered DiskStore whose reads and writes, or with ``scans`` whose recovery, work by ``make_io``.
    Closed afterwards.
    """

    def made(fd: int, *, is_direct: bool, depth: int = 0) -> FileIo:
        return make_io(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery if scans else block_io, "make_file_io", made)
        store = DiskStore(path, geometry, BUFFERED, clock=clock)
        try:
            yield store
        finally:
            store.close()
