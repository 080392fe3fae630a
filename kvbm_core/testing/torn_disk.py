"""A disk that loses power: what it may hold afterwards, made from the writes that it was given.

The model knows no order between two syncs. Every sector written since the last one may hold what was written,
what was there before any of these writes, a mixture of both, or zeros; each for itself.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from kvbm_core.storage.disk.io import Transfer

DEVICE_SECTOR_BYTES = 512
"""What a device writes as one piece, if that."""


class Written(NamedTuple):
    """Bytes that the disk was given."""

    offset_bytes: int
    content: bytes


class Synced(NamedTuple):
    """A moment from which on everything given before is there to stay."""


class PowerLoss(NamedTuple):
    """How the unsynced sectors fare: chances of each (the rest is kept), and whether writes fare as one.

    ``whole_writes``: the chance that all sectors of a write share one fate, as if the device had ordered
    them.
    """

    dropped: float
    zeroed: float
    torn: float
    whole_writes: float


MILD = PowerLoss(0.004, 0.001, 0.001, 0.5)
"""Most records survive; a few are wrong somewhere."""
HARSH = PowerLoss(0.3, 0.1, 0.1, 0.3)
"""Hardly a record is whole."""
UNEVEN = PowerLoss(0.4, 0.0, 0.0, 1.0)
"""Each write is there or not."""


class TornDisk:
    """A disk's content, and all that was written to it since, in order. One thread only."""

    def __init__(self, content: bytes) -> None:
        self._before = bytes(content)
        self.image = bytearray(content)
        """What the disk holds as long as the power stays on."""
        self._log: list[Written | Synced] = []

    @property
    def num_events(self) -> int:
        """Writes and syncs so far."""
        return len(self._log)

    def write(self, offset_bytes: int, content: bytes) -> None:
        """Applied at once, and remembered."""
        end = offset_bytes + len(content)
        if offset_bytes < 0 or end > len(self.image):
            raise ValueError(f"a write of {offset_bytes}..{end} to a disk of {len(self.image)} bytes")
        self.image[offset_bytes:end] = content
        self._log.append(Written(offset_bytes, content))

    def sync(self) -> None:
        """As fdatasync."""
        self._log.append(Synced())

    def after_loss(self, rng: Random, loss: PowerLoss, num_events: int | None = None) -> bytes:
        """What may be on the disk if power goes after the first ``num_events`` events (any number of
        them).
        """
        events = self._log[: rng.randrange(len(self._log) + 1) if num_events is None else num_events]
        last_sync = max((n for n, event in enumerate(events) if isinstance(event, Synced)), default=-1)
        disk = bytearray(self._before)
        for event in events[: last_sync + 1]:
            if isinstance(event, Written):
                disk[event.offset_bytes : event.offset_bytes + len(event.content)] = event.content
        synced = bytes(disk)
        for event in events[last_sync + 1 :]:
            if isinstance(event, Written):
                _apply(event, disk, synced, rng, loss)
        return bytes(disk)


def _apply(event: Written, disk: bytearray, synced: bytes, rng: Random, loss: PowerLoss) -> None:
    fates = ("dropped", "zeroed", "torn", "kept")
    weights = (loss.dropped, loss.zeroed, loss.torn, 1 - loss.dropped - loss.zeroed - loss.torn)
    end = event.offset_bytes + len(event.content)
    starts = range(event.offset_bytes, end, DEVICE_SECTOR_BYTES)
    if rng.random() < loss.whole_writes:
        chosen = rng.choices(fates, weights) * len(starts)
    else:
        chosen = rng.choices(fates, weights, k=len(starts))
    for start, fate in zip(starts, chosen, strict=True):
        stop = min(start + DEVICE_SECTOR_BYTES, end)
        new = event.content[start - event.offset_bytes : stop - event.offset_bytes]
        if fate == "kept":
            disk[start:stop] = new
        elif fate == "zeroed":
            disk[start:stop] = bytes(stop - start)
        elif fate == "torn":
            cut = rng.randrange(stop - start + 1)
            disk[start : start + cut] = new[:cut]
        elif rng.random() < 0.5:  # dropped: what an earlier unsynced write left stays, or is lost with it
            disk[start:stop] = synced[start:stop]


class TornIo:
    """FileIo on a TornDisk: what is submitted has been moved at once. One thread only, as any FileIo."""

    def __init__(self, disk: TornDisk) -> None:
        self._disk = disk
        self._ended: deque[tuple[int, int]] = deque()

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        in_flight = {tag for tag, _ in self._ended}
        for transfer in transfers:
            if transfer.tag in in_flight:
                raise ValueError(f"request {transfer.tag} is in flight")
            in_flight.add(transfer.tag)
            self._ended.append((transfer.tag, self._write(transfer) if is_write else self._read(transfer)))

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo; never waits."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return len(self._ended)

    def close(self, timeout_s: float) -> bool:
        """See FileIo."""
        self._ended.clear()
        return True

    def _write(self, transfer: Transfer) -> int:
        content = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in transfer.pieces)
        self._disk.write(transfer.offset_bytes, content)
        return len(content)

    def _read(self, transfer: Transfer) -> int:
        at = transfer.offset_bytes
        for address, nbytes in transfer.pieces:
            part = bytes(self._disk.image[at : at + nbytes])
            ctypes.memmove(address, part, len(part))
            at += len(part)
        return at - transfer.offset_bytes
