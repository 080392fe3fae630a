"""What was written to lower tiers: how much of it is read again, and what is of no use there."""

from __future__ import annotations

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.recency import as_slots
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.keyed import KeyedOptions, KeyedTier
from kvbm_core.tiers.written import Unread, WrittenSlots
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.plan import OrderKind
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key
from tests.unit.disk_bench import OTHER, PROMPT, bench_of, stored
from tests.unit.tier_bench import TierBench

KEYS = [BlockKey(number.to_bytes(32, "big")) for number in range(1, 41)]


def headless(bench: LeaderBench) -> float:
    """As the page has it."""
    (line,) = [
        line
        for line in bench.leader.metrics.exposition().splitlines()
        if line.startswith("kvbm_headless_blocks{")
    ]
    assert line.startswith('kvbm_headless_blocks{tier="disk"} ')
    return float(line.split()[-1])


def test_all_behind_a_missing_block_is_headless_until_it_is_back() -> None:
    bench = bench_of(16)
    stored(bench)
    stored(bench, OTHER)
    assert headless(bench) == 0
    bench.disk.slots.forget(bench.keys(PROMPT)[1:2])
    assert headless(bench) == 3
    bench.disk.slots.forget(bench.keys(OTHER)[:1])
    assert headless(bench) == 7
    bench.disk.offer([run_of(bench.keys(PROMPT))])
    assert headless(bench) == 4, "it is on its way there again"
    bench.write_to_disk()
    bench.disk.slots.reset()
    assert headless(bench) == 0


def test_of_what_an_earlier_process_wrote_nobody_knows_what_comes_before() -> None:
    bench = LeaderBench(16, disk=BenchDisk(0))
    keys = bench.keys(PROMPT)
    bench.disk_found(8, [Found(slot + 3, key, 1) for slot, key in enumerate(keys[1:4])])
    assert headless(bench) == 0
    bench.store(PROMPT)
    bench.write_to_disk()
    assert headless(bench) == 0
    bench.disk.slots.forget(keys[3:4])
    assert headless(bench) == 1, "the fifth block needs the fourth, which is of the earlier process"


def test_groups_have_chains_of_their_own() -> None:
    slots = WrittenSlots()
    first, second = ([block_key(SequenceHash(key), group) for key in KEYS[:3]] for group in (0, 1))
    slots.begin([0, 1, 2], first, [None, *first[:-1]])
    slots.begin([4, 5], second[1:], second[:-1])
    of = {(0, 1, 2, 4, 5): 2, (0, 1, 2): 0, (1, 2, 4): 3, (): 0}
    assert {used: slots.chains(as_slots(used)).num_headless for used in of} == of


def test_a_long_chain_is_followed_to_its_start() -> None:
    slots, order = WrittenSlots(), [7 * number % 40 for number in range(40)]
    slots.begin(order, KEYS, [None, *KEYS[:-1]])
    assert slots.chains(as_slots(range(40))).num_headless == 0
    used = [slot for slot in range(40) if slot != order[1]]
    assert slots.chains(as_slots(used)).num_headless == 38


def test_bytes_count_at_their_first_read_and_anew_when_they_are_written_again() -> None:
    slots, both = WrittenSlots(), as_slots([3, 4])
    for _ in range(2):
        slots.begin([3, 4], KEYS[:2])
        assert slots.read(both) == 0, "they have not come"
        slots.wrote([3, 4], 10)
        assert [slots.read(both[:1]), slots.read(both), slots.read(both)] == [10, 10, 0]


def test_names_without_slots_are_remembered_up_to_a_number() -> None:
    unread = Unread[str](2)
    unread.wrote([("a", 1), ("b", 2), ("c", 4)])
    assert unread.read(["a", "b"]) == 2 and unread.read(["b", "c", "c"]) == 4


def test_what_comes_back_from_a_store_counts_if_it_was_written_here() -> None:
    bench = TierBench[KeyedTier](
        lambda around: KeyedTier("store", Tier.REMOTE, AdmitAll(), around, KeyedOptions()), 64, 1
    )
    series = 'kvbm_read_again_bytes_total{tier="remote"}'
    bench.in_host(KEYS[:4])
    bench.tier.offer([run_of(KEYS[:4])])
    (store,) = bench.take_sent()
    bench.answer(store)
    bench.host.forget(KEYS[:4])
    for _ in range(2):
        assert bench.tier.wanted([run_of(KEYS[:8])])
        for order in bench.take_sent():
            outcome = Outcome.OK if order.kind is OrderKind.FETCH else Outcome.MISS
            bench.answer(order, outcome=outcome)
        assert bench.metrics.snapshot()[series] == 100, "all that the order wrote, once"
        bench.host.forget(KEYS[:4])
