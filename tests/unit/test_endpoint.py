"""Where leader and workers meet: private, on this machine, one leader each, and swept of what the dead have
left.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvbm_core.errors import ConfigError
from kvbm_core.runtime import endpoint as endpoint_module
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint, EndpointLock, ipc_endpoint, sweep, tcp_endpoint


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.startswith("kvbm: ")
    return text


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])
def test_a_routable_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        tcp_endpoint(host, 5000)
    assert "loopback" in one_line(error)


def test_loopback_addresses() -> None:
    assert tcp_endpoint("localhost", 5000).address == "tcp://127.0.0.1:5000"
    assert tcp_endpoint("127.0.0.1", 5000) == Endpoint("tcp://127.0.0.1:5000")
    assert tcp_endpoint("::1", 5000).address == "tcp://[::1]:5000"


def test_the_socket_of_an_engine_is_private_and_its_own(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    first = ipc_endpoint("engine")
    assert first == ipc_endpoint("engine") != ipc_endpoint("other")
    assert first.path is not None and first.path.parent.stat().st_mode & 0o777 == 0o700
    first.path.parent.chmod(0o755)
    with pytest.raises(ConfigError) as error:
        ipc_endpoint("engine")
    assert "chmod 700" in one_line(error)
    first.path.parent.rmdir()
    first.path.parent.symlink_to(short_path)
    with pytest.raises(ConfigError):
        ipc_endpoint("engine")


def test_a_temporary_directory_too_deep_for_a_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError) as error:
        ipc_endpoint("engine")
    assert "TMPDIR" in one_line(error) and "shorter" in one_line(error)


# ---------------------------------------------------------------- locks and sweeping


def killed_leader(path: Path) -> None:
    """Lock and socket as a leader leaves them that was killed."""
    program = (
        "import os, sys, zmq\nfrom pathlib import Path\nfrom kvbm_core.runtime.endpoint import "
        "Endpoint, EndpointLock\n"
        "path = Path(sys.argv[1])\nlock = EndpointLock(Endpoint(f'ipc://{path}', path))\n"
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
    channel = LeaderChannel(Endpoint(f"ipc://{path}", path), lambda identity, message: [])
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_leaders_left_is_swept_and_what_lives_or_is_young_is_not(tmp_path: Path) -> None:
    dead, young, live, new = (tmp_path / f"{name}.sock" for name in ("dead", "young", "live", "new"))
    killed_leader(dead)
    killed_leader(young)
    orphan = tmp_path / "orphan.sock"
    orphan.touch()
    stranger = tmp_path / "notes.txt"
    stranger.touch()
    with EndpointLock(Endpoint(f"ipc://{live}", live)):
        live.touch()
        make_old(dead, Path(f"{dead}.lock"), live, Path(f"{live}.lock"), orphan, stranger)
        with EndpointLock(Endpoint(f"ipc://{new}", new)):
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
    assert {path.name for path in tmp_path.iterdir()} == {"young.sock", "young.sock.lock", "notes.txt"}


def test_a_lock_on_a_file_removed_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening and locking are two steps; a leader that closes in between takes the file away."""
    path = tmp_path / "s.sock"
    endpoint = Endpoint(f"ipc://{path}", path)
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
    with EndpointLock(Endpoint(f"ipc://{path}", path)):
        path.touch()
        monkeypatch.setattr(endpoint_module, "STALE_AFTER_S", -1.0)
        assert sweep(tmp_path) == 0
        assert path.exists()
