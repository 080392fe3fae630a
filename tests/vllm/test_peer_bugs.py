"""What went wrong in other connectors with states and drafts, played under vLLM's scheduler with kvbm. Each
test names the thread in which its bug was reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbm_core.types import Direction
from kvbm_vllm.connector import DynamoConnector
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_pd import PdEngine
from tests.vllm.test_states import note_relocations

NGRAM: dict[str, Any] = {"draft_tokens": 3}
HEAD: dict[str, Any] = {"draft_tokens": 2, "has_draft_layer": True}
STATES: dict[str, Any] = {"windows": ("state", None), "retain_tokens": None}
STATES_AND_HEAD: dict[str, Any] = {"windows": ("state", None, None), "retain_tokens": None, **HEAD}
DRAFTING = {
    "ngram": NGRAM,
    "ngram, async scheduling": {**NGRAM, "async_scheduling": True},
    "draft head": HEAD,
    "draft head, async scheduling": {**HEAD, "async_scheduling": True},
}
every_way = pytest.mark.parametrize("drafting", DRAFTING.values(), ids=DRAFTING.keys())


def engine_of(folder: Path, kind: dict[str, Any], **more: Any) -> KvbmEngine:
    return KvbmEngine(folder, **({"num_blocks": 160, "host_blocks": 600} | kind | more))


@every_way
def test_vllm_46971_46972_a_block_that_was_held_back_is_stored_later(
    drafting: dict[str, Any], tmp_path: Path
) -> None:
    """The cursor went past the block that drafting holds back: holes in what was stored."""
    with engine_of(tmp_path, drafting, num_blocks=80) as engine:
        prompt = list(range(20))
        engine.add("a", prompt, 40)
        contains = engine.leader.chain.residents.contains
        while "a" in engine.scheduler.requests:
            engine.step()
            engine.settle()
            state = engine.leader.request("a")
            if state is not None:  # what is there has no hole
                there = [contains(key) for key in state.keys(0)]
                assert there == sorted(there, reverse=True)
        answer = engine.record.outputs["a"]
        engine.forget_device()
        engine.ask("b", [*prompt, *answer, 7])
        assert engine.external_tokens("b") == (20 + 39) // 4 * 4  # all that has KV
        engine.assert_clean()


@every_way
def test_vllm_46971_46972_the_held_back_block_of_a_preempted_request(
    drafting: dict[str, Any], tmp_path: Path
) -> None:
    """It begins anew, and so does what is considered for storing."""
    with engine_of(tmp_path, drafting, num_blocks=40) as engine:
        prompts = {name: list(range(start, start + 40)) for name, start in (("a", 0), ("b", 100), ("c", 200))}
        for name, prompt in prompts.items():
            engine.add(name, prompt, 40)
        engine.run()
        assert engine.record.preemptions > 0
        for name, prompt in prompts.items():
            engine.forget_device()
            engine.ask(f"{name} again", [*prompt, *engine.record.outputs[name], 7])
            assert engine.external_tokens(f"{name} again") == (40 + 39) // 4 * 4
        engine.assert_clean()


def test_vllm_52735_52771_states_beside_a_draft_head_are_found(tmp_path: Path) -> None:
    """All groups were taken for the draft head's, and the lookup drops the last chunk of those: a state is
    one chunk, so there was never a hit.
    """
    with engine_of(tmp_path, STATES_AND_HEAD) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        assert engine.ask("b", range(50), 8) == first
        assert engine.external_tokens("b") == 44  # vLLM's prefill leaves its last state there
        engine.assert_clean()


@every_way
@pytest.mark.parametrize("windows", [(None, None), ("state", None, None)], ids=["attention", "states"])
def test_vllm_44784_drafts_beyond_the_table_and_at_the_longest_length(
    drafting: dict[str, Any], windows: tuple[Any, ...], tmp_path: Path
) -> None:
    """Tokens are scheduled, drafts among them, for which the request has no block: a crash."""
    with engine_of(tmp_path, drafting, windows=windows, num_blocks=200, retain_tokens=None) as engine:
        longest = engine.spec.max_model_len
        for length in (longest - 1, longest - 2, longest - 7, 23, 24, 25):
            prompt = range(1000 * length, 1000 * length + length)
            count = min(longest - length, 30)
            answer = engine.ask(f"{length}", prompt, count)
            assert len(answer) == count
            engine.forget_device()
            assert engine.ask(f"{length} again", prompt, count) == answer
            assert engine.external_tokens(f"{length} again") > 0
            engine.forget_device()
        engine.assert_clean()


@pytest.mark.parametrize(
    "kind",
    [STATES, {**STATES, "windows": ("state", "state", "state", None)}, {**STATES, **NGRAM}],
    ids=["plain", "three groups", "ngram"],
)
def test_vllm_53505_lmcache_4247_a_hit_of_the_device_and_of_the_host_together(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    """The device's prefix and the rest from outside gave another answer."""
    assert not DynamoConnector.supports_divergent_local_hybrid_hits.fget(None)  # type: ignore[attr-defined]
    with engine_of(tmp_path, kind, max_batched_tokens=12, extra={"state_every_tokens": 1}) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        engine.ask("head", range(26))
        assert engine.ask("b", range(50), 8) == first
        calls = [call for call in engine.record.matches if call.request_id == "b"]
        assert calls[0].computed_tokens > 0 and engine.external_tokens("b") > 0
        engine.assert_clean()


def test_vllm_53505_states_that_the_device_lost_come_with_their_kv(tmp_path: Path) -> None:
    """The device has the KV, and not the state at its end: what all groups agree on counts, and the rest
    comes from the host, KV too.
    """
    with engine_of(tmp_path, STATES, max_batched_tokens=12, extra={"state_every_tokens": 1}) as engine:
        first = engine.ask("a", range(50), 8)
        engine.settle()
        pool = engine.scheduler.kv_cache_manager.block_pool
        states = next(i for i, group in enumerate(engine.leader.groups) if group.is_state)
        lost = [
            block.block_id
            for block in pool.blocks
            if block.block_hash is not None
            and int.from_bytes(block.block_hash[-4:], "big") == states
            and block.block_hash_num_tokens > 12
        ]
        pool.evict_blocks(set(lost))
        assert engine.ask("b", range(50), 8) == first
        calls = [call for call in engine.record.matches if call.request_id == "b"]
        assert (calls[0].computed_tokens, calls[0].tokens) == (12, 36)
        engine.assert_clean()


@pytest.mark.parametrize(
    "kind", [STATES_AND_HEAD, {**STATES, **NGRAM, "max_batched_tokens": 12}], ids=["head", "ngram"]
)
def test_lmcache_4984_steps_that_go_over_the_end_of_a_block(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of that end was never written, and what was in it was stored under a right key. Prompts of
    each length, so that steps go over the ends in each way; each state that was stored is read.
    """
    relocations = note_relocations(monkeypatch)
    with engine_of(tmp_path, kind, host_blocks=2000, extra={"state_every_tokens": 1}) as engine:
        hits = 0
        for length in range(17, 25):
            prompt = [length, *range(1, length)]
            answer = engine.ask(f"{length}", prompt, 24)
            for more in range(4, 24, 4):
                engine.forget_device()
                name = f"{length} {more}"
                engine.ask(name, [*prompt, *answer[:more], 7])
                hits += engine.external_tokens(name) > length
        assert hits > 8 and relocations
        engine.assert_clean()


@pytest.mark.parametrize("kind", [STATES, STATES_AND_HEAD], ids=["plain", "head"])
def test_lmcache_decoding_is_not_slowed_by_a_job_in_each_step(kind: dict[str, Any], tmp_path: Path) -> None:
    """A job for each block that is full, and not for each step."""
    with engine_of(tmp_path, kind, block_size_tokens=8) as engine:
        engine.ask("a", range(20), 64)
        engine.settle()
        jobs = sum(len(gate.submitted_of(Direction.OFFLOAD)) for gate in engine.executors)
        assert 0 < jobs <= 2 * ((20 + 63) // 8), engine.record.steps
        engine.assert_clean()


@every_way
def test_dynamo_6678_a_decode_worker_that_drafts(drafting: dict[str, Any], tmp_path: Path) -> None:
    """Its prompts are computed elsewhere; what it decodes is kept."""
    with PdEngine(tmp_path / "p", **drafting) as prefill, PdEngine(tmp_path / "d", **drafting) as decode:
        prompt = range(50)
        alone = prefill.ask("alone", prompt, 8)
        handed = prefill.prefill("a", prompt)
        assert decode.decode("b", prompt, handed) == alone
        decode.forget_device()
        decode.ask("next turn", [*prompt, *alone, 1, 2, 3], 1)
        assert decode.external_tokens("next turn") == 56
