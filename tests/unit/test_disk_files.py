"""How files of the disk tier are opened: regular ones alone, without waiting, and never kept by a child."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm_core.storage.disk.allocate import DiskError, FileOptions, open_file, open_to_read
from kvbm_core.storage.disk.block_file import SUFFIX, BlockFile, Geometry
from kvbm_core.storage.disk.files import NotAFileError, ProcessFile, open_regular
from kvbm_core.storage.disk.slot_log import LogFollower, SlotLog, log_path

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
GEOMETRY = Geometry(2, 100, bytes(16))
BUFFERED = FileOptions(is_direct=False)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"somebody else's")
    path.symlink_to("elsewhere")


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))  # /dev/null
    except PermissionError:
        pytest.skip("NOT RUN: a device with the name of a file: only root can make one")


KINDS = [make_pipe, make_socket, make_link, make_device, Path.mkdir]
FLAGS = [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT]


def within_time(task: Callable[[], object]) -> BaseException | None:
    """What it raised; it fails if the task waits for somebody."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits"
    return raised[0] if raised else None


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None], flags: int) -> None:
    make(tmp_path / "x")
    before = set(os.listdir("/proc/self/fd"))
    raised = within_time(lambda: open_regular(tmp_path / "x", flags))
    assert isinstance(raised, OSError), raised
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", KINDS)
def test_a_block_file_that_is_none_is_one_clear_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / f"x{SUFFIX}"
    make(path)
    raised = within_time(lambda: BlockFile(path, GEOMETRY, BUFFERED))
    assert isinstance(raised, DiskError) and str(path) in str(raised) and "\n" not in str(raised)
    if make is not Path.mkdir:
        assert str(raised).endswith("; remove it")
    assert isinstance(within_time(lambda: open_to_read(path, BUFFERED)), OSError)
    if make is make_link:
        assert (tmp_path / "elsewhere").read_bytes() == b"somebody else's"


def test_a_pipe_in_place_of_a_log_of_slots_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / f"x{SUFFIX}"
    file = BlockFile(path, GEOMETRY, BUFFERED)
    make_pipe(log_path(path))
    follower = LogFollower(path, GEOMETRY)
    assert within_time(follower.read_on) is None and follower.header is None
    make_pipe(log_path(path).with_name(log_path(path).name + "-new"))
    assert within_time(lambda: SlotLog(file).close()) is None
    assert follower.read_on() is None and follower.header is not None, "it has been replaced"
    follower.close()
    file.close()


@pytest.mark.parametrize("flags", FLAGS)
def test_a_pipe_that_comes_after_the_first_look_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    make_pipe(tmp_path / "x")

    def nothing_there_yet(path: object) -> os.stat_result:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "lstat", nothing_there_yet)
    assert isinstance(within_time(lambda: open_regular(tmp_path / "x", flags)), OSError)


def test_what_is_opened_reads_and_writes_as_any_file(tmp_path: Path) -> None:
    fd = open_regular(tmp_path / "new", os.O_RDWR | os.O_CREAT)
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK and not os.get_inheritable(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "not there", os.O_RDONLY)
    assert issubclass(NotAFileError, OSError)


# ---------------------------------------------------------------- children

FORK_AND_HOLD = """
import os, sys
from pathlib import Path
from kvbm_core.storage.disk.folder import DiskFolder
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from tests.unit.test_disk_files import BUFFERED, GEOMETRY
folder = DiskFolder(Path(sys.argv[1]), "layout")
file = BlockFile(folder.path / "x.blocks", GEOMETRY, BUFFERED)
read_fd, write_fd = os.pipe()
child = os.fork()
if child:
    os.read(read_fd, 1)  # it is there
    print(folder.path, child, flush=True)
else:
    os.write(write_fd, b"!")
sys.stdin.read()
"""


def test_a_child_keeps_no_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK_AND_HOLD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder, child = process.stdout.readline().split()
        path = Path(folder) / "x.blocks"
        try:
            with pytest.raises(DiskError, match="another process"):
                open_file(path, BUFFERED)
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            os.kill(int(child), 0)  # it is there
            open_file(path, BUFFERED).close()
            lock = ProcessFile(Path(folder) / "lock", os.O_RDWR)
            lock.lock()
            lock.close()
        finally:
            process.kill()
            os.kill(int(child), signal.SIGKILL)


FORK_WHILE_OPENING = """
import os, sys, threading
from pathlib import Path
from kvbm_core.storage.disk import files
opened, forked = threading.Event(), threading.Event()
usual = files.open_regular
def slow(*arguments):
    fd = usual(*arguments)
    opened.set()
    forked.wait(0.5)  # nobody forks now: not a wait for anything that happens
    return fd
files.open_regular = slow
opening = threading.Thread(target=files.ProcessFile, args=(Path(sys.argv[1]), os.O_RDONLY))
opening.start()
opened.wait()
child = os.fork()
if not child:
    paths = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
             if os.path.lexists(f"/proc/self/fd/{fd}")}
    os._exit(int(sys.argv[1] in paths))
forked.set()
opening.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child has it"
"""


def test_nobody_forks_between_the_opening_of_a_file_and_its_being_noted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    command = [sys.executable, "-c", FORK_WHILE_OPENING, str(path.resolve())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


CHECK_IN_CHILD = """
import os, sys
from pathlib import Path
from kvbm_core.storage.disk.allocate import open_file
from tests.unit.test_disk_files import BUFFERED
path = Path(sys.argv[1]) / "x.blocks"
file = open_file(path, BUFFERED)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.fstat(file.fd)
else:
    fd = os.open(path, os.O_RDONLY)
    assert file.fd == -1
    file.close()
    os.fstat(fd)
"""


def test_a_child_does_not_close_what_has_the_number_now(tmp_path: Path) -> None:
    """In a process of its own: this one has threads, and warns of forks."""
    command = [sys.executable, "-c", CHECK_IN_CHILD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=WAIT_S)
    assert result.returncode == 0, result.stderr.decode()
