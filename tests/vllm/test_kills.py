"""Engines under vLLM's own scheduler that are killed while they write to a store, and another one that reads
it.

``KVBM_FAULT_ENGINE_KILLS`` says how many are killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.engines.valkey_server import ValkeyServer
from tests.faults.nurseries import kill_one, nursery
from tests.vllm.kill_nursery import ANSWER_TOKENS, PROMPTS, opened
from tests.vllm.kvbm_engine import KvbmEngine

NUM_KILLS = int(os.environ.get("KVBM_FAULT_ENGINE_KILLS") or 50)
WAIT_S = 0.5
MARGIN_S = 0.5
"""More than a step takes on a busy machine."""
FROM_STORE = "kvbm_onboard_blocks_o2d"

pytestmark = [
    pytest.mark.valkey,
    pytest.mark.timeout(900),
    pytest.mark.nightly("tests/faults/test_record_kills.py has the store alone"),
]


def in_a_request(rng: Random, line: str) -> float:
    """One takes some 10 ms, and what it stores goes on beside the next."""
    return rng.random() * 0.03


class Held:
    """How long requests are held back: from the first time that vLLM is told to ask again, to an answer."""

    def __init__(self, engine: KvbmEngine) -> None:
        self.longest_s = 0.0
        self._since_s: dict[str, float] = {}
        self._ask = engine.connector.get_num_new_matched_tokens
        engine.connector.get_num_new_matched_tokens = self._spy  # type: ignore[method-assign]

    def _spy(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        found = self._ask(request, computed_tokens)
        now_s = time.monotonic()
        since_s = self._since_s.setdefault(request.request_id, now_s)
        self.longest_s = max(self.longest_s, now_s - since_s)
        return found


def test_another_engine_serves_what_the_killed_ones_have_written(
    tmp_path: Path, rng: Random, tell: Callable[[str], None]
) -> None:
    with opened(tmp_path, {}) as alone:
        expected = [alone.ask(str(number), prompt, ANSWER_TOKENS) for number, prompt in enumerate(PROMPTS)]
    found = brought = 0
    longest_s = 0.0
    with ValkeyServer(tmp_path) as server, nursery("tests.vllm.kill_nursery") as writers:
        login = {"remote_password_file": server.login().password_file}
        settings = {"store": server.url, "remote_load": "always", "remote_wait_s": WAIT_S, **login}
        for kill in range(NUM_KILLS):
            order = f"{rng.getrandbits(32)} {tmp_path} {json.dumps(settings)}"
            kill_one(writers, order, rng, in_a_request)
            with opened(tmp_path, settings) as engine:
                held = Held(engine)
                for number, prompt in enumerate(PROMPTS):  # every byte that comes is compared
                    assert engine.ask(f"{kill} {number}", prompt, ANSWER_TOKENS) == expected[number]
                    found += engine.external_tokens(f"{kill} {number}") > 0
                engine.assert_clean()
                brought += int(engine.metric(FROM_STORE))
                longest_s = max(longest_s, held.longest_s)
            if kill % 5 == 4:
                server.stop()  # it keeps nothing; the next ones begin with an empty store
                server.start(server.port)
    tell(f"{NUM_KILLS} engines killed; {found} hits, {brought} blocks; longest held {longest_s:.3f} s")
    assert longest_s < WAIT_S + MARGIN_S
    assert found > NUM_KILLS, "this test sees nothing"
