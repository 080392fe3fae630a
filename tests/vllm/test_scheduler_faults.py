"""Copies that fail, bytes that rot, bugs of our own, resets: the engine's answers stay right and it goes
on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvbm_core.errors import Outcome, StuckCopyError
from kvbm_core.types import Direction
from kvbm_vllm.metadata import DynamoWorkerMetadata
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try

PROMPT = range(50)
every_kind = pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())


# ---------------------------------------------------------------- loads that fail


@every_kind
@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.TIMED_OUT])
def test_a_failed_load_is_recomputed(outcome: Outcome, spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.executors[-1].fail_next(Direction.ONBOARD, outcome)  # one rank is enough
        assert engine.ask("b", PROMPT, 8) == first
        engine.settle()
        assert engine.metric(f'kvbm_failures_total{{kind="onboard_{outcome.value}"}}') == 1
        assert engine.metric("kvbm_onboard_blocks_h2d") == 0
        # What could not be brought back is not promised again, and was stored anew when it was computed.
        assert engine.promised("b")[-1] == 0
        engine.forget_device()
        assert engine.ask("c", PROMPT, 8) == first
        assert engine.external_tokens("c") > 0
        engine.assert_clean()


def test_a_load_is_not_given_up_while_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When our hook fails, and a copy hangs besides: vLLM must not recompute into blocks that change."""

    def fail() -> Any:
        raise RuntimeError("a bug")

    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("b", PROMPT, 8)
        (gate,), side = engine.executors, engine.ranks[0].connector.worker_side
        engine.run(until=lambda: bool(gate.held))
        gate.hangs = True
        with monkeypatch.context() as patch, pytest.raises(StuckCopyError, match="must not go on"):
            patch.setattr(side.worker, "take", fail)
            side.get_finished()
        assert side._loads, "it is still waited for"
        gate.hangs = False
        engine.release(Direction.ONBOARD)
        engine.run()
        assert engine.record.outputs["b"] == first


def test_only_what_was_not_brought_is_recomputed(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("long", range(50))
        engine.forget_device()
        engine.ask("head", range(17))  # sixteen tokens of the prompt are on the device again
        engine.settle()
        engine.executors[0].fail_next(Direction.ONBOARD)
        before = engine.record.computed_tokens
        engine.ask("again", range(50))
        assert engine.record.computed_tokens - before == 50 - 16
        engine.assert_clean()


def test_a_failed_load_touches_nobody_else(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("long", range(50))
        engine.forget_device()
        engine.add("sharer", [*range(18), 400, 401], 30)
        engine.run(until=lambda: len(engine.record.outputs["sharer"]) == 5)
        engine.executors[0].fail_next(Direction.ONBOARD)
        before = engine.record.computed_tokens
        engine.ask_until_done("again", range(50))
        others = len(engine.record.outputs["sharer"]) - 5
        assert engine.record.computed_tokens - before <= 50 - 16 + others + 1
        engine.assert_clean()


@pytest.mark.shows("KVBM_VERIFY_ONBOARD")
def test_bytes_that_rot_in_host_memory_are_noticed(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"verify_onboard": True}) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        memory = engine.ranks[0].connector.worker_side.worker._memory
        assert memory is not None
        memory.slab.array[5] ^= 1
        assert engine.ask("b", PROMPT, 8) == first
        engine.settle()
        assert engine.metric('kvbm_failures_total{kind="onboard_corrupt"}') == 1
        engine.assert_clean()


@pytest.mark.shows("KVBM_LOAD_FAILURE_POLICY=recompute")
def test_loads_that_fail_again_and_again_do_not_hang_the_request(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        for turn in range(4):
            engine.forget_device()
            engine.executors[0].fail_next(Direction.ONBOARD, times=1)
            assert engine.ask(f"b{turn}", PROMPT, 8) == first
        engine.assert_clean()


@pytest.mark.shows("KVBM_LOAD_FAILURE_POLICY=recompute")
def test_the_policy_is_set_for_the_user(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        assert engine.scheduler.recompute_kv_load_failures


# ---------------------------------------------------------------- stores that fail


@every_kind
def test_a_failed_offload_registers_nothing(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        engine.executors[-1].fail_next(Direction.OFFLOAD, times=100)
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == 0
        assert engine.metric("kvbm_offload_blocks_d2h") == 0
        assert engine.metric('kvbm_failures_total{kind="offload_io_error"}') > 0
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.promised("b") == [0]
        engine.assert_clean()


@pytest.mark.parametrize("is_cancellable", [True, False], ids=["waiting", "running"])
@pytest.mark.parametrize("spec", [{}, {"async_scheduling": True}, {"windows": (None, 8)}], ids=str)
def test_blocks_that_are_reused_while_they_are_read(
    spec: dict[str, Any], is_cancellable: bool, tmp_path: Path
) -> None:
    # Stores that never get on while requests are preempted and their blocks handed out again. The model would
    # see it later if bytes of a new owner had been stored under the old name.
    prompts = {name: range(start, start + 40) for name, start in (("a", 0), ("b", 100), ("c", 200))}
    with KvbmEngine(tmp_path, num_blocks=40, max_model_len=72, **spec) as engine:
        for executor in engine.executors:
            executor.is_cancellable = is_cancellable
        engine.hold(Direction.OFFLOAD)
        for name, prompt in prompts.items():
            engine.add(name, prompt, 30)
        for _ in range(60):
            engine.step()
        engine.release(Direction.OFFLOAD)
        engine.run()
        engine.forget_device()
        for name, prompt in prompts.items():
            assert engine.ask(f"{name} again", prompt, 30) == engine.record.outputs[name]
            engine.forget_device()
        engine.assert_clean()


# ---------------------------------------------------------------- reset


@every_kind
def test_reset_forgets_the_host_tier_too(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        assert engine.reset_device(with_connector=True)
        assert engine.leader.chain.host.resident_blocks == 0
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.promised("b") == [0]
        engine.forget_device()
        assert engine.ask("c", PROMPT, 8) == first
        assert engine.external_tokens("c") > 0
        engine.assert_clean()


@pytest.mark.parametrize("direction", list(Direction))
def test_reset_while_copies_are_under_way(direction: Direction, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.hold(direction)
        engine.add("x", [*PROMPT, 400, 401, 402, 403], 8)
        for _ in range(5):
            engine.step()
        engine.reset_device(with_connector=True, running=direction is Direction.OFFLOAD)
        engine.release(direction)
        engine.run()
        engine.settle()
        assert engine.ask("b", PROMPT, 8) == first
        engine.assert_clean()


def test_what_was_on_its_way_at_a_reset_does_not_arrive(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.hold(Direction.OFFLOAD)
        engine.add("x", PROMPT, 2)
        engine.step()
        engine.reset_device(with_connector=True)
        engine.release(Direction.OFFLOAD)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == 0
        engine.assert_clean()


# ---------------------------------------------------------------- bugs of our own


@pytest.mark.parametrize(
    "spec", [{}, {"async_scheduling": True}, {"windows": (None, 8)}, {"ranks": 2}], ids=str
)
@pytest.mark.parametrize("seam", ["match", "onboard", "offload", "poll", "finish"])
def test_a_bug_in_the_leader_is_a_miss(
    seam: str, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        with monkeypatch.context() as patch:
            patch.setattr(engine.leader, seam, broken)
            assert engine.ask("b", PROMPT, 8) == first
            engine.add("c", range(200, 240), 4)
            engine.step()
            engine.abort("c")
            engine.run()
        assert engine.errors > 0
        engine.settle()
        engine.reset_device()
        assert engine.ask("d", PROMPT, 8) == first
        engine.run()
        engine.settle()
        engine.assert_idle()
        assert engine.leader.chain.host.live_leases == 0
        assert engine.leader.chain.host.pending_blocks == 0
        with engine.leader.lock:
            engine.leader.check_integrity()


def test_a_bug_that_one_ranks_answer_meets_costs_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KvbmEngine(tmp_path, ranks=2) as engine:
        heard: list[int] = []

        def hear(rank: int, _: object) -> None:
            if not rank:
                raise RuntimeError("injected")
            heard.append(rank)

        with monkeypatch.context() as patch:
            patch.setattr(engine.leader, "acknowledge", hear)
            said = DynamoWorkerMetadata({0: [], 1: []})
            engine.hooks.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))
        assert heard == [1] and engine.errors == 1


@pytest.mark.parametrize("spec", [{}, {"windows": (None, 8)}, {"ranks": 2}], ids=str)
@pytest.mark.parametrize("seam", ["submit", "take", "fence"])
def test_a_bug_in_a_worker_is_a_failed_copy(
    seam: str, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        with monkeypatch.context() as patch:
            patch.setattr(engine.ranks[-1].connector.worker_side.worker, seam, broken)
            assert engine.ask("b", PROMPT, 8) == first
            engine.run()
        engine.reset_device()
        assert engine.ask("d", PROMPT, 8) == first
        engine.run()
        engine.assert_idle()


def test_an_engine_that_serves_without_a_ready_tier(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.leader.disable("injected")
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.promised("b") == [0]
        assert engine.status("b") is None
        engine.assert_clean()


def test_a_request_is_never_left_waiting_for_a_load(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("b", PROMPT, 8)
        engine.step()
        assert engine.status("b") == RequestStatus.WAITING_FOR_REMOTE_KVS
        engine.executors[0].wait(None, 10.0)
        engine.run()
        assert engine.record.outputs["b"] == first
        engine.assert_clean()
