"""Models with states (Mamba, gated delta nets) under vLLM's own scheduler: the fake model checks each state
that it reads, so a state that was not restored, or is that of other tokens, fails the step that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from kvbm_core.errors import Outcome
from kvbm_core.runtime.request import RequestState, StateOnDevice
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction
from tests.vllm.fake_model import FakeRank
from tests.vllm.fake_model import Sequence as Drafter
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.state_model import StateLayers

HYBRID = ("state", "state", "state", None)
"""Three groups with states, and one with attention."""
KINDS: dict[str, dict[str, Any]] = {
    "one state layer": {"windows": ("state", None)},
    "three groups of states, chunked": {"windows": HYBRID, "max_batched_tokens": 12},
    "async scheduling": {"windows": ("state", None), "async_scheduling": True},
    "two ranks": {"windows": ("state", "state", None), "ranks": 2},
    "blocks outermost": {"windows": ("state", None), "layout": "BLHNC"},
    "a window too": {"windows": ("state", 8, None)},
    "states alone": {"windows": ("state",)},
    "ngram": {"windows": ("state", None), "draft_tokens": 3},
    "ngram, async scheduling": {"windows": ("state", None), "draft_tokens": 3, "async_scheduling": True},
    "ngram, chunked": {"windows": ("state", None), "draft_tokens": 3, "max_batched_tokens": 12},
    "draft head": {"windows": ("state", None, None), "draft_tokens": 2, "has_draft_layer": True},
    "checkpoints": {"windows": ("state", None), "exports_checkpoints": True},
    "checkpoints inside blocks": {
        "windows": ("state", None),
        "exports_checkpoints": True,
        "match_tokens": 2,
    },
    "MLA": {"windows": ("state", "state", "state", None), "is_mla": True, "max_batched_tokens": 12},
    "MLA, two ranks, checkpoints": {
        "windows": ("state", "state", None),
        "is_mla": True,
        "ranks": 2,
        "exports_checkpoints": True,
    },
    "MLA, draft head": {
        "windows": ("state", None, None),
        "is_mla": True,
        "draft_tokens": 2,
        "has_draft_layer": True,
    },
    "partial hits": {"windows": ("state", "state", None), "match_tokens": 2, "block_size_tokens": 8},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
SIMPLE = KINDS["one state layer"]
EVERY = {"state_every_tokens": 1}
"""Each state that there is."""
RELOCATING = [KINDS[name] for name in ("ngram, chunked", "draft head", "MLA, draft head")]
"""Of these vLLM moves blocks for the states of drafts about within a table."""


def engine_of(folder: Path, kind: dict[str, Any] = SIMPLE, **more: Any) -> KvbmEngine:
    """With room for long prompts. vLLM keeps each state that it can."""
    return KvbmEngine(
        folder, **({"num_blocks": 160, "host_blocks": 600, "retain_tokens": None} | kind | more)
    )


def note_states(engine: KvbmEngine, monkeypatch: pytest.MonkeyPatch) -> list[StateOnDevice]:
    """What is given to the leader from now on."""
    seen: list[StateOnDevice] = []
    offload_states = engine.leader.offload_states

    def note(state: RequestState, tokens: Any, states: Sequence[StateOnDevice], end: int) -> int | None:
        seen.extend(states)
        return offload_states(state, tokens, states, end)

    monkeypatch.setattr(engine.leader, "offload_states", note)
    return seen


def note_relocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns out of which vLLM moves a block for the state of a draft, from now on."""
    seen: list[int] = []
    relocate = MambaManager._relocate_speculative_block

    def note(self: MambaManager, blocks: Any, column: int) -> None:
        seen.append(column)
        relocate(self, blocks, column)

    monkeypatch.setattr(MambaManager, "_relocate_speculative_block", note)
    return seen


def drop_key(engine: KvbmEngine, request_id: str, position: int, block: int) -> None:
    """The host loses block ``block`` of that group of a request that is still open."""
    state = engine.leader.request(request_id)
    assert state is not None
    key = state.keys(position)[block]
    assert engine.leader.chain.residents.contains(key)
    engine.leader.chain.forget([key])


def is_state_group(engine: KvbmEngine) -> list[bool]:
    return [group.is_state for group in engine.leader.groups]


@every_kind
def test_a_prompt_comes_back(kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relocations = note_relocations(monkeypatch)
    with engine_of(tmp_path, kind) as engine:
        size = engine.spec.block_size_tokens
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        assert engine.ask("b", range(50), 8) == first
        # With a draft head vLLM's prefill stops one block earlier.
        hit = 49 // size * size - (size if engine.spec.has_draft_layer else 0)
        assert engine.external_tokens("b") == hit
        assert bool(relocations) is (kind in RELOCATING)
        engine.assert_clean()


@every_kind
def test_the_answer_is_part_of_the_next_turn(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relocations = note_relocations(monkeypatch)
    drafts = kind.get("draft_tokens", 0)
    with engine_of(tmp_path, kind) as engine:
        size, prompt = engine.spec.block_size_tokens, list(range(20))
        for turn in range(3):
            answer = engine.ask(f"turn {turn}", prompt, 18)
            engine.forget_device()
            computed = (len(prompt) + 17) // size * size
            prompt += [*answer, 7, 8, 9]
            engine.ask(f"probe {turn}", prompt)
            hit = engine.external_tokens(f"probe {turn}")
            # vLLM hands no state off at an end that a drafting step went over when it is not sure of it yet.
            assert hit == computed if not drafts else 0 < hit <= computed and hit % size == 0
            engine.forget_device()
        assert relocations or not engine.spec.has_draft_layer
        engine.assert_clean()


def test_latents_lie_beside_states(tmp_path: Path) -> None:
    """As in Kimi-Linear, which has a group of each kind."""
    with engine_of(tmp_path, KINDS["MLA"]) as engine:
        groups = engine.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        assert sorted(kinds) == ["MLAAttentionSpec", "MambaSpec", "MambaSpec", "MambaSpec"]


def right_draft(sequence: Drafter, most: int, *, always: bool) -> list[int]:
    """``most`` tokens, all of them right."""
    trial = sequence.with_drafts((0,))
    trial.tokens.pop()
    for _ in range(most):
        trial.tokens.append(trial.next_token())
    return trial.tokens[len(sequence.tokens) :]


@pytest.mark.parametrize("drafts", [2, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_drafts_jump_over_the_end_of_a_block(
    is_async: bool, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asynchronous scheduling vLLM 0.32 keeps no state at an end that a step went over by two tokens
    or more. kvbm has the states that vLLM has: its hits end where the device's own end, before or at a jump;
    or a block earlier, where vLLM 0.33 does not hand off what the last step of an answer completes.
    """
    monkeypatch.setattr(Drafter, "draft", right_draft)
    kind = {"windows": ("state", None), "draft_tokens": drafts, "async_scheduling": is_async}
    with engine_of(tmp_path, kind, extra=EVERY) as engine:
        size, missing = engine.spec.block_size_tokens, 0
        for length in range(20, 20 + size):
            hits = []
            for first_token in (1000, 2000):
                name, prompt = f"{first_token}, {length}", [first_token, *range(1, length)]
                answer = engine.ask(name, prompt, 30)
                if hits:
                    engine.forget_device()
                engine.ask(f"{name}, next turn", [*prompt, *answer, 7])
                call = engine.record.matches[-1]
                hits.append((call.computed_tokens, call.tokens))
            (on_device, beyond), (none, in_host) = hits
            assert (beyond, none) == (0, 0) and on_device - size <= in_host <= on_device, length
            missing += on_device < (length + 29) // size * size
        assert not (is_async and missing)
        engine.assert_clean()


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"), [(48, 44), (47, 44), (49, 48), (4, 0), (5, 4), (3, 0)]
)
def test_a_hit_leaves_a_token_to_compute(prompt_tokens: int, expected: int, tmp_path: Path) -> None:
    """vLLM PR 51102: the state at the end of a prompt already has its last token in it."""
    with engine_of(tmp_path) as engine:
        first = engine.ask("a", range(prompt_tokens), 4)
        engine.forget_device()
        assert engine.ask("b", range(prompt_tokens), 4) == first
        assert engine.external_tokens("b") == expected
        engine.assert_clean()


def test_by_default_vllm_keeps_the_last_state_of_each_prompt(tmp_path: Path) -> None:
    with engine_of(tmp_path, max_batched_tokens=12, extra=EVERY, retain_tokens=0) as engine:
        answer = engine.ask("a", range(50), 18)
        engine.forget_device()
        engine.ask("next turn", [*range(50), *answer, 7])
        assert engine.external_tokens("next turn") == 48
        engine.forget_device()
        engine.ask("third turn", [*range(50), *answer, 7, 8])
        assert engine.external_tokens("third turn") == 68  # of the turn before
        engine.assert_clean()


def test_a_hit_ends_where_a_state_is_though_there_is_more_kv(tmp_path: Path) -> None:
    with engine_of(tmp_path, max_batched_tokens=12, extra=EVERY) as engine:
        engine.ask("a", range(50))  # states at 12, 24, 36 and 48
        engine.forget_device()
        engine.ask("head", [*range(34), 400])
        assert engine.external_tokens("head") == 24
        engine.assert_clean()


def test_what_the_device_has_is_not_loaded(tmp_path: Path) -> None:
    with engine_of(tmp_path, max_batched_tokens=12, extra=EVERY) as engine:
        engine.ask("a", range(50))
        engine.forget_device()
        engine.ask("head", range(26))  # state at 24 comes up
        engine.ask("b", range(50))
        call = engine.record.matches[-1]
        assert (call.computed_tokens, call.tokens) == (24, 24)
        engine.assert_clean()


@pytest.mark.parametrize("kind", ["one state layer", "async scheduling", "ngram", "checkpoints", "MLA"])
def test_preempted_requests_give_the_same_answer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "narrow").mkdir()
    prompts = {name: range(start, start + 40) for name, start in (("a", 0), ("b", 100), ("c", 200))}
    with engine_of(tmp_path / "wide", KINDS[kind]) as engine:
        expected = {name: engine.ask(name, prompt, 40) for name, prompt in prompts.items()}
    with engine_of(tmp_path / "narrow", KINDS[kind], num_blocks=66, extra=EVERY) as engine:
        for name, prompt in prompts.items():
            engine.add(name, prompt, 40)
        engine.run()
        assert engine.record.preemptions > 0
        assert engine.record.outputs == expected
        engine.forget_device()
        for name, prompt in prompts.items():
            engine.ask(f"{name} again", [*prompt, *expected[name], 5])
            assert engine.external_tokens(f"{name} again") > 40
        engine.assert_clean()


@pytest.mark.parametrize("direction", Direction)
def test_aborted_while_its_states_are_copied(direction: Direction, tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        engine.hold(direction)
        engine.add("b", [*range(50), 9] if direction is Direction.OFFLOAD else range(50), 8)
        for _ in range(4):
            engine.step()
        engine.abort("b")
        engine.step()
        engine.release(direction)
        engine.run()
        engine.forget_device()
        assert engine.ask("c", range(50), 8) == first
        assert engine.external_tokens("c") == 48
        engine.assert_clean()


@pytest.mark.parametrize(
    "kind",
    [
        "three groups of states, chunked",
        "async scheduling",
        "ngram",
        "two ranks",
        "MLA, two ranks, checkpoints",
    ],
)
def test_a_failed_load_is_computed_and_stored_anew(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, KINDS[kind]) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        seen = note_states(engine, monkeypatch)
        engine.executors[-1].fail_next(Direction.ONBOARD, Outcome.IO_ERROR)
        engine.add("b", range(50), 8)
        engine.run(until=lambda: bool(engine.record.allocs) and engine.external_tokens("b") > 0)
        while engine.hooks._requests["b"].is_loading:  # what is in the blocks now is of nobody
            assert not seen
            engine.step()
        engine.run()
        assert engine.record.outputs["b"] == first
        assert {one.end_tokens for one in seen} >= {48}
        engine.forget_device()
        assert engine.ask("c", range(50), 8) == first
        assert engine.external_tokens("c") == 48
        engine.assert_clean()


def test_a_failed_load_counts_nothing_as_computed(tmp_path: Path) -> None:
    """What the device had before the load is asked for anew: vLLM begins such a request at its start."""
    with engine_of(tmp_path, max_batched_tokens=12, extra=EVERY) as engine:
        first = engine.ask("a", range(50), 4)
        engine.forget_device()
        engine.ask("head", range(26))
        engine.executors[0].fail_next(Direction.ONBOARD, Outcome.IO_ERROR)
        assert engine.ask("b", range(50), 4) == first
        assert [call.computed_tokens for call in engine.record.matches if call.request_id == "b"] == [24, 24]
        engine.assert_clean()


@pytest.mark.parametrize("what", ["state", "kv"])
def test_a_state_without_its_kv_and_kv_without_its_state_are_no_hit(what: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, max_batched_tokens=24, extra=EVERY) as engine:
        first = engine.ask("a", range(50), 6)  # states at 24, 48, 52
        engine.settle()
        engine.add("b", range(50), 6)
        engine.run(until=lambda: len(engine.record.outputs["b"]) > 2)
        position = is_state_group(engine).index(what == "state")
        drop_key(engine, "b", position, 11)  # that ends at 48
        engine.abort("b")
        engine.forget_device()
        assert engine.ask("c", range(50), 6) == first
        assert engine.external_tokens("c") == 24
        engine.forget_device()
        engine.ask("d", range(50), 6)  # stored again by c
        assert engine.external_tokens("d") == 48
        engine.assert_clean()


def test_after_a_reset_nothing_is_known(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        first = engine.ask("a", range(50), 4)
        engine.settle()
        assert engine.reset_device(with_connector=True)
        assert engine.ask("b", range(50), 4) == first
        assert engine.external_tokens("b") == 0
        engine.assert_clean()


@pytest.mark.parametrize("kind", ["one state layer", "two ranks", "ngram", "MLA, two ranks, checkpoints"])
def test_states_come_back_from_disk_after_a_restart(kind: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, KINDS[kind], disk_blocks=300) as engine:
        first = engine.ask("a", range(50), 18)
        engine.assert_clean()
    with engine_of(tmp_path, KINDS[kind], disk_blocks=300) as engine:
        assert engine.ask("b", range(50), 18) == first
        assert engine.external_tokens("b") == 48
        engine.forget_device()
        engine.ask("c", [*range(50), *first, 1, 2])
        assert engine.external_tokens("c") > 48
        engine.assert_clean()


@every_kind
def test_a_block_handed_off_by_a_request_that_ends_in_the_same_step(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    """The copy is late, and everything else on the device is wanted meanwhile."""
    with engine_of(tmp_path, kind, num_blocks=100) as engine:
        engine.hold(Direction.OFFLOAD)
        first = engine.ask_until_done("a", range(33), 1)
        engine.take_blocks(leave=0)
        engine.give_blocks()  # each free block has been somebody else's
        for start in (100, 200):
            engine.ask_until_done(f"other {start}", range(start, start + 40), 1)
        engine.release(Direction.OFFLOAD)
        engine.run()
        engine.forget_device()
        assert engine.ask("b", range(33), 1) == first
        assert engine.external_tokens("b") > 0
        engine.assert_clean()


# ---------------------------------------------------------------- the order of things in a step


def test_states_are_read_behind_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for what has ended before it drafts, and copies states after that."""
    with engine_of(tmp_path, KINDS["ngram"]) as engine:
        worker = engine.connector_of(0).worker_side
        assert not worker._submits_without_save
        order: list[str] = []
        submit, after, ended = worker.worker.submit, StateLayers.after, worker.get_finished

        def note_submit(plan: TransferPlan) -> None:
            order.append("submit")
            submit(plan)

        def note_after(self: StateLayers, *args: Any, **kwargs: Any) -> None:
            after(self, *args, **kwargs)
            order.append("copied")

        def note_ended() -> tuple[set[str], set[str]]:
            order.append("asked")
            return ended()

        monkeypatch.setattr(worker.worker, "submit", note_submit)
        monkeypatch.setattr(StateLayers, "after", note_after)
        monkeypatch.setattr(worker, "get_finished", note_ended)
        engine.ask("a", range(50), 20)
        submits = [place for place, what in enumerate(order) if what == "submit"]
        assert len(submits) > 3
        for place in submits:
            before = [what for what in order[:place] if what != "submit"]
            assert before[-2:] == ["asked", "copied"], before[-4:]
        engine.assert_clean()


def test_a_load_begins_behind_what_empties_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM empties new blocks in the step that allocates them, also those that a load fills."""
    with engine_of(tmp_path) as engine:
        engine.ask("a", range(50))
        engine.forget_device()
        emptied: list[int] = []
        loaded: list[int] = []
        poison, submit = FakeRank._poison, engine.connector_of(0).worker_side.worker.submit

        def note_poison(self: FakeRank, blocks: list[int]) -> None:
            assert not set(blocks) & set(loaded)
            emptied.extend(blocks)
            poison(self, blocks)

        def note_submit(plan: TransferPlan) -> None:
            if plan.direction is Direction.ONBOARD:
                blocks = [block for move in plan.moves for block in move.device_blocks]
                assert set(blocks) <= set(emptied)
                loaded.extend(blocks)
            submit(plan)

        monkeypatch.setattr(FakeRank, "_poison", note_poison)
        monkeypatch.setattr(engine.connector_of(0).worker_side.worker, "submit", note_submit)
        engine.add("b", range(50))
        engine.run()
        assert len(loaded) == 13  # 12 blocks of KV, one state
        engine.assert_clean()


# ---------------------------------------------------------------- what vLLM hands off and must not be stored


def change_hand_offs(engine: KvbmEngine, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """``change(request_id, entries)`` answers what vLLM says instead."""
    build = engine.connector.build_connector_meta

    def changed(output: SchedulerOutput) -> Any:
        said = output.kv_connector_block_state
        if said is not None:
            said.boundary_state_offloads = {
                name: change(name, entries) for name, entries in said.boundary_state_offloads.items()
            }
        return build(output)

    monkeypatch.setattr(engine.connector, "build_connector_meta", changed)


def test_a_block_that_is_somebody_elses_by_now_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, extra=EVERY) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        engine.reset_device(with_connector=True)
        free = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        change_hand_offs(
            engine,
            monkeypatch,
            lambda name, entries: [
                (group, free.get_all_free_blocks()[0].block_id, end) for group, _, end in entries
            ],
        )
        assert engine.ask("b", range(50), 8) == first
        monkeypatch.undo()
        engine.forget_device()
        assert engine.ask("c", range(50), 8) == first
        assert engine.external_tokens("c") == 0  # KV alone
        engine.assert_clean()


def test_ends_inside_blocks_and_of_unknown_tokens_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, extra=EVERY) as engine:
        change_hand_offs(
            engine,
            monkeypatch,
            lambda name, entries: [
                (group, block, end + more) for group, block, end in entries for more in (2, 8)
            ],
        )
        first = engine.ask("a", range(50), 8)
        monkeypatch.undo()
        engine.forget_device()
        assert engine.ask("b", range(50), 8) == first
        assert engine.external_tokens("b") == 0
        engine.assert_clean()


def ask_over_an_end(engine: KvbmEngine) -> None:
    """A prompt whose hit ends inside a block, at 14; its first chunk goes over that block's end, at 16, and
    exports a checkpoint further on.
    """
    engine.ask("tail", range(15))
    engine.settle()
    engine.ask("over", range(31))


def test_a_block_that_a_chunk_went_over_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 hands it off as the state at its end: it is the one that the chunk began with."""
    with engine_of(tmp_path, KINDS["checkpoints inside blocks"], extra=EVERY) as engine:
        seen = note_states(engine, monkeypatch)
        said: list[int] = []
        change_hand_offs(
            engine, monkeypatch, lambda name, entries: said.extend(e for *_, e in entries) or entries
        )
        ask_over_an_end(engine)
        assert 16 in said and 16 not in {one.end_tokens for one in seen}
        engine.forget_device()
        engine.ask("again", [*range(21), 400])
        assert engine.external_tokens("again") == 0
        engine.assert_clean()


def test_a_chunk_that_begins_where_its_block_does_leaves_the_state_at_its_end(tmp_path: Path) -> None:
    with engine_of(tmp_path, KINDS["checkpoints"], extra=EVERY) as engine:
        engine.ask("a", range(46))  # its last state is at 44
        engine.ask("b", range(50))  # from 44 on, over 48, where it exports one
        assert engine.record.matches[-1].computed_tokens == 44
        engine.forget_device()
        engine.ask("c", range(50))
        assert engine.external_tokens("c") == 48
        engine.assert_clean()


def test_without_vllms_pool_no_state_is_read(tmp_path: Path) -> None:
    with engine_of(tmp_path, extra=EVERY) as engine:
        engine.hooks._pins._pool = None
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        assert engine.ask("b", range(50), 8) == first
        assert engine.external_tokens("b") == 0
        engine.assert_clean()


def test_states_of_a_step_that_broke_are_not_read_in_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then their blocks, which nobody holds, may be somebody else's."""
    with engine_of(tmp_path, KINDS["states alone"], extra=EVERY) as engine:
        broken: list[int] = []
        take = engine.leader.take_offloads

        def broken_once() -> Any:
            if broken or not engine.leader._offloading.has_gathered:
                return take()
            broken.append(engine.record.steps)
            raise RuntimeError("a test breaks this step")

        monkeypatch.setattr(engine.leader, "take_offloads", broken_once)
        engine.add("a", range(49))
        engine.run(until=lambda: bool(broken))
        assert not engine.leader._offloading.has_gathered and not engine.leader.pending_jobs
        engine.run()
        engine.forget_device()
        engine.ask("b", range(49))
        assert engine.external_tokens("b") == 0
        engine.forget_device()
        engine.ask("c", range(49))
        assert engine.external_tokens("c") == 48
        assert engine.errors == 1


def test_without_that_guard_the_model_sees_a_wrong_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, KINDS["checkpoints inside blocks"], extra=EVERY) as engine:
        monkeypatch.setattr(engine.hooks, "_is_passed_by", lambda *_: False)
        ask_over_an_end(engine)
        engine.forget_device()
        with pytest.raises(AssertionError, match="wrong state"):
            engine.ask("again", [*range(21), 400])


# ---------------------------------------------------------------- controls: these must be seen


@pytest.mark.parametrize("kind", ["one state layer", "ngram", "two ranks", "MLA"])
def test_a_state_that_is_not_restored_is_seen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path, KINDS[kind]) as engine:
        engine.ask("a", range(50), 8)
        engine.forget_device()
        states = {group.index for group in engine.leader.groups if group.is_state}
        onboard = engine.leader.onboard

        def without_states(*args: Any) -> TransferPlan | None:
            plan = onboard(*args)
            assert plan is not None
            return replace(plan, moves=tuple(move for move in plan.moves if move.group not in states))

        monkeypatch.setattr(engine.leader, "onboard", without_states)
        with pytest.raises(AssertionError, match="wrong state"):
            engine.ask("b", range(50), 8)


@pytest.mark.parametrize("kind", ["draft head", "checkpoints inside blocks"])
def test_states_by_their_places_in_a_table_are_wrong(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a connector would store that took each table as one state after the other."""
    with engine_of(tmp_path, KINDS[kind], extra=EVERY) as engine:
        hooks, size = engine.hooks, engine.spec.block_size_tokens

        def by_place(output: SchedulerOutput) -> None:
            for name, count in output.num_scheduled_tokens.items():
                followed = hooks._requests[name]
                request, state, tables = followed.request, followed.state, followed.tables
                assert state is not None
                end = min(request.num_computed_tokens + count, request.num_tokens)
                full = [
                    StateOnDevice(0, block, (place + 1) * size)
                    for place, block in enumerate(tables[0][: end // size])
                    if block
                ]
                hooks._note(
                    engine.leader.offload_states(
                        state, request.all_token_ids, full, request.num_prompt_tokens
                    )
                )

        monkeypatch.setattr(hooks, "_plan_states", by_place)
        with pytest.raises(AssertionError, match="wrong state"):
            ask_over_an_end(engine)
            engine.forget_device()
            engine.ask("again", [*range(21), 400])
            for length in range(20, 40):
                prompt = [length, *range(1, length)]
                answer = engine.ask(f"{length}", prompt, 30)
                for end in range(5, 30, 5):
                    engine.forget_device()
                    engine.ask(f"{length} {end}", [*prompt, *answer[:end], 7])
                engine.forget_device()
