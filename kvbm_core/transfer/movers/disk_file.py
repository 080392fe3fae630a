"""The block file of one rank: opened now or when it is free, looked through, and given to its mover."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvbm_core.storage.disk.allocate import AUTO, DirectoryBusyError, DiskError, FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.choose import chosen_file_io
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.recovery import Found, Recovery
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.movers.base import TierListener
from kvbm_core.transfer.movers.disk import DiskMover
from kvbm_core.types import Direction

LOCK_RETRY_S = 0.1
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger("kvbm")


class RankFile:
    """``open``, then ``start``, by one thread; the rest is safe from any thread. ``name``: of the tier.

    A file that another process has still (an engine that was killed may need a while to end) is opened by
    ``open_later`` when that has given it up.
    """

    def __init__(self, name: str, options: FileOptions, listener: TierListener) -> None:
        self._name = name
        self._options = options
        self._listener = listener
        self._file: BlockFile | None = None
        self._ios: list[FileIo] | None = None
        self._recovery: Recovery | None = None
        self._stops: list[Callable[[], bool]] = [self._stop_looking]
        self._place: tuple[Path, Geometry] | None = None
        self._closing = threading.Event()
        self._opener: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the file is to be had later: see ``open_later``."""
        return self._place is not None and self._file is None

    @property
    def is_open(self) -> bool:
        """Whether it is there to be read."""
        return self._file is not None

    def open(self, path: Path, num_slots: int, slot_bytes: int, fingerprint: str) -> bool:
        """Opens the file; False if that is not possible now. The listener is told if it will never be; then
        the rank serves without it.
        """
        meaning = hashlib.sha256(f"{fingerprint}/{slot_bytes}".encode()).digest()[:16]
        self._place = (path, Geometry(num_slots, slot_bytes, meaning))
        is_open = self._try_to_open()
        if self.is_busy:
            log.warning(
                "kvbm: %s: another process has it still; the disk tier joins when it is free, "
                "the engine serves without it meanwhile",
                path,
            )
        return is_open

    def open_later(self, on_open: Callable[[], None]) -> None:
        """Tries again, in a thread, until the file is open or never to be had; calls ``on_open`` then."""
        self._opener = threading.Thread(
            target=self._keep_trying, args=(on_open,), name="kvbm-disk-opener", daemon=True
        )
        self._opener.start()

    def _keep_trying(self, on_open: Callable[[], None]) -> None:
        while self.is_busy and not self._closing.wait(LOCK_RETRY_S):
            if not self._try_to_open():
                continue
            if self._closing.is_set() and self._file is not None:  # it took longer than ``close`` waits
                self._file.close()
                return
            try:
                on_open()
            except Exception as error:  # nobody else would hear of it
                log.exception("kvbm: the disk tier cannot join")
                self._listener.refused(self._name, str(error))

    def _try_to_open(self) -> bool:
        """False: it is busy, or never to be had; ``is_busy`` tells which."""
        if self._place is None:
            return False
        path, geometry = self._place
        file: BlockFile | None = None
        try:
            file = BlockFile(path, geometry, self._options)
            self._ios = self._make_ios(file)
        except DirectoryBusyError:
            return False
        except DiskError as error:
            log.error("%s", error.args[-1])
            self._place = None
            self._listener.refused(self._name, str(error.args[-1]))
            return False
        self._file = file
        log.info(
            "kvbm: disk tier: %s, %.2f GB (%s, %s, I/O: %s)",
            path,
            geometry.file_bytes / 1e9,
            "O_DIRECT" if file.is_direct else "page cache",
            "space reserved" if file.is_reserved else "sparse",
            self._options.io,
        )
        return True

    def _make_ios(self, file: BlockFile) -> list[FileIo] | None:
        """How the file is read and written, if a setting names it. Made when the file is opened: if it cannot
        be had, the listener is told in time.
        """
        if self._options.io == AUTO:
            return None
        ios: list[FileIo] = []
        try:
            for _ in Direction:
                ios.append(chosen_file_io(file.fd, is_direct=file.is_direct, kind=self._options.io))
        except DiskError:
            for io in ios:
                io.close(0.0)
            file.close()
            raise
        return ios

    def start(self, slab: HostSlab) -> DiskMover:
        """The mover of the open file. It closes the file."""
        mover = DiskMover(
            self.opened,
            slab,
            io_deadline_s=self._options.io_deadline_s,
            first_sequence=time.time_ns(),
            ios=self._ios,
        )
        mover.stop_others = lambda: all([stop() for stop in self._stops])
        return mover

    @property
    def opened(self) -> BlockFile:
        """The file, once it is open."""
        if self._file is None:
            raise ValueError("the file is not open")
        return self._file

    def stop_first(self, stop: Callable[[], bool]) -> None:
        """Whoever closes the file calls ``stop`` before; see DiskMover.stop_others."""
        self._stops.append(stop)

    def look(self) -> None:
        """Begins to look at what is in the file; the listener hears of it."""
        self._recovery = Recovery(self.opened, self._tell_found)

    def _stop_looking(self) -> bool:
        return self._recovery is None or self._recovery.close()

    def _tell_found(self, end: int, found: list[Found]) -> None:
        self._listener.found(self._name, end, found)

    def close(self) -> None:
        """Ends the search for what is in the file, and the wait for it; some seconds at most. The mover is
        closed by whoever it was given to.
        """
        self._closing.set()
        if self._opener is not None:
            self._opener.join(CLOSE_TIMEOUT_S)
        self._stop_looking()
