"""An engine that serves while the NATS server that hears its events is away, stands still or begins anew: it
hits as before, keeps bounded memory, and a router's picture is right again afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvbm_core.events import nats_sink
from kvbm_core.events.consumer import Picture
from kvbm_core.events.nats_sink import subject
from tests.engines.nats_server import NatsServer
from tests.vllm.harness import PATIENCE_S
from tests.vllm.kvbm_engine import KvbmEngine

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900)]

AWAY_S = 60.0
OUTBOX_BYTES = 20_000
"""So that it is full within seconds."""
PREFIX = subject("fleet", "engine", 0)
PROMPT_TOKENS, BLOCK_TOKENS = 50, 4
HIT_TOKENS = 48


class Served:
    """An engine, and a router that follows it over NATS."""

    def __init__(self, engine: KvbmEngine, server: NatsServer) -> None:
        from kvbm_core.events.nats_reader import NatsReader

        self.engine = engine
        self.reader = NatsReader(server.login(), PREFIX)
        self._numbers = count()
        self._names: set[Any] = set()
        service = engine.connector.scheduler_side.publishing  # type: ignore[attr-defined]
        self.publisher = service.publisher
        (self._sink,) = self.publisher._sinks

    def serve(self) -> None:
        """A new prompt, which drives others out of the host; and again, when the device has lost it."""
        number, engine = next(self._numbers), self.engine
        prompt = range(100 * number, 100 * number + PROMPT_TOKENS)
        request = engine.add(f"new {number}", prompt, 2)
        self._names |= {maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes}
        engine.run()
        engine.forget_device()
        answer = engine.ask(f"again {number}", prompt, 2)
        assert answer == engine.record.outputs[f"new {number}"]
        assert engine.external_tokens(f"again {number}") == HIT_TOKENS
        engine.forget_device()
        self.assert_bounded()

    def assert_bounded(self) -> None:
        """What waits for NATS."""
        client = self._sink._client
        assert self._sink._outbox_bytes <= OUTBOX_BYTES
        assert client is None or client.pending_data_size <= 2 * OUTBOX_BYTES

    def serve_for(self, seconds: float) -> None:
        """And until some of what was to be told has been dropped."""
        ends_at_s = time.monotonic() + seconds
        most_s = ends_at_s + PATIENCE_S
        while time.monotonic() < ends_at_s or not self.engine.metric("kvbm_event_batches_dropped_total"):
            assert time.monotonic() < most_s, "the outbox is never full"
            self.serve()

    @property
    def is_met(self) -> bool:
        """Whether the router knows all that is in the host, and nothing else."""

        def is_right(picture: Picture) -> bool:
            here = picture.places.get(("CPU_TIER1", 0), frozenset())
            num_resident = self.engine.leader.chain.host.resident_blocks
            return picture.is_current and len(here) == num_resident and here <= self._names

        return bool(self.reader.look(PREFIX, is_right))


def wait_for(condition: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_at_s, "what was waited for did not come"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "away_s",
    [
        3.0,
        pytest.param(AWAY_S, marks=pytest.mark.nightly("three minutes; three seconds each are tried always")),
    ],
)
@pytest.mark.parametrize("how", ["stopped", "frozen", "restarted"])
def test_an_engine_serves_on_whatever_becomes_of_nats(
    how: str, away_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarted: again and again, and nobody who listened is connected then."""
    monkeypatch.setattr(nats_sink, "CLIENT_BYTES", OUTBOX_BYTES)
    monkeypatch.setitem(nats_sink.NatsSink.__init__.__kwdefaults__, "max_outbox_bytes", OUTBOX_BYTES)
    with NatsServer(tmp_path) as server:
        monkeypatch.setenv("NATS_AUTH_PASSWORD", server.password)
        settings = {"events": "nats", "fleet": "fleet", "instance": "engine"}
        settings |= {"nats_server": server.url, "nats_username": server.user}
        with KvbmEngine(tmp_path, host_blocks=40, extra=settings) as engine:
            served = Served(engine, server)
            try:
                served.serve()
                wait_for(lambda: served.is_met)
                play(served, server, how, away_s)
                wait_for(lambda: served.is_met)
                served.serve()
                wait_for(lambda: served.is_met)
                engine.assert_clean()
            finally:
                served.reader.close()


def play(served: Served, server: NatsServer, how: str, away_s: float) -> None:
    if how == "restarted":
        ends_at_s = time.monotonic() + away_s
        while time.monotonic() < ends_at_s:
            server.stop()
            server.start(server.port)
            for _ in range(3):
                served.serve()
        return
    (server.freeze if how == "frozen" else server.stop)()
    try:
        served.serve_for(away_s)
    finally:
        server.thaw() if how == "frozen" else server.start(server.port)
