"""Where leader and workers meet: private, on this machine, one leader each, and swept of what the dead have
left.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvbm_core.errors import ConfigError
from kvbm_core.runtime import endpoint as endpoint_module
from kvbm_core.runtime.channel import LeaderChannel, WorkerChannel
from kvbm_core.runtime.endpoint import (
    SECRET_BYTES,
    Endpoint,
    EndpointLock,
    SecretFile,
    ipc_endpoint,
    private_folder,
    sweep,
    tcp_endpoint,
)

SECRET = b"s" * SECRET_BYTES


@pytest.fixture
def temp(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    return short_path


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.startswith("kvbm: ")
    return text


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])
def test_a_routable_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        tcp_endpoint(host, 5000, SECRET)
    assert "loopback" in one_line(error)


def test_loopback_addresses() -> None:
    assert tcp_endpoint("localhost", 5000, SECRET).address == "tcp://127.0.0.1:5000"
    assert tcp_endpoint("127.0.0.1", 5000, SECRET) == Endpoint("tcp://127.0.0.1:5000", secret=SECRET)
    assert tcp_endpoint("::1", 5000, SECRET).address == "tcp://[::1]:5000"


def test_the_socket_of_an_engine_is_private_and_its_own(temp: Path) -> None:
    first = ipc_endpoint("engine", SECRET)
    assert first == ipc_endpoint("engine", SECRET) != ipc_endpoint("other", SECRET)
    assert first.path is not None and first.path.parent.stat().st_mode & 0o777 == 0o700
    assert first.path.parent.parent == temp


def test_a_temporary_directory_too_deep_for_a_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError) as error:
        ipc_endpoint("engine", SECRET)
    assert "TMPDIR" in one_line(error) and "shorter" in one_line(error)


# ---------------------------------------------------------------- a folder and a secret of our own


def spoil(folder: Path, how: str) -> None:
    """What somebody else may have made of a folder's name. Another user's is one whose owner is not us."""
    if how == "file":
        folder.write_text("")
    elif how == "link":
        folder.symlink_to("/")
    elif how == "dangling link":
        folder.symlink_to("nowhere")
    else:
        folder.mkdir(mode=0o777 if how == "open" else 0o700)
        folder.chmod(0o777 if how == "open" else 0o700)
        if how == "another's":
            os.chown(folder, os.getuid() + 1, -1)


SPOILT = ["file", "link", "dangling link", "open", "another's"]


@pytest.mark.parametrize("how", SPOILT)
def test_a_folder_that_somebody_else_has_made_is_not_used_and_does_not_stop_the_start(
    temp: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "another's" and os.getuid() != 0:
        pytest.skip("only root can make a folder that is somebody else's")
    common = private_folder("engine")
    common.rmdir()
    spoil(common, how)
    folder = private_folder("engine")
    assert folder != common and folder.parent == temp and folder.stat().st_mode & 0o777 == 0o700
    assert folder == private_folder("engine") != private_folder("other")
    assert str(common) in caplog.text and "not private" in caplog.text
    # Those who come later meet those who came first, whatever became of the common folder since.
    remove(common)
    assert private_folder("engine") == folder and private_folder("third") == common


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def test_only_who_has_made_all_its_names_his_can_stop_it_and_then_it_says_so(temp: Path) -> None:
    common = private_folder("engine")
    common.rmdir()
    spoil(common, "file")
    own = private_folder("engine")
    own.rmdir()
    spoil(own, "file")
    with pytest.raises(ConfigError) as error:
        private_folder("engine")
    assert "TMPDIR" in one_line(error) and str(temp) in one_line(error)


def test_leader_and_workers_meet_with_the_secret_of_a_folder_of_their_own(temp: Path) -> None:
    common = private_folder("engine")
    common.rmdir()
    spoil(common, "file")
    holders = [SecretFile("engine") for _ in range(3)]
    assert len({holder.secret for holder in holders}) == 1
    leader, worker = (ipc_endpoint("engine", holder.secret, holder) for holder in holders[:2])
    channel = LeaderChannel(leader, lambda identity, message: [])
    other = WorkerChannel(worker, lambda message: None)
    assert leader == worker
    for each in (other, channel, holders[2]):
        each.close()
    assert [path.name for path in temp.iterdir()] == [common.name]  # their folder went with the last of them


def test_every_engine_has_a_secret_of_its_own_and_each_of_its_processes_reads_the_same(temp: Path) -> None:
    first, again, other = SecretFile("one"), SecretFile("one"), SecretFile("two")
    assert first.secret == again.secret != other.secret and len(first.secret) == SECRET_BYTES
    program = (
        "import sys\nfrom kvbm_core.runtime.endpoint import SecretFile\n"
        "holder = SecretFile(sys.argv[1])\nprint(holder.secret.hex())\nholder.close()\n"
    )
    environ = {**os.environ, "TMPDIR": str(temp)}
    root = Path(__file__).resolve().parents[2]
    told = subprocess.run(
        [sys.executable, "-c", program, "one"], cwd=root, env=environ, capture_output=True, text=True
    )
    assert told.stdout.strip() == first.secret.hex()
    (folder,) = temp.iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".secret"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    first.close()
    first.close()
    third = SecretFile("one")
    assert third.secret == again.secret  # one of its processes still had it
    for holder in (again, third, other):
        holder.close()
    assert list(folder.iterdir()) == []
    with_new = SecretFile("one")
    assert with_new.secret != third.secret
    with_new.close()


@pytest.mark.parametrize("left", [b"", b"s" * (SECRET_BYTES - 1)])
def test_a_secret_that_was_cut_off_is_made_anew(temp: Path, left: bytes) -> None:
    first = SecretFile("engine")
    (path,) = private_folder("engine").glob("*.secret")
    first.close()
    path.write_bytes(left)
    files = [SecretFile("engine") for _ in range(2)]
    assert files[0].secret == files[1].secret and len(files[0].secret) == SECRET_BYTES
    for file in files:
        file.close()
    assert not path.exists()


def test_processes_that_come_at_once_read_one_secret(temp: Path) -> None:
    start, secrets, holders = threading.Barrier(8), [], []

    def come() -> None:
        start.wait(20.0)
        holders.append(SecretFile("engine"))
        secrets.append(holders[-1].secret)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(secrets) == 8 and len(set(secrets)) == 1
    for holder in holders:
        holder.close()


def test_secrets_of_the_dead_are_swept_and_those_of_the_living_are_not(temp: Path) -> None:
    living = SecretFile("living")
    (folder,) = temp.iterdir()
    dead, draft, young = (folder / name for name in ("dead.secret", "a.draft", "young.secret"))
    for path in (dead, draft, young):
        path.write_bytes(bytes(SECRET_BYTES))
    make_old(dead, draft, *folder.glob(f"{living._path.name}"))
    new = SecretFile("new")
    assert not dead.exists() and not draft.exists() and young.exists() and living._path.exists()
    new.close()
    living.close()


# ---------------------------------------------------------------- locks and sweeping


def killed_leader(path: Path) -> None:
    """Lock and socket as a leader leaves them that was killed."""
    program = (
        "import os, sys, zmq\nfrom pathlib import Path\nfrom kvbm_core.runtime.endpoint import "
        "Endpoint, EndpointLock\n"
        "path = Path(sys.argv[1])\nlock = EndpointLock(Endpoint(f'ipc://{path}', path, secret=b's'))\n"
        "zmq.Context().socket(zmq.ROUTER).bind(f'ipc://{path}')\nos.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=root).returncode == -9
    assert path.exists() and Path(f"{path}.lock").exists()


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (0, time.time() - endpoint_module.STALE_AFTER_S - 1))


def test_a_killed_leaders_socket_does_not_stop_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    killed_leader(path)
    channel = LeaderChannel(Endpoint(f"ipc://{path}", path, secret=b"s"), lambda identity, message: [])
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    Path(f"{path}.lock").mkdir()  # for root no folder is forbidden
    with pytest.raises(ConfigError) as error:
        LeaderChannel(Endpoint(f"ipc://{path}", path, secret=b"s"), lambda identity, message: [])
    assert "TMPDIR" in one_line(error) and "Is a directory" in one_line(error)


def test_what_cannot_be_swept_stops_nobody(tmp_path: Path) -> None:
    strange, dead, path = (tmp_path / f"{name}.sock" for name in ("a", "dead", "s"))
    Path(f"{strange}.lock").mkdir()
    killed_leader(dead)
    make_old(Path(f"{strange}.lock"), dead, Path(f"{dead}.lock"))
    LeaderChannel(Endpoint(f"ipc://{path}", path, secret=b"s"), lambda identity, message: []).close()
    assert [found.name for found in tmp_path.iterdir()] == ["a.sock.lock"]


def test_what_killed_leaders_left_is_swept_and_what_lives_or_is_young_is_not(tmp_path: Path) -> None:
    dead, young, live, new = (tmp_path / f"{name}.sock" for name in ("dead", "young", "live", "new"))
    killed_leader(dead)
    killed_leader(young)
    orphan = tmp_path / "orphan.sock"
    orphan.touch()
    stranger = tmp_path / "notes.txt"
    stranger.touch()
    with EndpointLock(Endpoint(f"ipc://{live}", live, secret=b"s")):
        live.touch()
        make_old(dead, Path(f"{dead}.lock"), live, Path(f"{live}.lock"), orphan, stranger)
        with EndpointLock(Endpoint(f"ipc://{new}", new, secret=b"s")):
            kept = {
                "young.sock",
                "young.sock.lock",
                "live.sock",
                "live.sock.lock",
                "new.sock.lock",
                "notes.txt",
            }
            assert {path.name for path in tmp_path.iterdir()} == kept
        assert sweep(tmp_path) == 0
        live.touch()
        kept = {"live.sock", "live.sock.lock", "notes.txt"}
        assert sweep(tmp_path, also_young=True) == 1, "whose process has ended"
        assert {path.name for path in tmp_path.iterdir()} == kept
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}


def test_a_lock_on_a_file_removed_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening and locking are two steps; a leader that closes in between takes the file away."""
    path = tmp_path / "s.sock"
    endpoint = Endpoint(f"ipc://{path}", path, secret=b"s")
    real_flock = fcntl.flock
    removals = [Path(f"{path}.lock")]

    def flock(fd: int, operation: int) -> None:
        if removals:
            removals.pop().unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(endpoint_module.fcntl, "flock", flock)
    with EndpointLock(endpoint), pytest.raises(ConfigError):
        EndpointLock(endpoint)
    with EndpointLock(endpoint):  # free again
        assert not removals


def test_what_is_locked_between_look_and_lock_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sock"
    with EndpointLock(Endpoint(f"ipc://{path}", path, secret=b"s")):
        path.touch()
        monkeypatch.setattr(endpoint_module, "STALE_AFTER_S", -1.0)
        assert sweep(tmp_path) == 0
        assert path.exists()
