"""Blocks come back: vLLM's own scheduler, requests and block manager, with kvbm and a model that checks
bytes.
"""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvbm_core.runtime.due import STRIDE
from kvbm_core.types import Direction
from kvbm_vllm.metadata import QUIET, DynamoConnectorMetadata
from tests.vllm.harness import adapter, media
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try

every_kind = pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())


@every_kind
def test_a_prompt_comes_back_from_the_host(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        assert engine.ask("b", range(50), 8) == first
        size = engine.spec.block_size_tokens
        assert engine.promised("a") == [0]
        assert engine.external_tokens("b") == 49 // size * size
        engine.assert_clean()


def test_a_step_without_news_costs_the_workers_no_more_than_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KvbmEngine(tmp_path) as engine:
        sent: list[DynamoConnectorMetadata] = []
        build = engine.connector.build_connector_meta

        def note(output: Any) -> DynamoConnectorMetadata:
            sent.append(pickle.loads(pickle.dumps(build(output))))
            return sent[-1]

        monkeypatch.setattr(engine.connector, "build_connector_meta", note)
        first = engine.ask("a", range(50), 12)
        decoding = [metadata for metadata in sent if metadata is QUIET]
        assert len(decoding) >= 8 and len(pickle.dumps(QUIET)) < 64
        assert sum(plan.num_blocks for metadata in sent for plan in metadata.offloads) > 0
        engine.forget_device()
        assert engine.ask("b", range(50), 12) == first
        assert any(metadata.onboards for metadata in sent)
        assert DynamoConnectorMetadata() == QUIET, "somebody has written into it"
        engine.assert_clean()


@every_kind
def test_the_answer_is_part_of_the_next_turn(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **spec) as engine:
        prompt = list(range(20))
        for turn in range(3):
            answer = engine.ask(f"turn {turn}", prompt, 18)
            engine.forget_device()
            # All tokens but the newest have KV; whole blocks of them come back.
            size = engine.spec.block_size_tokens
            stored_tokens = (len(prompt) + 17) // size * size
            prompt += [*answer, 7, 8, 9]
            engine.add(f"probe {turn}", prompt, 1)
            engine.run()
            assert engine.external_tokens(f"probe {turn}") == stored_tokens
            engine.forget_device()
        engine.assert_clean()


def test_every_chunk_of_a_prefill_is_offloaded_when_it_is_there(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, max_batched_tokens=24) as engine:
        engine.add("a", range(64))
        stored = []
        for _ in range(3):
            engine.step()
            engine.settle()
            stored.append(engine.metric("kvbm_offload_blocks_d2h"))
        assert stored == [6, 12, 16]
        engine.assert_clean()


def test_what_the_device_still_has_is_not_loaded(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("long", range(48))
        engine.forget_device()
        engine.ask("head", range(20))  # from the host, now on the device: 16 tokens and what was computed
        engine.settle()
        engine.ask("again", range(48))
        call = engine.record.matches[-1]
        assert (call.computed_tokens, call.tokens) == (20, 24)
        engine.assert_clean()


def test_what_the_host_has_is_not_offloaded_again(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", range(50))
        engine.settle()
        stored = engine.metric("kvbm_offload_blocks_d2h")
        engine.ask("device hit", range(50))
        engine.forget_device()
        engine.ask("host hit", range(50))
        engine.settle()
        assert engine.metric("kvbm_offload_blocks_d2h") == stored == 12
        engine.assert_clean()


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"), [(48, 44), (47, 44), (49, 48), (4, 0), (5, 4), (3, 0)]
)
def test_a_full_hit_leaves_a_token_to_compute(prompt_tokens: int, expected: int, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", range(prompt_tokens), 4)
        engine.forget_device()
        assert engine.ask("b", range(prompt_tokens), 4) == first
        assert engine.external_tokens("b") == expected
        engine.assert_clean()


def test_the_second_allocation_call_stores_no_block_under_a_wrong_name(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("short", range(9))
        engine.forget_device()
        engine.ask("longer", range(21))  # two blocks loaded; vLLM then passes all its blocks once more
        assert [tokens for name, tokens in engine.record.allocs if name == "longer"] == [8, 0]
        engine.forget_device()
        engine.ask("longest", range(33))  # the model checks what the blocks after the second hold
        assert engine.external_tokens("longest") == 20
        engine.assert_clean()


@pytest.mark.parametrize("spec", [{}, {"async_scheduling": True}, {"windows": (None, 8)}], ids=str)
def test_a_preempted_request_is_brought_back_not_recomputed(spec: dict[str, Any], tmp_path: Path) -> None:
    prompts = {"a": range(40), "b": range(100, 140), "c": range(200, 240)}
    (tmp_path / "wide").mkdir()
    with KvbmEngine(tmp_path / "wide", **spec) as engine:
        expected = {name: engine.ask(name, prompt, 30) for name, prompt in prompts.items()}
    with KvbmEngine(tmp_path, num_blocks=40, max_model_len=72, **spec) as engine:
        for name, prompt in prompts.items():
            engine.add(name, prompt, 30)
        while engine.scheduler.has_requests():
            engine.step()
            engine.settle()
        assert engine.record.preemptions > 0
        assert engine.record.outputs == expected
        # What the device did not keep came from the host: at least the prompt, at each of them that was
        # resumed.
        last = {
            call.request_id: call
            for call in engine.record.matches
            if call.computed_tokens + (call.tokens or 0)
        }
        assert last and all(call.computed_tokens + (call.tokens or 0) >= 40 for call in last.values())
        assert any(engine.external_tokens(name) for name in prompts)
        engine.assert_clean()


def test_prompts_that_share_a_beginning_at_once(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, num_blocks=128) as engine:
        prompts = {f"r{i}": [*range(40), 300 + i, *range(50, 60)] for i in range(6)}
        first = {name: engine.ask(name, prompt, 6) for name, prompt in prompts.items()}
        engine.forget_device()
        for name, prompt in prompts.items():
            engine.add(f"again {name}", prompt, 6)
        engine.run()
        assert {name: engine.record.outputs[f"again {name}"] for name in prompts} == first
        # The shared ten blocks are loaded once: the others wait for them and find them on the device.
        assert sum(engine.external_tokens(f"again {name}") for name in prompts) < 2 * 40 + 6 * 12
        engine.assert_clean()


def test_identical_prompts_at_once_with_nothing_stored(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        for name in "abcd":
            engine.add(name, range(30), 12)
        engine.run()
        outputs = engine.record.outputs
        assert outputs["a"] == outputs["b"] == outputs["c"] == outputs["d"]
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == (30 + 11) // 4
        engine.assert_clean()


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ({"salt": "me"}, {"salt": "you"}),
        ({"salt": "me"}, {}),
        ({"salt": ""}, {}),
        ({"lora": adapter("poet", 1)}, {"lora": adapter("lawyer", 2)}),
        ({"lora": adapter("poet", 1)}, {}),
        ({"images": [media("cat", 4, 6)]}, {"images": [media("dog", 4, 6)]}),
        ({"images": [media("cat", 4, 6)]}, {"images": [media("cat", 5, 6)]}),
        ({"images": [media("cat", 4, 6)]}, {}),
    ],
    ids=[
        "salts",
        "salt and none",
        "empty salt and none",
        "adapters",
        "adapter and base",
        "images",
        "places",
        "image",
    ],
)
def test_what_differs_besides_the_tokens_is_kept_apart(
    mine: dict[str, Any], yours: dict[str, Any], tmp_path: Path
) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        first = engine.ask("mine", range(30), 4, **mine)
        engine.forget_device()
        engine.ask("yours", range(30), 4, **yours)  # the model would see the other one's bytes
        assert engine.external_tokens("yours") <= 4  # nothing from the first difference on
        engine.forget_device()
        assert engine.ask("mine again", range(30), 4, **mine) == first
        assert engine.external_tokens("mine again") == 28
        engine.assert_clean()


def test_a_request_that_must_see_all_its_tokens_is_not_given_a_hit(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", range(30))
        engine.forget_device()
        engine.ask("logprobs", range(30), prompt_logprobs=1)
        assert engine.promised("logprobs") == [0]
        engine.assert_clean()


@pytest.mark.parametrize("windows", [(None, 8), (None, 8, None, 8), (8, None, 12, None), (None, 6)], ids=str)
def test_hybrid_models_come_back_and_windows_are_not_loaded_whole(
    windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    with KvbmEngine(tmp_path, windows=windows, num_blocks=128) as engine:
        first = engine.ask("a", range(50), 12)
        engine.forget_device()
        loads = len(engine.executors[0].submitted)
        assert engine.ask("b", range(50), 12) == first
        assert engine.external_tokens("b") == 48
        plan = next(p for p in engine.executors[0].submitted[loads:] if p.direction is Direction.ONBOARD)
        per_group = {move.group: len(move.slots) for move in plan.moves}
        assert max(per_group.values()) == 12 and min(per_group.values()) < 6
        engine.assert_clean()


def test_a_hybrid_prefill_in_chunks_is_stored_whole(tmp_path: Path) -> None:
    # vLLM hands a block that left the window to the next chunk at once, while it may still be read.
    with KvbmEngine(tmp_path, windows=(None, 8), max_batched_tokens=12) as engine:
        first = engine.ask("a", range(80), 4)
        engine.forget_device()
        assert engine.ask("b", range(80), 4) == first
        assert engine.external_tokens("b") == 76
        engine.assert_clean()


def test_a_host_tier_that_is_too_small_keeps_what_it_can(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=10) as engine:
        first = engine.ask("a", range(60), 4)  # 15 blocks: the first ten stay, as a prefix
        engine.forget_device()
        assert engine.ask("b", range(60), 4) == first
        assert engine.external_tokens("b") == 40
        engine.forget_device()
        for turn in range(6):
            engine.ask(f"other {turn}", range(100 * turn, 100 * turn + 30), 4)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == 10
        assert engine.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') > 0
        engine.assert_clean()


def test_a_sequence_loses_its_tail_first(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=16) as engine:
        engine.ask("a", range(49))
        engine.settle()
        engine.ask("b", range(200, 233))  # eight blocks, four slots free: four of a's go
        engine.forget_device()
        engine.ask("a again", range(49))
        assert engine.external_tokens("a again") == 32
        engine.assert_clean()


@pytest.mark.shows("KVBM_DECODE_RUN_TOKENS=0")
def test_an_offload_delays_neither_the_forward_pass_nor_the_next_step(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"decode_run_tokens": 0}) as engine:
        engine.hold(Direction.OFFLOAD)
        engine.add("a", range(30), 20)
        engine.run(until=lambda: len(engine.record.outputs["a"]) == 19)
        assert engine.executors[0].held > 1  # not one copy is over, and the request is all but done
        engine.release(Direction.OFFLOAD)
        engine.assert_clean()


def test_a_finished_request_waits_only_for_its_own_copies(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", range(48))
        engine.settle()
        engine.hold(Direction.OFFLOAD)
        engine.ask_until_done("nothing to copy", range(48), 1)
        assert engine.status("nothing to copy") is None  # gone at once
        engine.ask_until_done("copying", range(200, 250), 1)
        assert engine.status("copying") == RequestStatus.FINISHED_LENGTH_CAPPED
        held_blocks = engine.spec.num_blocks - 1 - engine.free_blocks
        assert 12 <= held_blocks <= 13
        engine.release(Direction.OFFLOAD)
        engine.assert_clean()


def test_loading_one_request_does_not_stop_the_others(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", range(50))
        engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("loading", range(50), 4)
        engine.step()
        assert engine.ask_until_done("other", range(300, 330), 6)
        assert not engine.record.outputs["loading"]
        engine.release(Direction.ONBOARD)
        engine.run()
        assert len(engine.record.outputs["loading"]) == 4
        engine.assert_clean()


def test_positions_grow_without_gaps(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, max_batched_tokens=16) as engine:
        for turn, length in enumerate((10, 25, 40, 60, 80)):
            engine.ask(f"turn {turn}", range(length), 2)
            engine.forget_device()
        found = [engine.external_tokens(f"turn {turn}") for turn in range(5)]
        assert found == [0, 8, 24, 40, 60]
        assert all(a <= b for a, b in pairwise(found))
        engine.assert_clean()


@pytest.mark.shows("KVBM_DECODE_RUN_TOKENS")
def test_what_decoding_fills_is_stored_in_runs_and_the_rest_at_the_end(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"decode_run_tokens": 16}) as engine:  # four blocks
        engine.add("a", range(40), 30)
        stored = []
        while engine.scheduler.has_requests():
            engine.step()
            engine.settle()
            stored.append(engine.leader.chain.host.resident_blocks)
        engine.run()
        engine.settle()
        growth = [after - before for before, after in pairwise([10, *stored]) if after != before]
        assert stored[0] == 10 and max(growth) <= (16 + STRIDE - 1) // 4, (
            "a run, and what comes while others wait"
        )
        assert len(growth) <= 3, "for seven blocks"
        assert (
            engine.leader.chain.host.resident_blocks == 17
        )  # 69 tokens have KV: nothing that is full was left out
        engine.assert_clean()
