"""Keeps a model's folder within its size: removes the blocks that were used longest ago, at a slow pace."""

from __future__ import annotations

import errno
import os
import random
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvbm_core.clock import Clock
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.names import is_temporary, key_in, temporary_name
from kvbm_core.storage.directory.record_files import FULL
from kvbm_core.storage.directory.size import SharedSize
from kvbm_core.storage.names import is_fan, is_shard

LOCK = "evictor"
"""Who evicts renews this file; its text says who that is."""
BEAT_S = 30.0
STALE_S = 120.0
"""A lock that has not been renewed for so long is taken over."""
LEAST_BETWEEN_S = 60.0
MOST_BETWEEN_S = 600.0
"""Between two passes; the fuller the folder and the faster it grows, the sooner."""
TEMPORARY_S = 3600.0
"""What has been in writing for longer has no writer any more."""
SHARE = 0.25
"""Of one thread's time, at most, that a pass takes."""
LONGEST_PAUSE_S = 1.0
LOW_MARK = 0.9
"""Of the limit: a pass that removes anything removes down to it."""
AGE_STEP_S = 60.0
"""Blocks whose last use was within the same minute are equally old."""

limited_log = RateLimitedLogger(interval_s=3600.0)


@dataclass(slots=True)
class EvictionPass:
    """What one pass saw and did."""

    blocks: int = 0
    num_bytes: int = 0
    bytes_by_age: Counter[int] = field(default_factory=Counter)
    removed_blocks: int = 0
    removed_bytes: int = 0
    removed_temporary: int = 0

    @property
    def left_bytes(self) -> int:
        """What it left."""
        return self.num_bytes - self.removed_bytes


class _CutShort(Exception):
    """A pass ends before it has seen everything."""


class Evictor:
    """Of one namespace folder. A thread of its own, from the first block on that is written or has no space.

    In each folder one instance evicts at a time, whoever renews the lock; there is nothing to unlock, and
    two that do so at once are harmless: a block is removed by its name, and a reader that has it open, or
    misses it, does not care. What has no name of ours is left alone, as are links, pipes and folders.
    """

    def __init__(
        self,
        namespace: Path,
        max_bytes: int | None,
        clock: Clock,
        calls: FileCalls,
        size: SharedSize | None = None,
    ) -> None:
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._size = size  # says what ``max_bytes`` is, if it is there
        self._clock = clock
        self._calls = calls
        self._mine: tuple[int, int] | None = None
        self._others: tuple[int, int] | None = None
        self._others_since_s = 0.0
        self._beaten_s = 0.0
        self._file_system_s = 0.0  # the time by the clock of the file system, at the last beat
        self._last: tuple[float, int] | None = None  # when the last pass ended, and bytes that it left
        self._growth_bytes_s = 0.0
        self._written_bytes = 0  # by this instance, since then
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def note_written(self, num_bytes: int, *, is_full: bool = False) -> None:
        """This instance has put so much. ``is_full``: there was no space for some of it. Any thread."""
        if num_bytes or is_full:
            with self._lock:
                self._written_bytes += num_bytes
                if self._thread is None and not self._stopping.is_set():
                    self._thread = threading.Thread(
                        target=self._work, name="kvbm-directory-evict", daemon=True
                    )
                    self._thread.start()

    def stop(self) -> None:
        """Ends the thread at its next step. Any thread."""
        self._stopping.set()

    def close(self, timeout_s: float) -> bool:
        """Waits for its end; False if it hangs in the file system."""
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def tick(self) -> EvictionPass | None:
        """One turn: evicts if that is this instance's to do, and due. OSError."""
        if not self._has_lock():
            return None
        self._learn_size()
        return self.evict(share=SHARE) if self._is_due() else None

    def evict(self, *, share: float = 1.0) -> EvictionPass:
        """All of it now, whoever else does; ``share``: of this thread's time, at most. OSError."""
        self._beat()
        seen = EvictionPass()
        with suppress(_CutShort):
            for fan, names in self._folders(share):
                self._count(fan, names, seen)
            if self._max_bytes is not None and seen.num_bytes > self._max_bytes:
                self._make_room(seen, share)
            self._note(seen)
        return seen

    def _learn_size(self) -> None:
        num_bytes = self._size.look() if self._size is not None else None
        if num_bytes is not None:
            self._max_bytes = num_bytes or None

    def _note(self, seen: EvictionPass) -> None:
        now_s = self._clock.now_s()
        if self._last is not None and now_s > self._last[0]:
            grown_bytes = max(0, seen.num_bytes - self._last[1])
            self._growth_bytes_s = grown_bytes / (now_s - self._last[0])
        self._last = now_s, seen.left_bytes
        with self._lock:
            self._written_bytes = 0

    # ---------------------------------------------------------------- when, and who

    def _work(self) -> None:
        self._learn_size()
        pause_s = random.uniform(0.1, 1.0) * BEAT_S  # noqa: S311 - not all that start together look at once
        while not self._stopping.wait(pause_s):
            pause_s = BEAT_S
            try:
                self.tick()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    limited_log.warning(
                        error.errno,
                        "kvbm: %s cannot be kept within its size: %s",
                        self._namespace,
                        error.strerror,
                    )

    def _is_due(self) -> bool:
        if self._last is None:
            return True
        ended_s, left_bytes = self._last
        since_s = self._clock.now_s() - ended_s
        if since_s < LEAST_BETWEEN_S or self._max_bytes is None:
            return since_s >= TEMPORARY_S
        half_room_bytes = (self._max_bytes - left_bytes) / 2
        with self._lock:
            expected_bytes = max(self._written_bytes, self._growth_bytes_s * since_s)
        return since_s >= MOST_BETWEEN_S or expected_bytes > half_room_bytes

    def _has_lock(self) -> bool:
        """Whether it is this instance's turn; then the lock has been renewed.

        Another one's is stale once it has not changed for STALE_S of our own clock: machines' clocks are not
        compared.
        """
        seen = self._lock_there()
        if seen is not None and seen != self._mine:
            now_s = self._clock.now_s()
            if seen != self._others:
                self._others, self._others_since_s = seen, now_s
            if now_s - self._others_since_s < STALE_S:
                return False
        self._beat()
        return True

    def _lock_there(self) -> tuple[int, int] | None:
        try:
            status = self._calls.lstat(self._namespace / LOCK)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _beat(self) -> None:
        """Puts a lock of ours in place of what is there. A full file system has to be evicted from all the
        same: where no file can be made, what is there gets a new time, and without any we do without.
        """
        try:
            self._put_lock()
        except OSError as error:
            if error.errno not in FULL:
                raise
            with suppress(OSError):
                self._calls.utime(self._namespace / LOCK)
        self._mine = self._lock_there()
        if self._mine is not None:
            self._file_system_s = self._mine[1] / 1e9
        self._beaten_s = self._clock.now_s()

    def _put_lock(self) -> None:
        """Without space for its text it is empty: its time is what counts."""
        temporary = self._namespace / temporary_name(LOCK, secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._calls.open(temporary, flags, 0o644)
        try:
            try:
                self._write_text(fd)
            except OSError as error:
                if error.errno not in FULL:
                    raise
            self._calls.rename(temporary, self._namespace / LOCK)
        except OSError:
            with suppress(OSError):
                self._calls.unlink(temporary)
            raise

    def _write_text(self, fd: int) -> None:
        try:
            self._calls.pwritev(fd, [f"{os.uname().nodename} {os.getpid()}\n".encode()], 0)
        finally:
            self._calls.close(fd)

    # ---------------------------------------------------------------- the folders

    def _folders(self, share: float) -> Iterator[tuple[Path, list[str]]]:
        """Each folder with its names, in any order. _CutShort if this is to stop, or another took over."""
        yield self._namespace, self._calls.listdir(self._namespace)
        shards = [name for name in self._calls.listdir(self._namespace) if is_shard(name)]
        for shard in shards:
            names = self._names_in(self._namespace / shard)
            yield self._namespace / shard, names
            fans = list(filter(is_fan, names))
            random.shuffle(fans)
            for fan in fans:
                started_s = self._clock.now_s()
                yield self._namespace / shard / fan, self._names_in(self._namespace / shard / fan)
                took_s = self._clock.now_s() - started_s
                if self._stopping.wait(min(LONGEST_PAUSE_S, took_s * (1 / share - 1))):
                    raise _CutShort
                if self._clock.now_s() - self._beaten_s > BEAT_S:
                    if self._lock_there() != self._mine:
                        raise _CutShort
                    self._beat()

    def _names_in(self, folder: Path) -> list[str]:
        with suppress(OSError):
            return self._calls.listdir(folder)
        return []

    def _count(self, folder: Path, names: list[str], seen: EvictionPass) -> None:
        for name in names:
            is_block = key_in(name) is not None
            if not is_block and not is_temporary(name):
                continue
            status = self._file(folder / name)
            if status is None:
                continue
            if is_block:
                seen.blocks += 1
                seen.num_bytes += status.st_size
                seen.bytes_by_age[_age_step(status)] += status.st_size
            elif self._file_system_s - status.st_mtime > TEMPORARY_S and self._remove(folder / name):
                seen.removed_temporary += 1

    def _make_room(self, seen: EvictionPass, share: float) -> None:
        """Removes the oldest, down to the low mark; a block that has been used meanwhile stays."""
        assert self._max_bytes is not None  # noqa: S101
        excess_bytes = seen.num_bytes - int(LOW_MARK * self._max_bytes)
        older_bytes, last_step = 0, -1
        for step, num_bytes in sorted(seen.bytes_by_age.items()):
            last_step = step
            if older_bytes + num_bytes >= excess_bytes:
                break
            older_bytes += num_bytes
        last_budget_bytes = excess_bytes - older_bytes
        for fan, names in self._folders(share):
            for name in names:
                status = self._file(fan / name) if key_in(name) is not None else None
                if status is None or (step := _age_step(status)) > last_step:
                    continue
                if step == last_step:
                    if last_budget_bytes <= 0:
                        continue
                    last_budget_bytes -= status.st_size
                if self._remove(fan / name):
                    seen.removed_blocks += 1
                    seen.removed_bytes += status.st_size
            if seen.removed_bytes >= excess_bytes:
                return

    def _file(self, path: Path) -> os.stat_result | None:
        with suppress(OSError):
            status = self._calls.lstat(path)
            if stat.S_ISREG(status.st_mode):
                return status
        return None

    def _remove(self, path: Path) -> bool:
        try:
            self._calls.unlink(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                limited_log.warning(error.errno, "kvbm: %s cannot be removed: %s", path, error.strerror)
            return False
        return True


def _age_step(status: os.stat_result) -> int:
    return int(status.st_mtime // AGE_STEP_S)
