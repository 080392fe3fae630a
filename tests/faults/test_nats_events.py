"""KV events over a real NATS server that is stopped, frozen, restarted, refuses us: serving goes on, memory
is bounded, and a router's picture is complete after it is back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.events import nats_sink
from kvbm_core.events.consumer import Picture
from kvbm_core.events.nats_session import new_client
from kvbm_core.events.nats_sink import NatsLogin, NatsSink, login_of, subject
from kvbm_core.events.publisher import EventPublisher
from kvbm_core.events.service import EventService
from kvbm_core.observe.metrics import Metrics
from tests.engines.certificates import make_certificates
from tests.engines.nats_server import NatsServer
from tests.engines.plain_nats import PlainNats
from tests.unit.event_truth import Truth, make_log

pytestmark = pytest.mark.nats

PATIENCE_S = 40.0
PREFIX = subject("test", "one", 0)
SMALL_BYTES = 200_000
"""Of the outbox, so that seconds without a server fill it."""


@pytest.fixture(autouse=True)
def small_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client holds is bounded too."""
    monkeypatch.setattr(nats_sink, "CLIENT_BYTES", SMALL_BYTES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as started:
        yield started


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + patience_s, "what was waited for did not come"
        time.sleep(0.01)
    return time.monotonic() - began_s


class Bench:
    """An instance that churns and publishes, and a router that follows it."""

    def __init__(self, login: NatsLogin, seed: int) -> None:
        from kvbm_core.events.nats_reader import NatsReader

        self.log = make_log()
        self.truth = Truth(self.log, random.Random(seed))
        self.metrics = Metrics()
        self.sink = NatsSink(login, PREFIX, self.metrics, max_outbox_bytes=SMALL_BYTES)
        self.publisher = EventPublisher(self.log, [self.sink], 0, self.metrics)
        self.reader = NatsReader(login, PREFIX)

    def churn(self, seconds: float) -> None:
        """And no step takes long, and no more than the outbox may have waits."""
        ends_at_s = time.monotonic() + seconds
        while time.monotonic() < ends_at_s:
            self.truth.step()
            assert self.sink._outbox_bytes <= SMALL_BYTES
            client = self.sink._client
            assert client is None or client.pending_data_size <= 2 * SMALL_BYTES
            time.sleep(0.0005)

    def churn_until_full(self, seconds: float) -> None:
        """So long at least, and until the outbox has been full."""
        wait_for(lambda: self.churn(seconds) is None and self.num_dropped > 0)

    @property
    def num_dropped(self) -> float:
        """Batches."""
        return self.metrics.snapshot()["kvbm_event_batches_dropped_total"]

    @property
    def is_met(self) -> bool:
        """Whether the router's picture is the truth."""
        now = self.truth.now()
        return bool(self.reader.look(PREFIX, lambda picture: picture.is_current and picture.places == now))

    def close(self) -> None:
        self.publisher.close()
        self.reader.close()


@pytest.fixture
def bench(server: NatsServer, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(server.login(), 1)
    try:
        made.churn(0.3)
        wait_for(lambda: made.is_met)
        yield made
    finally:
        made.close()


def test_a_router_follows_over_nats(bench: Bench) -> None:
    for _ in range(3):
        bench.churn(0.2)
        wait_for(lambda: bench.is_met, 10)
    assert bench.num_dropped == 0


@pytest.mark.shows("KVBM_EVENTS", "KVBM_EVENTS=nats", "KVBM_FLEET", "KVBM_INSTANCE")
@pytest.mark.shows("NATS_SERVER", "NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD")
def test_events_are_published_where_and_as_the_settings_say(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_core.events.nats_reader import NatsReader

    monkeypatch.setenv("NATS_AUTH_PASSWORD", server.password)
    given = {"events": "nats", "fleet": "mine", "instance": "one"}
    given |= {"nats_server": server.url, "nats_username": server.user}
    log, prefix = make_log(), subject("mine", "one", 2)
    truth = Truth(log, random.Random(1))
    service = EventService(KvbmSettings.from_env(given), log, 2, Metrics())
    reader = NatsReader(server.login(), prefix)
    try:
        for _ in range(50):
            truth.step()
        now = truth.now()
        assert now
        wait_for(lambda: bool(reader.look(prefix, lambda picture: picture.places == now)), 10)
    finally:
        service.close()
        reader.close()


def test_a_reader_of_many_asks_some_at_a_time(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All dumps at once are more than a server keeps for one connection, which it then closes."""
    from nats.aio.client import Client

    from kvbm_core.events.nats_reader import MAX_ASKED, NatsReader

    asked, most_asked, request, all_are_heard = 0, 0, Client.request, threading.Event()

    async def counted(self: Client, *arguments: Any, **options: Any) -> Any:
        nonlocal asked, most_asked
        asked += 1
        most_asked = max(most_asked, asked)
        while not all_are_heard.is_set():
            await asyncio.sleep(0.01)
        try:
            return await request(self, *arguments, **options)
        finally:
            asked -= 1

    monkeypatch.setattr(Client, "request", counted)
    reader = NatsReader(server.login(), subject("test", "*", 0))
    streams = [subject("test", f"instance-{i}", 0) for i in range(30)]
    sinks = [NatsSink(server.login(), stream, Metrics()) for stream in streams]
    publishers = [EventPublisher(make_log(), [sink], 0, Metrics()) for sink in sinks]

    def all_streams(see: Callable[[Picture], bool]) -> bool:
        return all(reader.look(stream, see) for stream in streams)

    try:
        wait_for(lambda: all_streams(lambda picture: picture.wants_dump))
        all_are_heard.set()
        wait_for(lambda: all_streams(lambda picture: picture.is_current))
    finally:
        all_are_heard.set()
        for each in (*publishers, reader):
            each.close()
    assert most_asked == MAX_ASKED


def test_a_server_that_is_killed_and_comes_back_is_met_again(bench: Bench, server: NatsServer) -> None:
    server.stop()
    bench.churn_until_full(4.0)
    server.start(server.port)
    wait_for(lambda: bench.is_met)
    bench.churn(0.2)
    wait_for(lambda: bench.is_met, 10)


def test_a_frozen_server_costs_nothing_but_its_events(bench: Bench, server: NatsServer) -> None:
    server.freeze()
    try:
        bench.churn_until_full(7.0)  # longer than its pings take to be missed
    finally:
        server.thaw()
    assert wait_for(lambda: bench.is_met) < 15


class EarlyPing:
    """A server that stood still pings whom it has just accepted before it answers. As a real one does that at
    one moment in thousands, this stands between it and its first ``count`` clients.
    """

    def __init__(self, server: NatsServer, count: int) -> None:
        self._server = server
        self._left = count
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def login(self) -> NatsLogin:
        """Through it."""
        return replace(self._server.login(), server=f"nats://127.0.0.1:{self._listening.getsockname()[1]}")

    @property
    def num_left(self) -> int:
        """Clients that are still to be pinged."""
        return self._left

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                self._open += [client, server]
                is_early, self._left = self._left > 0, max(0, self._left - 1)
                self._threads += [
                    threading.Thread(target=self._pass, args=(client, server, False)),
                    threading.Thread(target=self._pass, args=(server, client, is_early)),
                ]
                for thread in self._threads[-2:]:
                    thread.start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, is_early: bool) -> None:
        with suppress(OSError):
            while part := source.recv(65536):
                if is_early and b"PONG" in part:
                    part, is_early = part.replace(b"PONG", b"PING\r\nPONG", 1), False
                target.sendall(part)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """All connections too."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


def test_a_server_that_pings_before_it_answers_is_left_and_met_again(server: NatsServer) -> None:
    """The client would believe itself on its way to a connection for ever, and send nothing."""
    with closing(EarlyPing(server, count=4)) as early, closing(Bench(early.login, 1)) as bench:
        bench.churn(0.3)
        wait_for(lambda: bench.is_met)
        assert early.num_left == 0


def test_a_server_that_is_away_at_the_start_is_found_when_it_comes(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        bench = Bench(server.login(), 2)
        try:
            bench.churn(2.5)
            told = [
                record.getMessage() for record in caplog.records if "do not reach NATS" in record.getMessage()
            ]
            assert 1 <= len(told) <= 3, told  # one for each kind of failure
            server.start(server.port)
            wait_for(lambda: bench.is_met)
        finally:
            bench.close()


def test_who_has_not_the_password_is_told_so_and_the_engine_serves(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        log = make_log()
        truth = Truth(log, random.Random(3))
        sink = NatsSink(server.login("wrong"), PREFIX, Metrics(), max_outbox_bytes=SMALL_BYTES)
        publisher = EventPublisher(log, [sink], 0, Metrics())
        try:
            for _ in range(2000):
                truth.step()
            wait_for(lambda: any("Authorization" in record.getMessage() for record in caplog.records))
            assert sink._outbox_bytes <= SMALL_BYTES
        finally:
            publisher.close()
    assert "wrong" not in caplog.text


def test_a_server_that_let_nobody_in_for_a_while_is_met_again(
    bench: Bench, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose passwords were changed by mistake."""
    password, server.password = server.password, "another one"
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        server.stop()
        server.start(server.port)
        bench.churn(2.0)
        wait_for(lambda: "Authorization" in caplog.text)
        server.stop()
        server.password = password
        server.start(server.port)
        wait_for(lambda: bench.is_met)
    assert "takes KV events again" in caplog.text


def test_a_server_that_is_away_does_not_hold_up_the_end(server: NatsServer) -> None:
    server.stop()
    bench = Bench(server.login(), 2)
    bench.churn(0.2)
    began_s = time.monotonic()
    bench.publisher.close()
    assert time.monotonic() - began_s < PATIENCE_S and not bench.sink._thread.is_alive()
    bench.close()


def test_the_end_is_told(bench: Bench) -> None:
    bench.publisher.close()
    wait_for(lambda: bench.reader.look(PREFIX, lambda picture: picture.is_current and not picture.places))


def test_two_engines_of_one_name_are_told_so(
    bench: Bench, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        other = Bench(server.login(), 7)
        try:
            wait_for(lambda: caplog.text.count("KVBM_INSTANCE of its own") == 2)  # each of them
        finally:
            other.close()


@pytest.mark.parametrize(("user", "is_told"), [("mute", True), ("deaf", False)])
def test_what_the_server_does_not_permit_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, user: str, is_told: bool
) -> None:
    users = (
        'users: [ { user: "mute", password: "m", permissions: { publish: "x", subscribe: ">" } },'
        ' { user: "deaf", password: "d", permissions: { publish: ">", subscribe: "*.*.*.*.*.dump" } } ]'
    )
    with NatsServer(tmp_path, authorization=users) as server:
        sink = NatsSink(NatsLogin(server.url, user, user[0]), PREFIX, Metrics())
        with caplog.at_level(logging.WARNING, logger="kvbm"):
            publisher = EventPublisher(make_log(), [sink], 0, Metrics())
            try:
                if is_told:
                    wait_for(lambda: "permissions violation for publish" in caplog.text.lower())
                else:  # it may not hear whether there is a twin, and does its work
                    wait_for(lambda: sink._client is not None and sink._client.stats["out_msgs"] > 1)
            finally:
                publisher.close()
    assert len(caplog.records) == is_told


def test_a_server_that_takes_small_messages_alone_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "small.conf").write_text("max_payload: 4096\n")
    with (
        NatsServer(tmp_path, "-c", str(tmp_path / "small.conf")) as server,
        caplog.at_level(logging.WARNING, logger="kvbm"),
    ):
        bench = Bench(server.login(), 8)
        try:
            wait_for(lambda: "max_payload" in caplog.text)
        finally:
            bench.close()


def test_a_server_that_wants_tls_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_certificates(tmp_path)
    arguments = ["--tls", f"--tlscert={made.certificate}", f"--tlskey={made.key}"]
    with (
        NatsServer(tmp_path, *arguments) as server,
        caplog.at_level(logging.WARNING, logger="kvbm"),
    ):
        bench = Bench(server.login(), 9)
        try:
            wait_for(lambda: "do not reach NATS" in caplog.text)
        finally:
            bench.close()
    print(caplog.records[0].getMessage())
    assert len(caplog.records) == 1


def test_a_router_that_stands_still_does_not_hold_up_the_publisher(bench: Bench) -> None:
    with bench.reader._lock:  # its thread waits for the picture
        bench.churn(3.0)
    wait_for(lambda: bench.is_met)


@pytest.mark.shows("NATS_SERVER", "KVBM_NATS_CA_FILE", "KVBM_NATS_CERT_FILE")
@pytest.mark.parametrize("is_mutual", [False, True])
def test_tls_with_an_authority_of_our_own(tmp_path: Path, is_mutual: bool) -> None:
    made = make_certificates(tmp_path)
    arguments = ["--tls", f"--tlscert={made.certificate}", f"--tlskey={made.key}"]
    if is_mutual:
        arguments += ["--tlsverify", f"--tlscacert={made.authority}"]
    with NatsServer(tmp_path, *arguments, scheme="tls") as server:
        given = {"nats_server": server.url, "nats_username": server.user, "nats_ca_file": str(made.authority)}
        if is_mutual:
            given["nats_cert_file"] = str(made.both)
        login = login_of(KvbmSettings.from_env(given))
        bench = Bench(replace(login, password=server.password), 4)
        try:
            bench.churn(0.2)
            wait_for(lambda: bench.is_met)
        finally:
            bench.close()


def test_a_server_that_comes_back_without_tls_hears_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a client that nats-py itself connects again."""
    made = make_certificates(tmp_path)
    arguments = ["--tls", f"--tlscert={made.certificate}", f"--tlskey={made.key}"]
    with NatsServer(tmp_path, *arguments, scheme="tls") as server:
        login = replace(server.login(), ca_file=str(made.authority))
        with caplog.at_level(logging.WARNING, logger="kvbm"), closing(Bench(login, 10)) as bench:
            bench.churn(0.2)
            wait_for(lambda: bench.is_met)
            told = asyncio.run(_told_to_plain(server, login, lambda: "TLS is wanted" in caplog.text))
            server.start(server.port)
            wait_for(lambda: bench.is_met)
    assert told == b""


async def _told_to_plain(server: NatsServer, login: NatsLogin, is_enough: Callable[[], bool]) -> bytes:
    """What one hears that takes the server's place, also from a client that has a message waiting."""

    async def say_nothing(error: Exception) -> None:
        """Instead of a line of the client's own."""

    client = new_client()
    await client.connect(**login.options(), error_cb=say_nothing, reconnect_time_wait=0)
    server.stop()
    with PlainNats(server.port) as plain:
        await client.publish("waiting", b"message")
        while plain.num_ended < 3 or not is_enough():
            await asyncio.sleep(0.05)
        await client.close()
    return bytes(plain.heard)


def _nkey(kind: str) -> tuple[str, str]:
    """Seed and public key of a USER, an ACCOUNT or an OPERATOR."""
    import nkeys

    seed = nkeys.encode_seed(secrets.token_bytes(32), getattr(nkeys, f"PREFIX_BYTE_{kind}"))
    return seed.decode(), nkeys.from_seed(seed).public_key.decode()


class JwtServer(NatsServer):
    """That lets in whom its operator's account has signed; ``credentials``: the file of such a user."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kinds = ("OPERATOR", "ACCOUNT", "USER")
        (operator, its), (account, of_account), (user, of_user) = map(_nkey, kinds)
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        own = _jwt(operator, its, its, {"type": "operator"})
        claims = {"type": "account", "limits": {**limits, "wildcards": True}}
        accounts = _jwt(operator, its, of_account, claims)
        (folder / "jwt.conf").write_text(
            f"operator: {own}\nresolver: MEMORY\nresolver_preload: {{ {of_account}: {accounts} }}\n"
        )
        signed = _jwt(account, of_account, of_user, {"type": "user", "subs": -1, "data": -1, "payload": -1})
        self.credentials = folder / "user.creds"
        parts = (("NATS USER JWT", signed), ("USER NKEY SEED", user))
        texts = (f"-----BEGIN {name}-----\n{part}\n------END {name}------\n" for name, part in parts)
        self.credentials.write_text("\n".join(texts))

    def _command(self) -> list[str]:
        return [*super()._command()[:5], "-c", str(self._folder / "jwt.conf")]


def _jwt(seed: str, issuer: str, subject: str, claims: dict[str, object]) -> str:
    """As NATS reads it: who ``subject`` is, signed by ``issuer``."""
    import nkeys

    def packed(part: object) -> str:
        data = part if isinstance(part, bytes) else json.dumps(part).encode()
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    about = {"jti": secrets.token_hex(16), "iat": int(time.time()), "iss": issuer, "sub": subject}
    body = {**about, "nats": {**claims, "version": 2}}
    text = f"{packed({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{packed(body)}"
    return f"{text}.{packed(nkeys.from_seed(seed.encode()).sign(text.encode()))}"


@pytest.mark.shows("NATS_AUTH_CREDENTIALS_FILE")
def test_who_has_credentials_is_let_in(tmp_path: Path) -> None:
    with JwtServer(tmp_path) as server:
        given = {"nats_server": server.url, "nats_credentials_file": str(server.credentials)}
        bench = Bench(login_of(KvbmSettings.from_env(given)), 7)
        try:
            bench.churn(0.2)
            wait_for(lambda: bench.is_met)
        finally:
            bench.close()


@pytest.mark.shows("NATS_SERVER", "NATS_AUTH_TOKEN", "NATS_AUTH_NKEY")
@pytest.mark.parametrize("how", ["token", "nkey"])
def test_other_ways_to_say_who_we_are(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, public = _nkey("USER")
    allowed = {"token": 'token: "let-us-in"', "nkey": f"users: [ {{ nkey: {public} }} ]"}[how]
    with NatsServer(tmp_path, authorization=allowed) as server:
        monkeypatch.setenv("NATS_SERVER", server.url)
        monkeypatch.setenv(f"NATS_AUTH_{how.upper()}", "let-us-in" if how == "token" else seed)
        bench = Bench(login_of(KvbmSettings.from_env()), 5)
        try:
            bench.churn(0.2)
            wait_for(lambda: bench.is_met)
        finally:
            bench.close()


def test_who_may_not_subscribe_hears_nothing(tmp_path: Path) -> None:
    users = (
        'users: [ { user: "engine", password: "e" },'
        ' { user: "other", password: "o", permissions: { subscribe: "_INBOX.>", publish: "x" } } ]'
    )
    from kvbm_core.events.nats_reader import NatsReader

    with NatsServer(tmp_path, authorization=users) as server:
        bench = Bench(NatsLogin(server.url, "engine", "e"), 6)
        stranger = NatsReader(NatsLogin(server.url, "other", "o"), PREFIX)
        try:
            bench.churn(0.3)
            wait_for(lambda: bench.is_met)
            assert not stranger.look(PREFIX, lambda picture: picture.places or picture.wants_dump)
        finally:
            stranger.close()
            bench.close()


@pytest.mark.parametrize(
    ("login", "line"),
    [
        (NatsLogin("nats://192.0.2.1:4222"), "no TLS"),
        (NatsLogin("nats://127.0.0.1.example:4222"), "no TLS"),
        (NatsLogin("redis://127.0.0.1:4222"), "write nats://"),
        (NatsLogin("nats://127.0.0.1:port"), "write nats://"),
        (NatsLogin("nats://[::1:4222"), "write nats://"),
        (NatsLogin("tls://127.0.0.1:4222", ca_file="nowhere"), "KVBM_NATS_CA_FILE=nowhere"),
        (
            NatsLogin("nats://127.0.0.1:4222", credentials_file="nowhere"),
            "NATS_AUTH_CREDENTIALS_FILE=nowhere",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(login: NatsLogin, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        NatsSink(login, PREFIX, Metrics())
    assert "\n" not in str(raised.value)


def test_secrets_are_not_shown() -> None:
    login = NatsLogin("nats://me:hidden@127.0.0.1:4222", "me", "hidden", "hidden", nkey="hidden")
    shown = repr(NatsLogin("nats://127.0.0.1", "me", "hidden", "hidden", nkey="hidden"))
    assert "hidden" not in shown
    with pytest.raises(ConfigError) as raised:
        NatsLogin("http://me:hidden@127.0.0.1:4222").check()
    assert "hidden" not in str(raised.value)
    login.check()


@pytest.mark.nightly("two minutes, as long as the promise says")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_minute_without_nats(bench: Bench, server: NatsServer, how: str) -> None:
    (server.stop if how == "stopped" else server.freeze)()
    bench.churn(60.0)
    if how == "stopped":
        server.start(server.port)
    else:
        server.thaw()
    assert wait_for(lambda: bench.is_met) < 15
