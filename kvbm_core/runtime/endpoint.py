"""Where leader and workers meet: an ipc socket in a private directory, or loopback TCP when ports are asked
for.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvbm_core.errors import ConfigError

STALE_AFTER_S = 60.0
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ZMQ address; ``path`` is the socket file of an ipc address."""

    address: str
    path: Path | None = None


def ipc_endpoint(engine_id: str) -> Endpoint:
    """The socket of the engine called ``engine_id``; the same in each of its processes, private to this
    user.
    """
    directory = Path(tempfile.gettempdir()) / f"kvbm-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        remedy = "is not a directory that only this user can enter; remove it or chmod 700"
        raise ConfigError("TMPDIR", directory, remedy)
    path = directory / (hashlib.sha256(engine_id.encode()).hexdigest()[:24] + ".sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            "TMPDIR", directory.parent, "is too long for the path of a socket; set a shorter one"
        )
    return Endpoint(f"ipc://{path}", path)


def tcp_endpoint(host: str, port: int) -> Endpoint:
    """Loopback TCP. A routable address is refused: the channel has no key yet."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        raise ConfigError(
            "DYN_KVBM_LEADER_ZMQ_HOST",
            host,
            "is not a loopback address; use 127.0.0.1 (a routable bind needs a key)",
        )
    bracketed = f"[{host}]" if ":" in host else "127.0.0.1" if host == "localhost" else host
    return Endpoint(f"tcp://{bracketed}:{port}")


class EndpointLock:
    """Held by the one leader that may bind an ipc endpoint; freed by the kernel when its process ends.

    Whoever takes one removes what leaders that were killed have left beside it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._fd: int | None = None
        self._path = endpoint.path
        if endpoint.path is None:
            return
        self._fd = _try_lock(_lock_path(endpoint.path))
        if self._fd is None:
            remedy = "another running engine uses it; give each its own"
            raise ConfigError("engine_id", endpoint.path.stem, remedy)
        sweep(endpoint.path.parent)

    def __enter__(self) -> EndpointLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes socket and lock file. May be called twice."""
        if self._fd is None or self._path is None:
            return
        self._path.unlink(missing_ok=True)
        _lock_path(self._path).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


def sweep(directory: Path) -> int:
    """Removes sockets of leaders that are gone, with their locks; returns how many. What is young is left
    alone.
    """
    removed = 0
    for found in directory.glob("*.sock*"):
        socket = found.with_name(found.name.removesuffix(".lock"))
        fd = _try_lock(_lock_path(socket)) if _is_old(found) else None
        if fd is None:
            continue
        try:
            # Again, now that nobody can bind it: a leader may have come and gone since.
            if not socket.exists() or _is_old(socket):
                removed += 1
                socket.unlink(missing_ok=True)
                _lock_path(socket).unlink(missing_ok=True)
        finally:
            os.close(fd)
    return removed


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > STALE_AFTER_S
    except OSError:
        return False


def _lock_path(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.lock")


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock on the file that is called ``path`` now, or None if somebody else
    does.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        try:
            if os.path.samestat(os.fstat(fd), path.lstat()):
                return fd
        except FileNotFoundError:
            pass
        # It was removed between open and lock: what we hold has no name any more.
        os.close(fd)
