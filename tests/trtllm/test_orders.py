"""An operator's orders to TensorRT-LLM's double: also while its loop sleeps, and no request fails by them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from kvbm_core.control.asking import ask_here
from kvbm_core.control.messages import Answer, Order, Result, Verb
from kvbm_core.types import Direction
from tests.trtllm.double import NEWEST, RELEASED, World
from tests.trtllm.harness import Kind, serve
from tests.unit.control_bench import here, wait_for

__all__ = ["here"]

PROMPT = list(range(40))
KINDS = [Kind(RELEASED, "v1", True), Kind(NEWEST, "v2", False)]
ENV = {"KVBM_CONTROL": "socket", "KVBM_INSTANCE": "one"}


def give(order: Order) -> Answer:
    (answer,) = ask_here(order).answers
    return answer


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_order_is_carried_out_while_the_loop_sleeps(kind: Kind, here: Path) -> None:
    with World(kind.version), serve(0, kind, env=ENV) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        answer = give(Order(verb=Verb.RESET, wait_s=20.0))
        assert answer.result is Result.DONE and answer.status is not None
        assert answer.status.tiers["host"] == (0, 256) and answer.status.engine == "TensorRT-LLM"
        serving.ask(PROMPT)
        serving.forget_device()
        assert give(Order(verb=Verb.DRAIN, wait_s=20.0)).result is Result.DONE
        drained = serving.ask(PROMPT)
        serving.expect_match(drained, (0, False))
        assert give(Order(verb=Verb.RESUME, wait_s=20.0)).result is Result.DONE
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (36, True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_tells_why_requests_missed(kind: Kind, here: Path) -> None:
    with World(kind.version), serve(0, kind, env={"KVBM_INSTANCE": "one"}) as serving:  # by default
        serving.ask(PROMPT)
        serving.forget_device()
        assert give(Order(verb=Verb.DRAIN, wait_s=20.0)).result is Result.DONE
        serving.ask(PROMPT)
        assert give(Order(verb=Verb.RESUME, wait_s=20.0)).result is Result.DONE
        serving.forget_device()
        serving.ask(PROMPT)
        rows = give(Order(verb=Verb.WHY)).why
        assert [row.reason for row in rows] == ["", "not_ready", "never_seen"]
        assert [row.host_tokens for row in rows] == [36, 0, 0] and "drained" in rows[1].text


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_load_fails_by_a_reset(kind: Kind, here: Path) -> None:
    """TensorRT-LLM cannot be told of one that fails: its request would end with an error."""
    with World(kind.version), serve(0, kind, env=ENV) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        request = serving.submit(PROMPT)
        for _ in range(5):
            serving.executor.step()
        assert serving.gate.held
        given: list[Answer] = []
        thread = threading.Thread(target=lambda: given.append(give(Order(verb=Verb.RESET, wait_s=20.0))))
        thread.start()
        wait_for(lambda: serving.leader._orders.hold_back)
        assert serving.look(lambda: serving.leader.chain.host.resident_blocks) > 0 and not given
        serving.gate.release(Direction.ONBOARD)
        serving.executor.run_until_idle()
        serving.settle()
        thread.join(20)
        assert given[0].result is Result.DONE and serving.reason(request) == "length"
