"""Dynamo's own router and event publishers before two engines: vLLM's scheduler, kvbm and its consolidator.

The engines compute no model and serve nobody; tests/dynamo/test_serving.py has all of it for real, at night.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="NOT RUN: Dynamo's router before vLLM's scheduler; vLLM is missing")

from kvbm_core.events import publisher as publisher_module
from tests.conftest import DYNAMO_PYTHON
from tests.engines import PATIENCE_S
from tests.engines.etcd_server import EtcdServer, find_etcd
from tests.engines.ports import HOST, free_port
from tests.vllm.kvbm_engine import KvbmEngine

BLOCK_TOKENS = 4
POLL_S = 0.01
PROMPTS = range(50), range(200, 250)
FULL_BLOCKS = 12
ROUTING = Path(__file__).with_name("routing.py")
HOSTS = ("SYSTEM", "EVENT_PLANE", "TCP_RESPONSE_STREAM", "TCP_RPC", "HTTP_RPC")


class Routing:
    """Dynamo's router, in its own Python, which hears what is published at ``endpoints``. ``discovery``:
    environment that says how its parts find each other.
    """

    def __init__(self, folder: Path, endpoints: Sequence[str], discovery: dict[str, str]) -> None:
        env = {
            **os.environ,
            **{f"DYN_{name}_HOST": HOST for name in HOSTS},
            **discovery,
            "DYN_LOGGING_DISABLE_ANSI_COLORS": "1",
        }
        self.log_path = folder / "routing.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(DYNAMO_PYTHON), str(ROUTING), str(BLOCK_TOKENS), *endpoints],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )
        assert self._read() == "ready"

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log_path.read_text(errors="replace")[-4000:]
        return json.loads(line)

    def ask(self, prompt: range) -> tuple[int, list[dict[str, int]]]:
        """The worker that it would choose, and what it knows of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(prompt)) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return int(answer["best"]), [answer["known"][name] for name in sorted(answer["known"])]

    def blocks(self, prompt: range, medium: str) -> list[int]:
        """How many of the prompt's blocks each worker has."""
        return [known[f"{medium}_blocks"] for known in self.ask(prompt)[1]]

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class Fleet:
    """Two engines and the router before them."""

    def __init__(self, engines: list[KvbmEngine], routing: Routing) -> None:
        self.engines, self.routing = engines, routing
        self._asked = 0

    def step(self) -> None:
        """vLLM publishes in a step what has happened since the last one."""
        for engine in self.engines:
            self._asked += 1
            engine.ask(f"step {self._asked}", range(5000 + 3 * self._asked, 5002 + 3 * self._asked), 1)

    def wait_until_heard(self) -> None:
        """Until what the engines say reaches the router."""
        turn = 0

        def is_heard() -> bool:
            nonlocal turn
            turn += 1
            prompt = range(10_000 + 8 * turn, 10_005 + 8 * turn)
            for engine in self.engines:
                engine.ask(f"early {turn}", prompt, 1)
            time.sleep(POLL_S)
            return all(self.routing.blocks(prompt, "device"))

        wait_for(is_heard)

    def forget_devices(self) -> None:
        """What is left is in kvbm."""
        for engine in self.engines:
            engine.forget_device()
        self.step()


def wait_for(condition: Callable[[], bool]) -> None:
    """Patiently."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"
        time.sleep(POLL_S)


@pytest.fixture(params=["files", "etcd"])
def discovery(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """No NATS with either."""
    if request.param == "files":
        yield {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "discovery")}
        return
    if find_etcd() is None:
        pytest.skip("NOT RUN: Dynamo's router with etcd; etcd is missing")
    with EtcdServer(tmp_path) as etcd:
        yield {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.url}


@pytest.fixture(params=["dedup", "passthrough"])
def fleet(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    discovery: dict[str, str],
) -> Iterator[tuple[Fleet, str]]:
    """And the medium under which the router keeps host memory."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)
    with ExitStack() as stack:
        engines, endpoints = [], []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            device, published = (f"tcp://{HOST}:{free_port()}" for _ in range(2))
            extra = {"kv_events_consolidator_mode": request.param}
            ends = (device, published, published)
            engine = KvbmEngine(tmp_path / name, host_blocks=200, consolidated=ends, extra=extra)
            engines.append(stack.enter_context(engine))
            endpoints.append(published)
        routing = Routing(tmp_path, endpoints, discovery)
        stack.callback(routing.close)
        fleet = Fleet(engines, routing)
        fleet.wait_until_heard()
        yield fleet, {"dedup": "device", "passthrough": "host_pinned"}[request.param]
        for engine in engines:
            engine.assert_clean()


def test_a_prefix_that_only_kvbm_has_draws_the_request(fleet: tuple[Fleet, str]) -> None:
    both, host = fleet
    for number, (engine, prompt) in enumerate(zip(both.engines, PROMPTS, strict=True)):
        assert both.routing.blocks(prompt, "device") == [0, 0]
        engine.ask(f"owner {number}", prompt, 1)
        owned = [FULL_BLOCKS * (owner == number) for owner in range(2)]
        wait_for(lambda p=prompt, owned=owned: both.routing.blocks(p, "device") == owned)
    both.forget_devices()
    for owner, prompt in enumerate(PROMPTS):
        owned = [FULL_BLOCKS * (owner == number) for number in range(2)]
        wait_for(lambda p=prompt, owned=owned: both.routing.blocks(p, host) == owned)
        if host != "device":
            wait_for(lambda p=prompt: both.routing.blocks(p, "device") == [0, 0])
        assert [both.routing.ask(prompt)[0] for _ in range(4)] == [owner] * 4
    for engine in both.engines:
        assert engine.reset_device(with_connector=True)
    both.step()
    for prompt in PROMPTS:
        wait_for(lambda p=prompt: both.routing.blocks(p, host) == both.routing.blocks(p, "device") == [0, 0])
