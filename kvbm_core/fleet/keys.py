"""Who may speak to us over a network: CURVE keys of ZMQ, in certificate files as pyzmq writes them.

A process has one key pair (``KVBM_CURVE_KEY_FILE``) and a list of public keys (``KVBM_CURVE_ALLOWED``): of
those who may connect to it, and of those it connects to. What is sent is encrypted and authenticated.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.config import KvbmSettings
from kvbm_core.config.addresses import is_loopback
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger

log = logging.getLogger("kvbm")

KEY_FILE = "KVBM_CURVE_KEY_FILE"
ALLOWED = "KVBM_CURVE_ALLOWED"
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 10_000
REREAD_EVERY_S = 1.0
_MAKE_KEYS = "make a key pair with: kvbm keys new FOLDER"
_NAME_KEYS = f"set {KEY_FILE} and {ALLOWED} ({_MAKE_KEYS})"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys as ZMQ takes them: 40 characters (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)


class CurveKeys:
    """This process' key pair, and the public keys that it trusts. Any thread.

    The list is read again when somebody connects, at most once a second: a key that was added may connect,
    one that was removed may not connect again. Nor may one whose file cannot be used then, until it can.
    """

    def __init__(self, own: KeyPair, allowed: Path, clock: Clock | None = None) -> None:
        self.own = own
        self._path = allowed
        self._clock = clock or SystemClock()
        self._log = RateLimitedLogger(log)
        self._names = _read_allowed(allowed, _raise)
        self._read_at_s = self._clock.now_s()

    @classmethod
    def from_settings(cls, settings: KvbmSettings) -> CurveKeys | None:
        """The keys that the settings name, or None if they name none. ConfigError."""
        if not settings.curve_key_file:  # that both are set, or none, is known of settings
            return None
        if not zmq.has("curve"):
            raise ConfigError("pyzmq", zmq.__version__, "is built without CURVE; install its wheel")
        own = _read_own(Path(settings.curve_key_file).expanduser())
        return cls(own, Path(settings.curve_allowed).expanduser())

    def is_allowed(self, public: bytes) -> bool:
        """Whether the holder of this key may speak to us; ``public`` as ZMQ takes it (Z85)."""
        self._read_again()
        return public in self._names

    def server_key(self, host: str) -> bytes:
        """The public key of the server at ``host``: of the file HOST.key, or the only one there is.
        ConfigError if neither is there.
        """
        self._read_again()
        names = self._names  # one picture of it
        found = [public for public, name in names.items() if name == host] or list(names)
        if len(found) == 1:
            return found[0]
        remedy = f"has {len(names)} keys, none of them called {host}{PUBLIC_SUFFIX}; call the server's so"
        raise ConfigError(ALLOWED, self._path, remedy)

    def _read_again(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._read_at_s < REREAD_EVERY_S:
            return
        self._read_at_s = now_s
        self._names = _read_allowed(self._path, self._tell)

    def _tell(self, problem: ConfigError) -> None:
        self._log.warning("allowed", "%s; whose keys were there cannot connect until then", problem)

    def client_socket(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, server_key: bytes
    ) -> zmq.Socket[bytes]:
        """A socket that will talk to the holder of ``server_key`` alone; not yet connected."""
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        self.trust(socket, server_key)
        return socket

    def trust(self, socket: zmq.Socket[bytes], server_key: bytes) -> None:
        """What ``socket`` connects to from now on has to hold ``server_key``."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)


def is_local(address: str) -> bool:
    """Whether a ZMQ address can be reached from this machine alone."""
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    return is_loopback(rest.rpartition(":")[0].strip("[]"))


def require_keys(setting: str, address: str, keys: CurveKeys | None) -> None:
    """ConfigError if ``address``, which ``setting`` asks to bind, can be reached from other machines and
    there are no keys.
    """
    if keys is None and not is_local(address):
        remedy = f"can be reached from other machines; {_NAME_KEYS}, or use a loopback address"
        raise ConfigError(setting, address, remedy)


# ---------------------------------------------------------------- files


def new_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes NAME.key and NAME.key_secret in ``folder``; the latter can be read by its owner alone.

    Returns their paths. FileExistsError if one of them is there, OSError if they cannot be written.
    """
    public, secret = zmq.curve_keypair()
    paths = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    lines = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_new(
        paths[1], 0o600, f'# Secret: keep it from others.\n{lines}    secret-key = "{secret.decode()}"\n'
    )
    try:
        _write_new(paths[0], 0o644, f"# Public: for whoever is to speak with {name}.\n{lines}")
    except OSError:
        paths[1].unlink()
        raise
    return paths


def _write_new(path: Path, mode: int, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text)


def _read_own(path: Path) -> KeyPair:
    content, status = _read(KEY_FILE, path)
    # One that root has put there (a mounted secret) is given to its readers by its group.
    hidden = 0o077 if status.st_uid == os.geteuid() != 0 else 0o037
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & hidden:
        remedy = f"is not this user's alone (mode {stat.S_IMODE(status.st_mode):o}); run: chmod 600 {path}"
        raise ConfigError(KEY_FILE, path, remedy)
    publics, secrets = _values(content, b"public-key"), _values(content, b"secret-key")
    if len(publics) != 1 or len(secrets) != 1 or _curve_public(secrets[0]) != publics[0]:
        raise ConfigError(KEY_FILE, path, f"holds no key pair; {_MAKE_KEYS}")
    return KeyPair(publics[0], secrets[0])


def _curve_public(secret: bytes) -> bytes | None:
    return zmq.curve_public(secret) if _is_key(secret) else None


def _raise(problem: ConfigError) -> None:
    raise problem


def _read_allowed(path: Path, on_problem: Callable[[ConfigError], None]) -> dict[bytes, str]:
    """Public key -> name of its file, without suffix; of those files that can be used."""
    try:
        files = _files_of(path)
    except ConfigError as error:
        on_problem(error)
        return {}
    found: dict[bytes, str] = {}
    for file in files:
        try:
            found.update(dict.fromkeys(_read_publics(file), file.name.removesuffix(PUBLIC_SUFFIX)))
        except ConfigError as error:
            on_problem(error)
    return found


def _files_of(path: Path) -> list[Path]:
    try:
        files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
        _require_ours(path)
    except OSError as error:
        raise ConfigError(ALLOWED, path, f"cannot be read: {error.strerror}") from None
    if len(files) > MAX_FILES:
        raise ConfigError(ALLOWED, path, f"holds more than {MAX_FILES} files")
    if not files:
        raise ConfigError(ALLOWED, path, f"holds no *{PUBLIC_SUFFIX} file; put the public keys there")
    return files


def _read_publics(file: Path) -> list[bytes]:
    content, _ = _read(ALLOWED, file)
    try:
        _require_ours(file)
    except OSError as error:  # it was removed meanwhile
        raise ConfigError(ALLOWED, file, f"cannot be read: {error.strerror}") from None
    publics = _values(content, b"public-key")
    if not publics or not all(map(_is_key, publics)):
        raise ConfigError(ALLOWED, file, f"holds no public key; {_MAKE_KEYS}")
    return publics


def _require_ours(path: Path) -> None:
    """Whoever may write there could let himself in; nobody can where a volume is mounted read-only."""
    status = path.stat()
    is_others = status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022
    if is_others and not os.statvfs(path).f_flag & os.ST_RDONLY:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(ALLOWED, path, f"others may write there (mode {mode:o}); run: chmod go-w {path}")


def _read(setting: str, path: Path) -> tuple[bytes, os.stat_result]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(setting, path, f"is no file; {_MAKE_KEYS}")
            return file.read(MAX_FILE_BYTES), status
    except OSError as error:
        raise ConfigError(setting, path, f"cannot be read: {error.strerror}; {_MAKE_KEYS}") from None


def _values(content: bytes, name: bytes) -> list[bytes]:
    """Of lines ``name = "value"``; not of comments."""
    pairs = (line.partition(b"=") for line in content.splitlines())
    return [value.strip(b" \t'\"") for found, _, value in pairs if found.strip() == name]


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
