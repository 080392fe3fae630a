"""The SHA-256 of what a folder of weights holds, and a memory of it, so that nothing is read twice."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import os
import re
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm_core.identity.hub import is_as_downloaded

WEIGHT_SUFFIXES = frozenset(
    (
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".gguf",
        ".npz",
        ".npy",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".tensors",
        ".index",
        ".data",
    )
)
# What shapes no K or V: words, pictures, logs, and what makes token ids of text, which are given.
_OTHER_SUFFIXES = frozenset(
    (
        ".md",
        ".rst",
        ".log",
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
        ".svg",
        ".webp",
        ".pdf",
        ".html",
        ".ipynb",
        ".mp4",
        ".wav",
        ".jinja",
        ".lock",
        ".pyc",
        ".tiktoken",
        ".incomplete",
        ".tmp",
        ".swp",
    )
)
# Only code that comes with the weights may read these.
_DATA_SUFFIXES = frozenset((".csv", ".jsonl", ".parquet", ".txt"))
_CODE_SUFFIXES = frozenset((".py", ".so"))
_OTHER_NAMES = frozenset(
    (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "tekken.json",
        "sentencepiece.bpe.model",
        "spiece.model",
        "all_results.json",
        "eval_results.json",
        "predict_results.json",
        "test_results.json",
        "train_results.json",
        "chat_template.json",
        "generation_config.json",
        "trainer_state.json",
        "training_args.bin",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scaler.pt",
        "LICENSE",
        "NOTICE",
        "README",
    )
)
_NO_FOLDERS = re.compile(r"\..*|__pycache__")
_OTHER_FOLDERS = re.compile(r"checkpoint-\d+|runs|logs")
_PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.[a-z]+)")
MAX_FILES = 20_000
READ_BYTES = 2 << 20
"""Few enough reads that they do not fight the engine's Python code for the interpreter's lock."""
READS_AHEAD = 4
MAX_THREADS = 4
RACY_NS = 2_000_000_000
"""A file that changed less than this ago may change again without another time stamp."""
MAX_REMEMBERED = 8192
_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
"""File systems that never write back: a page that is mapped changes there for ever without a time stamp."""
_ENTRY = re.compile(r"kvbm-digest 1 (\d+) (\d+) (\d+) (\d+) (\d+) ([0-9a-f]{64})\n")


class UnreadableError(Exception):
    """What a folder holds cannot be told; the message says why, for the log."""


class StoppedError(Exception):
    """The digest was not finished, as nobody wants it any more."""


class Signature(NamedTuple):
    """What a file's content is remembered by: any write, rename over it or copy changes one of these."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        """Of an ``os.stat``."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Content(NamedTuple):
    """What a folder holds. ``changed_ns``: when something of it last changed, by the time stamps of what is
    as the hub has it, and ``newest`` that something. ``read_bytes``: how much was read for it.
    """

    sha256: str
    changed_ns: int
    newest: Path
    read_bytes: int
    signatures: tuple[tuple[str, Signature], ...]
    """As ``signatures_of``, of the very files that were looked at."""


class DigestMemory:
    """Digests of files, one small private file each, so that processes need no lock among them.

    ``folder`` None: nothing is remembered. Foreign, damaged and unreadable entries are as if they were not.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def is_kept(self) -> bool:
        """Whether anything is remembered."""
        return self._folder is not None

    def find(self, signature: Signature) -> str:
        """The digest of the file that has this signature; "" if it is not known."""
        if self._folder is None:
            return ""
        try:
            fd = os.open(self._entry(signature), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, encoding="ascii", errors="replace") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                    return ""
                found = _ENTRY.fullmatch(file.read(512))
        except OSError:
            return ""
        return found[6] if found and Signature(*map(int, found.groups()[:5])) == signature else ""

    def remember(self, signature: Signature, sha256: str) -> None:
        """Notes a digest, unless the file is so new that it may yet change unseen."""
        newest_ns = max(signature.mtime_ns, signature.ctime_ns)
        if self._folder is None or time.time_ns() - newest_ns < RACY_NS:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self._folder.lstat()):
                return
            self._make_room()
            fd, name = tempfile.mkstemp(dir=self._folder)
            try:
                with open(fd, "w", encoding="ascii") as file:
                    file.write(f"kvbm-digest 1 {' '.join(map(str, signature))} {sha256}\n")
                os.replace(name, self._entry(signature))
            except OSError:
                os.unlink(name)
                raise

    def _entry(self, signature: Signature) -> Path:
        return (self._folder or Path()) / f"{signature.device:x}-{signature.inode:x}"

    def _make_room(self) -> None:
        names = os.listdir(self._folder or ".")
        if len(names) < MAX_REMEMBERED:
            return
        paths = [self._entry(Signature(0, 0, 0, 0, 0)).with_name(name) for name in names]
        paths.sort(key=lambda path: path.lstat().st_mtime_ns)
        for path in paths[: MAX_REMEMBERED // 4]:
            path.unlink(missing_ok=True)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def cache_folder() -> Path | None:
    """kvbm's in the user's cache folder; None without one."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # no home
        return None
    return base / "kvbm" if base.is_absolute() else None


def default_memory() -> DigestMemory:
    """In the user's cache folder; without one, nothing is remembered."""
    folder = cache_folder()
    return DigestMemory(None if folder is None else folder / "digests")


# ---------------------------------------------------------------- which files


def files_of(path: Path, *, any_file: bool = False) -> dict[str, Path]:
    """What shapes K and V of a folder of weights, by its name within it; of a file, it and the other parts of
    a file that comes in parts. With ``any_file`` also what only code that comes with them may read.
    UnreadableError if there are too many, OSError if they cannot be listed.
    """
    if path.is_file():
        part = _PART.fullmatch(path.name)
        others = path.parent.glob(f"{_escaped(part[1])}*{_escaped(part[2])}") if part else ()
        return {other.name: other for other in (path, *others)}
    files: dict[str, Path] = {}
    counts = _counts_for_code if any_file else _counts
    for name, file in _walk(path, "", {path.stat().st_ino}, counts, any_file=any_file):
        files[name] = file
        if len(files) > MAX_FILES:
            raise UnreadableError(f"{path} holds more than {MAX_FILES} files")
    return files


def _walk(
    folder: Path, prefix: str, above: set[int], counts: Callable[[str], bool], *, any_file: bool
) -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name, path = entry.name, folder / entry.name
            if entry.is_dir():
                inode = path.stat().st_ino
                is_other = _OTHER_FOLDERS.fullmatch(name) is not None
                if _NO_FOLDERS.fullmatch(name) or inode in above or (is_other and not any_file):
                    continue
                below = _is_code if is_other else counts
                yield from _walk(path, f"{prefix}{name}/", {*above, inode}, below, any_file=any_file)
            elif counts(name) and entry.is_file():
                yield prefix + name, path


def _counts(name: str) -> bool:
    return _counts_for_code(name) and _suffix(name) not in _DATA_SUFFIXES


def _counts_for_code(name: str) -> bool:
    return not (name.startswith(".") or name in _OTHER_NAMES or _suffix(name) in _OTHER_SUFFIXES)


def _is_code(name: str) -> bool:
    return _suffix(name) in _CODE_SUFFIXES


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


# ---------------------------------------------------------------- what they hold


class _File(NamedTuple):
    sha256: str
    changed_ns: int
    """0: it is as the hub's cache names it by its content."""
    read_bytes: int
    signature: Signature


class Digester:
    """Digests folders in threads of its own, which yield to all others. ``is_stopped`` is asked often. Of
    ``total_bytes``, ``done_bytes`` are known, and ``read_bytes`` were read for that.
    """

    def __init__(self, memory: DigestMemory, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._memory = memory
        self._is_stopped = is_stopped
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.done_bytes = 0
        self.total_bytes = 0

    def content(self, path: Path, *, is_code: bool = False, any_file: bool = False) -> Content:
        """What ``path`` holds, by ``files_of``. UnreadableError for what is no weights (unless it
        ``is_code``), or changes meanwhile; StoppedError.
        """
        try:
            return self._content(path, is_code=is_code, any_file=any_file)
        except (OSError, ValueError) as error:
            raise UnreadableError(f"{path} cannot be read: {error}") from error

    def file(self, path: Path) -> str:
        """sha256 of one file. OSError, or UnreadableError if it changes meanwhile."""
        return self._file(path).sha256

    def _content(self, path: Path, *, is_code: bool, any_file: bool) -> Content:
        files = files_of(path, any_file=any_file)
        if not is_code and not any(_suffix(name) in WEIGHT_SUFFIXES for name in files):
            raise UnreadableError(f"{path} holds no weights")
        sizes = {name: file.stat().st_size for name, file in files.items()}
        self.total_bytes += sum(sizes.values())
        order = sorted(files, key=lambda name: -sizes[name])  # the longest first: threads end together
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2, len(order)))
        with ThreadPoolExecutor(threads, "kvbm-digest", initializer=yield_to_others) as pool:
            parts = dict(zip(order, pool.map(self._file, [files[name] for name in order]), strict=True))
        if files_of(path, any_file=any_file) != files:
            raise UnreadableError(f"{path} was changed while it was read")
        whole = hashlib.sha256()
        for name in sorted(parts):
            whole.update(f"{name}\0{sizes[name]}\0{parts[name].sha256}\n".encode())
        if not parts:
            raise UnreadableError(f"{path} is empty")
        newest = max(parts, key=lambda name: parts[name].changed_ns)
        read_bytes = sum(part.read_bytes for part in parts.values())
        signatures = tuple(sorted((name, part.signature) for name, part in parts.items()))
        return Content(whole.hexdigest(), parts[newest].changed_ns, files[newest], read_bytes, signatures)

    def _file(self, path: Path) -> _File:
        signature = Signature.of(path.stat())
        sha256, read_bytes = self._memory.find(signature), 0
        if not sha256:
            sha256 = self._digest(path, signature)
            read_bytes = signature.size_bytes
        else:
            self._progress(signature.size_bytes, 0)
        changed_ns = 0
        if not is_as_downloaded(path, sha256):
            changed_ns = max(signature.ctime_ns, _link_changed_ns(path))
        return _File(sha256, changed_ns, read_bytes, signature)

    def _digest(self, path: Path, signature: Signature) -> str:
        digest, place = hashlib.sha256(), 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_written_back = self._memory.is_kept and _write_back(fd, signature.device)
            with contextlib.closing(_pieces(fd, signature.size_bytes)) as pieces:
                for piece in pieces:
                    if self._is_stopped():
                        raise StoppedError
                    digest.update(piece)
                    place += len(piece)
                    self._progress(len(piece), len(piece))
            after = Signature.of(os.fstat(fd))
        finally:
            os.close(fd)
        if not signature == after == Signature.of(path.stat()) or place != signature.size_bytes:
            raise UnreadableError(f"{path} was changed while it was read")
        if is_written_back:
            self._memory.remember(signature, digest.hexdigest())
        return digest.hexdigest()

    def _progress(self, num_done: int, num_read: int) -> None:
        with self._lock:
            self.done_bytes += num_done
            self.read_bytes += num_read


def _pieces(fd: int, size_bytes: int) -> Generator[memoryview, None, None]:
    """What the file holds, each piece until the next is asked for; others are read ahead meanwhile. To be
    closed before ``fd``.

    What is not in memory is read past the page cache: to fill it takes as much of a core as SHA-256 does, and
    pushes out what the engine has there.
    """
    length = min(READ_BYTES, -(-(size_bytes + 1) // mmap.PAGESIZE) * mmap.PAGESIZE)  # the last one is shorter
    num_ahead = min(READS_AHEAD, size_bytes // length)
    buffers = [memoryview(mmap.mmap(-1, length)) for _ in range(num_ahead + 1)]
    direct_fd = None if _is_cached(fd, size_bytes) else _open_direct(fd)
    num_threads = 1 if direct_fd is None else max(1, num_ahead)
    readers = ThreadPoolExecutor(num_threads, "kvbm-digest-read", initializer=yield_to_others)
    try:
        reads: deque[tuple[memoryview, Future[int]]] = deque()
        for number in itertools.count():
            buffer = buffers[number % len(buffers)]
            reads.append((buffer, readers.submit(_fill, fd, direct_fd, buffer, number * length)))
            if len(reads) < len(buffers):
                continue
            done, read = reads.popleft()
            filled = read.result()
            if filled:
                yield done[:filled]
            if filled < length:
                return
    finally:
        readers.shutdown(cancel_futures=True)
        if direct_fd is not None:
            os.close(direct_fd)


def _fill(fd: int, direct_fd: int | None, buffer: memoryview, place: int) -> int:
    """How many bytes there were from ``place`` on. Some file systems give them in parts, or not directly."""
    filled = 0
    if direct_fd is not None:
        with contextlib.suppress(OSError):
            filled = os.preadv(direct_fd, [buffer], place)
    while filled < len(buffer) and (got := os.preadv(fd, [buffer[filled:]], place + filled)):
        filled += got
    return filled


def _open_direct(fd: int) -> int | None:
    """The same file past the page cache, where its file system can."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def _is_cached(fd: int, size_bytes: int) -> bool:
    """Whether most of the file is in the page cache, or nobody can tell. Reads nothing."""
    try:
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as mapping:
            is_here = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
            address = ctypes.c_void_p(np.frombuffer(mapping, np.uint8).ctypes.data)
            if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size_bytes), is_here):
                return True
    except (OSError, ValueError):
        return True
    return 2 * bytes(is_here).count(1) >= len(is_here)


def signatures_of(path: Path, *, any_file: bool = False) -> tuple[tuple[str, Signature], ...]:
    """Of all that ``files_of`` answers, sorted: equal unless something changed. Reads no file."""
    files = files_of(path, any_file=any_file)
    return tuple(sorted((name, Signature.of(file.stat())) for name, file in files.items()))


def link_changed_ns(paths: Sequence[Path]) -> int:
    """When the newest of the links on the way to ``paths`` was made; 0 without links."""
    return max(map(_link_changed_ns, paths), default=0)


def _link_changed_ns(path: Path) -> int:
    newest = 0
    seen: set[Path] = set()
    ways = [path]
    while ways:
        way = ways.pop()
        for part in (way, *way.parents):
            if part in seen:
                continue
            seen.add(part)
            status = part.lstat()
            if stat.S_ISLNK(status.st_mode):
                newest = max(newest, status.st_ctime_ns)
                ways.append(part.parent / part.readlink())
    return newest


def _write_back(fd: int, device: int) -> bool:
    """Sees to it that any later write changes a time stamp. A write through a mapping does not while the page
    is still to be written back from one before. False if that cannot be had.
    """
    if file_system_of(device) in _IN_MEMORY:
        return False
    try:
        os.fsync(fd)
    except OSError:
        return False
    return True


def file_system_of(device: int, mounts: str | None = None) -> str:
    """The kind of the file system on a device; empty if the kernel does not say. ``mounts``: what it says."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace") if mounts is None else mounts
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return ""


def yield_to_others() -> None:
    """This thread runs when those of usual priority leave a core to it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
