"""An operator's orders to vLLM: taken at a step, never in a load's way, and the tokens stay the same."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvbm_core.control.asking import ask_here
from kvbm_core.control.messages import MAX_WAIT_S, Answer, Order, Result, Verb
from kvbm_core.types import Direction
from tests.unit.control_bench import here
from tests.vllm.kvbm_engine import KvbmEngine

__all__ = ["here"]

PROMPT = range(50)
CONTROL = {"control": "socket", "instance": "one"}
RESET = Order(verb=Verb.RESET, wait_s=0.0)


def give(order: Order) -> Answer:
    (answer,) = ask_here(order).answers
    return answer


def test_an_idle_engine_forgets_without_a_step(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        answer = give(Order(verb=Verb.RESET, wait_s=MAX_WAIT_S))
        assert answer.result is Result.DONE
        assert answer.status is not None and answer.status.engine == "vLLM" and answer.status.namespace
        assert engine.leader.chain.host.resident_blocks == 0
        assert engine.ask("b", PROMPT, 8) == first and engine.promised("b") == [0]
        engine.forget_device()
        assert engine.ask("c", PROMPT, 8) == first and engine.external_tokens("c") > 0
        engine.assert_clean()


@pytest.mark.parametrize("tier", ["host", "disk", "all"])
def test_a_reset_of_a_tier_leaves_the_others(tier: str, here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.wait_for(lambda: not engine.leader.chain.storing_blocks)
        give(Order(verb=Verb.RESET, tier=tier, wait_s=0.0))  # type: ignore[arg-type]
        engine.leader.poll()
        residents = engine.leader.chain.host.resident_blocks, engine.disk.slots.resident_blocks
        assert [num > 0 for num in residents] == [tier == "disk", tier == "host"]
        assert engine.ask("b", PROMPT, 8) == first
        assert (engine.external_tokens("b") > 0) is (tier != "all")
        engine.assert_clean()


def test_a_load_under_way_ends_first_and_its_request_does_not_fail(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("b", PROMPT, 8)
        engine.step()
        given: list[Answer] = []
        thread = threading.Thread(target=lambda: given.append(give(Order(verb=Verb.RESET, wait_s=20.0))))
        thread.start()
        engine.wait_for(lambda: engine.leader._orders._resets)
        engine.step()
        assert engine.leader.chain.host.resident_blocks > 0 and not given
        engine.release(Direction.ONBOARD)
        engine.run()
        engine.settle()
        thread.join(20)
        (answer,) = given
        assert answer.result is Result.DONE and engine.record.outputs["b"] == first
        assert engine.metric('kvbm_failures_total{kind="lease_expired"}') == 0
        engine.assert_clean()


def test_a_drained_engine_serves_without_hits_and_stores_nothing(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        give(Order(verb=Verb.DRAIN, wait_s=0.0))
        stored = engine.leader.chain.host.resident_blocks
        assert engine.ask("b", PROMPT, 8) == first and engine.promised("b") == [0]
        engine.ask("new", range(1000, 1050), 8)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == stored
        status = give(Order(verb=Verb.STATUS)).status
        assert status is not None and status.is_draining and status.tiers["host"][0] == stored
        give(Order(verb=Verb.RESUME, wait_s=0.0))
        engine.forget_device()
        assert engine.ask("c", PROMPT, 8) == first and engine.external_tokens("c") > 0
        engine.assert_clean()
