"""What is in a shared directory, looked at from outside while engines use it: counted, checked, removed.

Only names of ours are touched, in folders of ours; links are never followed. Any thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import xxhash

from kvbm_core.errors import Outcome
from kvbm_core.storage.directory.evictor import LOCK
from kvbm_core.storage.directory.names import TOP, is_temporary, key_in
from kvbm_core.storage.directory.record_files import NOT_THERE
from kvbm_core.storage.directory.size import SIZE
from kvbm_core.storage.disk.inspect import OnProgress, reading
from kvbm_core.storage.disk.record import SECTOR_BYTES, FileHeader, judge_record, record_bytes, unpack_record
from kvbm_core.storage.inspection import Checked, Counted, Model, OnCount, Removed, Shard
from kvbm_core.storage.names import ObjectInfo, is_fan, is_namespace, is_shard, life_of

VERIFY_THREADS = 8
"""A server that is far away answers several at once as fast as one."""
VERIFIED_TOGETHER = 4096
FANS = 4096
"""Folders in a rank's folder, at most."""
READ_BYTES = 4 << 20
MAX_LOCK_BYTES = 256
OURS = (LOCK, SIZE)
"""In a model's folder, beside those of its ranks."""
FLAWS = {
    Outcome.CORRUPT: "the header does not verify",
    Outcome.INCOMPATIBLE: "its blocks mean something else",
    Outcome.MISS: "it is another block's",
}


class DirectoryInspection:
    """A StoreInspection. ``where``: the directory."""

    top = TOP
    evicts_itself = False

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._directory = directory
        self._top = directory / TOP

    def models(self) -> list[str]:
        """See StoreInspection."""
        return sorted({namespace for namespace, _ in self._shards()})

    def count(self, now_ns: int, on_count: OnCount) -> Counted:
        """See StoreInspection."""
        there, shards = list(self._shards()), list[Shard]()
        for number, (namespace, shard) in enumerate(there):
            folders = count(number * FANS)

            def on_folders(_: int, folders: Iterator[int] = folders) -> None:
                on_count(next(folders), len(there) * FANS)

            shards.append(self._counted(namespace, shard, now_ns, on_folders))
        models = {namespace: _look_at(self._top / namespace) for namespace, _ in there}
        return Counted(shards, models)

    def _counted(self, namespace: str, shard: str, now_ns: int, on_folders: OnProgress) -> Shard:
        """Looks at all files of a rank's folder; ``on_folders(1)`` after each of up to FANS folders in it."""
        seen = Shard(namespace, shard)
        for folder in _folders_in(self._top / namespace / shard, seen):
            for name in _readable_names_in(folder, seen):
                _count_file(folder / name, seen, now_ns)
            on_folders(1)
        return seen

    def verify(self, models: Sequence[str] = (), *, removes_damaged: bool = False) -> Iterator[Checked]:
        """See StoreInspection. Many at a time."""
        with ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="kvbm-directory-verify") as pool:
            paths = self._files(models)
            while some := list(islice(paths, VERIFIED_TOGETHER)):
                for checked in pool.map(_check, some):
                    yield checked
                    if removes_damaged and checked.what and not checked.is_unreadable:
                        (self._directory / checked.name).unlink(missing_ok=True)

    def remove_model(self, namespace: str, on_records: OnProgress) -> Removed:
        """See StoreInspection. What is half written, and the folders that are empty then, too."""
        top = self._top / namespace
        removed, removed_bytes, strange = 0, 0, 0
        for shard in filter(is_shard, os.listdir(top)):
            for fan in filter(is_fan, os.listdir(top / shard)):
                for name in os.listdir(top / shard / fan):
                    is_block = key_in(name) is not None
                    size = _remove(top / shard / fan / name, is_ours=is_block)
                    if is_block and size is not None:
                        removed, removed_bytes = removed + 1, removed_bytes + size
                        on_records(1)
                    strange += size is None
                _rmdir(top / shard / fan)
            for name in os.listdir(top / shard):
                strange += not is_fan(name) and _remove(top / shard / name) is None
            _rmdir(top / shard)
        for name in os.listdir(top):
            strange += not is_shard(name) and _remove(top / name, is_ours=name in OURS) is None
        _rmdir(top)
        return Removed(removed, removed_bytes, strange)

    def objects(self, models: Sequence[str] = ()) -> Iterator[ObjectInfo]:
        """See StoreInspection."""
        for path in self._files(models):
            try:
                status = os.lstat(path)
            except OSError:  # removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(_relative(path), status.st_size, status.st_mtime)

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        """See StoreInspection."""
        return [self._unlink(self._directory / name) for name in names]

    def close(self) -> None:
        """See StoreInspection."""

    def _shards(self) -> Iterator[tuple[str, str]]:
        """(namespace, shard) of each rank's folder, in order. OSError if the directory, or a folder above
        those of ranks, cannot be read.
        """
        os.scandir(self._directory).close()
        for namespace in filter(is_namespace, _names_in(self._top)):
            for shard in filter(is_shard, _names_in(self._top / namespace)):
                yield namespace, shard

    def _files(self, models: Sequence[str]) -> Iterator[Path]:
        """The files that have the name of a block, in folders that can be read: ``count`` tells of others."""
        for namespace, shard in self._shards():
            if not models or namespace in models:
                seen = Shard(namespace, shard)
                for folder in _folders_in(self._top / namespace / shard, seen):
                    names = _readable_names_in(folder, seen)
                    yield from (folder / name for name in names if key_in(name) is not None)

    @staticmethod
    def _unlink(path: Path) -> Outcome:
        try:
            path.unlink()
        except OSError as error:
            return Outcome.MISS if error.errno in NOT_THERE else Outcome.IO_ERROR
        return Outcome.OK


# -------------------------------------------------------------------- inside


def _look_at(folder: Path) -> Model:
    """What is in a model's folder beside those of its ranks. OSError if it cannot be read."""
    names = _names_in(folder)
    return Model(
        _evictor_of(folder),
        sum(not (is_shard(name) or name in OURS or is_temporary(name)) for name in names),
    )


def _relative(path: Path) -> str:
    """A block's file, from the directory on."""
    return "/".join(path.parts[-5:])


def _names_in(folder: Path) -> list[str]:
    """None if it is not there, or is no folder. OSError if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise


def _readable_names_in(folder: Path, seen: Shard) -> list[str]:
    try:
        return _names_in(folder)
    except OSError:
        seen.unreadable += 1
        return []


def _evictor_of(folder: Path) -> str:
    try:
        with reading(folder / LOCK) as fd:
            return os.pread(fd, MAX_LOCK_BYTES, 0).decode(errors="replace").strip()
    except OSError:
        return ""


def _folders_in(shard: Path, seen: Shard) -> Iterator[Path]:
    for name in _readable_names_in(shard, seen):
        if is_fan(name):
            yield shard / name
        else:
            seen.temporary += is_temporary(name)
            seen.strange += not is_temporary(name)


def _count_file(path: Path, seen: Shard, now_ns: int) -> None:
    is_block = key_in(path.name) is not None
    try:
        status = os.lstat(path)
    except OSError as error:
        seen.unreadable += error.errno not in NOT_THERE
        return
    if not stat.S_ISREG(status.st_mode) or not (is_block or is_temporary(path.name)):
        seen.strange += 1
        return
    seen.num_bytes += status.st_size
    if is_block:
        seen.contents.add(status.st_mtime_ns, now_ns)
        seen.num_blocks += 1
    else:
        seen.temporary += 1


def _check(path: Path) -> Checked:
    try:
        with reading(path) as fd:
            num_bytes = os.fstat(fd).st_size
            what = _what_is_wrong(fd, path, num_bytes)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return Checked(_relative(path), what, num_bytes)
    except OSError as error:
        if error.errno in NOT_THERE and not path.is_symlink():
            return Checked(_relative(path), is_gone=True)
        return Checked(_relative(path), error.strerror or str(error), is_unreadable=True)


def _what_is_wrong(fd: int, path: Path, num_bytes: int) -> str:
    header = unpack_record(os.pread(fd, SECTOR_BYTES, 0))
    key = key_in(path.name)
    if header is None or key is None:
        return FLAWS[Outcome.CORRUPT]
    namespace, shard = path.parts[-4:-2]
    fingerprint = bytes.fromhex(shard[:16]) + header.fingerprint[8:]
    file = FileHeader(life_of(namespace, shard), fingerprint, header.payload_bytes, 1)
    outcome = judge_record(header, key, 0, file)
    if outcome is not Outcome.OK:
        return FLAWS[outcome]
    if num_bytes != record_bytes(header.payload_bytes):
        return "its length is not what its header says"
    state = xxhash.xxh3_128()
    at, end = SECTOR_BYTES, SECTOR_BYTES + header.payload_bytes
    while at < end:
        piece = os.pread(fd, min(READ_BYTES, end - at), at)
        if not piece:
            return "it ends too soon"
        state.update(piece)
        at += len(piece)
    return "" if state.digest() == header.digest else "the payload does not match its checksum"


def _remove(path: Path, *, is_ours: bool = False) -> int | None:
    """The bytes of what was removed, or had gone; None if it is none of ours, nor half written."""
    if not (is_ours or is_temporary(path.name)):
        return None
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        path.unlink()
    except FileNotFoundError:
        return 0
    return status.st_size


def _rmdir(folder: Path) -> None:
    with suppress(OSError):  # something else is in it, or is being put there
        folder.rmdir()
