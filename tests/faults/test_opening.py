"""Directories and files that cannot be used, or only in part: one clear line, or a way round it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import allocate
from kvbm_core.storage.disk.allocate import DirectoryBusyError, DiskError, FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.faults.versions import put_versions, read_all
from tests.open_files import open_files

ROOT = Path(__file__).parents[2]
PAYLOAD_BYTES = 8192
NUM_SLOTS = 4
GEOMETRY = Geometry(NUM_SLOTS, PAYLOAD_BYTES, b"opening".ljust(16))
AT_OPEN = FileOptions(opens_direct=True)
AFTER_OPEN = FileOptions(opens_direct=False)
BUFFERED = FileOptions(is_direct=False)

PRELUDE = """
import errno, os, resource, signal, sys
from dataclasses import replace
from pathlib import Path
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import allocate
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.testing.store_contract import LONG_S
from kvbm_core.storage.disk.store import DiskStore
from tests.faults.test_opening import AFTER_OPEN, BUFFERED, GEOMETRY, PAYLOAD_BYTES
from tests.faults.versions import put_versions, read_all
path = Path(sys.argv[1])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file that is not there yet, nor its directory."""
    return tmp_path / "cache" / "opening.blocks"


@pytest.fixture(autouse=True)
def no_open_files_are_left() -> Iterator[None]:
    """Whatever happens."""
    before = open_files()
    yield
    assert open_files() == before


def fails(path: Path, options: FileOptions | None = None, *, code: int, remedy: str) -> None:
    """Opening ends in one line that says what is wrong with which file, and what to do."""
    with pytest.raises(DiskError) as caught:
        DiskStore(path, GEOMETRY, options)
    assert caught.value.errno == code
    line = str(caught.value)
    assert "\n" not in line and f"kvbm: {path}: {os.strerror(code)}" in line and remedy in line, line


def works(path: Path, options: FileOptions | None = None, version: int = 1) -> tuple[bool, bool]:
    """Opens a store, puts and gets with it, and again after a restart; (is_direct, is_reserved)."""
    for is_new in (True, False):
        store = DiskStore(path, GEOMETRY, options)
        assert store.wait_recovered(LONG_S)
        if is_new:
            put = put_versions(store, dict.fromkeys(range(NUM_SLOTS), version), PAYLOAD_BYTES)
            assert put == [Outcome.OK] * NUM_SLOTS
        assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[1] == [version] * NUM_SLOTS
        flags = fcntl.fcntl(store._file.fd, fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) is store._file.is_direct
        store.close()
    return store._file.is_direct, store._file.is_reserved


def run(program: str, path: Path) -> None:
    """In a process of its own; it has to end well."""
    command = [sys.executable, "-c", PRELUDE + dedent(program), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=LONG_S * 4)
    assert result.returncode == 0, result.stderr.decode()


# ---------------------------------------------------------------- what cannot be opened


def test_a_place_that_is_no_directory_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    fails(tmp_path / "file" / "x.blocks", code=errno.EEXIST, remedy="set DYN_KVBM_DISK_CACHE_DIR")
    (tmp_path / "folder.blocks").mkdir()
    fails(tmp_path / "folder.blocks", code=errno.EISDIR, remedy="set DYN_KVBM_DISK_CACHE_DIR")


@pytest.mark.skipif(
    os.geteuid() == 0, reason="NOT RUN: a directory without permission to write: root may write anywhere"
)
def test_a_directory_that_may_not_be_written(path: Path) -> None:
    path.parent.mkdir(mode=0o500)
    fails(path, code=errno.EACCES, remedy="set DYN_KVBM_DISK_CACHE_DIR to a directory that can be written")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_file_system_that_may_not_be_written(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(file: Path, flags: int, mode: int = 0o777) -> int:
        if Path(file) == path:
            raise OSError(code, os.strerror(code))
        return real_open(file, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    fails(path, code=code, remedy="set DYN_KVBM_DISK_CACHE_DIR to a directory that can be written")


def test_a_process_without_file_numbers_left(path: Path) -> None:
    program = """
        def attempt():
            try:
                DiskStore(path, GEOMETRY, BUFFERED).close()
            except DiskError as error:
                return error
        assert attempt() is None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        fillers = []
        try:
            while True:
                fillers.append(os.dup(0))
        except OSError as error:
            assert error.errno == errno.EMFILE
        error = attempt()
        assert error is not None and error.errno == errno.EMFILE, error
        assert "raise the limit of open files (ulimit -n)" in str(error) and str(path) in str(error), error
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert attempt() is None
    """
    run(program, path)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("options", [BUFFERED, AFTER_OPEN])
def test_a_disk_that_fails_at_the_files_header(
    path: Path, call: str, options: FileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(path, options)

    def refuse(fd: int, buffers: Sequence[object], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refuse)
    fails(path, options, code=errno.EIO, remedy="set DYN_KVBM_DISK_CACHE_DIR to a directory on a local disk")


def test_a_header_that_is_written_in_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 512)
    with pytest.raises(DiskError, match="header could not be written"):
        DiskStore(path, GEOMETRY, BUFFERED)


def test_a_foreign_file_is_closed_again(path: Path) -> None:
    works(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x02\x00")
    for _ in range(2):
        with pytest.raises(DiskError, match="is of format"):
            DiskStore(path, GEOMETRY)


# ---------------------------------------------------------------- two of us


def test_a_second_process_is_refused_and_changes_nothing(path: Path) -> None:
    program = """
        store = DiskStore(path, GEOMETRY, BUFFERED)
        assert store.wait_recovered(LONG_S)
        assert put_versions(store, {0: 1, 1: 1}, PAYLOAD_BYTES) == [Outcome.OK] * 2
        print("open", flush=True)
        sys.stdin.read()
        assert read_all(store, 2, PAYLOAD_BYTES)[1] == [1, 1]
        assert put_versions(store, {2: 1, 3: 1}, PAYLOAD_BYTES) == [Outcome.OK] * 2
        store.close()
    """
    command = [sys.executable, "-c", PRELUDE + dedent(program), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        content, changed_ns = path.read_bytes(), path.stat().st_mtime_ns
        for geometry in (GEOMETRY, Geometry(1, 1, bytes(16)), Geometry(100, 100_000, bytes(16))):
            with pytest.raises(DirectoryBusyError, match="another process uses it") as caught:
                DiskStore(path, geometry)
            assert caught.value.errno == errno.EBUSY and str(path) in str(caught.value)
        assert path.read_bytes() == content and path.stat().st_mtime_ns == changed_ns
        other.communicate()
    assert other.returncode == 0
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[1] == [1] * NUM_SLOTS
    store.close()


# ---------------------------------------------------------------- no space


@pytest.mark.parametrize("call", ["_fallocate", "os.ftruncate"])
def test_a_disk_without_space(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, num_bytes: int) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
        patch.setattr(f"{allocate.__name__}.{call}", full)
        fails(
            path, code=errno.ENOSPC, remedy="GB are free, as df says); set a smaller DYN_KVBM_DISK_CACHE_GB"
        )
    works(path)


def test_nothing_is_taken_of_a_disk_that_is_too_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else writes there would find it full meanwhile."""
    tried: list[int] = []
    monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: bool(tried.append(num_bytes)))
    room = os.statvfs(path.parent.parent)
    free_bytes = room.f_bfree * room.f_frsize
    geometry = Geometry(2 * free_bytes // PAYLOAD_BYTES, PAYLOAD_BYTES, GEOMETRY.fingerprint)
    with pytest.raises(DiskError, match=r"for [0-9.]+ GB \([0-9.]+ GB are free, as df says\); set") as caught:
        DiskStore(path, geometry, BUFFERED)
    told_gb = float(str(caught.value).partition(" GB (")[2].partition(" GB")[0])
    assert 0.5 * room.f_bavail < 1e9 * told_gb / room.f_frsize < 2 * room.f_bavail
    assert not tried and path.stat().st_blocks == 0


@pytest.mark.parametrize("options", ["BUFFERED", "AFTER_OPEN"])
def test_a_limit_of_the_size_of_files(path: Path, options: str) -> None:
    """Of the kernel's own making, at opening and under an open file whose space is not reserved."""
    program = """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (GEOMETRY.file_bytes - 4096, hard))
        def check_refused(options):
            try:
                DiskStore(path, GEOMETRY, options)
                raise AssertionError("it was opened")
            except DiskError as error:
                assert error.errno == errno.EFBIG, error
                assert "set a smaller DYN_KVBM_DISK_CACHE_GB" in str(error), error
                assert path.stat().st_blocks == 0, path.stat()
        check_refused(OPTIONS)
        allocate._fallocate = lambda fd, num_bytes: False
        check_refused(OPTIONS)
        check_refused(replace(OPTIONS, zero_fill=True))
        path.unlink()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store = DiskStore(path, GEOMETRY, OPTIONS)
        assert store.wait_recovered(LONG_S)
        resource.setrlimit(resource.RLIMIT_FSIZE, (GEOMETRY.file_bytes - 3 * PAYLOAD_BYTES, hard))
        put = put_versions(store, dict.fromkeys(range(4), 1), PAYLOAD_BYTES)
        assert put == [Outcome.OK, Outcome.OK, Outcome.NO_SPACE, Outcome.NO_SPACE], put
        assert read_all(store, 4, PAYLOAD_BYTES)[1] == [1, 1, None, None]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert put_versions(store, {2: 1, 3: 1}, PAYLOAD_BYTES) == [Outcome.OK] * 2
        assert read_all(store, 4, PAYLOAD_BYTES)[1] == [1] * 4
        store.close()
    """
    run(program.replace("OPTIONS", options), path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MB, as machines have them."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=LONG_S)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("NOT RUN: a disk that is full: a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=LONG_S)


def free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


TOO_LARGE = Geometry(100_000, PAYLOAD_BYTES, GEOMETRY.fingerprint)
FITS = Geometry(1000, PAYLOAD_BYTES, GEOMETRY.fingerprint)


@pytest.mark.parametrize("zero_fill", [False, True])
def test_a_file_that_does_not_fit_takes_no_space(
    small_disk: Path, zero_fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if zero_fill:
        monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
    options = FileOptions(is_direct=False, zero_fill=zero_fill)
    path, before = small_disk / "new.blocks", free_bytes(small_disk)
    with pytest.raises(DiskError, match=r"No space left.*set a smaller DYN_KVBM_DISK_CACHE_GB") as caught:
        BlockFile(path, TOO_LARGE, options)
    assert "\n" not in str(caught.value)
    assert path.stat().st_size == 0 and path.stat().st_blocks == 0
    assert before - free_bytes(small_disk) < 1 << 20
    BlockFile(small_disk / "other.blocks", FITS, options).close()  # others have it


@pytest.mark.parametrize("was_sparse", [False, True])
def test_what_an_earlier_engine_stored_outlives_a_larger_file_that_does_not_fit(
    small_disk: Path, was_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_disk / "kept.blocks"

    def check(is_new: bool) -> None:
        store = DiskStore(path, FITS, BUFFERED)
        assert store.wait_recovered(LONG_S)
        if is_new:
            assert put_versions(store, dict.fromkeys(range(8), 1), PAYLOAD_BYTES) == [Outcome.OK] * 8
        assert read_all(store, 8, PAYLOAD_BYTES)[1] == [1] * 8
        store.close()

    with monkeypatch.context() as patch:
        if was_sparse:
            patch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
        check(is_new=True)
    os.sync()
    status = path.stat()
    with pytest.raises(DiskError, match="No space left"):
        BlockFile(path, TOO_LARGE, BUFFERED)
    assert path.stat().st_size == status.st_size
    taken_bytes = 512 * (path.stat().st_blocks - status.st_blocks)
    assert 0 <= taken_bytes < 1 << 16, taken_bytes  # the file system's own notes
    if was_sparse:
        monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
    check(is_new=False)


def test_space_that_cannot_be_reserved_is_written_or_the_file_is_sparse(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
    assert works(path, BUFFERED) == (False, False)
    assert "the file is sparse; the disk may fill up" in caplog.text
    assert path.stat().st_size == GEOMETRY.file_bytes > path.stat().st_blocks * 512
    path.unlink()
    for options in (FileOptions(is_direct=False, zero_fill=True), FileOptions(zero_fill=True)):
        caplog.clear()
        assert works(path, options, version=2)[1] is True
        # Of more, INFO too, depends on what ran before in this process, and on when a thread says it.
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert path.stat().st_size == GEOMETRY.file_bytes <= path.stat().st_blocks * 512


def test_reserved_space_is_the_files_own(path: Path) -> None:
    if not works(path)[1]:
        pytest.skip("NOT RUN: space that is reserved: the file system of temporary files has no fallocate")
    assert path.stat().st_size == GEOMETRY.file_bytes <= path.stat().st_blocks * 512


# ---------------------------------------------------------------- no O_DIRECT


@pytest.fixture
def direct(path: Path) -> None:
    """There is O_DIRECT as long as nobody refuses it."""
    file = BlockFile(path, GEOMETRY)
    is_direct = file.is_direct
    file.close()
    path.unlink()
    if not is_direct:
        pytest.skip("NOT RUN: O_DIRECT refused: the file system of temporary files has none to begin with")


@pytest.mark.usefixtures("direct")
def test_direct_files_work(path: Path) -> None:
    assert (
        works(path, AFTER_OPEN)[0]
        and works(path, AT_OPEN, version=2)[0]
        and not works(path, BUFFERED, version=3)[0]
    )


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("options", [AT_OPEN, AFTER_OPEN])
def test_a_file_system_without_o_direct(
    path: Path, options: FileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_fcntl = os.open, fcntl.fcntl

    def open_refusing(file: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(file, flags, mode)

    def fcntl_refusing(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_fcntl(fd, command, flags)

    monkeypatch.setattr(os, "open", open_refusing)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_refusing)
    assert works(path, options)[0] is False


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("options", [AT_OPEN, AFTER_OPEN])
def test_a_file_system_that_wants_larger_pieces(
    path: Path, options: FileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preadv = os.preadv

    def refuse(fd: int, buffers: Sequence[object], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(fd, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", refuse)
    assert works(path, options)[0] is False
