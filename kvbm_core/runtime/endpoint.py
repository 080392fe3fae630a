"""Where leader and workers meet, and the secret by which they know each other.

An ipc socket in a folder that only this user can enter, or loopback TCP when ports are asked for. On both the
channel takes nothing from anybody who has not the secret: neither from another user of the machine, nor from
a second engine of this user that was given the same ports or name. Where ranks are on several machines, there
are keys in place of the secret (``fleet/``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from kvbm_core.config import KvbmSettings
from kvbm_core.config.addresses import bracketed, is_loopback
from kvbm_core.control.place import is_private, private_place
from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from kvbm_core.fleet.meeting import Apart

log = logging.getLogger("kvbm")

STALE_AFTER_S = 60.0
MAX_SOCKET_PATH_BYTES = 107
SECRET_BYTES = 32


@dataclass(frozen=True)
class Endpoint:
    """A ZMQ address, and what leader and workers of one engine know and nobody else does.

    ``path``: the socket file of an ipc address. ``holder``: keeps the secret's file while the channel is
    open. ``apart``: leader and workers may be on several machines; then there is no secret.
    """

    address: str
    path: Path | None = None
    secret: bytes = field(default=b"", kw_only=True, repr=False)
    holder: SecretFile | None = field(default=None, kw_only=True, repr=False, compare=False)
    apart: Apart | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def engine(self) -> str:
        """By which leader and workers tell each other their engine where they are apart; else empty."""
        return self.apart.engine if self.apart is not None else ""

    def release(self) -> None:
        """The channel is closed. May be called twice."""
        if self.holder is not None:
            self.holder.close()


def endpoint_apart(
    settings: KvbmSettings, name: str, data_parallel_rank: int, *, is_spread: bool = False
) -> Endpoint | None:
    """Where leader and workers meet if they may be on several machines, as the settings are; None if they
    meet on theirs. ``is_spread``: the engine says that they are on several. ConfigError, one line.
    """
    is_asked_for = settings.curve_key_file or settings.etcd_endpoints or settings.is_set("leader_zmq_host")
    if not is_spread and not is_asked_for:
        return None
    from kvbm_core.fleet.meeting import Apart

    apart = Apart.from_settings(settings, name, data_parallel_rank, is_spread=is_spread)
    return Endpoint(apart.address, apart=apart) if apart is not None else None


def engine_endpoint(
    settings: KvbmSettings,
    name: str,
    secret: bytes,
    data_parallel_rank: int,
    holder: SecretFile | None = None,
) -> Endpoint:
    """Where leader and workers of the engine called ``name`` meet on one machine: ipc, unless host or port
    was set by the user. Engines of one data-parallel group take neighbouring ports.
    """
    if settings.is_set("leader_zmq_host") or settings.is_set("leader_zmq_ack_port"):
        port = settings.leader_zmq_ack_port + data_parallel_rank
        return tcp_endpoint(settings.leader_zmq_host, port, secret, holder)
    return ipc_endpoint(name, secret, holder)


def ipc_endpoint(name: str, secret: bytes, holder: SecretFile | None = None) -> Endpoint:
    """The socket of the engine called ``name``; the same in each of its processes, private to this user."""
    path = private_folder(name) / f"{_stem(name)}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        remedy = "is too long for the path of a socket; set a shorter one"
        raise ConfigError("TMPDIR", tempfile.gettempdir(), remedy)
    return Endpoint(f"ipc://{path}", path, secret=secret, holder=holder)


def tcp_endpoint(host: str, port: int, secret: bytes, holder: SecretFile | None = None) -> Endpoint:
    """Loopback TCP. A routable address is refused: a tier's bytes never leave the machine, nor need its
    orders.
    """
    if not is_loopback(host):
        remedy = "is not a loopback address; use 127.0.0.1: leader and workers are on one machine"
        raise ConfigError("DYN_KVBM_LEADER_ZMQ_HOST", host, remedy)
    host = "127.0.0.1" if host == "localhost" else bracketed(host)
    return Endpoint(f"tcp://{host}:{port}", secret=secret, holder=holder)


# ---------------------------------------------------------------- a folder and a secret of our own


def private_folder(name: str) -> Path:
    """A folder that only this user can enter, the same in each process of the engine called ``name``.

    All engines of a user share one, unless somebody else has made something of its name: then each has its
    own, whose name nobody else can know. ConfigError if there is none to be had.
    """
    common = private_place()
    own = common.with_name(f"{common.name}-{_stem(name)}")
    if is_private(own):  # where the others of this engine are, whatever became of the common one since
        return own
    for folder in (common, own):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if is_private(folder):
            if folder == own:
                log.warning("kvbm: %s is not private to this user; using %s instead", common, own)
            return folder
    remedy = "no folder that only this user can enter can be made there; set a directory that can be written"
    raise ConfigError("TMPDIR", tempfile.gettempdir(), remedy)


def _leave(folder: Path) -> None:
    """Removes a folder that one engine had for itself, once nothing is in it."""
    if folder.name.startswith(f"kvbm-{os.getuid()}-"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _stem(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class SecretFile:
    """The secret of the engine called ``name``, made by whichever of its processes asks first.

    For engines that start leader and workers apart and let them tell each other nothing. Every process that
    has read the file holds a shared lock on it until ``close``; whoever is the last removes it.
    """

    def __init__(self, name: str) -> None:
        self._path = private_folder(name) / f"{_stem(name)}.secret"
        self._fd: int | None = None
        try:
            self._fd, self.secret = self._open()
        except OSError as error:
            remedy = f"cannot hold the secret of leader and workers ({error}); set a directory that can"
            raise ConfigError("TMPDIR", self._path.parent, remedy) from None

    def _open(self) -> tuple[int, bytes]:
        while True:
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                self._create()
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)  # an exclusive one is only held to remove the file
            secret = os.read(fd, SECRET_BYTES)
            if len(secret) == SECRET_BYTES and _is_named(fd, self._path):
                return fd, secret
            if len(secret) < SECRET_BYTES:  # lost with the machine's power; anybody could guess it
                fcntl.flock(fd, fcntl.LOCK_EX)
                if _is_named(fd, self._path):
                    self._path.unlink()
            os.close(fd)  # else it was removed between open and lock

    def _create(self) -> None:
        # Whole under its name, or not at all: others read it as soon as it is there.
        fd, draft = tempfile.mkstemp(suffix=".draft", dir=self._path.parent)
        try:
            os.write(fd, secrets.token_bytes(SECRET_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._path)
        finally:
            os.close(fd)
            os.unlink(draft)
        sweep(self._path.parent)

    def close(self) -> None:
        """Lets go of it. May be called twice."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # others still use it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(fd, self._path):
                self._path.unlink()
                _leave(self._path.parent)
        os.close(fd)


def _is_named(fd: int, path: Path) -> bool:
    """Whether the open file is the one that is called ``path`` now."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- one leader per socket


class EndpointLock:
    """Held by the one leader that may bind an ipc endpoint; freed by the kernel when its process ends.

    Whoever takes one removes what leaders that were killed have left beside it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._fd: int | None = None
        self._path = endpoint.path
        if endpoint.path is None:
            return
        try:
            self._fd = _try_lock(_lock_path(endpoint.path))
        except OSError as error:
            remedy = f"cannot hold the lock of leader and workers ({error}); set a directory that can"
            raise ConfigError("TMPDIR", endpoint.path.parent, remedy) from None
        if self._fd is None:
            remedy = "another running engine has this name; give each its own engine_id"
            raise ConfigError("engine_id", endpoint.path.stem, remedy)
        os.ftruncate(self._fd, 0)
        os.write(self._fd, str(os.getpid()).encode())
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
        _leave(self._path.parent)


def sweep(directory: Path, *, also_young: bool = False) -> int:
    """Removes sockets of leaders that are gone, with their locks, and secrets that nobody holds; returns how
    many.

    What is young is left alone: it may be about to be used. ``also_young``: not what a process has made that
    has ended, and secrets, whose maker looks whether they are still there.
    """
    removed = sum(_sweep_secret(path) for path in directory.glob("*.draft"))
    removed += sum(_sweep_secret(path, also_young=also_young) for path in directory.glob("*.secret"))
    for found in directory.glob("*.sock*"):
        with contextlib.suppress(OSError):  # what is none of ours, or no room for its lock
            socket = found.with_name(found.name.removesuffix(".lock"))
            is_left = also_young and _has_ended(_lock_path(socket))
            removed += (is_left or _is_old(found)) and _sweep_socket(socket, also_young=is_left)
    return removed


def _has_ended(lock: Path) -> bool:
    """Whether the leader that has made it is known to be gone."""
    try:
        stat = Path(f"/proc/{int(lock.read_bytes())}/stat")
    except (OSError, ValueError):
        return False
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "XZ"  # killed, and not yet waited for
    except FileNotFoundError:
        return Path("/proc/self").exists()


def _sweep_socket(socket: Path, *, also_young: bool) -> bool:
    fd = _try_lock(_lock_path(socket))
    if fd is None:
        return False
    try:
        # Again, now that nobody can bind it: a leader may have come and gone since.
        if socket.exists() and not (also_young or _is_old(socket)):
            return False
        socket.unlink(missing_ok=True)
        _lock_path(socket).unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _sweep_secret(path: Path, *, also_young: bool = False) -> bool:
    if not (also_young or _is_old(path)):
        return False
    with contextlib.suppress(OSError):  # gone, or held by a process that is alive
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(fd, path):
                path.unlink()
                return True
        finally:
            os.close(fd)
    return False


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
        if _is_named(fd, path):
            return fd
        # It was removed between open and lock: what we hold has no name any more.
        os.close(fd)
