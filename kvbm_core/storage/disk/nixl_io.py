"""Reads and writes of one file by NIXL: its POSIX plugin, or GPUDirect Storage where a GPU and cuFile are
there.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbm_core.storage.disk.io import ThreadIo, Transfer, tags_of

PLUGINS = ("POSIX", "GDS", "GDS_MT")
QUEUES = ("uring", "aio")
"""What the POSIX plugin may work by, the better one first. Its third, posix_aio, is of no use after an error.
"""
SPAN_BYTES = 256 << 20
"""Memory that was told of is registered by so many bytes, when the first of them are used."""
PIECES_IN_FLIGHT = 1 << 15
"""Half of the POSIX plugin's pool: one that finds it empty fails with a part of its pieces started."""
GDS_BATCHES, GDS_BATCH_ENTRIES, GDS_ENTRY_BYTES = 16, 128, 16 << 20
"""The GDS plugin's own defaults, said to it, as what is beyond them fails: batches at once, entries in one,
bytes of one.
"""
MAX_PIECES = os.sysconf("SC_IOV_MAX")
PROBE_S = 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 1e-3

log = logging.getLogger("kvbm")

_NUMBERS = itertools.count()


class _Region(NamedTuple):
    """Memory that was told of, and the bytes from its start on that are registered together."""

    address: int
    end: int
    span_bytes: int


class _MemoryKind(NamedTuple):
    """NIXL's word for it, and the number of the device that it is on."""

    kind: str
    device: int


_HOST_MEMORY = _MemoryKind("DRAM", 0)


class _Flight(NamedTuple):
    """A transfer that NIXL has, and what was registered for it alone."""

    transfer: Transfer
    is_write: bool
    handle: Any
    registered: Any


class NixlIo:
    """FileIo by a NIXL agent of its own, a request each for NIXL; made and used by one thread at a time.

    ``queue`` says what the POSIX plugin works by; None for other plugins. ``gpu``: the number of the device
    that all memory belongs to; None: host memory. OSError, whose text says what is missing, where NIXL or its
    plugin cannot be had. What NIXL fails at is done again by preadv and pwritev in a thread: it tells neither
    how many bytes it moved nor why it did not, and takes the end of a file for an error. With memory of a GPU
    it ends as -EIO.
    """

    def __init__(self, fd: int, plugin: str = "POSIX", *, gpu: int | None = None) -> None:
        if plugin not in PLUGINS:
            raise ValueError(f"{plugin} is none of {', '.join(PLUGINS)}")
        self._fd = fd
        self._plugin = plugin
        self._is_on_gpu = gpu is not None
        self._memory = _HOST_MEMORY if gpu is None else _MemoryKind("VRAM", gpu)
        self.failure = ""
        """What NIXL has said last of a request that failed, in one line."""
        self._tags: set[int] = set()
        self._waiting: deque[tuple[Transfer, bool]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._cost_in_flight = 0
        self._may_write_later = False
        self._ended: list[tuple[int, int]] = []
        # Of a request that failed as the whole queue did, pieces may still be there, and NIXL would write to
        # what was given back.
        self._failed: list[Any] = []
        self._plain: ThreadIo | None = None
        self._regions: list[_Region] = []
        self._spans: dict[int, Any] = {}
        self._is_closed = False
        self._agent, self.queue = self._open()
        self._file = self._agent.register_memory([(0, 0, fd, "")], "FILE", backends=[plugin])
        _OPEN.add(self)

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        if self._is_closed:
            raise ValueError("this is closed")
        self._tags |= tags_of(transfers, self._tags)
        for transfer in transfers:
            self._waiting.append((transfer, is_write))
        self._start_waiting()

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        ends_at_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while self._tags:
            self._poll()
            if self._ended:
                ended, self._ended = self._ended, []
                self._tags.difference_update(tag for tag, _ in ended)
                return ended
            left_s = ends_at_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return []

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return len(self._tags)

    def register(self, address: int, nbytes: int, unit_bytes: int) -> None:
        """See TakesMemory."""
        units = max(1, min(SPAN_BYTES, nbytes) // unit_bytes)
        self._regions.append(_Region(address, address + nbytes, units * unit_bytes))
        self._regions.sort()

    def close(self, timeout_s: float) -> bool:
        """See FileIo; what NIXL does not end stays with it, and with this, for as long as the process lives.

        NIXL cannot call a transfer back: one that is given back moves its bytes later all the same.
        """
        ends_at_s = time.monotonic() + timeout_s
        self._is_closed = True
        while self._tags and self.collect(max(0.0, ends_at_s - time.monotonic())):
            pass
        has_ended = not self._tags
        if self._plain is not None and not self._plain.in_flight:  # also beside a request that never ends
            has_ended &= self._plain.close(max(0.0, ends_at_s - time.monotonic()))
        if not has_ended:
            return False
        if self._agent is not None:
            self._give_back()
            _OPEN.discard(self)
        return True

    # ---------------------------------------------------------------- the agent

    def _open(self) -> tuple[Any, str | None]:
        """An agent and its queue."""
        try:
            import nixl
        except ImportError as error:
            raise OSError(
                errno.ENOSYS, f"NIXL cannot be imported ({error}); pip install 'nixl>=1.5'"
            ) from error
        for queue in QUEUES if self._plugin == "POSIX" else (None,):
            name = f"kvbm-disk-{os.getpid()}-{next(_NUMBERS)}"
            try:
                agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
                agent.create_backend(self._plugin, {f"use_{queue}": "true"} if queue else self._bounds())
                if queue:
                    _probe(agent, self._plugin, self._fd)
            except Exception as error:  # NIXL's have no class in common
                log.debug("kvbm: NIXL's %s plugin, %s: %r", self._plugin, queue, error)
            else:
                log.info("kvbm: NIXL's %s plugin%s", self._plugin, f" by {queue}" if queue else "")
                return agent, queue
        if self._plugin == "POSIX":
            raise OSError(
                errno.ENOTSUP, "NIXL's POSIX plugin has neither io_uring nor Linux AIO here; allow one"
            )
        need = "it needs an NVIDIA GPU, its driver and libcufile"
        raise OSError(errno.ENOTSUP, f"NIXL cannot load its {self._plugin} plugin: {need}")

    def _bounds(self) -> dict[str, str]:
        if self._plugin != "GDS":
            return {}
        return {
            "batch_pool_size": str(GDS_BATCHES),
            "batch_limit": str(GDS_BATCH_ENTRIES),
            "max_request_size": str(GDS_ENTRY_BYTES),
        }

    def _give_back(self) -> None:
        self._failed.clear()
        for registered in (*self._spans.values(), self._file):
            self._deregister(registered)
        self._spans.clear()
        self._agent = None

    def _register(self, ranges: Sequence[tuple[int, int]]) -> Any:
        rows = [(address, nbytes, self._memory.device, "") for address, nbytes in ranges]
        return self._agent.register_memory(rows, self._memory.kind, backends=[self._plugin])

    def _deregister(self, registered: Any) -> None:
        try:
            self._agent.deregister_memory(registered, backends=[self._plugin])
        except Exception as error:  # the agent's end does it
            log.debug("kvbm: NIXL does not deregister: %r", error)

    # ---------------------------------------------------------------- requests

    def _start_waiting(self) -> None:
        most = GDS_BATCHES if self._plugin == "GDS" else PIECES_IN_FLIGHT
        while self._waiting:
            cost = self._cost_in_flight + self._cost_of(self._waiting[0][0])
            if self._flights and cost > most:
                return
            self._start(*self._waiting.popleft())

    def _cost_of(self, transfer: Transfer) -> int:
        """Of what the plugin has no more than so much: pieces, or GDS's batches."""
        if self._plugin != "GDS":
            return len(transfer.pieces)
        return -(-_num_entries(transfer) // GDS_BATCH_ENTRIES)

    def _start(self, transfer: Transfer, is_write: bool) -> None:
        pieces = [piece for piece in transfer.pieces if piece[1]]
        has_no_words = not pieces or len(transfer.pieces) > MAX_PIECES or transfer.offset_bytes < 0
        if has_no_words or self._may_write_later:
            self._do_plainly(transfer, is_write)
            return
        handle = registered = None
        try:
            if foreign := [piece for piece in pieces if not self._is_registered(piece)]:
                # Nobody said how long this memory stays; NIXL must not know it by the time it is somebody
                # else's.
                registered = self._register(foreign)
            place = self._fd, transfer.offset_bytes
            handle = _request(self._agent, self._plugin, place, pieces, self._memory, is_write=is_write)
            state = self._agent.transfer(handle)
        except Exception as error:  # NIXL's have no class in common
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._fail(_Flight(transfer, is_write, handle, registered))
            return
        self._flights[transfer.tag] = _Flight(transfer, is_write, handle, registered)
        self._cost_in_flight += self._cost_of(transfer)
        if state != "PROC":
            self._end(transfer.tag, state)

    def _is_registered(self, piece: tuple[int, int]) -> bool:
        """Whether NIXL knows this memory, once the span that it is in has been registered."""
        address, nbytes = piece
        place = bisect_right(self._regions, address, key=lambda region: region.address) - 1
        if place < 0 or address + nbytes > self._regions[place].end:
            return False
        region = self._regions[place]
        start = address - (address - region.address) % region.span_bytes
        end = min(start + region.span_bytes, region.end)
        if address + nbytes > end:
            return False
        if start not in self._spans:
            self._spans[start] = self._register([(start, end - start)])
        return True

    def _poll(self) -> None:
        for tag, flight in list(self._flights.items()):
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except Exception:
                state = "ERR"
            if state != "PROC":
                self._end(tag, state)
        if self._plain is not None:
            self._ended += self._plain.collect(0.0)
        self._start_waiting()

    def _end(self, tag: int, state: str) -> None:
        flight = self._flights.pop(tag)
        self._cost_in_flight -= self._cost_of(flight.transfer)
        if state != "DONE":
            self.failure = f"a request ended as {state}"
            self._fail(flight)
            return
        self._agent.release_xfer_handle(flight.handle)
        if flight.registered is not None:
            self._deregister(flight.registered)
        self._ended.append((tag, flight.transfer.num_bytes))

    def _fail(self, flight: _Flight) -> None:
        """NIXL tells of an error when no piece of the request is in flight any more, so it can be done again.
        A test holds POSIX to this.

        Not so GDS: its first entry that fails fails the request, while others are read or written on, and
        their batch is used again. Such a request never ends here, so that nobody uses its memory; and as
        nothing that the plugin says is sure any more, it is asked for nothing more.
        """
        if flight.handle is not None:
            self._failed.append(flight.handle)
            if self._plugin == "GDS" and _num_entries(flight.transfer) > 1:
                self._may_write_later = True
                return
        if flight.registered is not None:
            self._deregister(flight.registered)
        self._do_plainly(flight.transfer, flight.is_write)

    def _do_plainly(self, transfer: Transfer, is_write: bool) -> None:
        if self._is_on_gpu:  # no address for the kernel
            self._ended.append((transfer.tag, -errno.EIO))
            return
        # In a thread: a disk that fails may take its time, and collect must not.
        if self._plain is None:
            self._plain = ThreadIo(self._fd, num_threads=1)
        self._plain.submit([transfer], is_write=is_write)


_OPEN: set[NixlIo] = (
    set()
)  # not closed: with the last reference to one, NIXL would give back what is in flight


def _num_entries(transfer: Transfer) -> int:
    """What GDS makes of it."""
    return sum(-(-num_bytes // GDS_ENTRY_BYTES) for _, num_bytes in transfer.pieces)


def _request(
    agent: Any,
    plugin: str,
    place: tuple[int, int],
    pieces: Sequence[tuple[int, int]],
    kind: _MemoryKind,
    *,
    is_write: bool,
) -> Any:
    """A transfer of NIXL, not started, between the pieces and ``place``: a file descriptor, and where in the
    file.
    """
    fd, offset_bytes = place
    memory = np.array([(address, nbytes, kind.device) for address, nbytes in pieces], np.uint64)
    parts = memory.copy()
    parts[0, 0] = offset_bytes
    parts[1:, 0] = np.uint64(offset_bytes) + np.cumsum(memory[:-1, 1])
    parts[:, 2] = fd
    sides = agent.get_xfer_descs(memory, kind.kind), agent.get_xfer_descs(parts, "FILE")
    return agent.initialize_xfer("WRITE" if is_write else "READ", *sides, agent.name, b"", [plugin])


def _probe(agent: Any, plugin: str, fd: int) -> None:
    """Raises if the queue does not read nothing: one that the kernel or a container forbids may only say so
    now.
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    registered = [
        agent.register_memory([(address, mmap.PAGESIZE, 0, "")], "DRAM", backends=[plugin]),
        agent.register_memory([(0, 0, fd, "")], "FILE", backends=[plugin]),
    ]
    handle = _request(agent, plugin, (fd, 0), [(address, 0)], _HOST_MEMORY, is_write=False)
    state, ends_at_s = agent.transfer(handle), time.monotonic() + PROBE_S
    while state == "PROC" and time.monotonic() < ends_at_s:
        time.sleep(FIRST_PAUSE_S)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise OSError(errno.EIO, f"a read of nothing ends as {state}")
    agent.release_xfer_handle(handle)
    for each in registered:
        agent.deregister_memory(each, backends=[plugin])
