"""TLS to NATS that is wanted and not offered: whoever listens there hears no password, no event, no order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbm_core.cli.doctor.check import Level
from kvbm_core.cli.main import app
from kvbm_core.events.nats_session import new_client
from kvbm_core.events.nats_sink import NatsLogin, NatsSink, subject
from kvbm_core.events.publisher import EventPublisher
from kvbm_core.observe.metrics import Metrics
from tests.engines.certificates import make_certificates
from tests.engines.plain_nats import PlainNats
from tests.unit.control_bench import Cache, operator, taking_orders, wait_for
from tests.unit.doctor_bench import found, look
from tests.unit.event_truth import make_log

LINE = "TLS is wanted and the server does not ask for it"


@pytest.fixture
def server() -> Iterator[PlainNats]:
    with PlainNats() as listening:
        yield listening


@pytest.fixture(params=["tls", "TLS", "authority", "one of two"])
def wanting(
    request: pytest.FixtureRequest, server: PlainNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Settings that want TLS of ``server``."""
    url, given = f"127.0.0.1:{server.port}", {"nats_username": "engine"}
    monkeypatch.setenv("NATS_AUTH_PASSWORD", "hidden")
    if request.param == "authority":
        authority = str(make_certificates(tmp_path / "tls").authority)
        return {**given, "nats_server": f"nats://{url}", "nats_ca_file": authority}
    both = f"nats://{url},tls://{url}"
    return {**given, "nats_server": both if request.param == "one of two" else f"{request.param}://{url}"}


def login_to(server: PlainNats) -> NatsLogin:
    return NatsLogin(f"tls://127.0.0.1:{server.port}", "engine", "hidden")


def test_events_wait(server: PlainNats, caplog: pytest.LogCaptureFixture) -> None:
    sink = NatsSink(login_to(server), subject("test", "one", 0), Metrics())
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        publisher = EventPublisher(make_log(), [sink], 0, Metrics())
        try:
            wait_for(lambda: server.num_ended >= 2)
        finally:
            publisher.close()
    assert server.heard == b""
    assert [LINE in record.getMessage() for record in caplog.records] == [True]


def test_no_orders_are_taken(
    server: PlainNats, wanting: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, _ = operator(tmp_path)
    settings = {"control": "nats", "control_operators": key.public, "instance": "one", **wanting}
    with caplog.at_level(logging.WARNING, logger="kvbm"), taking_orders(settings, Cache().control):
        wait_for(lambda: server.num_ended >= 2)
    assert server.heard == b"" and LINE in caplog.text


def test_no_order_is_given(server: PlainNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = operator(tmp_path)
    environ = {"NATS_SERVER": login_to(server).server, "NATS_AUTH_USERNAME": "operator"}
    environ |= {"NATS_AUTH_PASSWORD": "hidden", "NO_COLOR": "1", "COLUMNS": "400"}
    done = CliRunner().invoke(app, ["fleet", "reset", "--all", "--key", str(file)], env=environ)
    assert done.exit_code == 2 and LINE in done.stderr
    wait_for(lambda: server.num_ended == 1)
    assert server.heard == b""


def test_the_doctor_says_so(server: PlainNats, wanting: dict[str, str]) -> None:
    findings = look("nats", events="nats", **wanting)
    found(findings, Level.ERROR, LINE, "give the server a certificate")
    assert server.heard == b""


def connect(server: PlainNats, **options: Any) -> None:
    async def run() -> None:
        client = new_client()
        try:
            await client.connect(**login_to(server).options(), **options)
        finally:
            with suppress(AssertionError):  # it was not even begun
                await client.close()

    asyncio.run(run())


async def say_nothing(error: Exception) -> None:
    """Instead of a line of the client's own."""


def test_servers_that_it_names_hear_nothing_either() -> None:
    with PlainNats() as other, PlainNats(others=(f"127.0.0.1:{other.port}",)) as first:
        often: dict[str, Any] = {"max_reconnect_attempts": 2, "reconnect_time_wait": 0}
        with pytest.raises(Exception, match="no servers available"):
            connect(first, error_cb=say_nothing, **often)
        wait_for(lambda: first.num_ended >= 2 and other.num_ended >= 2)
        assert first.heard == other.heard == b""


def test_a_nats_py_of_another_form_tells_nothing(server: PlainNats, monkeypatch: pytest.MonkeyPatch) -> None:
    from nats.aio.client import Client

    made: Any = new_client()
    made._transport = SimpleNamespace(close=lambda: None)  # which keeps its connection elsewhere
    with pytest.raises(ConnectionError, match=LINE):
        made._connect_command()
    monkeypatch.delattr(Client, "_connect_command")
    with pytest.raises(ConnectionError, match="this nats-py is not known"):
        connect(server, error_cb=say_nothing, allow_reconnect=False)
    assert server.heard == b""
