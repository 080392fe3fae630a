"""Pins, quotas and resets of a salt, on vLLM's own scheduler: what operators order is what requests find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbm_core.control.messages import MAX_WAIT_S, Answer, Order, Result, Verb
from kvbm_core.types import Direction
from tests.unit.control_bench import here
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_orders import CONTROL, give

__all__ = ["here"]

SYSTEM = range(40)
HOST_BLOCKS = 64
TENANTS = {"one": "salt-of-one", "two": "salt-of-two"}


def ordered(verb: Verb, **what: Any) -> Answer:
    return give(Order(verb=verb, wait_s=5.0, **what))


def flood(engine: KvbmEngine, num_blocks: int, salt: str | None = None, first: int = 1000) -> None:
    """So many new blocks of prompts that nobody asks again."""
    size = engine.leader.groups[0].block_size_tokens
    tokens = 8 * size
    for number in range(num_blocks // 8 + 1):
        begin = first + number * tokens
        engine.ask(f"flood{first}.{number}", range(begin, begin + tokens + 1), 1, salt=salt)
        engine.settle()


def hits(engine: KvbmEngine, name: str, prompt: range, salt: str | None = None) -> int:
    engine.forget_device()
    engine.ask(name, prompt, 4, salt=salt)
    return engine.external_tokens(name)


def test_a_pinned_system_prompt_survives_a_flood_of_ten_times_the_host(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, host_blocks=HOST_BLOCKS) as engine:
        pinned = ordered(Verb.PIN, pin="system", tokens=tuple(SYSTEM))  # before anybody has asked it
        assert pinned.result is Result.DONE and "first request" in pinned.text
        first = engine.ask("a", SYSTEM, 4)
        flood(engine, 10 * HOST_BLOCKS)
        assert engine.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') > 8 * HOST_BLOCKS
        found = ordered(Verb.LOOKUP, tokens=tuple(SYSTEM)).found
        assert found is not None and found.host_blocks == found.num_blocks == found.matched_blocks > 0
        assert hits(engine, "b", SYSTEM) > 0 and engine.record.outputs["b"] == first
        assert ordered(Verb.UNPIN, pin="system").result is Result.DONE
        flood(engine, 2 * HOST_BLOCKS, first=100_000)
        assert hits(engine, "c", SYSTEM) == 0  # the twin: without the pin it does not
        engine.assert_clean()


def test_a_pinned_prompt_of_a_model_with_states_is_told_as_requests_find_it(
    here: Path, tmp_path: Path
) -> None:
    kind: dict[str, Any] = {
        "windows": ("state", "state", None),
        "num_blocks": 200,
        "host_blocks": HOST_BLOCKS,
    }
    with KvbmEngine(tmp_path, extra=CONTROL, **kind) as engine:
        engine.ask("a", SYSTEM, 4)
        engine.settle()
        pinned = ordered(Verb.PIN, pin="system", tokens=tuple(SYSTEM))
        assert pinned.text == "10 of 10 blocks are in the host and stay"
        flood(engine, 4 * HOST_BLOCKS)
        found = ordered(Verb.LOOKUP, tokens=tuple(SYSTEM)).found
        assert found is not None
        assert (found.num_blocks, found.matched_blocks, found.host_blocks) == (10, 9, 10)
        engine.forget_device()
        engine.ask("b", [*SYSTEM, 7, 8])
        assert engine.external_tokens("b") == 9 * engine.spec.block_size_tokens
        assert ordered(Verb.LOOKUP, tokens=tuple(range(5000, 5040))).text.startswith("0 of 10 blocks")
        engine.assert_clean()


def test_a_tenant_over_its_quota_evicts_its_own(here: Path, tmp_path: Path) -> None:
    one, two = TENANTS.values()
    with KvbmEngine(tmp_path, extra=CONTROL, host_blocks=HOST_BLOCKS) as engine:
        assert ordered(Verb.QUOTA, salt=two, host_blocks=16).result is Result.DONE
        engine.ask("a", SYSTEM, 4, salt=one)
        flood(engine, 4 * HOST_BLOCKS, two)
        host = engine.leader.chain.host
        number = next(n for t, n in engine.leader.tenants._numbers.items() if t.salt == two)
        assert host.used_by(number) == 16
        assert hits(engine, "b", SYSTEM, one) > 0
        assert ordered(Verb.QUOTA, salt=two).text == "no quota any more"
        flood(engine, 4 * HOST_BLOCKS, two, first=100_000)
        assert hits(engine, "c", SYSTEM, one) == 0  # the twin: without the quota its blocks go
        engine.assert_clean()


def test_a_reset_of_a_salt_leaves_the_hits_of_others(here: Path, tmp_path: Path) -> None:
    one, two = TENANTS.values()
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        for salt in (one, two, None):
            engine.ask(f"first of {salt}", SYSTEM, 4, salt=salt)
        engine.forget_device()
        give(Order(verb=Verb.RESET, salt=one, wait_s=0.0))
        assert hits(engine, "one", SYSTEM, one) == 0
        assert hits(engine, "two", SYSTEM, two) > 0 and hits(engine, "none", SYSTEM) > 0
        engine.assert_clean()


@pytest.mark.parametrize("by", ["salt", "prompt"])
def test_what_was_cleared_is_not_found_after_a_restart(by: str, here: Path, tmp_path: Path) -> None:
    one, two = TENANTS.values()
    what: dict[str, Any] = {"salt": one} | ({"tokens": tuple(SYSTEM)} if by == "prompt" else {})
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        for salt in (one, two):
            engine.ask(f"first of {salt}", SYSTEM, 4, salt=salt)
        engine.settle()
        engine.forget_device()
        assert give(Order(verb=Verb.RESET, wait_s=MAX_WAIT_S, **what)).result is Result.DONE
        assert hits(engine, "two", SYSTEM, two) > 0
        engine.ask("later", range(1000, 1040), 4)
        engine.settle()  # what is stored later is written after the headers were erased
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        engine.wait_for(lambda: engine.disk.slots.resident_blocks > 0)
        assert hits(engine, "two", SYSTEM, two) > 0 and hits(engine, "one", SYSTEM, one) == 0
        engine.assert_clean()


def test_a_reset_of_a_prompt_holds_for_what_is_on_its_way(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        engine.hold(Direction.OFFLOAD)
        engine.add("a", SYSTEM, 4)
        engine.step()
        engine.step()
        assert engine.leader.chain.host.pending_blocks
        give(Order(verb=Verb.RESET, tokens=tuple(SYSTEM), wait_s=0.0))
        engine.leader.poll()
        engine.release(Direction.OFFLOAD)
        engine.run()
        assert hits(engine, "b", SYSTEM) == 0 and hits(engine, "c", SYSTEM) > 0
        engine.assert_clean()


def test_a_reset_of_a_prompt_leaves_other_prompts(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, disk_blocks=64) as engine:
        other = range(500, 540)
        engine.ask("a", SYSTEM, 4)
        engine.ask("b", other, 4)
        engine.forget_device()
        give(Order(verb=Verb.RESET, tokens=tuple(SYSTEM), wait_s=0.0))
        assert hits(engine, "c", SYSTEM) == 0 and hits(engine, "d", other) > 0
        engine.assert_clean()


def test_pins_without_a_host_tier_leave_what_blocks_pass_through(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, host_blocks=0, disk_blocks=HOST_BLOCKS) as engine:
        assert ordered(Verb.PIN, pin="system", tokens=tuple(SYSTEM)).result is Result.DONE
        first = engine.ask("a", SYSTEM, 4)
        assert "stay on disk" in ordered(Verb.PIN, pin="again", tokens=tuple(SYSTEM)).text
        flood(engine, 4 * HOST_BLOCKS)
        assert engine.leader.chain.host.kept_blocks == 0 < engine.disk.slots.kept_blocks
        assert hits(engine, "b", SYSTEM) > 0 and engine.record.outputs["b"] == first
        engine.assert_clean()


def test_a_small_disk_bounds_what_is_pinned(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, host_blocks=HOST_BLOCKS, disk_blocks=8) as engine:
        engine.wait_for(lambda: engine.disk.slots.capacity_blocks)
        size = engine.leader.groups[0].block_size_tokens
        assert ordered(Verb.PIN, pin="p", tokens=tuple(range(4 * size))).result is Result.DONE
        more = ordered(Verb.PIN, pin="p", tokens=tuple(range(5 * size)))
        assert more.result is Result.REFUSED and "50% of 8 disk blocks" in more.text
        engine.assert_clean()


def test_too_much_is_not_pinned(here: Path, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=CONTROL, host_blocks=HOST_BLOCKS) as engine:
        size = engine.leader.groups[0].block_size_tokens
        most = size * HOST_BLOCKS // 2
        assert ordered(Verb.PIN, pin="most", tokens=tuple(range(most))).result is Result.DONE
        more = ordered(Verb.PIN, pin="more", tokens=tuple(range(most)))
        assert more.result is Result.REFUSED and "50%" in more.text
        short = ordered(Verb.PIN, pin="short", tokens=(1,))
        assert short.result is Result.REFUSED and "less than a block" in short.text
        assert ordered(Verb.PIN, tokens=tuple(SYSTEM)).text == "a pin needs a name"
        engine.assert_clean()
