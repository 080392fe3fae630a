"""The leader of a model with states: where hits end, what is stored, what counts as used, what goes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm_core.cli.status import parse_samples, status_rows
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import leader_options
from kvbm_core.runtime.request import NULL_BLOCK, RequestState, StateOnDevice, Worth
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.testing.leader_bench import BenchDisk
from kvbm_core.tiers.groups import GroupSpec
from tests.unit.states_bench import ATTENTION, BLOCK, HYBRID, OTHER, PROMPT, STATES, StatesBench

STATES_ONLY = (GroupSpec(0, BLOCK, is_state=True),)


# ---------------------------------------------------------------- hits


def test_a_hit_ends_at_a_state_and_loads_that_one_alone() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12, 24])
    state = bench.open()
    assert bench.match(state, PROMPT) == 24
    plan = bench.leader.onboard(state, 24, bench.tables(24))
    assert plan is not None
    assert {move.group: move.device_blocks for move in plan.moves} == {
        0: (6,),
        1: (1006,),
        2: tuple(range(2001, 2007)),
    }
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.loads(PROMPT[:20]) == 12
    bench.assert_idle()


@pytest.mark.parametrize("lacking", [*STATES, ATTENTION])
def test_no_hit_without_the_kv_nor_without_a_state_of_each_group(lacking: int) -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12])
    bench.tier.forget(bench.chain(PROMPT, lacking))
    assert bench.match(bench.open(), PROMPT) == 0


def test_a_prompt_that_ends_with_its_state_is_not_loaded_whole() -> None:
    bench = StatesBench()
    bench.serve(PROMPT[:24], [12, 24])
    assert bench.loads(PROMPT[:24]) == 12  # one token is left to compute: not from the state after it
    assert bench.loads(PROMPT[:25]) == 24


def without_the_state(table: list[list[int]]) -> None:
    table[0][-1] = NULL_BLOCK


def with_another_state(table: list[list[int]]) -> None:
    table[0][-2] = 999


@pytest.mark.parametrize("change", [without_the_state, with_another_state])
def test_a_load_without_exactly_its_state_is_refused(change: Callable[[list[list[int]]], None]) -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12, 24])
    state, tables = bench.open(), bench.tables(24)
    assert bench.match(state, PROMPT) == 24
    change(tables)
    assert bench.leader.onboard(state, 24, tables) is None
    bench.leader.finish(state)
    bench.assert_idle()


def test_an_engine_that_takes_less_than_was_matched_has_no_state_for_it() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12, 24])
    state = bench.open()
    assert bench.match(state, PROMPT) == 24
    assert bench.leader.onboard(state, 20, [[NULL_BLOCK] * 6, [NULL_BLOCK] * 6, bench.tables(24)[2]]) is None


def test_a_failed_load_of_a_state_is_a_shorter_hit_the_next_time() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12, 24])
    state = bench.open()
    assert bench.match(state, PROMPT) == 24
    plan = bench.leader.onboard(state, 24, bench.tables(24))
    assert plan is not None
    bench.answer(plan, Outcome.CORRUPT)
    assert state.next_offload == [0, 0, 0] and bench.ends(PROMPT) == [12]
    assert bench.match(state, PROMPT) == 0  # the KV is forgotten too
    plan = bench.computes(state, PROMPT, 0, 24, prompt=33)
    bench.answer(plan)
    assert bench.ends(PROMPT) == [12, 24] and bench.match(bench.open("again"), PROMPT) == 24


# ---------------------------------------------------------------- what is stored


def test_hand_offs_come_in_any_order_twice_and_where_no_hit_can_end() -> None:
    bench = StatesBench()
    ended: list[JobPart] = []
    bench.leader._offloading._on_part_end = lambda part, committed: ended.append(part)
    state = bench.open()
    bench.leader.match(state, PROMPT, 0, 0)
    handed = [*bench.handed(24), *bench.handed(12), *bench.handed(24)]
    handed += [StateOnDevice(0, 77, 22), StateOnDevice(0, 78, 0), StateOnDevice(0, 79, 400)]
    handed += [StateOnDevice(0, NULL_BLOCK, 16)]
    bench.leader.offload(state, PROMPT, 0, 24, [[], [], range(2001, 2009)])
    bench.leader.offload_states(state, PROMPT, handed, 33)
    bench.leader.offload_states(state, PROMPT, bench.handed(12), 33)
    plan = bench.take_offloads()
    assert plan is not None
    assert {move.group: move.device_blocks for move in plan.moves} == {
        0: (3, 6),
        1: (1003, 1006),
        2: tuple(range(2001, 2007)),
    }
    bench.answer(plan)
    assert bench.ends(PROMPT) == [12, 24] and len(ended) == 1
    bench.leader.finish(state)
    bench.assert_idle()


def test_states_alone_come_in_prefix_order() -> None:
    bench = StatesBench()
    state = bench.open()
    bench.leader.offload_states(state, PROMPT, [*bench.handed(24), *bench.handed(12)], 33)
    plan = bench.take_offloads()
    assert plan is not None and plan.moves[0].device_blocks == (3, 6)
    bench.answer(plan)
    bench.leader.finish(state)


def test_a_model_of_states_alone_has_no_table_to_read() -> None:
    bench = StatesBench(groups=STATES_ONLY)
    state = bench.serve(PROMPT, [12, 24])
    assert bench.ends(PROMPT) == [12, 24] and bench.tier.resident_blocks == 2
    assert state.next_full_tokens == 36
    assert bench.loads(PROMPT) == 24


def test_inside_a_prompt_states_are_kept_so_far_apart_and_the_last_one_always() -> None:
    bench = StatesBench(every_tokens=12)
    bench.serve(PROMPT, range(4, 33, 4))
    assert bench.ends(PROMPT) == [12, 24, 28, 32]  # one of the last two, whichever the engine makes the last
    bench.serve(OTHER, [8, 16, 28])
    assert bench.ends(OTHER) == [16, 28]


def test_distances_count_from_what_the_request_began_with() -> None:
    bench = StatesBench(every_tokens=12)
    bench.serve(PROMPT[:17], [8, 16])
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    bench.answer(bench.leader.onboard(state, 16, bench.tables(16)))
    bench.answer(bench.computes(state, PROMPT, 16, 20, prompt=100))
    bench.answer(bench.computes(state, PROMPT, 20, 28, prompt=100))
    assert bench.ends(PROMPT) == [16, 28]


def test_of_kv_and_states_of_a_step_too_what_fits_is_what_comes_first() -> None:
    bench = StatesBench(6)
    state = bench.open()
    tables = [bench.leader.groups[g].index * 1000 + 1 for g in range(3)]
    bench.leader.offload(state, PROMPT, 0, 32, [range(first, first + 8) for first in tables])
    bench.leader.offload_states(state, PROMPT, [*bench.handed(16), *bench.handed(32)], 33)
    plan = bench.take_offloads()
    assert plan is not None
    bench.answer(plan)
    assert bench.ends(PROMPT) == [16] and bench.attention_blocks(PROMPT) == 4


@pytest.mark.parametrize("why", ["retired", "distrusted", "off"])
def test_states_that_are_not_what_their_names_say_are_not_stored(why: str) -> None:
    bench = StatesBench()
    state = bench.open()
    if why == "retired":
        bench.leader.retire(state)
    elif why == "distrusted":
        bench.leader._distrusted.add(state.chain.root)
    else:
        bench.leader.disable("a test")
    assert bench.leader.offload_states(state, PROMPT, bench.handed(16), 33) is None
    assert bench.take_offloads() is None


@pytest.mark.shows("KVBM_STATE_EVERY_TOKENS", "KVBM_STATE_EVERY_TOKENS=0")
@pytest.mark.parametrize(("every", "ends"), [(12, [12, 24, 28, 32]), (0, [*range(4, 33, 4)])])
def test_the_setting_says_how_far_apart(every: int, ends: list[int]) -> None:
    settings = KvbmSettings.from_env({"state_every_tokens": every})
    options = leader_options(settings, share_loads=True, state_every_tokens=settings.state_every_tokens)
    bench = StatesBench(every_tokens=options.state_every_tokens)
    bench.serve(PROMPT, range(4, 33, 4))
    assert bench.ends(PROMPT) == ends


def test_what_of_a_step_fits_is_what_comes_first() -> None:
    bench = StatesBench(4)
    bench.serve(PROMPT, [12], finishes=False)
    assert bench.attention_blocks(PROMPT) + 2 * len(bench.ends(PROMPT)) <= 4


# ---------------------------------------------------------------- what goes first


def test_of_an_answer_the_newest_state_stays_and_the_one_before_it_goes_first() -> None:
    bench = StatesBench(every_tokens=100)
    bench.serve(OTHER, [32], request_id="older")
    bench.serve(PROMPT, [12, 16, 20, 24], prompt=14)
    assert bench.ends(PROMPT) == [12, 16, 20, 24]
    assert bench.next_to_go(4) == set(bench.states(PROMPT, [16, 20]))
    assert bench.ends(PROMPT) == [12, 24]  # where the prompt ended, and where the answer did


def hands_off(bench: StatesBench, state: RequestState, end: int) -> None:
    """The state at ``end`` of an answer, whose KV is kept back."""
    bench.leader.offload_states(state, PROMPT, bench.handed(end), 14)
    plan = bench.take_offloads()
    assert plan is not None
    bench.answer(plan)


def test_a_state_whose_kv_is_kept_back_does_not_follow_another_one_yet() -> None:
    """With drafts the newest full block of KV comes one later than its state."""
    bench = StatesBench(every_tokens=100)
    bench.serve(OTHER, [32], request_id="older")
    state = bench.serve(PROMPT[:16], [12, 16], prompt=14, finishes=False)
    hands_off(bench, state, 20)
    assert bench.ends(PROMPT) == [12, 16, 20]
    bench.leader.finish(state)  # aborted
    gone = bench.next_to_go(len(bench.tier.keys()) - 6)
    assert gone >= {*bench.states(PROMPT, [20]), *bench.states(OTHER, [32])}
    assert bench.ends(PROMPT) == [16] and bench.attention_blocks(PROMPT) == 4
    assert bench.loads(PROMPT) == 16


def test_it_does_when_its_kv_is_there() -> None:
    bench = StatesBench(every_tokens=100)
    bench.serve(OTHER, [32], request_id="older")
    state = bench.serve(PROMPT[:16], [12, 16], prompt=14, finishes=False)
    hands_off(bench, state, 20)
    plan = bench.computes(state, PROMPT, 16, 20, prompt=14, hands_off=False)
    assert plan is not None
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.next_to_go(2) == set(bench.states(PROMPT, [16]))


def test_of_an_answer_states_far_enough_apart_stay() -> None:
    bench = StatesBench(every_tokens=8)
    bench.serve(PROMPT, [12, 16, 20, 24, 28, 32], prompt=14)
    bench.next_to_go(4)
    assert bench.ends(PROMPT) == [12, 20, 28, 32]


def test_a_superseded_state_that_is_hit_is_of_use_again() -> None:
    bench = StatesBench(every_tokens=100)
    bench.serve(PROMPT, [12, 16, 20], prompt=14)
    assert bench.loads(PROMPT[:18]) == 16
    bench.serve(OTHER, [32])
    assert not bench.next_to_go(2) & set(bench.states(PROMPT, [16]))


def test_a_hit_uses_one_state_and_the_kv_before_it() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [12, 24, 32])
    bench.serve(OTHER, [32], request_id="between")
    assert bench.loads(PROMPT[:26]) == 24
    gone = bench.next_to_go(6)
    kv = bench.chain(PROMPT, ATTENTION)
    # Older states, and what is behind the one that was hit.
    assert gone == {*bench.states(PROMPT, [12, 32]), *kv[6:8]}


def test_kv_behind_the_last_state_goes_before_what_is_of_use() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [16])  # 16 tokens more have no state
    assert bench.next_to_go(4) == set(bench.chain(PROMPT, ATTENTION)[4:])


def test_a_state_goes_with_the_kv_that_is_of_no_use_without_it() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [32])
    bench.serve(OTHER, [32])
    assert bench.next_to_go(10) == {*bench.chain(PROMPT, ATTENTION), *bench.states(PROMPT, [32])}


def test_states_whose_kv_is_gone_go_first_once_somebody_asks() -> None:
    bench = StatesBench()
    bench.serve(OTHER, [32], request_id="older")
    bench.serve(PROMPT, [12, 24, 32])
    bench.tier.forget(bench.chain(PROMPT, ATTENTION)[4:5])
    assert bench.match(bench.open(), PROMPT) == 12
    assert bench.next_to_go(4) == set(bench.states(PROMPT, [24, 32]))


def test_states_whose_kv_is_computed_again_are_of_use_again() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [24])
    bench.serve(OTHER, [32], request_id="between")
    bench.tier.forget(bench.chain(PROMPT, ATTENTION)[2:3])
    bench.serve(PROMPT, [24], request_id="again")
    assert not bench.next_to_go(2) & set(bench.states(PROMPT, [24]))
    assert bench.loads(PROMPT) == 24


def test_kv_on_its_way_is_not_gone() -> None:
    bench = StatesBench()
    bench.serve(OTHER, [32], request_id="older")
    bench.serve(PROMPT, [24])
    bench.tier.forget(bench.chain(PROMPT, ATTENTION)[2:])
    computing = bench.open("computing")
    plan = bench.computes(computing, PROMPT, 0, 16, prompt=33, hands_off=False)
    assert bench.match(bench.open("asks"), PROMPT) == 0
    assert not bench.next_to_go(2) & set(bench.states(PROMPT, [24]))
    bench.answer(plan)


def test_own_blocks_make_no_room_for_each_other() -> None:
    bench = StatesBench(12, every_tokens=100)
    bench.serve(OTHER, [4], request_id="older")
    state = bench.serve(PROMPT[:21], [12], prompt=14, finishes=False)  # 5 KV, 2 states; OTHER: 2 and 2
    assert bench.ends(PROMPT) == [12]
    bench.answer(bench.computes(state, PROMPT, 21, 32, prompt=14))
    # Three more KV blocks and two states: what is older than the newest state made room, nothing else.
    assert bench.attention_blocks(PROMPT) == 8 and 32 in bench.ends(PROMPT)
    bench.leader.finish(state)
    bench.leader.check_integrity()


def test_a_quota_gives_up_superseded_states_first() -> None:
    bench = StatesBench(every_tokens=100)
    bench.tier.set_quota({7}, 12)
    state = bench.open()
    state.tenant = 7
    before = 0
    for end in (12, 16, 20, 24):
        bench.answer(bench.computes(state, PROMPT, before, end, prompt=14))
        before = end
    bench.leader.finish(state)
    assert bench.ends(PROMPT) == [12, 20, 24] and bench.attention_blocks(PROMPT) == 6
    bench.leader.check_integrity()


# ---------------------------------------------------------------- lower tiers


def on_disk(bench: StatesBench) -> list[int]:
    there = bench.disk.slots.contains
    return [end for end in range(4, 33, 4) if all(map(there, bench.states(PROMPT, [end])))]


def test_of_an_answer_only_the_newest_state_goes_down_when_the_request_ends() -> None:
    bench = StatesBench(every_tokens=100, disk=BenchDisk(64))
    state = bench.serve(PROMPT, [12, 16, 20, 24], prompt=14, finishes=False)
    while bench.write_to_disk():
        pass
    assert on_disk(bench) == [12]
    bench.leader.finish(state)
    bench.write_to_disk()
    assert on_disk(bench) == [12, 24]
    bench.assert_idle()


@pytest.mark.parametrize(("every", "ends"), [(100, [12, 24]), (8, [12, 20, 24])])
def test_states_whose_kv_is_kept_back_go_down_as_others_do(every: int, ends: list[int]) -> None:
    bench = StatesBench(every_tokens=every, disk=BenchDisk(64))
    state = bench.serve(PROMPT[:16], [12, 16], prompt=14, finishes=False)
    for end in (20, 24):
        hands_off(bench, state, end)
        while bench.write_to_disk():
            pass
        assert on_disk(bench) == [one for one in ends if one < end]
        plan = bench.computes(state, PROMPT, end - 4, end, prompt=14, hands_off=False)
        assert plan is not None
        if end == 24:
            bench.leader.finish(state)
        bench.answer(plan)
    while bench.write_to_disk():
        pass
    assert on_disk(bench) == ends
    bench.assert_idle()


def test_a_state_on_disk_and_kv_in_the_host_make_a_hit() -> None:
    bench = StatesBench(disk=BenchDisk(64))
    bench.serve(PROMPT, [12, 24])
    while bench.write_to_disk():
        pass
    bench.tier.forget(bench.states(PROMPT, [12, 24]))
    state = bench.open()
    assert bench.match(state, PROMPT) == 24
    plan = bench.leader.onboard(state, 24, bench.tables(24))
    assert plan is not None and set(plan.reads[0].keys) == set(bench.states(PROMPT, [24]))
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.ends(PROMPT) == [24]


def test_of_an_adapter_that_is_confirmed_at_the_end_the_states_of_use_go_down() -> None:
    bench = StatesBench(every_tokens=100, disk=BenchDisk(64))
    state = bench.open()
    state.worth = Worth.LOCAL
    before = 0
    for end in (12, 16, 20, 24):
        bench.answer(bench.computes(state, PROMPT, before, end, prompt=14))
        before = end
    assert not bench.stores()
    bench.leader.confirm(state)
    bench.leader.finish(state)
    while bench.write_to_disk():
        pass
    assert on_disk(bench) == [12, 24]
    assert bench.disk.slots.match_prefix(bench.chain(PROMPT, ATTENTION)) == 6


def test_of_an_adapter_that_is_confirmed_all_states_that_stay_go_down() -> None:
    """Those inside the prompt and its last one too, though the answer is long."""
    bench = StatesBench(every_tokens=8, disk=BenchDisk(64))
    state = bench.open()
    state.worth = Worth.LOCAL
    before = 0
    for end in (4, 8, 12, 16, 20, 24, 28, 32):
        bench.answer(bench.computes(state, PROMPT, before, end, prompt=22))
        before = end
    bench.leader.confirm(state)
    bench.leader.finish(state)
    while bench.write_to_disk():
        pass
    assert on_disk(bench) == [8, 16, 20, 28, 32]


# ---------------------------------------------------------------- the rest


def test_an_audit_compares_kv_and_stores_no_state_meanwhile() -> None:
    bench = StatesBench()
    bench.serve(PROMPT, [24])
    bench.leader._sampler._rate = 1.0
    state = bench.open()
    assert bench.match(state, PROMPT) == 0 and state.audited is not None
    assert bench.leader.offload_states(state, PROMPT, bench.handed(12), 33) is None
    bench.leader.offload(state, PROMPT, 0, 24, [[], [], range(2001, 2009)])
    (audit,) = bench.leader.take_audits()
    assert [move.group for move in audit.plan().moves] == [ATTENTION]
    bench.answer(audit.plan())
    bench.leader.finish(state)
    assert bench.metric('kvbm_audited_blocks_total{result="equal"}') == 6


def test_states_are_counted_apart_in_each_tier() -> None:
    bench = StatesBench(disk=BenchDisk(64))
    bench.serve(PROMPT, [12, 24])
    while bench.write_to_disk():
        pass
    host, disk = 'kvbm_state_blocks{tier="host"}', 'kvbm_state_blocks{tier="disk"}'
    assert (bench.metric(host), bench.metric(disk)) == (4, 4)
    shown = {what: value for _, what, value in status_rows(parse_samples(bench.leader.metrics.exposition()))}
    assert shown["host"] == shown["disk"] == "12 of 64 blocks (19 %), 4 of them states"
    lease = bench.tier.lease("reader", bench.states(PROMPT, [12]), 1.0)
    assert lease is not None
    bench.tier.forget(bench.states(PROMPT, [12]))
    assert (bench.metric(host), bench.metric(disk)) == (2, 4)
    bench.tier.release(lease)
    bench.leader.check_integrity()
    bench.leader.reset()
    assert (bench.metric(host), bench.metric(disk)) == (0, 0)


def test_groups_are_what_the_tests_say() -> None:
    assert [group.is_state for group in HYBRID] == [True, True, False] and not HYBRID[0].needs_all
