"""Whoever writes blocks to a disk and reads them back, as one interface."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Rates(NamedTuple):
    """GB/s of blocks' bytes; headers, names and directories take their time and do not count."""

    write: float
    read: float


class Side(Protocol):
    """A way to keep blocks on a disk."""

    name: str

    def turn(self) -> Rates:
        """Writes everything, then reads everything. WrongAnswer if what comes back is not what was
        written.
        """

    def close(self) -> None:
        """Ends threads, closes files."""
