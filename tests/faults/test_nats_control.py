"""Orders over a real NATS server, to instances that a real etcd lists: signed ones alone are taken, a flood
is not listened to, and after every loss of a server orders can be given again.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.control.budget import BURST, ORDERS_PER_S
from kvbm_core.control.messages import MAX_WAIT_S, Order, Verb
from kvbm_core.control.nats_wire import PAUSE_S, subject_of
from kvbm_core.control.operators import OperatorKey
from kvbm_core.control.service import ControlService
from kvbm_core.observe.metrics import Metrics
from tests.engines.etcd_server import EtcdServer
from tests.engines.nats_server import NatsServer
from tests.unit.control_bench import Cache, operator, taking_orders, wait_for

pytestmark = pytest.mark.nats

FLEET = "tests"
RESET = Order(verb=Verb.RESET, fleet=FLEET, wait_s=5.0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """Known to engines and command by the environment."""
    with NatsServer(tmp_path) as started:
        monkeypatch.setenv("NATS_SERVER", started.url)
        monkeypatch.setenv("NATS_AUTH_USERNAME", started.user)
        monkeypatch.setenv("NATS_AUTH_PASSWORD", started.password)
        monkeypatch.setenv("KVBM_FLEET", FLEET)
        yield started


class Bench:
    """One instance, and an operator of its fleet."""

    def __init__(self, folder: Path) -> None:
        self.key, self.key_file = operator(folder)
        self.cache = Cache()
        self.metrics = Metrics()
        self.service: ControlService

    @property
    def settings(self) -> dict[str, object]:
        return {"control": "nats", "control_operators": self.key.public, "instance": "one"}

    @property
    def wire(self) -> Any:
        return self.service._nats

    def fleet(self, *arguments: str) -> Result:
        given = [arguments[0], "--key", str(self.key_file), *arguments[1:]]
        return CliRunner().invoke(app, ["fleet", *given], env={"NO_COLOR": "1", "COLUMNS": "200"})

    def names(self, wait_s: float = 0.2) -> list[str]:
        """Who answers."""
        done = self.fleet("status", "--json", "--wait", str(wait_s))
        if done.exit_code == 2:
            return []  # there is no server
        return [answer["instance"] for answer in json.loads(done.stdout)["answers"]]


@pytest.fixture
def bench(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("kvbm_core.control.asking.EXTRA_WAIT_S", 0.3)
    made = Bench(tmp_path)
    with taking_orders(made.settings, made.cache.control, made.metrics) as made.service:
        wait_for(lambda: made.names() == ["one"])
        yield made


def with_client(server: NatsServer, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Whoever may log in there."""
    from nats.aio.client import Client

    async def run() -> Any:
        client = Client()
        await client.connect(**server.login().options(), allow_reconnect=False)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def ask(server: NatsServer, payload: bytes, subject: str = subject_of(FLEET, "one")) -> dict[str, Any] | None:
    """The answer to it; None if there is none."""

    async def use(client: Any) -> Any:
        from nats.errors import TimeoutError as NoAnswer

        try:
            return json.loads((await client.request(subject, payload, timeout=2)).data)
        except NoAnswer:
            return None

    return with_client(server, use)


@pytest.mark.shows(
    "KVBM_CONTROL",
    "KVBM_CONTROL=nats",
    "KVBM_CONTROL_OPERATORS",
    "KVBM_INSTANCE",
    "NATS_SERVER",
    "NATS_AUTH_USERNAME",
    "NATS_AUTH_PASSWORD",
)
def test_an_operator_asks_and_orders_over_nats(bench: Bench) -> None:
    assert bench.fleet("reset", "--instance", "one", "--wait", "1").exit_code == 0
    assert len(bench.cache.resets) == 1
    assert bench.fleet("drain", "--all", "--wait", "1").exit_code == 0 and bench.cache.control.is_draining
    assert bench.fleet("resume", "--all", "--wait", "1").exit_code == 0
    assert not bench.cache.control.is_draining
    nobody = bench.fleet("reset", "--instance", "two")
    assert nobody.exit_code == 1 and "two is not there" in nobody.stderr
    assert "without ETCD_ENDPOINTS nobody knows" in bench.fleet("status", "--wait", "0.1").stderr


def test_status_and_top_show_the_fleet_to_who_has_a_key(bench: Bench, tmp_path: Path) -> None:
    bench.metrics.describe(engine="an engine", model="a/model", name="one", rank=0, version="1")
    bench.metrics.matched_tokens(4242)

    def shown(*arguments: str, key: Path = bench.key_file) -> Result:
        given = [*arguments, "--key", str(key), "--timeout", "0.5"]
        return CliRunner().invoke(app, given, env={"NO_COLOR": "1", "COLUMNS": "200"})

    done = shown("status")
    assert done.exit_code == 0 and "one.0, an engine, a/model, NATS" in done.stdout and "4,242" in done.stdout
    (instance,) = json.loads(shown("top", "--json", "--interval", "0.2").stdout)["instances"]
    assert (instance["name"], instance["where"]) == ("one.0", "NATS")
    _, stranger = operator(tmp_path, "stranger")
    refused = shown("status", key=stranger)
    assert refused.exit_code == 1 and "one.0 refuses: " in refused.stderr


@pytest.mark.shows("KVBM_CONTROL_OPERATORS")
def test_nobody_without_an_operators_key_is_heard(bench: Bench, server: NatsServer, tmp_path: Path) -> None:
    """Each attempt of somebody who may log in to NATS; the same on the subject of all instances."""
    stranger, stranger_file = operator(tmp_path, "stranger")
    plain = msgspec.json.encode(RESET)
    good = json.loads(bench.key.sign(RESET))
    attempts = {
        "unsigned": plain,
        "signed by another": stranger.sign(RESET),
        "under an operator's name": json.dumps({**json.loads(stranger.sign(RESET)), "key": bench.key.public}),
        "changed": json.dumps({**good, "order": good["order"].replace("all", "host")}),
        "for another fleet": bench.key.sign(msgspec.structs.replace(RESET, fleet="others")),
        "for another instance": bench.key.sign(msgspec.structs.replace(RESET, instance="two")),
        "noise": os.urandom(300),
        "huge": b"x" * 900_000,
        "nothing": b"",
    }
    for name, payload in attempts.items():
        data = payload if isinstance(payload, bytes) else payload.encode()
        for subject in (subject_of(FLEET, "one"), subject_of(FLEET)):
            answer = ask(server, data, subject)
            assert answer is not None and answer["result"] == "refused" and not answer.get("status"), name
    done = CliRunner().invoke(app, ["fleet", "reset", "--all", "--wait", "0.1", "--key", str(stranger_file)])
    assert done.exit_code == 1
    assert not bench.cache.resets and not bench.cache.control.is_draining
    assert bench.metrics.snapshot()['kvbm_failures_total{kind="bad_message"}'] == 2 * len(attempts) + 1


def test_an_order_that_was_overheard_is_not_taken_again(bench: Bench, server: NatsServer) -> None:
    payload = bench.key.sign(RESET)
    first, again = ask(server, payload), ask(server, payload)
    assert first is not None and first["result"] == "done"
    assert again is not None and again["result"] == "refused" and "given before" in again["text"]
    other = ask(server, payload, subject_of(FLEET))
    assert other is not None and other["result"] == "refused" and len(bench.cache.resets) == 1


def test_answers_go_to_inboxes_alone(bench: Bench, server: NatsServer) -> None:
    """Else who may publish orders could have an engine publish, say, KV events."""

    async def use(client: Any) -> list[bytes]:
        heard: list[bytes] = []

        async def hear(message: Any) -> None:
            heard.append(message.data)

        await client.subscribe("kvbm.v1.tests.one.0.kv", cb=hear)
        await client.publish(subject_of(FLEET, "one"), bench.key.sign(RESET), reply="kvbm.v1.tests.one.0.kv")
        await client.publish(subject_of(FLEET, "one"), bench.key.sign(RESET))
        await client.request(subject_of(FLEET, "one"), b"", timeout=5)  # the others came before
        return heard

    assert with_client(server, use) == [] and not bench.cache.resets


def test_a_flood_is_not_listened_to(
    bench: Bench, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """10,000 requests with an operator's public key, which is no secret: few of them cost a check."""
    forged = json.dumps({**json.loads(bench.key.sign(RESET)), "signature": "A" * 88}).encode()
    checked: list[bytes] = []
    operators = bench.wire._operators
    check = operators.check
    operators.check = lambda payload: (checked.append(payload), check(payload))[1]
    heard_before = bench.wire.heard_total

    async def use(client: Any) -> None:
        for number in range(10_000):
            await client.publish(subject_of(FLEET, "one"), forged, reply=f"_INBOX.x.{number}")
            if number % 500 == 0:
                await client.flush()
        await client.flush()

    began_s = time.monotonic()
    with_client(server, use)
    took_s = time.monotonic() - began_s
    rounds = 1 + took_s / PAUSE_S
    assert len(checked) <= rounds * (BURST + ORDERS_PER_S * PAUSE_S)
    assert bench.wire.heard_total - heard_before < 10_000 / 2
    assert not bench.cache.resets and "none is taken for" in caplog.text
    wait_for(lambda: bench.names() == ["one"])  # and then it listens again
    assert threading.active_count() < 20


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_after_the_loss_of_nats_orders_can_be_given_again(how: str, bench: Bench, server: NatsServer) -> None:
    if how == "killed":
        server.stop()
        assert bench.fleet("status", "--wait", "0.1").exit_code == 2
        server.start(server.port)  # as empty as it always is
    else:
        server.freeze()
        try:
            assert bench.fleet("status", "--wait", "0.1").exit_code == 2
            wait_for(lambda: not bench.wire._client.is_connected)
        finally:
            server.thaw()
    wait_for(lambda: bench.names() == ["one"])
    assert bench.fleet("reset", "--all", "--wait", "1").exit_code == 0 and len(bench.cache.resets) == 1


def test_an_instance_that_begins_without_nats_is_there_when_it_comes(
    server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    bench = Bench(tmp_path)
    with taking_orders(bench.settings, bench.cache.control) as bench.service:
        wait_for(lambda: "no orders come over NATS" in caplog.text)
        server.start(server.port)
        wait_for(lambda: bench.names() == ["one"])


def test_without_operators_or_with_a_wrong_server_there_is_one_line_and_no_wire(
    server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    threads = set(threading.enumerate())
    for wrong in (
        {"control_operators": ""},
        {"nats_server": "http://x"},
        {"nats_server": "nats://192.0.2.1"},
    ):
        caplog.clear()
        with taking_orders({**bench.settings, **wrong}, bench.cache.control):
            (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert "orders are not taken over nats" in line and "\n" not in line
            assert set(threading.enumerate()) <= threads


def test_an_order_that_the_server_would_not_carry_is_one_line(bench: Bench, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([123_456] * 200_000), encoding="ascii")
    given = ["pin", "p", "--all", "--tokens", str(prompt), "--key", str(bench.key_file)]
    done = CliRunner().invoke(app, given, env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert done.exit_code == 2 and "set its max_payload, or shorten the prompt" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.shows("ETCD_ENDPOINTS")
@pytest.mark.etcd
def test_etcd_says_who_should_have_answered(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd:
        monkeypatch.setenv("ETCD_ENDPOINTS", etcd.url)
        monkeypatch.setenv("KVBM_FLEET_LEASE_S", "2")
        bench = Bench(tmp_path)
        two = {**bench.settings, "instance": "two"}
        with taking_orders(bench.settings, bench.cache.control) as bench.service:
            with taking_orders(two, Cache().control) as other:
                wait_for(lambda: bench.fleet("status").exit_code == 0 and bench.names() == ["one", "two"])
                began_s = time.monotonic()
                assert bench.names(wait_s=MAX_WAIT_S) == ["one", "two"]
                assert time.monotonic() - began_s < MAX_WAIT_S  # nobody else is waited for
                client = etcd.client()
                records = [value for value, _ in client.get_prefix(f"/kvbm/v1/{FLEET}/inst/")]
                client.close()
                assert len(records) == 2 and all(len(record) < 2048 for record in records)
                _deafen(other)
                missing = bench.fleet("status", "--wait", "0.5")
                assert missing.exit_code == 1 and "two.0 did not answer" in missing.stderr
            # It has ended, and taken its record back.
            wait_for(lambda: bench.fleet("status", "--wait", "0.5").exit_code == 0)
            etcd.stop()
            done = bench.fleet("status", "--wait", "0.5")
            assert done.exit_code == 2 and "ETCD_ENDPOINTS" in done.stderr and done.stderr.count("\n") == 1


def _deafen(service: ControlService) -> None:
    """It is there, and hears nothing: its connection to NATS hangs."""
    wire: Any = service._nats
    assert service._loop is not None

    async def unsubscribe() -> None:
        for subscription in wire._listening:
            await subscription.unsubscribe()
        await wire._client.flush()

    asyncio.run_coroutine_threadsafe(unsubscribe(), service._loop).result(10)


def test_a_key_of_an_operator_can_be_made_and_used(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CliRunner().invoke(app, ["keys", "operator", str(tmp_path / "mine.nk")])
    assert made.exit_code == 0 and made.stdout.startswith("export KVBM_CONTROL_OPERATORS=U")
    assert OperatorKey(tmp_path / "mine.nk").public == made.stdout.strip().partition("=")[2]
    again = CliRunner().invoke(app, ["keys", "operator", str(tmp_path / "mine.nk")])
    assert again.exit_code == 2 and "exists" in again.stderr
