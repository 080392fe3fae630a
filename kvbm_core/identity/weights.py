"""What is known of the weights that a running engine computes with: a stamp that changes when they do."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.identity.digest import (
    Content,
    Digester,
    DigestMemory,
    Signature,
    StoppedError,
    UnreadableError,
    default_memory,
    link_changed_ns,
    signatures_of,
)
from kvbm_core.identity.hub import is_snapshot, snapshot_of
from kvbm_core.identity.load_formats import files_read
from kvbm_core.identity.roots import Stamp, process_stamp

log = logging.getLogger("kvbm")

WEIGHTS_WAIT_S = 2.0
"""Small models, and those that are remembered, are known by then: the first request finds the disk."""
PROGRESS_S = 10.0
CLOCK_TICK_NS = 20_000_000
"""File systems stamp changes with a clock that is behind by up to so much."""
_NOT_SHARED = "until the engine is started again no block goes to a disk or a shared directory"


_Files = tuple[tuple[str, Signature], ...]
Beginning = Mapping[str, _Files | None]
"""What lay at each source when the engine began to load, by the source's role; None: nothing known."""


@dataclass(frozen=True)
class Source:
    """Where an engine reads weights: a folder, a file, or a name of the hub. ``unknown``: why nobody can tell
    what comes from there ("" = can). ``is_code``: there need not be weights in it.
    """

    name: str
    revision: str = ""
    cache_dir: str = ""
    unknown: str = ""
    is_code: bool = False
    load_format: str = ""
    runs_code: bool = False
    """Its own code builds the model, and may read any of its files."""

    @property
    def counts_any_file(self) -> bool:
        """Whether files count that no engine reads by itself."""
        return self.is_code or self.runs_code


class WeightsIdentity:
    """The stamp of the model's weights now. Any thread may ask and tell.

    Until their content is known, and after any change in place, the stamp means nothing in another process.
    Nor does it while nobody knows whether they have changed.
    ``loaded_after_ns``: the engine began to load no sooner than that (Unix time); files that changed later
    may not be what is in memory. ``beginning``: ``files_of_sources`` at that time; without it, what
    lies there now.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        loaded_after_ns: int,
        memory: DigestMemory | None = None,
        *,
        beginning: Beginning | None = None,
        progress_s: float = PROGRESS_S,
    ) -> None:
        self._sources = dict(sources)
        self._beginning = files_of_sources(sources) if beginning is None else beginning
        self._loaded_after_ns = loaded_after_ns
        self._progress_s = progress_s
        self._lock = threading.Lock()
        self._id = secrets.token_hex(16)
        self._generation = self._last_generation = 0
        self._stamp = self._stamp_of_generation()
        self._before_doubt: tuple[int, Stamp] | None = None
        self._is_closed = threading.Event()
        self._is_over = threading.Event()
        self._digester = Digester(memory or default_memory(), self._is_stopped)
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """The number of the weights that the stamp is of: a new one with each change in place, and with each
        doubt, which may turn out to be the one before it.
        """
        return self._generation

    @property
    def doubted_generation(self) -> int | None:
        """That of which nobody knows whether it goes on; None: there is no doubt."""
        before = self._before_doubt
        return None if before is None else before[0]

    @property
    def read_bytes(self) -> int:
        """Of the files of weights, so far; what was remembered, or named by its content, was not read."""
        return self._digester.read_bytes

    def stamp(self) -> Stamp:
        """What is known now. At once."""
        return self._stamp

    def start(self) -> None:
        """Begins to find out what the weights are, in a thread of its own. Once; only who keeps blocks for
        others needs it.
        """
        if self._thread is None and not self._is_closed.is_set():
            self._thread = threading.Thread(target=self._run, name="kvbm-weights", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits until it is known what the weights are, or that it cannot be known. Whether it is over."""
        return self._thread is None or self._is_over.wait(seconds)

    def changed(self, why: str) -> None:
        """The weights in memory are others from now on. What was computed with those before is not found, and
        what is computed now stays in this process: nobody knows which weights these are.
        """
        with self._lock:
            was_lasting = self._is_first
            self._begin_generation()
            self._before_doubt = None
        line = "kvbm: %s: cached blocks of the weights before are not used any more%s"
        first = f"; {_NOT_SHARED}" if was_lasting else ""
        log.info(line, why, first)

    def doubt(self) -> None:
        """The weights may be others from now on: what was stored is not found, and what is stored now stays
        in this process, until it is known (``end_doubt``) or they have ``changed``.
        """
        with self._lock:
            self._before_doubt = self._before_doubt or (self._generation, self._stamp)
            self._begin_generation()

    def end_doubt(self, *, are_same: bool) -> None:
        """They are those of the doubted generation, which goes on; or they are not, or nobody can tell."""
        with self._lock:
            before = self._before_doubt
            if before is not None and are_same:
                self._generation, self._stamp = before
            self._before_doubt = None
        if before is not None and not are_same:
            line = "kvbm: caches were reset, and the weights are not known to be the same: %s"
            log.info(line, _NOT_SHARED)

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    # ---------------------------------------------------------------- its thread

    def _is_stopped(self) -> bool:
        return self._is_closed.is_set() or not self._is_first

    @property
    def _is_first(self) -> bool:
        """Whether the weights may be those that were loaded."""
        before = self._before_doubt
        return not (self._generation if before is None else before[0])

    def _run(self) -> None:
        began_s = time.monotonic()
        reporter = threading.Thread(target=self._report, name="kvbm-weights-log", daemon=True)
        reporter.start()
        try:
            stamp = self._find_out()
            with self._lock:
                if self._before_doubt is not None and self._is_first:
                    self._before_doubt = 0, stamp
                elif self._is_first:
                    self._stamp = stamp
            seconds, read_gb = time.monotonic() - began_s, self._digester.read_bytes / 1e9
            line = "kvbm: the weights are %s (%.1f GB read, %.1f s): blocks can be named by them from now on"
            log.info(line, stamp.text[:23], read_gb, seconds)
        except UnreadableError as error:
            log.warning(
                "kvbm: %s: nobody can tell these weights from others, so no block goes to a disk or a shared "
                "directory",
                error,
            )
        except StoppedError:
            pass
        except Exception:
            log.exception(
                "kvbm: the weights could not be looked at: no block goes to a disk or a shared directory"
            )
        finally:
            self._is_over.set()
            reporter.join()

    def _find_out(self) -> Stamp:
        whole = hashlib.sha256()
        for role, source in sorted(self._sources.items()):
            content = content_of(source, self._digester, self._loaded_after_ns)
            # Time stamps do not tell that another folder was put in place further up.
            if not _is_same(source, self._beginning.get(role), content.signatures):
                raise UnreadableError(f"{source.name} holds other files than when the engine began to load")
            whole.update(f"{role}\0{content.sha256}\0{_reading(source, content)}\n".encode())
        return Stamp(f"sha256:{whole.hexdigest()}", is_lasting=True)

    def _report(self) -> None:
        seen_bytes = 0
        while not self._is_over.wait(self._progress_s):
            done, total = self._digester.done_bytes, self._digester.total_bytes
            rate = (done - seen_bytes) / 1e9 / self._progress_s
            seen_bytes = done
            line = (
                "kvbm: %d%% of %.1f GB of weights looked at, %.2f GB/s; no block goes to a disk or a shared "
                "directory before it is done"
            )
            log.info(line, 100 * done // max(1, total), total / 1e9, rate)

    def _begin_generation(self) -> None:
        self._last_generation += 1
        self._generation = self._last_generation
        self._stamp = self._stamp_of_generation()

    def _stamp_of_generation(self) -> Stamp:
        return process_stamp(f"weights {self._id} generation {self._generation}")


def code_repositories(auto_map: object) -> set[str]:
    """Code for a model may lie in another one: transformers' "org/name--module.Class"."""
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
    return {item.partition("--")[0] for item in flat if isinstance(item, str) and "--" in item}


def content_of(source: Source, digester: Digester, loaded_after_ns: int) -> Content:
    """What ``source`` holds, if that is what an engine has that began to load it no sooner than
    ``loaded_after_ns``. UnreadableError, StoppedError.
    """
    path, links = resolve(source)
    content = digester.content(path, is_code=source.is_code, any_file=source.counts_any_file)
    changed = {content.newest: content.changed_ns} | {link: _changed_ns(link) for link in links}
    for what, changed_ns in changed.items():
        if changed_ns >= loaded_after_ns - CLOCK_TICK_NS:
            raise UnreadableError(f"{what} was changed after the engine began to load its weights")
    return content


def resolve(source: Source) -> tuple[Path, Sequence[Path]]:
    """Where its files are, and what must not change for them to be those. UnreadableError if there are
    none here.
    """
    if source.unknown:
        raise UnreadableError(source.unknown)
    path = Path(source.name).expanduser()
    try:
        if path.exists():
            # A folder that was put in another's place has files that are older than that. Those of the hub's
            # cache are named by what they hold.
            return path, (path,) if path.is_dir() and not is_snapshot(path) else ()
        snapshot = snapshot_of(source.name, source.revision, source.cache_dir)
    except (OSError, RuntimeError) as error:
        raise UnreadableError(f"{source.name} cannot be read: {error}") from error
    if snapshot is None:
        raise UnreadableError(f"{source.name} is neither a folder here nor in the hub's cache")
    is_only_one = len(list(snapshot.folder.parent.iterdir())) == 1  # the download of this very start
    return snapshot.folder, () if snapshot.ref is None or is_only_one else (snapshot.ref,)


def files_of_sources(sources: Mapping[str, Source]) -> Beginning:
    """What lies there now, by signatures. Reads no file and raises nothing."""
    return {role: _files_of(source) for role, source in sources.items()}


def _files_of(source: Source) -> _Files | None:
    try:
        return signatures_of(resolve(source)[0], any_file=source.counts_any_file) if source.name else None
    except (OSError, ValueError, UnreadableError):
        return None


def _is_same(source: Source, before: _Files | None, now: _Files) -> bool:
    if before is None:  # it was not here yet: the time stamps must do
        return True
    # A revision in the hub's cache may have been there in part: the engine has downloaded the rest.
    is_hubs = is_snapshot(resolve(source)[0])
    return set(before) <= set(now) if is_hubs else before == now


def _reading(source: Source, content: Content) -> str:
    """Which of its files the engine reads. UnreadableError."""
    names = [name for name, _ in content.signatures]
    try:
        return files_read(source.load_format, resolve(source)[0], names)
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise UnreadableError(f"{source.name} cannot be read: {error}") from error


def _changed_ns(path: Path) -> int:
    try:
        return max(path.stat().st_ctime_ns, link_changed_ns([path]))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from error


def process_began_ns() -> int:
    """When this process began, as Unix time: it has read nothing before."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
