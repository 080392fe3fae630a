"""Engines under vLLM's own scheduler that are killed while they write to a store, and another one that serves
meanwhile and afterwards from the same store: no wrong byte, no request held beyond its limit, nothing left.

``KVBM_FAULT_ENGINE_KILLS`` says how many are killed for each store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.stores import inspect_store
from tests.effort import tries
from tests.engines.faulty_store import faulty_store
from tests.engines.object_servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY
from tests.faults.nurseries import Moment, kill_one, nursery
from tests.faults.test_record_kills import MORE, Store, bucket, held_now, look_at_all, valkey
from tests.vllm.kill_nursery import ANSWER_TOKENS, NUM_SHARED, opened, prompts_of
from tests.vllm.kvbm_engine import KvbmEngine

NUM_KILLS = int(os.environ.get("KVBM_FAULT_ENGINE_KILLS") or tries(12, nightly=200))
KILLS_EACH = 6
"""While so many are killed the same one serves; then it ends, leaves nothing, and a new one starts."""
WAIT_S, DEADLINE_S = 30.0, 60.0
"""For a machine with other things to do: the store answers."""
FROM_STORE = "kvbm_onboard_blocks_o2d"


@contextmanager
def bucket_in_memory(folder: Path) -> Iterator[Store]:
    """A server that is fast, and lists nothing."""
    with faulty_store() as server:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
        yield Store(f"s3://{BUCKET}/killed", {"AWS_ENDPOINT_URL_S3": server.url, **keys}, "obstore")
        assert server.requests["PUT"] and not server.requests["POST"], "objects are made in parts"


class Served:
    """The engines that are not killed, one after the other. ``longest_s``: how long a request was held back,
    from the first time that vLLM asked on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], seen: Counter[str]) -> None:
        self.longest_s = 0.0
        self._folder, self._settings, self._seen = folder, settings, seen
        self._numbers = count()
        self._since_s: dict[str, float] = {}

    @contextmanager
    def running(self) -> Iterator[KvbmEngine]:
        with opened(self._folder, self._settings) as engine:
            ask = engine.connector.get_num_new_matched_tokens

            def spy(request: Any, computed_tokens: int) -> tuple[int | None, bool]:
                asked_s, name = time.monotonic(), request.request_id
                tokens, is_async = ask(request, computed_tokens)
                if tokens is None:  # it is to ask again
                    held_s = asked_s - self._since_s.setdefault(name, time.monotonic())
                    assert held_s <= WAIT_S, "a request is held back beyond its limit"
                    self.longest_s = max(self.longest_s, held_s)
                return tokens, is_async

            engine.connector.get_num_new_matched_tokens = spy  # type: ignore[method-assign]
            yield engine
            engine.assert_clean()
            self._seen["blocks brought"] += int(engine.metric(FROM_STORE))

    def ask(self, engine: KvbmEngine, prompt: list[int], expected: list[int], what: str) -> None:
        """Every byte that comes is compared by the model."""
        name = f"served {next(self._numbers)}"
        assert engine.ask(name, prompt, ANSWER_TOKENS) == expected
        self._seen[what] += engine.external_tokens(name) > 0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(bucket_in_memory, id="s3"),
        pytest.param(bucket, id="SeaweedFS", marks=pytest.mark.nightly("a server that starts slowly")),
        pytest.param(valkey, id="valkey", marks=pytest.mark.valkey),
    ],
)
def test_another_engine_serves_what_the_killed_ones_have_written(
    make: Callable[[Path], AbstractContextManager[Store]],
    tmp_path: Path,
    rng: Random,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str], None],
) -> None:
    started_s, seen, held = time.monotonic(), Counter[str](), list[tuple[int, int]]()
    with make(tmp_path) as store, opened(tmp_path, {}) as alone, ThreadPoolExecutor(1) as beside:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        settings = {
            **{"store": store.url, "remote_filter": "all", "remote_load": "always"},
            **{"remote_wait_s": WAIT_S, "remote_deadline_s": DEADLINE_S},
        }
        served = Served(tmp_path, settings, seen)
        with nursery("tests.vllm.kill_nursery", store.module) as writers:
            for first in range(0, NUM_KILLS, KILLS_EACH):
                with served.running() as engine:
                    for kill in range(first, min(first + KILLS_EACH, NUM_KILLS)):
                        prompts = prompts_of(kill)
                        answers = [
                            alone.ask(f"{kill} {n}", prompt, ANSWER_TOKENS)
                            for n, prompt in enumerate(prompts)
                        ]
                        order = f"{kill} {rng.getrandbits(32)} {tmp_path} {json.dumps(settings)}"
                        begins, moment = threading.Event(), Moment.of(rng, kill, (1, 2))
                        killed = beside.submit(kill_one, writers, order, moment, begins.set)
                        killed.add_done_callback(lambda _, begins=begins: begins.set())
                        begins.wait()  # also if it cannot be killed
                        asked, turns = list(zip(prompts, answers, strict=True)), 0
                        while not killed.done() or turns < 2:  # these both engines compute and store at once
                            for prompt, answer in asked[:NUM_SHARED]:
                                served.ask(engine, prompt, answer, "hits meanwhile")
                            engine.settle()
                            assert engine.reset_device(with_connector=True)
                            turns += 1
                        killed.result()
                        for prompt, answer in asked[NUM_SHARED:]:
                            served.ask(engine, prompt, answer, "hits of the killed ones'")
                look_at_the_store(store, make, seen)
                held.append(held_now())
    told = ", ".join(f"{what} {number}" for what, number in sorted(seen.items()))
    tell(
        f"{NUM_KILLS} engines killed in {time.monotonic() - started_s:.0f} s; {told}; longest held "
        f"{served.longest_s:.2f} s"
    )
    assert min(seen["hits of the killed ones'"], seen["hits meanwhile"]) >= NUM_KILLS, "it sees nothing"
    before, after = held[: -(-len(held) // 2)], held[len(held) // 2 :]
    for index, what in enumerate(("descriptors", "threads")):
        assert max(now[index] for now in after) <= max(now[index] for now in before) + MORE, what


def look_at_the_store(store: Store, make: Callable[..., Any], seen: Counter[str]) -> None:
    """Every record in it is right, and a sweep leaves nothing."""
    if make is bucket_in_memory:
        return
    inspection = inspect_store(store.url, store_options(KvbmSettings.from_env(None)))
    try:
        look_at_all(inspection, seen)
    finally:
        inspection.close()
