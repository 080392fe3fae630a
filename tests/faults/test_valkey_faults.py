"""What becomes of an engine's calls when its Valkey or Redis server fails: the table of docs/remote.md."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.remote.engine import GetItem, Got, PutItem
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.resp import Deadline
from kvbm_core.storage.remote.valkey import MAX_OBJECT_BYTES, ValkeyEngine
from kvbm_core.testing.engine_contract import content_of, room
from tests.engines.certificates import make_certificates
from tests.engines.ports import HOST, free_port
from tests.engines.valkey_server import ValkeyServer
from tests.faults.deadlines import GRACE_S

pytestmark = pytest.mark.valkey
LONG_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as started:
        yield started


@contextmanager
def client(server: ValkeyServer, url: str = "", login: ServerLogin | None = None) -> Iterator[ValkeyEngine]:
    engine = server.engine(url, login)
    try:
        yield engine
    finally:
        engine.close()


def put(engine: ValkeyEngine, name: str, num_bytes: int = 1000, deadline_s: float = LONG_S) -> Outcome:
    item = PutItem(name, [memoryview(content_of(name, num_bytes))])
    return engine.put([item], deadline_s=deadline_s)[0]


def get(engine: ValkeyEngine, name: str, num_bytes: int = 1000, deadline_s: float = LONG_S) -> Got:
    pieces = room(num_bytes)
    (got,) = engine.get([GetItem(name, pieces)], deadline_s=deadline_s)
    if got.outcome is Outcome.OK:
        assert b"".join(pieces) == content_of(name, num_bytes)
    return got


def all_outcomes(engine: ValkeyEngine, deadline_s: float = LONG_S) -> set[Outcome]:
    """Of one call of each kind."""
    found = {put(engine, "a", deadline_s=deadline_s), get(engine, "a", deadline_s=deadline_s).outcome}
    for call in (engine.exists, engine.remove, engine.renew):
        found |= set(call(["a"], deadline_s=deadline_s))
    return found


def until(is_so: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvbm"]


def test_a_killed_server_is_an_error_said_once_and_an_empty_one_at_its_place_is_used(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client(server) as engine:
        assert put(engine, "a") is Outcome.OK
        port = server.port
        server.stop()
        assert all_outcomes(engine) == {Outcome.IO_ERROR}
        assert all_outcomes(engine) == {Outcome.IO_ERROR}
        told = [line for line in lines(caplog) if "refused" in line.lower()]
        assert len(told) == 1 and f":{port}" in told[0]
        server.start(port)
        assert get(engine, "a").outcome is Outcome.MISS
        assert put(engine, "a") is get(engine, "a").outcome is Outcome.OK
        assert any("works again" in line for line in lines(caplog))


def test_a_restart_between_two_calls_is_not_noticed_but_for_what_is_gone(server: ValkeyServer) -> None:
    with client(server) as engine:
        assert put(engine, "a") is Outcome.OK
        port = server.port
        server.stop()
        server.start(port)
        assert get(engine, "a").outcome is Outcome.MISS, "a connection that was closed is not used"
        assert put(engine, "a") is Outcome.OK


@pytest.mark.parametrize("num_bytes", [100, 8 << 20])
def test_a_frozen_server_costs_the_deadline_and_no_more(
    server: ValkeyServer, num_bytes: int, waits_s: list[float]
) -> None:
    with client(server) as engine:
        assert put(engine, "a", num_bytes) is Outcome.OK
        server.freeze()
        source, target = memoryview(content_of("a", num_bytes)), room(num_bytes)
        calls: list[Callable[[], list[Any]]] = [
            lambda: engine.put([PutItem("a", [source])], deadline_s=0.5),
            lambda: [got.outcome for got in engine.get([GetItem("a", target)], deadline_s=0.5)],
        ]
        waits_s.clear()
        for call in calls:
            started_s = time.monotonic()
            assert call() == [Outcome.TIMED_OUT]
            assert time.monotonic() - started_s < 0.5 + GRACE_S and max(waits_s) == 0.5
            waits_s.clear()
        started_s = time.monotonic()
        assert engine.exists(["a"] * 3, deadline_s=0.3) == [Outcome.TIMED_OUT] * 3
        assert time.monotonic() - started_s < 0.3 + GRACE_S and max(waits_s) == 0.3
        server.thaw()
        assert get(engine, "a", num_bytes).outcome is Outcome.OK


def test_a_late_answer_touches_nothing(server: ValkeyServer) -> None:
    with client(server) as engine:
        assert put(engine, "a", 4 << 20) is Outcome.OK
        server.freeze()
        (piece,) = room(4 << 20)
        (got,) = engine.get([GetItem("a", [piece])], deadline_s=0.2)
        assert got.outcome is Outcome.TIMED_OUT
        piece[:] = b"\xa5" * len(piece)
        server.thaw()
        assert get(engine, "a", 4 << 20).outcome is Outcome.OK
        assert bytes(piece) == b"\xa5" * len(piece)


def test_of_a_put_that_was_given_up_nothing_is_kept_but_the_whole(server: ValkeyServer) -> None:
    size = 16 << 20
    with client(server) as engine:
        memory = memoryview(bytearray(content_of("big", size)))
        server.freeze()
        assert engine.put([PutItem("big", [memory])], deadline_s=0.3) == [Outcome.TIMED_OUT]
        memory[:] = bytes(size)
        server.thaw()
        until(lambda: put(engine, "other") is Outcome.OK)
        assert get(engine, "big", size).outcome in (Outcome.MISS, Outcome.OK)


class Listener:
    """Calls ``serve(connection, is_over)`` in a thread for each connection, until ``is_over``."""

    def __init__(self, serve: Callable[[socket.socket, threading.Event], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server((HOST, 0))
        self._is_over = threading.Event()
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """As in KVBM_REMOTE_URL."""
        return f"redis://{HOST}:{self.port}"

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LONG_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve_one, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve_one(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            self._serve(sock, self._is_over)


def faulty_server(answer: bytes, step_bytes: int = 1 << 20, pause_s: float = 0.0) -> Listener:
    """Answers every command with the same bytes, at a given pace."""

    def serve(sock: socket.socket, is_over: threading.Event) -> None:
        sock.settimeout(0.05)
        while not is_over.is_set():
            try:
                count = sock.recv(1 << 20).count(b"*")
            except TimeoutError:
                continue
            if not count:
                return
            for start in range(0, len(answer) * count, step_bytes):
                sock.sendall((answer * count)[start : start + step_bytes])
                if is_over.wait(pause_s):
                    return

    return Listener(serve)


def test_a_server_that_trickles_costs_the_deadline_and_no_more(server: ValkeyServer) -> None:
    with (
        faulty_server(b"$1000\r\n" + bytes(1000) + b"\r\n", 1, 0.05) as faulty,
        client(server, faulty.url, ServerLogin()) as engine,
    ):
        started_s = time.monotonic()
        assert get(engine, "a", deadline_s=0.4).outcome is Outcome.TIMED_OUT
        assert time.monotonic() - started_s < 0.4 + GRACE_S


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-7x\r\n",
        b"$5\r\nabcdefgh\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b"x" * 10_000,
        b"$999999999999\r\n",
        b"*1000000000\r\n",
        b"*300000000\r\n" * 6,
        b">1\r\n+x\r\n" * 5000,
        b">0\r\n",
        b"%1\r\n*0\r\n:1\r\n",
        b"~2\r\n*0\r\n*0\r\n",
        b"-MOVED\r\n",
        b"-ASK\r\n",
        b"-ASK 1 \xff\r\n",
        b"-\r\n",
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_another_protocol_is_an_error(server: ValkeyServer, answer: bytes) -> None:
    with faulty_server(answer) as faulty, client(server, faulty.url, ServerLogin()) as engine:
        assert put(engine, "a", deadline_s=1.0) in (Outcome.IO_ERROR, Outcome.TIMED_OUT)
        assert get(engine, "a", deadline_s=1.0).outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT)


@pytest.mark.parametrize(
    "answer",
    [b"*2\r\n:0\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n-ERR\r\n", b"*0\r\n"],
)
def test_a_list_of_something_else_is_an_error(server: ValkeyServer, answer: bytes) -> None:
    with (
        faulty_server(answer) as faulty,
        client(server, faulty.url, ServerLogin()) as engine,
        pytest.raises(OSError, match=r"expected|no server of this kind"),
    ):
        list(engine.scan("", deadline_s=1.0))


def test_what_a_server_says_of_sizes_takes_no_memory(server: ValkeyServer) -> None:
    for answer in (b"*100000000\r\n", b"*2\r\n*100000000\r\n", b"$60000000\r\n", b"$99999999999\r\n"):
        with faulty_server(answer) as faulty, client(server, faulty.url, ServerLogin()) as engine:
            tracemalloc.start()
            try:
                assert get(engine, "a", deadline_s=0.2).outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT)
                assert tracemalloc.get_traced_memory()[1] < (16 << 20)
            finally:
                tracemalloc.stop()


def test_a_limit_of_memory_that_is_no_number_is_none(server: ValkeyServer) -> None:
    info = b"maxmemory:" + b"9" * 5000
    with (
        faulty_server(b"$%d\r\n%s\r\n" % (len(info), info)) as faulty,
        client(server, faulty.url, ServerLogin()) as engine,
    ):
        assert put(engine, "a", deadline_s=1.0) in (Outcome.IO_ERROR, Outcome.TIMED_OUT)


@pytest.mark.parametrize(
    ("answer", "outcome", "told"),
    [
        (b"-MOVED 3999 127.0.0.1:6381\r\n", Outcome.IO_ERROR, "a cluster, which is not supported"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", Outcome.BUSY, "loading"),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", Outcome.IO_ERROR, "snapshot"),
        (b"-ERR max number of clients reached\r\n", Outcome.IO_ERROR, "max number of clients"),
        (b"-NOPERM this user has no permissions\r\n", Outcome.IO_ERROR, "docs/remote.md"),
    ],
)
def test_an_error_reply_is_its_outcome_and_a_line(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture, answer: bytes, outcome: Outcome, told: str
) -> None:
    with faulty_server(answer) as faulty, client(server, faulty.url, ServerLogin()) as engine:
        for _ in range(3):
            assert put(engine, "a") is outcome
        assert len([line for line in lines(caplog) if told in line]) == 1


def test_an_error_reply_that_repeats_what_was_sent_is_cut(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    echo = b"-ERR unknown command 'SET', with args beginning with: 'kvbytes' \r\n"
    with faulty_server(echo) as faulty, client(server, faulty.url, ServerLogin()) as engine:
        assert put(engine, "a") is Outcome.IO_ERROR
    assert "unknown command" in caplog.text and "kvbytes" not in caplog.text


# -------------------------------------------------------------------- who may


def test_without_the_password_or_with_another_one_all_fails_and_the_line_says_what_to_set(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client(server, login=ServerLogin()) as engine:
        assert all_outcomes(engine) == {Outcome.IO_ERROR}
        assert any("NOAUTH" in line and "KVBM_REMOTE_PASSWORD_FILE" in line for line in lines(caplog))
    caplog.clear()
    with client(server, login=server.login("wrong-word")) as engine:
        assert all_outcomes(engine) == {Outcome.IO_ERROR}
        assert any("WRONGPASS" in line and "KVBM_REMOTE_PASSWORD_FILE" in line for line in lines(caplog))
    assert "wrong-word" not in caplog.text


@pytest.mark.shows("KVBM_REMOTE_PASSWORD_FILE")
def test_a_password_that_changes_is_read_again(server: ValkeyServer) -> None:
    login = server.login("wrong-word")
    with client(server, login=login) as engine:
        assert put(engine, "a") is Outcome.IO_ERROR
        Path(login.password_file).write_text(server.password)
        assert put(engine, "a") is Outcome.OK


def test_a_user_of_the_servers_own(server: ValkeyServer, tmp_path: Path) -> None:
    with client(server) as admin, admin._connections.lent(Deadline(LONG_S)) as connection:
        rules = (b"on", b">user-word", b"~kvbm1*", b"+set", b"+get", b"+exists", b"+unlink", b"+touch")
        assert connection.ask(b"ACL", b"SETUSER", b"kv", *rules) == "OK"
    login = replace(server.login("user-word"), username="kv")
    with client(server, login=login) as engine:
        assert put(engine, "kvbm1/a") is get(engine, "kvbm1/a").outcome is Outcome.OK
        assert engine.remove(["kvbm1/a"], deadline_s=LONG_S) == [Outcome.OK]
        assert put(engine, "other") is Outcome.IO_ERROR
        with pytest.raises(OSError, match="NOPERM"):
            list(engine.scan("", deadline_s=LONG_S))
        with client(server) as admin, admin._connections.lent(Deadline(LONG_S)) as connection:
            more = (b"+scan", b"+strlen", b"+object|idletime")
            assert connection.ask(b"ACL", b"SETUSER", b"kv", *more) == "OK"
        assert put(engine, "kvbm1/b") is Outcome.OK
        assert [info.name for info in engine.scan("kvbm1", deadline_s=LONG_S)] == ["kvbm1/b"]


def test_a_password_file_that_is_not_there_is_said_at_once(server: ValkeyServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KVBM_REMOTE_PASSWORD_FILE=.*cannot be read"):
        server.engine(login=ServerLogin(password_file=str(tmp_path / "none")))


def test_no_database_of_that_number(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    with client(server, f"{server.url}/999") as engine:
        assert put(engine, "a") is Outcome.IO_ERROR
    assert any("out of range" in line for line in lines(caplog))
    with client(server, f"{server.url}/3") as third, client(server) as first:
        assert put(third, "a") is Outcome.OK
        assert get(first, "a").outcome is Outcome.MISS


# -------------------------------------------------------------------- room


def test_a_full_server_that_makes_no_room_takes_nothing_and_gives_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvbm")
    room_20mb = ("--maxmemory", "20mb", "--maxmemory-policy", "noeviction")
    with ValkeyServer(tmp_path, *room_20mb) as server, client(server) as engine:
        outcomes = [put(engine, f"a/{number}", 1 << 20) for number in range(30)]
        assert outcomes[0] is Outcome.OK and outcomes[-1] is Outcome.NO_SPACE
        assert get(engine, "a/0", 1 << 20).outcome is Outcome.OK
        assert engine.remove([f"a/{i}" for i in range(9)], deadline_s=LONG_S) == [Outcome.OK] * 9
        until(lambda: put(engine, "b", 1 << 20) is Outcome.OK)
    told = lines(caplog)
    assert any("when that is full (noeviction)" in line for line in told)
    assert len([line for line in told if "OOM" in line]) == 1


def test_a_server_that_makes_room_forgets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvbm")
    room_20mb = ("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    with ValkeyServer(tmp_path, *room_20mb) as server, client(server) as engine:
        assert {put(engine, f"a/{number}", 1 << 20) for number in range(60)} == {Outcome.OK}
        held = [get(engine, f"a/{number}", 1 << 20).outcome for number in range(60)]
        assert set(held) == {Outcome.OK, Outcome.MISS} and held.count(Outcome.OK) <= 20
    assert any("it has 0.0209715 GB, and makes room by allkeys-lru" in line for line in lines(caplog))


def test_a_server_without_a_limit_is_said(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    with client(server) as engine, client(server) as other:
        assert put(engine, "a") is put(other, "b") is Outcome.OK
    assert len([line for line in lines(caplog) if "no limit of memory" in line]) == 1


def test_a_replica_gives_and_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        primary = stack.enter_context(ValkeyServer(folders[0], password=""))
        arguments = ("--replicaof", f"{HOST} {primary.port}", "--repl-diskless-sync-delay", "0")
        replica = stack.enter_context(ValkeyServer(folders[1], *arguments, password=""))
        writer, engine = stack.enter_context(client(primary)), stack.enter_context(client(replica))
        assert put(writer, "a") is Outcome.OK
        until(lambda: get(engine, "a").outcome is Outcome.OK)
        assert put(engine, "b") is Outcome.IO_ERROR
        assert get(engine, "a").outcome is Outcome.OK
    assert len([line for line in lines(caplog) if "it is a replica: name the primary" in line]) == 1


def test_a_value_beyond_the_limit_is_refused_and_a_foreign_one_is_not_kept(
    server: ValkeyServer,
) -> None:
    with client(server) as engine:
        big = memoryview(bytearray(1)).cast("B")
        pieces = [memoryview(bytes(MAX_OBJECT_BYTES)), big]
        assert engine.put([PutItem("big", pieces)], deadline_s=LONG_S) == [Outcome.NO_SPACE]
        with engine._connections.lent(Deadline(LONG_S)) as connection:
            connection.ask(b"SETRANGE", b"foreign", b"%d" % (200 << 20), b"x")
            connection.ask(b"LPUSH", b"list", b"x")
        before = memory_bytes()
        assert get(engine, "foreign").outcome is Outcome.CORRUPT
        assert get(engine, "list").outcome is Outcome.CORRUPT
        assert memory_bytes() - before < (100 << 20), "it is read past, not kept"


def memory_bytes() -> int:
    """The most that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_looking_at_what_there_is_does_not_count_as_use(server: ValkeyServer) -> None:
    with client(server) as engine:
        assert put(engine, "kvbm1/a") is Outcome.OK
        with engine._connections.lent(Deadline(LONG_S)) as connection:
            if connection.ask(b"CLIENT", b"NO-TOUCH", b"OFF") != "OK":
                pytest.skip("NOT RUN: a server before 7.2 cannot look without touching")
        until(lambda: next(engine.scan("", deadline_s=LONG_S)).changed_s < time.time() - 1.5)
        assert engine.renew(["kvbm1/a"], deadline_s=LONG_S) == [Outcome.OK]
        (info,) = engine.scan("kvbm1/", deadline_s=LONG_S)
        assert info.changed_s > time.time() - 1.5


# -------------------------------------------------------------------- TLS


def tls_proxy(port: int, context: ssl.SSLContext) -> Listener:
    """TLS before a server that has none."""

    def serve(plain: socket.socket, _: threading.Event) -> None:
        with (
            context.wrap_socket(plain, server_side=True) as outer,
            socket.create_connection((HOST, port)) as inner,
        ):
            inner.settimeout(0.02)
            while data := outer.recv(1 << 16):
                inner.sendall(data)
                with suppress(TimeoutError):
                    while answer := inner.recv(1 << 20):
                        outer.sendall(answer)

    return Listener(serve)


@pytest.mark.shows("KVBM_REMOTE_CA_FILE", "KVBM_REMOTE_CERT_FILE")
def test_tls_with_a_ca_of_ones_own_and_a_certificate_for_us(
    server: ValkeyServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "others")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.certificate, ours.key)
    context.load_verify_locations(ours.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    ca, mine, other_ca = map(str, (ours.authority, ours.both, others.authority))
    with tls_proxy(server.port, context) as proxy:
        url, login = f"rediss://{HOST}:{proxy.port}", replace(server.login(), ca_file=ca, cert_file=mine)
        with client(server, url, login) as engine:
            assert put(engine, "a", 1 << 20) is get(engine, "a", 1 << 20).outcome is Outcome.OK
        wrong_name = url.replace(HOST, "localhost")
        for other_url, other, systems_ca in [
            (url, replace(login, ca_file=other_ca), ""),
            (url, replace(login, ca_file=other_ca), ca),
            (url, replace(login, ca_file=""), ""),
            (wrong_name, login, ""),
        ]:
            monkeypatch.setenv("SSL_CERT_FILE", systems_ca)
            caplog.clear()
            with client(server, other_url, other) as engine:
                assert put(engine, "b", deadline_s=3.0) is Outcome.IO_ERROR
            assert any("certificate verify failed" in line.lower() for line in lines(caplog))
        with client(server, url, replace(login, cert_file="")) as engine:
            assert put(engine, "b", deadline_s=3.0) is Outcome.IO_ERROR


def test_certificates_that_cannot_be_read_are_said_at_once(server: ValkeyServer, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for name, field in (("KVBM_REMOTE_CA_FILE", "ca_file"), ("KVBM_REMOTE_CERT_FILE", "cert_file")):
        for path in (bad, tmp_path / "none"):
            login = replace(ServerLogin(), **{field: str(path)})
            with pytest.raises(ConfigError, match=name):
                server.engine(f"rediss://{HOST}:1", login)


# -------------------------------------------------------------------- names and ends


def test_names_that_do_not_resolve_and_ports_where_nobody_is(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        assert host == "no-such-host.invalid"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for url in (f"redis://{HOST}:{free_port()}", "redis://no-such-host.invalid"):
        with client(server, url) as engine:
            started_s = time.monotonic()
            assert put(engine, "a", deadline_s=1.0) in (Outcome.IO_ERROR, Outcome.TIMED_OUT)
            assert time.monotonic() - started_s < 1.0 + GRACE_S


def test_a_server_that_takes_no_connection_costs_the_deadline(server: ValkeyServer) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(3):  # its queue is full
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        engine = stack.enter_context(client(server, f"redis://{HOST}:{listener.getsockname()[1]}"))
        started_s = time.monotonic()
        assert put(engine, "a", deadline_s=0.3) is Outcome.TIMED_OUT
        assert time.monotonic() - started_s < 0.3 + GRACE_S


def test_a_name_whose_resolution_hangs_costs_the_deadline(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        is_over.wait(LONG_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with client(server, "redis://slow.example") as engine:
        started_s = time.monotonic()
        assert put(engine, "a", deadline_s=0.3) is Outcome.TIMED_OUT
        assert time.monotonic() - started_s < 0.3 + GRACE_S
        is_over.set()


def test_close_ends_a_call_that_waits(server: ValkeyServer) -> None:
    with client(server) as engine:
        assert put(engine, "a") is Outcome.OK
        server.freeze()
        answers: list[Got] = []
        waiting = threading.Thread(target=lambda: answers.append(get(engine, "a")))
        waiting.start()
        until(lambda: bool(engine._connections._lent))
        engine.close()
        waiting.join(LONG_S)
        assert answers == [Got(Outcome.REJECTED)]
