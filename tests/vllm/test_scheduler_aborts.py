"""A client goes away: in every state a request can be in, nothing leaks, crashes or hangs, and others go
on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvbm_core.types import Direction
from tests.vllm.kvbm_engine import KvbmEngine

Reach = Callable[[KvbmEngine], None]
"""Brings request "x" into a state; its prompt's first twelve blocks are in the host tier, the device has
none.
"""

PROMPT = range(50)


def queued(engine: KvbmEngine) -> None:
    engine.add("x", PROMPT, 8)


def matched(engine: KvbmEngine) -> None:
    # Found in the host tier, but the device has no room for it.
    engine.take_blocks(leave=5)
    engine.add("x", PROMPT, 8)
    engine.step()
    assert engine.promised("x") == [48] and engine.status("x") == RequestStatus.WAITING


def allocated(engine: KvbmEngine) -> None:
    # Between schedule() and the workers' step.
    engine.add("x", PROMPT, 8)
    scheduled = engine.scheduler.schedule()
    assert engine.status("x") == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort("x")
    engine.execute(scheduled)


def loading(engine: KvbmEngine) -> None:
    engine.hold(Direction.ONBOARD)
    engine.add("x", PROMPT, 8)
    engine.step()
    engine.step()
    assert engine.status("x") == RequestStatus.WAITING_FOR_REMOTE_KVS


def loaded_but_not_reported(engine: KvbmEngine) -> None:
    # The leader knows that the load is over, vLLM does not yet.
    engine.hold(Direction.ONBOARD)
    engine.add("x", PROMPT, 8)
    engine.step()
    engine.release(Direction.ONBOARD)
    engine.settle()
    assert engine.status("x") == RequestStatus.WAITING_FOR_REMOTE_KVS


def loaded(engine: KvbmEngine) -> None:
    engine.add("x", PROMPT, 8)
    engine.run(until=lambda: "x" in engine.scheduler.finished_recving_kv_req_ids)


def load_failed(engine: KvbmEngine) -> None:
    for executor in engine.executors:
        executor.fail_next(Direction.ONBOARD)
    engine.add("x", PROMPT, 8)
    engine.run(until=lambda: "x" in engine.scheduler.finished_recving_kv_req_ids)


def prefilling(engine: KvbmEngine) -> None:
    engine.hold(Direction.OFFLOAD)
    engine.add("x", [*PROMPT, *range(400, 460)], 8)
    engine.run(until=lambda: engine.status("x") == RequestStatus.RUNNING)
    assert not engine.record.outputs["x"]


def decoding(engine: KvbmEngine) -> None:
    engine.hold(Direction.OFFLOAD)
    engine.add("x", [*PROMPT, 5, 6, 7], 20)
    engine.run(until=lambda: len(engine.record.outputs["x"]) == 9)


def saving(engine: KvbmEngine) -> None:
    # Finished; its blocks are still being copied.
    engine.hold(Direction.OFFLOAD)
    engine.add("x", [*PROMPT, *range(400, 420)], 2)
    engine.run(until=lambda: len(engine.record.outputs["x"]) == 2)
    engine.step()


STATES: list[Reach] = [
    queued,
    matched,
    allocated,
    loading,
    loaded_but_not_reported,
    loaded,
    load_failed,
    prefilling,
    decoding,
    saving,
]
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "ranks": {"ranks": 2},
    "hybrid": {"windows": (None, 8)},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_abort(reach: Reach, spec: dict[str, Any], tmp_path: Path) -> None:
    num_blocks = 64 if "windows" in spec else 33
    with KvbmEngine(
        tmp_path, num_blocks=num_blocks, max_batched_tokens=32, max_model_len=120, **spec
    ) as engine:
        first = engine.ask("warm", PROMPT, 8)
        engine.forget_device()
        reach(engine)
        engine.abort("x")
        engine.step()
        engine.give_blocks()
        for direction in Direction:
            engine.release(direction)
        engine.run()
        assert engine.ask("after", PROMPT, 8) == first
        engine.assert_clean()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_all_requests_at_once(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("warm", PROMPT, 8)
        engine.forget_device()
        for number in range(8):
            engine.add(f"r{number}", [*range(10 * (number % 3), 50)], 12)
        for _ in range(3):
            engine.step()
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine.run()
        assert engine.ask("after", PROMPT, 8) == first
        engine.assert_clean()


def test_abort_between_allocation_and_the_steps_metadata(tmp_path: Path) -> None:
    # vLLM 0.33 can defer an allocation, so that an abort falls between it and the metadata of its step.
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("warm", PROMPT, 8)
        engine.forget_device()
        build = engine.connector.build_connector_meta

        def abort_first(scheduled: Any) -> Any:
            engine.connector.build_connector_meta = build
            engine.abort("x")
            return build(scheduled)

        engine.connector.build_connector_meta = abort_first
        engine.add("x", PROMPT, 8)
        engine.run()
        assert engine.ask("after", PROMPT, 8) == first
        engine.assert_clean()


def test_a_match_that_was_never_used_holds_nothing(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("warm", PROMPT, 8)
        engine.forget_device()
        matched(engine)
        assert engine.leader.chain.host.live_leases == 1
        engine.abort("x")
        assert engine.leader.chain.host.live_leases == 0
        engine.give_blocks()
        engine.assert_clean()


def test_an_aborted_preempted_request_whose_old_copy_still_runs(tmp_path: Path) -> None:
    # Preempted while its blocks are being stored, loading them back, aborted when the leader knows that the
    # load is over and vLLM does not: its id may be reported to vLLM once only.
    with KvbmEngine(tmp_path, extra={"decode_run_tokens": 0}) as engine:
        engine.add("x", range(40), 20)
        engine.run(until=lambda: len(engine.record.outputs["x"]) == 1)
        engine.settle()
        engine.hold(Direction.OFFLOAD)
        engine.run(until=lambda: len(engine.record.outputs["x"]) == 10)
        assert engine.executors[0].held
        engine.hold(Direction.ONBOARD)
        engine.reset_device(running=True)  # preempts
        engine.run(until=lambda: engine.status("x") == RequestStatus.WAITING_FOR_REMOTE_KVS)
        held_offloads = engine.executors[0].held
        engine.release(Direction.ONBOARD)
        engine.wait_for(lambda: engine.leader.request("x").onboard_job is None)
        assert engine.status("x") == RequestStatus.WAITING_FOR_REMOTE_KVS and held_offloads
        engine.abort("x")
        engine.step()
        engine.release(Direction.OFFLOAD)
        engine.assert_clean()
