"""A leader over a store that keeps extents: which extents it stores of requests, and when."""

from __future__ import annotations

from kvbm_core.policy.admission import AdmitAll
from kvbm_core.storage.extents import EXTENT_BYTES
from kvbm_core.testing.leader_bench import ONE_GROUP, BenchDisk, LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.keyed import KeyedOptions, keyed_tier
from kvbm_core.transfer.plan import OrderKind
from kvbm_core.types import Tier
from tests.unit.extent_bench import names_of

FULL = 8
PROMPT = list(range(4 * 13 + 1))  # 13 blocks: extents of 1, 1, 2, 4, and 5 that are left
WINDOWED = (GroupSpec(0, 4), GroupSpec(1, 4, window_tokens=6))


def bench_of(groups: tuple[GroupSpec, ...] = ONE_GROUP, world_size: int = 1) -> LeaderBench:
    options = KeyedOptions(extent_bytes=EXTENT_BYTES)
    maker = keyed_tier("store", Tier.REMOTE, AdmitAll(), options)
    disk = BenchDisk(0, more=(maker,), block_bytes=world_size * EXTENT_BYTES // FULL)
    return LeaderBench(100, groups=groups, world_size=world_size, disk=disk)


def stored(bench: LeaderBench) -> list[int]:
    """The sizes of the extents that were ordered to be stored; all ranks answer."""
    orders = [order for order in bench.take_sent() if order.tier == "store"]
    for order in orders:
        assert order.kind is OrderKind.STORE
        bench.say(order.job_id)
    bench.leader.poll()
    return [size for order in orders for _, size in names_of(order)]


def test_what_is_left_of_a_request_is_stored_when_it_ends() -> None:
    bench = bench_of()
    state = bench.open()
    bench.answer(bench.offload(state, PROMPT))
    assert stored(bench) == [1, 1, 2, 4]
    bench.leader.finish(state)
    assert stored(bench) == [4, 1]
    bench.assert_idle()


def test_the_end_waits_for_the_last_offload() -> None:
    bench = bench_of()
    state = bench.open()
    plan = bench.offload(state, PROMPT)
    bench.leader.finish(state)
    assert stored(bench) == []
    bench.answer(plan)
    assert stored(bench) == [1, 1, 2, 4, 4, 1]
    bench.assert_idle()


def test_what_comes_block_by_block_is_stored_when_an_extent_is_whole() -> None:
    bench = bench_of()
    state, sizes = bench.open(), list[list[int]]()
    for block in range(13):
        tokens = PROMPT[: 4 * (block + 1)]
        plan = bench.offload_step(state, tokens, 4 * block, len(tokens), [range(1, 14)])
        bench.answer(plan)
        sizes.append(stored(bench))
    assert sizes == [[1], [1], [], [2], [], [], [], [4], [], [], [], [], []]
    bench.leader.finish(state)
    assert stored(bench) == [4, 1]


def test_ranks_and_groups_each_have_extents_of_their_own() -> None:
    bench = bench_of(WINDOWED, world_size=2)
    state = bench.open()
    bench.answer(bench.offload(state, PROMPT))
    bench.leader.finish(state)
    assert sorted(stored(bench)) == sorted(2 * [1, 1, 2, 4, 4, 1])


def test_what_means_nothing_elsewhere_is_not_stored() -> None:
    bench = bench_of()
    state = bench.leader.open("r", bytes(32), None, is_lasting=False)  # type: ignore[arg-type]
    bench.answer(bench.offload(state, PROMPT))
    bench.leader.finish(state)
    assert stored(bench) == []
    bench.assert_idle()


def test_of_a_request_whose_weights_have_changed_no_end_is_stored() -> None:
    bench = bench_of()
    state = bench.open()
    bench.answer(bench.offload(state, PROMPT))
    assert stored(bench) == [1, 1, 2, 4]
    bench.leader.retire(state)
    bench.leader.finish(state)
    assert stored(bench) == []
    bench.assert_idle()


def test_a_cold_prompt_costs_one_look_up_whatever_the_groups() -> None:
    bench = bench_of(WINDOWED)
    state = bench.open()
    assert bench.match(state, PROMPT) == 0  # this bench's requests do not wait
    (find,) = bench.take_sent()
    assert find.kind is OrderKind.FIND and len(find.keys) == 1
    bench.leader.finish(state)
