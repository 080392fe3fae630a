"""Everything at once, in any order: a model that checks every byte, a twin without kvbm, a leak check at the
end.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm_core.errors import Outcome
from kvbm_core.testing import toy_store
from kvbm_core.types import Direction

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.effort import IS_NIGHTLY, tries
from tests.trtllm.double import NEWEST, RELEASED, World
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, kinds, serve
from tests.trtllm.kinds import each

IDENTITIES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"lora_task_id": 1},
    {"cache_salt": "me"},
    {"multimodal": [[7] * 8]},
)
FAULTS = "latency_ms=1&fails=0.02&loses=0.05&spoils=0.05&is_late=0.01"
WINDOWS: dict[str, Any] = {"attention_windows": (None, 8), "num_layers": 2}
MAX_ALIVE = 12
NUM_BLOCKS, MOST_BLOCKS = 40, 16
"""Of the device, and of one request in ``Engine``."""
LONG_RUN = tries(2_000, nightly=10_000)
LONG_RUN_WITH_WINDOWS = tries(700, nightly=3_000)


class Engine(RuleBasedStateMachine):
    """A small executor with a tiny host tier, and all that clients, operators and bad luck do to it."""

    kind: Kind

    @initialize(
        chunk=st.sampled_from([None, 8]),
        windows=st.booleans(),
        keeps=st.booleans(),
        each=st.booleans(),
        store=st.none() | st.integers(0, 1000),
    )
    def start(self, chunk: int | None, windows: bool, keeps: bool, each: bool, store: int | None) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(World(self.kind.version))
        options: dict[str, Any] = WINDOWS if windows and self.kind.is_v2 else {}
        if keeps:
            options = {**options, "executor_class": KeepingExecutor}
        env = {"KVBM_DECODE_RUN_TOKENS": "0" if each else "128"}
        if store is not None:
            toy_store.register()
            toy_store.forget_all()
            env |= {"KVBM_REMOTE_URL": f"toy://random?seed={store}&{FAULTS}", "KVBM_REMOTE_CACHE_GB": "0"}
            model = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            (model / "model.safetensors").write_bytes(bytes(1024))
            options = {**options, "model": str(model)}
        self.serving: Serving = self.stack.enter_context(
            serve(0, self.kind, host_blocks=14, env=env, num_blocks=NUM_BLOCKS, chunk_tokens=chunk, **options)
        )
        self.serving.may_fail = True
        self.asked: list[int] = []

    @property
    def alive(self) -> list[int]:
        return [request for request in self.asked if request not in self.serving.executor.outputs]

    @precondition(lambda self: len(self.alive) < MAX_ALIVE)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_new_tokens=st.integers(1, 20),
        options=st.sampled_from(IDENTITIES),
        stop_after=st.none() | st.integers(1, 8),
    )
    def arrive(
        self, family: int, length: int, max_new_tokens: int, options: dict[str, Any], stop_after: int | None
    ) -> None:
        prompt = range(1000 * family, 1000 * family + length)
        self.asked.append(self.serving.submit(prompt, max_new_tokens, stop_after=stop_after, **options))

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.serving.executor.step()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.serving.executor.cancel(data.draw(st.sampled_from(self.asked)))

    @rule()
    def forget_device(self) -> None:
        self.serving.executor.drop_device_cache()

    @rule()
    def fail_forward(self) -> None:
        self.serving.executor.fail_next_forward()

    @rule(direction=st.sampled_from(Direction), is_cancellable=st.booleans())
    def hold(self, direction: Direction, is_cancellable: bool) -> None:
        self.serving.gate.is_cancellable = is_cancellable
        self.serving.gate.hold(direction)

    @rule()
    def release(self) -> None:
        for direction in Direction:
            self.serving.gate.release(direction)

    @rule(
        direction=st.sampled_from(Direction), outcome=st.sampled_from([Outcome.IO_ERROR, Outcome.TIMED_OUT])
    )
    def fail_copy(self, direction: Direction, outcome: Outcome) -> None:
        self.serving.gate.fail_next(direction, outcome)

    @precondition(lambda self: self.kind.version == NEWEST)
    @rule()
    def drop_batch(self) -> None:
        self.serving.executor.drop_next_batch()

    @precondition(lambda self: self.kind.is_v2 and self.alive)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.serving.executor.preempt(data.draw(st.sampled_from(self.alive)))

    @invariant()
    def leader_agrees_with_itself(self) -> None:
        if hasattr(self, "serving"):
            self.serving.look(self.serving.leader.check_integrity)

    def teardown(self) -> None:
        if hasattr(self, "serving"):
            self.release()
            self.serving.step_until(self._is_over)
            self.stack.close()

    def _is_over(self) -> bool:
        executor = self.serving.executor
        if executor.blocks_lost > NUM_BLOCKS - MOST_BLOCKS:  # one that waits may find no room
            executor.free_lost()
        return executor.is_idle


@pytest.mark.parametrize("kind", each(kinds(1)))
def test_any_order(kind: Kind) -> None:
    """A failure is made smaller at night only: where it is a hang, each try waits for it to its end."""
    case = type("EngineOfKind", (Engine,), {"kind": kind}).TestCase
    case.settings = settings(
        max_examples=tries(8, nightly=30),
        stateful_step_count=40,
        phases=[phase for phase in Phase if IS_NIGHTLY or phase is not Phase.shrink],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    case().runTest()


def _disturb(serving: Serving, rng: random.Random, asked: list[int]) -> None:
    what = rng.random()
    # Where the blocks of requests that failed are never freed, a long run would have none left.
    may_fail = not serving.executor.contract.leaks_on_error
    if what < 0.4 and asked:
        serving.executor.cancel(rng.choice(asked[-20:]))
    elif what < 0.6:
        serving.executor.drop_device_cache()
    elif what < 0.64 and may_fail:
        serving.executor.fail_next_forward()
    elif what < 0.7 and may_fail:
        serving.gate.fail_next(rng.choice(list(Direction)))
    elif what < 0.8:
        serving.gate.hold(rng.choice(list(Direction)))
    else:
        for direction in Direction:
            serving.gate.release(direction)


def _long_run(kind: Kind, num_requests: int, rng: random.Random, **options: Any) -> None:
    with (
        World(kind.version),
        serve(0, kind, host_blocks=200, num_blocks=160, record=False, **options) as serving,
    ):
        serving.may_fail = True
        asked: list[int] = []
        while len(asked) < num_requests:
            executor = serving.executor
            waiting = len(asked) - len(executor.outputs)
            for _ in range(min(rng.randrange(8), max(0, 24 - waiting))):
                family = 1000 * rng.randrange(6)
                prompt = range(family, family + 5 * rng.randrange(1, 8))
                asked.append(serving.submit(prompt, rng.choice([1, 4, 9]), **rng.choice(IDENTITIES[:4])))
            if rng.random() < 0.05:
                _disturb(serving, rng, asked)
            executor.step()
        for direction in Direction:
            serving.gate.release(direction)
        serving.executor.run_until_idle()
        ends = list(serving.executor.finish_reasons.values())
        assert len(ends) == len(asked) and ends.count("length") > 0.7 * num_requests
        assert serving.metric("kvbm_matched_tokens") > num_requests


@pytest.mark.parametrize("version", [RELEASED, NEWEST], ids=str)
def test_thousands_of_requests(version: str, seed: int) -> None:
    _long_run(Kind(version, "v1", True), LONG_RUN, random.Random(seed))


def test_many_requests_with_windows(seed: int) -> None:
    _long_run(Kind(NEWEST, "v2", True), LONG_RUN_WITH_WINDOWS, random.Random(seed), **WINDOWS)
