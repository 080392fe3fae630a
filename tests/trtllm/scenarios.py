"""Scenarios of one request after another: hits, misses, chunks, decoding, identities, tiers.

Each is run on every rank alike, on any kind that it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbm_core.types import Direction
from tests.trtllm.double import EARLY, NEWEST
from tests.trtllm.harness import BLOCK, Kind, serve

PROMPT = list(range(40))
CAP = 36
"""What of PROMPT can be matched: full blocks, one token left to compute."""
ALL_SYNC = {"KVBM_SYNC_ONBOARD_BYTES": "1000000"}
EACH_BLOCK = {"KVBM_DECODE_RUN_TOKENS": "0"}

Play = Callable[[int, Kind], Any]


@dataclass(frozen=True)
class Scenario:
    """``is_essential``: on several ranks too."""

    play: Play
    fits: Callable[[Kind], bool]
    is_essential: bool


def scenario_list() -> tuple[dict[str, Scenario], Callable[..., Callable[[Play], Play]]]:
    """A list, and the decorator that puts a function on it, given what it fits and whether it is
    essential.
    """
    found: dict[str, Scenario] = {}

    def scenario(
        fits: Callable[[Kind], bool] = lambda kind: True, *, is_essential: bool = False
    ) -> Callable[[Play], Play]:
        def note(play: Play) -> Play:
            found[play.__name__] = Scenario(play, fits, is_essential)
            return play

        return note

    return found, scenario


SCENARIOS, scenario = scenario_list()


def is_newest(kind: Kind) -> bool:
    """Of the newest contract."""
    return kind.version == NEWEST


def is_v1(kind: Kind) -> bool:
    """Of the V1 manager."""
    return not kind.is_v2


def is_v2(kind: Kind) -> bool:
    """Of KVCacheManagerV2."""
    return kind.is_v2


def cap_of(num_tokens: int) -> int:
    """What of a prompt of this length can be matched at most."""
    return (num_tokens - 1) // BLOCK * BLOCK


# ---------------------------------------------------------------- hits


@scenario(is_essential=True)
def no_hit(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        request = serving.ask(PROMPT)
        serving.expect_match(request, (0, False))
        calls = serving.executor.calls
        if serving.is_leading:
            groups = "_by_layer_group" if kind.is_v2 else ""
            assert (
                calls.count(f"update_state_after_alloc{groups}")
                == calls.count(f"request_finished{groups}")
                == 1
            )
        assert serving.metric("kvbm_matched_tokens") == 0
        # 40 tokens of the prompt and 7 of the answer were computed.
        assert serving.metric("kvbm_offload_blocks_d2h") == 47 // BLOCK


@scenario(is_essential=True)
def async_hit(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        before = serving.executor.num_computed_tokens
        again = serving.ask(PROMPT)
        serving.expect_match(again, (CAP, True))
        assert serving.executor.num_computed_tokens - before == 40 - CAP + 7
        assert serving.metric("kvbm_matched_tokens") == CAP
        assert serving.metric("kvbm_onboard_blocks_h2d") == CAP // BLOCK


@scenario(is_essential=True)
def load_over_many_iterations(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        again = serving.submit(PROMPT)
        for _ in range(6):
            serving.executor.step()
        assert serving.executor.state_of(again) == "loading" and serving.gate.held == 1
        other = serving.submit(range(100, 120), 4)  # goes on beside it
        serving.step_until(lambda: other in serving.executor.outputs)
        if rank == kind.ranks - 1:  # all have to be there
            for _ in range(3):
                serving.executor.step()
            serving.gate.release(Direction.ONBOARD)
        else:
            serving.gate.release(Direction.ONBOARD)
            for _ in range(3):
                serving.executor.step()
        serving.executor.run_until_idle()
        assert serving.reason(again) == "length"
        serving.expect_match(again, (CAP, True))


@scenario(is_essential=True)
def sync_hit(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env=ALL_SYNC) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        again = serving.ask(PROMPT)
        serving.expect_match(again, (CAP, False))
        assert serving.metric("kvbm_matched_tokens") == CAP


@scenario()
def small_loads_are_sync(rank: int, kind: Kind) -> None:
    block_bytes = 2 * 2 * BLOCK * 8 * kind.shards  # of all ranks together
    with serve(rank, kind, env={"KVBM_SYNC_ONBOARD_BYTES": str(2 * block_bytes)}) as serving:
        serving.ask(PROMPT)
        for length, is_async in ((9, False), (13, True)):
            serving.forget_device()
            serving.expect_match(serving.ask(PROMPT[:length]), (cap_of(length), is_async))


@scenario()
def device_hit_and_host_hit(rank: int, kind: Kind) -> None:
    for env in ({}, ALL_SYNC):
        with serve(rank, kind, env=env) as serving:
            serving.ask(PROMPT)
            serving.forget_device()
            serving.ask(PROMPT[:17], 1)
            before = serving.executor.num_computed_tokens
            again = serving.ask(PROMPT)
            assert serving.device_hit(again) == 16
            serving.expect_match(again, (CAP - 16, not env))
            assert serving.executor.num_computed_tokens - before == 40 - CAP + 7


@scenario(is_v1)
def part_of_a_block_on_the_device(rank: int, kind: Kind) -> None:
    with serve(rank, kind, enable_partial_reuse=True) as serving:
        serving.ask(PROMPT)
        part = serving.ask([*PROMPT[:18], *range(500, 520)])
        assert serving.device_hit(part) == 18
        serving.expect_match(part, (0, False))
        serving.forget_device()
        serving.expect_match(serving.ask([*PROMPT[:18], *range(500, 520)]), (CAP, True))


@scenario()
def prompts_of_every_length(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        for length in range(1, 14):
            serving.forget_device()
            matched = cap_of(length)
            serving.expect_match(serving.ask(PROMPT[:length], 2), (matched, matched > 0))


@scenario(is_essential=True)
def chunked_prefill(rank: int, kind: Kind) -> None:
    for env in ({}, ALL_SYNC):
        with serve(rank, kind, env=env, chunk_tokens=8) as serving:
            serving.ask(PROMPT)
            serving.forget_device()
            short = serving.ask([*PROMPT[:20], *range(300, 330)])
            serving.expect_match(short, (20, not env))
            serving.forget_device()
            again = serving.ask([*PROMPT[:20], *range(300, 330)])
            serving.expect_match(again, (cap_of(50), not env))


@scenario()
def stored_no_earlier_than_computed(rank: int, kind: Kind) -> None:
    with serve(rank, kind, chunk_tokens=8) as serving:
        request = serving.submit(PROMPT)
        for chunk in range(1, 4):
            serving.executor.step()
            plans = serving.gate.submitted_of(Direction.OFFLOAD)
            # The early interface does not say what an iteration computes: that is known in the next one.
            num_known = chunk - (kind.version == EARLY)
            assert sum(len(move.slots) for plan in plans for move in plan.moves) == 2 * num_known
        serving.executor.run_until_idle()
        assert serving.reason(request) == "length"


# ---------------------------------------------------------------- what decoding fills


def _decoded(rank: int, kind: Kind, env: dict[str, str], **options: Any) -> int:
    with serve(rank, kind, env=env) as serving:
        first = serving.ask(range(10), 60, **options)
        num_plans = len(serving.gate.submitted_of(Direction.OFFLOAD))
        serving.forget_device()
        whole = [*range(10), *serving.output(first)]
        again = serving.ask(whole, 4)
        # The last token was sampled and not computed; of the blocks before it all are there, the tail too.
        serving.expect_match(again, (cap_of(len(whole)), True))
        return num_plans


@scenario()
def decoded_blocks_one_by_one(rank: int, kind: Kind) -> None:
    assert _decoded(rank, kind, EACH_BLOCK) > 10


@scenario(is_essential=True)
def decoded_blocks_in_runs(rank: int, kind: Kind) -> None:
    assert _decoded(rank, kind, {}) <= 4


@scenario()
def decoded_to_an_early_end(rank: int, kind: Kind) -> None:
    for double_finish in (False, True):
        with serve(rank, kind, double_finish=double_finish) as serving:
            first = serving.ask(range(10), 40, stop_after=23)
            assert serving.reason(first) == "eos"
            serving.forget_device()
            whole = [*range(10), *serving.output(first)]
            serving.expect_match(serving.ask(whole, 4), (cap_of(len(whole)), True))


@scenario()
def conversation(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        history = list(range(7))
        for turn in range(6):
            known = cap_of(len(history)) if turn else 0
            history += range(500 + 10 * turn, 506 + 10 * turn) if turn else []
            request = serving.ask(history, 9)
            serving.expect_match(request, (known, turn > 0))
            history += serving.output(request)
            serving.forget_device()


@scenario(lambda kind: kind.version != EARLY, is_essential=True)
def cuda_graphs(rank: int, kind: Kind) -> None:
    with serve(rank, kind, cuda_graphs=True, warmup_forwards=5) as serving:
        first = serving.ask(range(10), 30)
        serving.forget_device()
        whole = [*range(10), *serving.output(first)]
        serving.expect_match(serving.ask(whole, 4), (cap_of(len(whole)), True))
        names = serving.executor.calls.names()
        assert names.index("register_forward_pass_callable") < names.index("forward_pass_callable")


# ---------------------------------------------------------------- who shares with whom


@scenario(is_essential=True)
def lora_and_salt(rank: int, kind: Kind) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"lora_task_id": 1},
        {"lora_task_id": 2},
        {"cache_salt": "me"},
        {"cache_salt": "you"},
        {"lora_task_id": 1, "cache_salt": "me"},
    ]
    with serve(rank, kind) as serving:
        for options in kinds:
            serving.expect_match(serving.ask(PROMPT, **options), (0, False))
            serving.forget_device()
        for options in kinds:
            serving.expect_match(serving.ask(PROMPT, **options), (CAP, True))
            serving.forget_device()


@scenario()
def multimodal(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        resident = serving.from_leader(lambda: serving.leader.chain.host.resident_blocks)
        for image in (1, 2):
            serving.expect_match(serving.ask(PROMPT, multimodal=[[image] * 8]), (0, False))
            serving.forget_device()
        assert serving.metric('kvbm_uncached_requests_total{reason="multimodal"}') == 2
        assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == resident


@scenario()
def what_a_prefill_worker_is_asked_for(rank: int, kind: Kind) -> None:
    """Prompts, and one token of each answer; the next turn begins with the answer that another one has made.
    What sends their KV on is no part of the double."""
    with serve(rank, kind) as serving:
        serving.ask(PROMPT, 1)
        serving.forget_device()
        answer = [*range(700, 720)]
        serving.expect_match(serving.ask([*PROMPT, *answer], 1), (len(PROMPT) // BLOCK * BLOCK, True))


@scenario()
def dummy_and_generation_only(rank: int, kind: Kind) -> None:
    with serve(rank, kind, spoils_late=False) as serving:
        dummy = serving.ask(PROMPT, dummy=True)
        serving.expect_match(dummy, *([] if is_newest(kind) else [(0, False)]))
        if kind.is_v2:  # V1 ends the loop, with any connector
            serving.expect_match(serving.ask(PROMPT, 8, generation_only=True))
        assert serving.metric("kvbm_offload_blocks_d2h") == 0
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (0, False))


@scenario(lambda kind: is_newest(kind) and not kind.is_v2)
def retention_priorities(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env={"DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "40"}) as serving:
        for number, (priority, stored) in enumerate([(None, 0), (39, 0), (40, CAP), (90, CAP)]):
            prompt = range(1000 * number, 1000 * number + 40)
            serving.ask(prompt, priority=priority)
            serving.forget_device()
            serving.expect_match(serving.ask(prompt), (stored, stored > 0))
            serving.forget_device()
    with serve(rank, kind, env={"DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "35"}) as serving:
        for number, (priority, stored) in enumerate([(None, CAP), (34, 0), (35, CAP)]):
            prompt = range(1000 * number, 1000 * number + 40)
            serving.ask(prompt, priority=priority)
            serving.forget_device()
            serving.expect_match(serving.ask(prompt), (stored, stored > 0))
            serving.forget_device()


# ---------------------------------------------------------------- tiers


@scenario(is_essential=True)
def host_smaller_than_the_prompts(rank: int, kind: Kind) -> None:
    with serve(rank, kind, host_blocks=8) as serving:
        serving.may_fail = True  # blocks find no room
        for turn in range(3):
            for start in (0, 100, 200):
                serving.ask(range(start, start + 40 - 7 * turn))
                serving.forget_device()
        serving.ask(PROMPT)
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (8 * BLOCK, True))
        assert serving.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') > 0


@scenario(is_essential=True)
def tier_that_is_not_ready(rank: int, kind: Kind) -> None:
    with serve(rank, kind, is_ready=False) as serving:
        serving.expect_match(serving.ask(PROMPT), (0, False))
        serving.may_begin.set()
        serving.wait_ready()
        serving.step_until(lambda: serving.from_leader(lambda: serving.leader.is_ready))
        assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 0
        serving.executor.drop_device_cache()
        serving.expect_match(serving.ask(PROMPT), (0, False))
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@scenario()
def many_prompts_in_a_small_host(rank: int, kind: Kind) -> None:
    with serve(rank, kind, host_blocks=40) as serving:
        for turn in range(3):
            for start in range(0, 1000, 100):
                serving.submit(range(start, start + 30 + turn), 6)
            serving.executor.run_until_idle()
            serving.forget_device()
        assert serving.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') > 0
        serving.may_fail = True
