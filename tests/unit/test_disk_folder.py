"""Which folder an engine's blocks are in: the same again after a restart, never one that somebody else
has.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.assembly import DISK, LowerTiers
from kvbm_core.storage.disk import folder as module
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX, BlockFile, Geometry
from kvbm_core.storage.disk.folder import (
    CLAIM,
    LOCK,
    MAX_ENGINES,
    NEXT,
    TOP,
    DiskFolder,
    claimed_folder,
)
from kvbm_core.storage.disk.record import FORMAT_VERSION, SECTOR_BYTES

LAYOUT = "layout0-layout1"
NOBODY = 65534
HOLD = """
import sys
from pathlib import Path
from kvbm_core.storage.disk.folder import DiskFolder
folder = DiskFolder(Path(sys.argv[1]), sys.argv[2])
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbers(*folders: DiskFolder) -> list[int]:
    """Which of the folders of its layout each one is."""
    return [int(folder.path.name.rsplit("-", 1)[1]) for folder in folders]


def block_file(folder: Path, version: int = FORMAT_VERSION) -> Path:
    """A file as engines leave it, of this version of the format or of another."""
    path = folder / f"rank-0-of-1{SUFFIX}"
    BlockFile(path, Geometry(1, 100, bytes(16)), FileOptions(is_direct=False)).close()
    with path.open("r+b") as file:
        file.seek(8)  # after the magic
        file.write(version.to_bytes(2, "little"))
    return path


@contextmanager
def another_engine(directory: Path, fingerprint: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder, and which one."""
    command = [sys.executable, "-c", HOLD, str(directory), fingerprint]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().rstrip("\n"))
        finally:
            process.kill()


def test_the_first_free_folder_is_taken_and_found_again(directory: Path) -> None:
    before = open_files()
    first = DiskFolder(directory, LAYOUT)
    assert first.path.parent == directory / TOP and first.path.is_dir()
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "kept").write_text("x")
    for _ in range(2):
        first.close()
    again = DiskFolder(directory, LAYOUT)
    assert again.path == first.path and (again.path / "kept").exists()
    first.close()  # has nothing to do with who has it now
    second = DiskFolder(directory, LAYOUT)
    assert numbers(again, second) == [0, 1]
    for folder in (again, second):
        folder.close()
    assert open_files() == before


def test_engines_of_one_layout_have_a_folder_each(directory: Path) -> None:
    folders = [DiskFolder(directory, LAYOUT) for _ in range(4)]
    assert numbers(*folders) == [0, 1, 2, 3]
    folders[1].close()
    folders.append(DiskFolder(directory, LAYOUT))
    assert numbers(folders[-1]) == [1]
    for folder in folders:
        folder.close()


def test_other_layouts_are_elsewhere(directory: Path) -> None:
    one, other = DiskFolder(directory, LAYOUT), DiskFolder(directory, LAYOUT + "x")
    assert numbers(one, other) == [0, 0] and one.path != other.path
    for folder in (one, other):
        folder.close()


def test_a_folder_goes_with_the_process_that_had_it(directory: Path) -> None:
    with another_engine(directory, LAYOUT) as (process, path):
        second = DiskFolder(directory, LAYOUT)
        assert numbers(second) == [1] and path == directory / TOP / second.path.name.replace("-1", "-0")
        process.send_signal(signal.SIGKILL)
        process.wait(60.0)
        third = DiskFolder(directory, LAYOUT)
        assert third.path == path
        for folder in (second, third):
            folder.close()


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 65535])
def test_what_another_version_left_is_passed_over_and_said(
    directory: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    first = DiskFolder(directory, LAYOUT)
    path = block_file(first.path, version)
    content = path.read_bytes()
    first.close()
    before = open_files()
    with caplog.at_level(logging.WARNING, "kvbm"):
        again = DiskFolder(directory, LAYOUT)
    assert numbers(again) == [1] and path.read_bytes() == content
    (record,) = caplog.records
    assert f"{path} is of format {version}" in record.getMessage() and "\n" not in record.getMessage()
    with (first.path / LOCK).open() as lock:  # that version may have it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    again.close()
    assert open_files() == before


def test_files_of_this_version_and_of_nobody_are_no_reason_to_go_elsewhere(directory: Path) -> None:
    first = DiskFolder(directory, LAYOUT)
    block_file(first.path)
    (first.path / f"rank-1-of-2{SUFFIX}").write_bytes(bytes(SECTOR_BYTES - 1))  # cut off
    (first.path / f"rank-2-of-2{SUFFIX}").write_bytes(os.urandom(SECTOR_BYTES))
    first.close()
    again = DiskFolder(directory, LAYOUT)
    assert again.path == first.path
    again.close()


def refusal(directory: Path) -> str:
    """Why not; nothing is left open."""
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        DiskFolder(directory, LAYOUT)
    assert caught.value.setting == "DYN_KVBM_DISK_CACHE_DIR"
    assert len(str(caught.value).splitlines()) == 1 and str(directory) in str(caught.value)
    caught.value.__traceback__ = None
    assert open_files() == before
    return str(caught.value)


def test_a_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    is_root = os.geteuid() == 0
    if is_root:  # may write everywhere
        os.seteuid(NOBODY)
    try:
        text = refusal(tmp_path)
    finally:
        if is_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)
    assert "Permission denied; set it to a directory on a local disk that can be written" in text


def test_a_file_where_the_directory_should_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in refusal(tmp_path / "file") or "File exists" in refusal(tmp_path / "file")


def test_a_file_system_without_locks_is_one_clear_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "No locks available" in refusal(directory)


def test_a_block_file_that_cannot_be_read_is_one_clear_line_and_holds_no_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> int | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    first = DiskFolder(directory, LAYOUT)
    block_file(first.path)
    first.close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_version_of", fail)
        assert "Input/output error" in refusal(directory)
    again = DiskFolder(directory, LAYOUT)
    assert again.path == first.path
    again.close()


def test_there_are_not_folders_without_end(directory: Path) -> None:
    folders = [DiskFolder(directory, LAYOUT) for _ in range(MAX_ENGINES)]
    assert numbers(*folders) == list(range(MAX_ENGINES))
    assert f"{MAX_ENGINES} engines use it already; set another directory" in refusal(directory)
    folders[40].close()
    folders[40] = DiskFolder(directory, LAYOUT)
    assert numbers(folders[40]) == [40]
    for folder in folders:
        folder.close()


def test_a_folder_in_which_others_could_plant_blocks_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskFolder(directory, LAYOUT).close()
    (directory / TOP).chmod(0o707)
    with pytest.raises(
        ConfigError, match=r"DYN_KVBM_DISK_CACHE_DIR=.*a directory of your own"
    ) as open_to_all:
        DiskFolder(directory, LAYOUT)
    (directory / TOP).chmod(0o700)
    DiskFolder(directory, LAYOUT).close()
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(ConfigError, match="belongs to another user") as foreign:
        DiskFolder(directory, LAYOUT)
    for error in (open_to_all, foreign):
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", [0o770, 0o2775, 0o720])
@pytest.mark.parametrize("is_top", [False, True])
def test_a_folder_that_its_group_can_write_to_is_refused(directory: Path, mode: int, is_top: bool) -> None:
    first = DiskFolder(directory, LAYOUT, "engine 1")
    first.close()
    folder = directory / TOP if is_top else first.path
    folder.chmod(mode)
    text = refusal(directory)
    assert f"others can write to {folder} (mode {mode:o}); chmod go-w it" in text
    if not is_top:
        assert claimed_folder(directory, LAYOUT, "engine 1") is None
    folder.chmod(mode & ~0o022)
    DiskFolder(directory, LAYOUT).close()


def test_a_umask_of_two_and_a_shared_directory_are_no_reason_to_refuse(directory: Path) -> None:
    """As on systems where each user has a group, and a directory that hands its group down."""
    directory.mkdir(parents=True)
    directory.chmod(0o2775)
    before = os.umask(0o002)
    try:
        for _ in range(2):
            folder = DiskFolder(directory, LAYOUT)
            folder.close()
    finally:
        os.umask(before)
    assert numbers(folder) == [0] and folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [LOCK, NEXT])
def test_a_pipe_in_place_of_a_lock_is_one_clear_line(directory: Path, name: str) -> None:
    first = DiskFolder(directory, LAYOUT)
    first.close()
    (first.path / name).unlink()
    os.mkfifo(first.path / name)
    assert f"{first.path / name} is no regular file; remove it" in refusal(directory)


def test_pipes_named_like_block_files_and_claims_hold_nobody_up(directory: Path) -> None:
    first = DiskFolder(directory, LAYOUT)
    first.close()
    os.mkfifo(first.path / f"other{SUFFIX}")
    os.mkfifo(first.path / CLAIM)
    assert claimed_folder(directory, LAYOUT, "engine 1") is None
    again = DiskFolder(directory, LAYOUT, "engine 1")
    assert again.path == first.path and claimed_folder(directory, LAYOUT, "engine 1") is None
    again.close()


def test_a_link_to_somewhere_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / TOP).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a directory of your own"):
        DiskFolder(tmp_path, LAYOUT)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# ---------------------------------------------------------------- models


def test_models_find_their_own_folders_in_whatever_order_they_start(directory: Path) -> None:
    one, other = (DiskFolder(directory, LAYOUT, identity=name) for name in ("one", "other"))
    assert one.path != other.path and numbers(one, other) == [0, 0]
    for folder in (one, other):
        folder.close()
    # In the other order, side by side and one after the other.
    other_again, one_again = (DiskFolder(directory, LAYOUT, identity=name) for name in ("other", "one"))
    assert (one_again.path, other_again.path) == (one.path, other.path)
    second = DiskFolder(directory, LAYOUT, identity="one")
    assert numbers(second) == [1] and second.path.name.startswith(one.path.name[:-1])
    for folder in (one_again, other_again, second):
        folder.close()
    assert len(list((directory / TOP).iterdir())) == 3


def test_leaders_of_two_models_of_one_layout_keep_their_folders(directory: Path) -> None:
    settings = KvbmSettings.from_env(
        {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 4, "DYN_KVBM_DISK_CACHE_DIR": str(directory)}
    )
    places: list[dict[str, str]] = []
    for order in (("one", "other"), ("other", "one")):
        disks = {model: LowerTiers(settings, 1, SystemClock(), model) for model in order}
        places.append({model: disk.plans()[DISK](4096, LAYOUT).location for model, disk in disks.items()})
        for disk in disks.values():
            disk.close()
    assert places[0] == places[1] and len(set(places[0].values())) == 2


def test_a_claim_is_of_one_model(directory: Path) -> None:
    folder = DiskFolder(directory, LAYOUT, "engine 1", identity="one")
    assert claimed_folder(directory, LAYOUT, "engine 1", identity="one") == folder.path
    assert claimed_folder(directory, LAYOUT, "engine 1", identity="other") is None
    folder.close()


# ---------------------------------------------------------------- engines that were killed

LARGE = """
import mmap, sys
from pathlib import Path
from kvbm_core.storage.disk.folder import DiskFolder
folder = DiskFolder(Path(sys.argv[1]), sys.argv[2])
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_that_gives_its_memory_back_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.3 s per GB, in which its locks hold: the next engine does not begin with an empty folder."""
    monkeypatch.setattr(sys.modules[__name__], "HOLD", LARGE)
    with another_engine(directory, LAYOUT) as (process, path):
        process.send_signal(signal.SIGKILL)
        heir = DiskFolder(directory, LAYOUT)
        third = DiskFolder(directory, LAYOUT)
        assert heir.path == path and numbers(heir, third) == [0, 1]
        process.wait(60.0)
    if heir._waiter is not None:
        heir._waiter.join(60.0)
    with pytest.raises(BlockingIOError):
        holds(path / LOCK)
    holds(path / NEXT)
    for folder in (heir, third):
        folder.close()
    holds(path / LOCK)


def test_the_heir_of_a_killed_engine_is_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine before seems to be ending, and does not: nobody else waits too, and a wait can be ended."""
    monkeypatch.setattr(module, "_is_held_by_ending_process", lambda file: True)
    first = DiskFolder(directory, LAYOUT)
    heir, other = DiskFolder(directory, LAYOUT), DiskFolder(directory, LAYOUT)
    assert numbers(first, heir, other) == [0, 0, 1]
    heir.close()
    second = DiskFolder(directory, LAYOUT)
    assert numbers(second) == [0] and second._waiter is not None
    first.close()
    second._waiter.join(60.0)
    with pytest.raises(BlockingIOError):
        holds(first.path / LOCK)
    for folder in (second, other):
        folder.close()


def holds(path: Path) -> None:
    """Locks it for a moment; BlockingIOError if somebody has it."""
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---------------------------------------------------------------- claims


def test_a_folder_is_known_by_its_claim(directory: Path) -> None:
    assert claimed_folder(directory, "layout", "engine 2") is None, "nobody has one yet"
    first = DiskFolder(directory, "layout", "engine 1")
    second = DiskFolder(directory, "layout", "engine 2")
    try:
        assert claimed_folder(directory, "layout", "engine 1") == first.path
        assert claimed_folder(directory, "layout", "engine 2") == second.path
        assert claimed_folder(directory, "layout", "engine 3") is None
        assert claimed_folder(directory, "another layout", "engine 1") is None
    finally:
        first.close()
        second.close()
    third = DiskFolder(directory, "layout", "engine 3")
    try:
        assert claimed_folder(directory, "layout", "engine 3") == third.path == first.path
        assert claimed_folder(directory, "layout", "engine 1") is None, "another one has it now"
    finally:
        third.close()


def test_a_claim_in_a_folder_of_others_is_not_believed(directory: Path) -> None:
    folder = DiskFolder(directory, "layout", "engine 1")
    folder.close()
    folder.path.chmod(0o777)
    assert claimed_folder(directory, "layout", "engine 1") is None


def test_a_claim_that_is_no_text_is_nobodys(directory: Path) -> None:
    folder = DiskFolder(directory, "layout", "engine 1")
    folder.close()
    (folder.path / "claim").write_bytes(b"\xff\xfe")
    assert claimed_folder(directory, "layout", "engine 1") is None
