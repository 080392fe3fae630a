"""CURVE keys: their files, and who gets in. Real sockets on loopback."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.auth
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet import gate as gates
from kvbm_core.fleet import keys as key_files
from kvbm_core.fleet.gate import Gate
from kvbm_core.fleet.keys import CurveKeys, KeyPair, is_local, new_keys, require_keys
from tests.threads import threads_since

LONG_MS = 20_000
Socket = zmq.Socket[bytes]


def keys_of(folder: Path, name: str, allowed: Path | None = None) -> CurveKeys:
    """A new key pair in ``folder``; read as a process that is given these settings reads it."""
    _, secret = new_keys(folder, name)
    settings = KvbmSettings.from_env({"curve_key_file": str(secret), "curve_allowed": str(allowed or folder)})
    keys = CurveKeys.from_settings(settings)
    assert keys is not None
    return keys


class Server:
    """A server socket behind a gate that notes who was refused."""

    def __init__(self, context: zmq.Context[Socket], keys: CurveKeys) -> None:
        self.refused = threading.Semaphore(0)
        self.gate = Gate(context, keys, self.refused.release)
        self.socket = self.gate.server_socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    def next(self) -> tuple[bytes, str]:
        """What somebody said, and the key that says it."""
        assert self.socket.poll(LONG_MS)
        frame = self.socket.recv_multipart(copy=False)[1]
        return frame.bytes, frame.get("User-Id")


@contextmanager
def serving(keys: CurveKeys) -> Iterator[Server]:
    context = zmq.Context()
    server = Server(context, keys)
    try:
        yield server
    finally:
        server.socket.close()
        server.gate.close()
        context.term()


@contextmanager
def talking(server: Server, open_socket: Callable[[zmq.Context[Socket]], Socket]) -> Iterator[Socket]:
    with zmq.Context() as context, open_socket(context) as socket:
        socket.connect(server.address)
        socket.send(b"let me in")
        yield socket


def test_who_is_on_the_list_gets_in_and_is_named_by_his_key(tmp_path: Path) -> None:
    friend, owner = keys_of(tmp_path, "friend"), keys_of(tmp_path, "owner")
    server_key = owner.own.public
    with serving(owner) as server, talking(server, lambda c: friend.client_socket(c, zmq.DEALER, server_key)):
        assert server.next() == (b"let me in", friend.own.public.decode())
        assert server.gate.refused_total == 0


def strangers(keys: CurveKeys, server_key: bytes) -> dict[str, Callable[[zmq.Context[Socket]], Socket]]:
    """All who must stay out."""
    other = KeyPair(*zmq.curve_keypair())

    def with_password(context: zmq.Context[Socket]) -> Socket:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.plain_username, socket.plain_password = b"admin", b"admin"
        return socket

    def without_keys(context: zmq.Context[Socket]) -> Socket:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        return socket

    return {
        "a key that is not on the list": lambda c: keys.client_socket(c, zmq.DEALER, server_key),
        "another server's key": lambda c: keys.client_socket(c, zmq.DEALER, other.public),
        "no key": without_keys,
        "a password": with_password,
    }


@pytest.mark.parametrize(
    "who", ["a key that is not on the list", "another server's key", "no key", "a password"]
)
def test_nobody_else_gets_in_and_each_is_counted(tmp_path: Path, who: str) -> None:
    friend, owner = keys_of(tmp_path / "fleet", "friend"), keys_of(tmp_path / "fleet", "owner")
    stranger = keys_of(tmp_path / "other", "stranger")
    with serving(owner) as server:
        with talking(server, strangers(stranger, owner.own.public)[who]):
            assert server.refused.acquire(timeout=LONG_MS / 1000)
            assert not server.socket.poll(0)
        with talking(server, lambda c: friend.client_socket(c, zmq.DEALER, owner.own.public)):
            assert server.next()[0] == b"let me in"  # and only he
        assert server.gate.refused_total > 0


def test_who_is_put_on_the_list_later_gets_in_without_being_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_files, "REREAD_EVERY_S", 0.0)
    owner, late = keys_of(tmp_path / "fleet", "owner"), keys_of(tmp_path / "other", "late")
    with (
        serving(owner) as server,
        talking(server, lambda c: late.client_socket(c, zmq.DEALER, owner.own.public)),
    ):
        assert server.refused.acquire(timeout=LONG_MS / 1000)
        (tmp_path / "fleet" / "late.key").write_bytes((tmp_path / "other" / "late.key").read_bytes())
        assert server.next()[0] == b"let me in"


def test_a_refused_key_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owner = keys_of(tmp_path / "fleet", "owner")
    one, two = keys_of(tmp_path / "a", "one"), keys_of(tmp_path / "b", "two")
    with serving(owner) as server:
        for keys in (one, two, one):
            connect = strangers(keys, owner.own.public)["a key that is not on the list"]
            with talking(server, connect):
                assert server.refused.acquire(timeout=LONG_MS / 1000)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert one.own.public.decode() in line and "KVBM_CURVE_ALLOWED" in line and "127.0.0.1" in line


def test_without_its_gate_a_server_lets_nobody_in(tmp_path: Path) -> None:
    """libzmq by itself would take any key then."""
    friend, owner = keys_of(tmp_path, "friend"), keys_of(tmp_path, "owner")
    with serving(owner) as server:
        server.gate.close()
        with talking(server, lambda c: friend.client_socket(c, zmq.DEALER, owner.own.public)):
            assert not server.socket.poll(300)


def test_gates_of_two_contexts_share_nothing(tmp_path: Path) -> None:
    one, two = keys_of(tmp_path / "a", "one"), keys_of(tmp_path / "b", "two")
    with serving(one) as first, serving(two) as second:
        first.gate.close()
        with talking(second, lambda c: two.client_socket(c, zmq.DEALER, two.own.public)):
            assert second.next()[0] == b"let me in"


def test_a_gate_ends_with_its_context(tmp_path: Path) -> None:
    context, before = zmq.Context(), set(threading.enumerate())
    server = Server(context, keys_of(tmp_path, "owner"))
    server.socket.close()
    context.term()
    server.gate.close()
    assert not threads_since(before)


def test_a_bug_in_a_comparison_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    friend, owner = keys_of(tmp_path, "friend"), keys_of(tmp_path, "owner")
    with serving(owner) as server:
        with monkeypatch.context() as broken:
            broken.setattr(owner, "is_allowed", lambda public: 1 / 0)
            with talking(server, lambda c: friend.client_socket(c, zmq.DEALER, owner.own.public)):
                assert server.refused.acquire(timeout=LONG_MS / 1000)
        with talking(server, lambda c: friend.client_socket(c, zmq.DEALER, owner.own.public)):
            assert server.next()[0] == b"let me in"


# ---------------------------------------------------------------- files


def test_the_list_is_read_again(tmp_path: Path) -> None:
    clock, folder = ManualClock(), tmp_path / "allowed"
    new_keys(folder, "first")
    keys = CurveKeys(KeyPair(*zmq.curve_keypair()), folder, clock)
    second_path, _ = new_keys(folder, "second")
    second = zmq.auth.load_certificate(second_path)[0]
    assert not keys.is_allowed(second)
    clock.advance(1.0)
    assert keys.is_allowed(second)
    second_path.unlink()
    clock.advance(1.0)
    assert not keys.is_allowed(second)


def test_which_key_a_server_has(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "10.0.0.1")
    assert keys.server_key("10.0.0.7") == keys.own.public, "the only one"
    other = keys_of(tmp_path, "node-2")
    assert other.server_key("10.0.0.1") == keys.own.public
    with pytest.raises(ConfigError, match=r"KVBM_CURVE_ALLOWED.*10\.0\.0\.7\.key"):
        other.server_key("10.0.0.7")


def test_files_of_pyzmq_are_read(tmp_path: Path) -> None:
    public_path, secret_path = zmq.auth.create_certificates(tmp_path, "node", {"for": "us"})
    os.chmod(secret_path, 0o600)
    settings = KvbmSettings.from_env({"curve_key_file": secret_path, "curve_allowed": public_path})
    keys = CurveKeys.from_settings(settings)
    assert keys is not None and keys.is_allowed(keys.own.public)
    assert zmq.auth.load_certificate(secret_path) == (keys.own.public, keys.own.secret)
    assert keys.own.secret.decode() not in repr(keys.own)


def test_no_settings_no_keys() -> None:
    assert CurveKeys.from_settings(KvbmSettings.from_env({})) is None


@pytest.mark.parametrize(("name", "other"), [("curve_key_file", "ALLOWED"), ("curve_allowed", "KEY_FILE")])
def test_one_setting_alone_is_refused(name: str, other: str) -> None:
    said = f"^kvbm: KVBM_{name.upper()}=x: goes together with KVBM_CURVE_{other}"
    with pytest.raises(ConfigError, match=said) as caught:
        KvbmSettings.from_env({name: "x"})
    assert "\n" not in str(caught.value)


def _drop(path: Path) -> None:
    path.unlink()


def _open_to_group(path: Path) -> None:
    path.chmod(0o640 if os.geteuid() else 0o644)  # root's own may be its group's: mounted secrets are


def _others_key(path: Path) -> None:
    public = zmq.curve_keypair()[0]
    path.write_bytes(b'public-key = "%s"\nsecret-key = "%s"\n' % (public, zmq.curve_keypair()[1]))


def _public_alone(path: Path) -> None:
    path.write_bytes(b'public-key = "%s"\n' % zmq.curve_keypair()[0])


def _garbage(path: Path) -> None:
    path.write_bytes(b'public-key = "' + bytes(range(128, 168)) + b'"\nsecret-key = "%s"\n' % (b"~" * 40))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [_drop, _open_to_group, _others_key, _public_alone, _garbage, _fifo])
def test_a_key_file_that_cannot_be_used_is_one_line(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    public, secret = new_keys(tmp_path, "node")
    spoil(secret)
    settings = KvbmSettings.from_env({"curve_key_file": str(secret), "curve_allowed": str(public)})
    with pytest.raises(ConfigError) as caught:
        CurveKeys.from_settings(settings)
    text = str(caught.value)
    assert text.startswith(f"kvbm: KVBM_CURVE_KEY_FILE={secret}: ") and "\n" not in text


def _nothing_there(folder: Path) -> None:
    for path in folder.glob("*.key"):
        path.unlink()


def _a_bad_file(folder: Path) -> None:
    (folder / "bad.key").write_text('public-key = "short"\n')


def _writable_by_all(folder: Path) -> None:
    folder.chmod(0o777)


def _a_file_writable_by_all(folder: Path) -> None:
    next(folder.glob("*.key")).chmod(0o666)


def _gone(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    "spoil", [_nothing_there, _a_bad_file, _writable_by_all, _a_file_writable_by_all, _gone]
)
def test_a_list_that_cannot_be_used_is_one_line(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    _, secret = new_keys(tmp_path / "own", "node")
    folder = tmp_path / "allowed"
    new_keys(folder, "other")
    spoil(folder)
    settings = KvbmSettings.from_env({"curve_key_file": str(secret), "curve_allowed": str(folder)})
    with pytest.raises(ConfigError) as caught:
        CurveKeys.from_settings(settings)
    text = str(caught.value)
    assert text.startswith(f"kvbm: KVBM_CURVE_ALLOWED={folder}") and "\n" not in text


def _broken_beside(folder: Path) -> None:
    (folder / "removed.key").unlink()
    (folder / "kept.key").write_text("half of a fi")


@pytest.mark.parametrize("spoil", [_broken_beside, _nothing_there, _writable_by_all, _gone])
def test_a_key_that_was_removed_is_out_whatever_else_is_wrong_with_the_list(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    clock, folder = ManualClock(), tmp_path / "allowed"
    kept, removed = (zmq.auth.load_certificate(new_keys(folder, name)[0])[0] for name in ("kept", "removed"))
    whole = (folder / "kept.key").read_bytes()
    keys = CurveKeys(KeyPair(*zmq.curve_keypair()), folder, clock)
    assert keys.is_allowed(kept) and keys.is_allowed(removed)
    spoil(folder)
    clock.advance(1.0)
    assert not keys.is_allowed(removed) and not keys.is_allowed(kept)
    assert caplog.text.count("cannot connect until then") == 1 and str(folder) in caplog.text
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    (folder / "removed.key").unlink(missing_ok=True)
    (folder / "kept.key").write_bytes(whole)
    clock.advance(1.0)
    assert keys.is_allowed(kept) and not keys.is_allowed(removed)


def test_a_file_that_cannot_be_used_keeps_out_nobody_else(tmp_path: Path) -> None:
    """A key that is just being copied there."""
    clock = ManualClock()
    new_keys(tmp_path, "first")
    keys = CurveKeys(KeyPair(*zmq.curve_keypair()), tmp_path, clock)
    second = zmq.auth.load_certificate(new_keys(tmp_path, "second")[0])[0]
    (tmp_path / "a-third.key").write_text("half of a fi")
    clock.advance(1.0)
    assert keys.is_allowed(second)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///tmp/x.sock", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:*", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://[::]:5", False),
        ("tcp://eth0:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://localhost.example.org:5", False),
        ("udp://239.0.0.1:5", False),
    ],
)
def test_what_can_be_reached_from_elsewhere_needs_keys(address: str, local: bool, tmp_path: Path) -> None:
    assert is_local(address) is local
    require_keys("KVBM_X", address, keys_of(tmp_path, "node"))
    if local:
        require_keys("KVBM_X", address, None)
        return
    with pytest.raises(ConfigError, match=r"^kvbm: KVBM_X=.*KVBM_CURVE_KEY_FILE.*kvbm keys new") as caught:
        require_keys("KVBM_X", address, None)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the command


def test_the_command_makes_keys_that_work(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    result = CliRunner().invoke(app, ["keys", "new", str(folder), "--name", "node-1"])
    assert result.exit_code == 0, result.output
    lines = [line.removeprefix("export ") for line in result.stdout.splitlines()]
    assert lines == [f"KVBM_CURVE_KEY_FILE={folder}/node-1.key_secret", f"KVBM_CURVE_ALLOWED={folder}"]
    assert (folder / "node-1.key_secret").stat().st_mode & 0o777 == 0o600
    assert b"secret" not in (folder / "node-1.key").read_bytes()
    settings = KvbmSettings.from_env(dict(line.split("=", 1) for line in lines))
    keys = CurveKeys.from_settings(settings)
    assert keys is not None and keys.is_allowed(keys.own.public)


@pytest.mark.parametrize("there", ["node.key", "node.key_secret"])
def test_the_command_overwrites_nothing(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path), "--name", "node"])
    assert result.exit_code == 2 and there in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_the_command_takes_no_file_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "file"), "--name", "node"])
    assert result.exit_code == 2 and f"{tmp_path}/file is no folder" in result.stderr.replace("\n", "")


@pytest.mark.parametrize("name", ["../x", "a b", "x\n"])
def test_the_command_refuses_odd_names(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path), "--name", name])
    assert result.exit_code == 2 and not list(tmp_path.parent.glob("x*"))


def test_handshakes_have_a_limit(tmp_path: Path) -> None:
    with serving(keys_of(tmp_path, "owner")) as server:
        assert server.socket.getsockopt(zmq.HANDSHAKE_IVL) == gates.HANDSHAKE_TIMEOUT_MS


def test_with_nothing_of_the_fleet_configured_nothing_of_it_is_there(tmp_path: Path) -> None:
    """A leader and a worker on one machine: no module, thread or socket more."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from kvbm_core.config import KvbmSettings\n"
        "from kvbm_core.observe.metrics import Metrics\n"
        "from kvbm_core.runtime.assembly import LeaderProcess, rank_options\n"
        "from kvbm_core.runtime.endpoint import Endpoint, endpoint_apart\n"
        "from kvbm_core.runtime.worker import Worker\n"
        "settings = KvbmSettings.from_env({'cpu_cache_gb': 0.001})\n"
        "assert endpoint_apart(settings, 'engine', 0) is None\n"
        "path = Path(sys.argv[1])\n"
        "endpoint = Endpoint(f'ipc://{path}', path, secret=b's')\n"
        "leader = LeaderProcess(settings, Metrics(), endpoint, world_size=1, model='m', engine_name='e')\n"
        "worker = Worker(0, 1, endpoint, rank_options(settings))\n"
        "print(sorted(thread.name for thread in threading.enumerate()))\n"
        "found = {'grpc', 'etcd3', 'google', 'nats', 'nkeys', 'kvbm_core.fleet'}\n"
        "found |= {'kvbm_core.control.service', 'kvbm_core.control.socket_wire'}\n"
        "found &= set(sys.modules)\n"
        "worker.close(), leader.close()\n"
        "sys.exit(f'{found} loaded' if found else 0)\n"
    )
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("KVBM", "DYN_", "ETCD"))
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['MainThread', 'kvbm-leader-channel', 'kvbm-worker-channel']\n"
