"""A shared directory as a BlockStore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, check_blocks, check_targets
from kvbm_core.storage.call_pool import CallPool, IsGivenUp, Task
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.evictor import Evictor
from kvbm_core.storage.directory.folder import Folder
from kvbm_core.storage.directory.names import key_in
from kvbm_core.storage.directory.record_files import RecordFiles
from kvbm_core.storage.directory.size import SharedSize
from kvbm_core.storage.names import FINGERPRINT_BYTES, Meaning, is_fan
from kvbm_core.types import BlockKey

CLOSE_TIMEOUT_S = 2.0
"""What is under way when the store is closed has so long; then it is given up."""
LIST_DEADLINE_S = 10.0
"""A folder that is not listed by then ends a scan."""


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """``max_bytes``: of the model's folder, all ranks and machines together; None: no limit, or, with
    ``shares_size``, what is written in that folder, which the first engine does.
    ``trusts_group``: blocks of all members of the folder's group are read, not this user's alone.

    ``num_threads``: as many for reads and as many for writes. ``is_direct``: past the page cache where that
    works.
    """

    max_bytes: int | None = None
    trusts_group: bool = False
    is_direct: bool = True
    num_threads: int = 16
    shares_size: bool = False


class DirectoryStore:
    """BlockStore in a directory that any number of engines on any number of machines use at once.

    Safe to call from any thread. Nothing is locked: a block is named by its content, so writing it twice is
    harmless, and a reader believes a record's own header and checksum alone. Every call ends by its deadline
    also when the file system hangs, as a hard NFS mount does; a read that is TIMED_OUT may then still be
    written into the caller's memory later: ``LATE`` says so. With all threads hanging, calls are BUSY.

    Making one does not touch the file system. ``path`` has to be there when a block is first put or got
    (IO_ERROR until then); it is not made. ValueError for a fingerprint that is not 16 bytes.
    """

    def __init__(
        self,
        path: Path,
        meaning: Meaning,
        payload_bytes: int,
        options: DirectoryOptions | None = None,
        *,
        clock: Clock | None = None,
        calls: FileCalls | None = None,
    ) -> None:
        if len(meaning.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(
                f"a fingerprint of {len(meaning.fingerprint)} bytes; it takes {FINGERPRINT_BYTES}"
            )
        options = options or DirectoryOptions()
        clock = clock or SystemClock()
        self._payload_bytes = payload_bytes
        self._calls = calls or FileCalls()
        self._folder = Folder(path, meaning, self._calls, trusts_group=options.trusts_group)
        self._files = RecordFiles(
            self._folder, meaning.fingerprint, payload_bytes, clock, is_direct=options.is_direct
        )
        self._readers = CallPool("directory-read", options.num_threads, clock)
        self._writers = CallPool("directory-write", options.num_threads, clock)
        size = SharedSize(self._folder) if options.shares_size else None
        self.evictor = Evictor(self._folder.namespace, options.max_bytes, clock, self._calls, size)

    @property
    def stuck_threads(self) -> int:
        """Threads that hang in the file system."""
        return self._readers.stuck_threads + self._writers.stuck_threads

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore. A block's bytes are not looked at."""
        return self._readers.run(
            self._task(lambda i, _: self._files.has(keys[i])), len(keys), deadline_s=deadline_s, is_small=True
        )

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. A block that is there already is not written again; room is made by the evictor.

        A late write does not become visible, so the memory of a TIMED_OUT one may be used again at once.
        """
        check_blocks(keys, payloads, self._payload_bytes)
        put = self._task(lambda i, is_given_up: self._files.write(keys[i], payloads[i], is_given_up))
        outcomes = self._writers.run(put, len(keys), deadline_s=deadline_s)
        written_bytes = outcomes.count(Outcome.OK) * self._files.file_bytes
        self.evictor.note_written(written_bytes, is_full=Outcome.NO_SPACE in outcomes)
        return outcomes

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. A block that does not verify is removed."""
        check_blocks(keys, targets, self._payload_bytes)
        check_targets(targets)
        get = self._task(lambda i, _: self._files.read(keys[i], targets[i]))
        return self._readers.run(get, len(keys), deadline_s=deadline_s, targets=targets)

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._writers.run(
            self._task(lambda i, _: self._files.remove(keys[i])),
            len(keys),
            deadline_s=deadline_s,
            is_small=True,
        )

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore. A folder that cannot be listed in time ends it."""
        for fan in filter(is_fan, self._names_in(self._folder.shard)):
            for name in self._names_in(self._folder.shard / fan):
                key = key_in(name)
                if key is not None:
                    yield key

    def close(self) -> None:
        """See BlockStore. It takes some seconds at most; threads that hang in the file system are left."""
        self.evictor.stop()
        for pool in (self._readers, self._writers):
            pool.close(CLOSE_TIMEOUT_S)
        self.evictor.close(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- inside

    def _task(self, act: Task) -> Task:
        """``act``, once the folder is there and can be trusted."""

        def act_in_folder(index: int, is_given_up: IsGivenUp) -> Outcome:
            opened = self._files.open_folder()
            return act(index, is_given_up) if opened is Outcome.OK else opened

        return act_in_folder

    def _names_in(self, folder: Path) -> list[str]:
        names: list[str] = []

        def look(index: int, is_given_up: IsGivenUp) -> Outcome:
            try:
                names.extend(self._calls.listdir(folder))
            except OSError:
                return Outcome.MISS
            return Outcome.OK

        outcomes = self._readers.run(look, 1, deadline_s=LIST_DEADLINE_S)
        return names if outcomes == [Outcome.OK] else []
