"""A store that keeps extents: how few questions and answers bring a prompt up, and what is stored of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.storage.extents import extent_blocks
from kvbm_core.storage.stores import extent_bytes
from kvbm_core.tiers.keyed import HOST_SHARE, KeyedOptions
from kvbm_core.tiers.lower import Seeker, Sought
from kvbm_core.tiers.storing import StoringOptions
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import NO_SLOT, OrderKind
from kvbm_core.types import BlockKey
from tests.unit.extent_bench import ExtentBench, chain, names_of

LONG = chain(8192)  # 131,072 tokens
SHORT = chain(100)
OPTIONS = KeyedOptions()

# ---------------------------------------------------------------- the way up: requests


def test_a_cold_prompt_costs_one_request() -> None:
    bench = ExtentBench()
    assert bench.ask(LONG) is Sought.COMING
    bench.reply()
    for _ in range(3):
        assert bench.ask(LONG) is Sought.NOWHERE and not bench.sent
    assert bench.asked == [(LONG[0], 1)]


@pytest.mark.parametrize(
    ("full_blocks", "most_finds", "most_requests"), [(64, 20, 160), (512, 20, 50)], ids=str
)
@pytest.mark.parametrize("end", [8192, 8191, 8000])
def test_a_full_hit_of_a_long_prompt(full_blocks: int, most_finds: int, most_requests: int, end: int) -> None:
    """131,072 tokens, of which the last one is always computed: blocks up to 8191 are wanted."""
    bench = ExtentBench(1 << 16, full_blocks)
    bench.put(LONG)
    assert bench.bring(LONG, end) >= end
    assert len(bench.asked) <= most_finds, bench.asked
    assert len(bench.asked) + len(bench.got) <= most_requests
    assert len(bench.got) == len(set(bench.got)) and set(bench.got) <= bench.has


@pytest.mark.parametrize("stored", [1, 3, 63, 65, 100, 1000, 4097, 8191])
def test_what_is_stored_of_a_prompt_is_found_to_its_last_block(stored: int) -> None:
    bench = ExtentBench(1 << 16)
    bench.put(LONG, stored)
    assert bench.bring(LONG) == stored
    assert len(bench.asked) <= 60, bench.asked
    assert all(name in bench.has for name in bench.got), "what is absent was fetched"


@pytest.mark.parametrize("local", [1, 5, 64, 70, 99, 127])
def test_what_lies_beyond_the_hosts_part_is_found(local: int) -> None:
    bench, keys = ExtentBench(), chain(200)
    bench.in_host(keys[:local])
    bench.put(keys, 128)
    assert bench.bring(keys) == 128
    assert bench.host.pending_blocks == 0


def test_of_an_extent_only_what_is_missing_is_fetched() -> None:
    bench = ExtentBench(full_blocks=8)
    keys = chain(32)
    bench.in_host([*keys[:10], keys[12]])
    bench.put(keys)
    assert bench.ask(keys, 10, 16) is Sought.COMING
    bench.reply()
    assert bench.ask(keys, 10, 16) is Sought.COMING
    (fetch,) = [order for order in bench.sent if order.kind is OrderKind.FETCH]
    assert fetch.extents == ((8, 2),) and fetch.keys == tuple(keys[10:16])
    assert [slot == NO_SLOT for slot in fetch.slots] == [False, False, True, False, False, False]
    bench.reply()
    assert bench.host.match_prefix(keys) == 16


def test_early_blocks_come_first_and_only_a_part_of_the_host_is_fetched_into() -> None:
    bench = ExtentBench(num_slots=64 * HOST_SHARE, full_blocks=8)
    bench.put(LONG)
    seeker = Seeker()
    for _ in range(3):
        bench.reply()
        assert bench.ask(LONG, seeker=seeker) is Sought.COMING
    fetches = bench.take_sent()
    assert [order.kind for order in fetches] == [OrderKind.FETCH] * len(fetches) and len(fetches) > 1
    assert [key for order in fetches for key in order.keys] == LONG[1 : 1 + bench.tier.fetching_blocks]
    assert 32 <= bench.tier.fetching_blocks <= 64
    bench.answer(fetches[0])
    assert bench.host.match_prefix(LONG) == 1 + len(fetches[0].keys)
    for order in fetches[1:]:
        bench.answer(order)
    bench.assert_idle()


def test_an_extent_larger_than_the_hosts_share_comes_alone() -> None:
    bench = ExtentBench(num_slots=200, full_blocks=64)
    bench.put(LONG)
    assert bench.bring(LONG[:128]) == 128


def test_a_prompt_larger_than_the_host_does_not_drive_out_its_own_head() -> None:
    bench = ExtentBench(num_slots=200, full_blocks=8)
    bench.put(LONG)
    assert 190 < bench.bring(LONG[:256]) <= 200


def test_several_requests_share_a_fetch() -> None:
    bench, other = ExtentBench(), [*SHORT[:40], *chain(40, salt=1)]
    bench.put(SHORT)
    first, second = Seeker(), Seeker()
    while Sought.COMING in {bench.ask(SHORT, seeker=first), bench.ask(other, seeker=second)}:
        bench.reply()
    assert len(bench.asked) == len(set(bench.asked)) and len(bench.got) == len(set(bench.got))
    assert bench.host.match_prefix(SHORT) == 100


# ---------------------------------------------------------------- the way up: faults


def test_a_rumor_costs_a_read_and_ends() -> None:
    """An extent in the middle is gone, and a later one is there: what lies before it was believed."""
    bench = ExtentBench(1 << 16)
    bench.put(LONG)
    bench.has.discard((LONG[64 * 40 - 1], 64))
    seeker = Seeker()
    assert bench.bring(LONG, seeker=seeker) == 64 * 39
    assert bench.got.count((LONG[64 * 40 - 1], 64)) == 1


def test_of_a_damaged_extent_the_blocks_before_the_bad_one_are_kept() -> None:
    bench = ExtentBench()
    bench.put(SHORT)
    bad = dict.fromkeys(SHORT[50:64], Outcome.CORRUPT)
    seeker = Seeker()
    for _ in range(20):
        if bench.ask(SHORT, seeker=seeker) is not Sought.COMING:
            break
        bench.reply(bad)
    assert bench.host.match_prefix(SHORT) == 50
    assert bench.got.count((SHORT[63], 32)) == 1, "one request asks once for what failed for it"
    bench.clock.advance(OPTIONS.absent_s)
    assert bench.ask(SHORT, seeker=seeker) is not Sought.COMING and not bench.sent
    assert bench.ask(SHORT) is Sought.COMING, "another request asks again"
    assert (SHORT[63], 32) in names_of(bench.sent[0])


@pytest.mark.parametrize(
    ("outcome", "until_asked_again_s"),
    [(Outcome.MISS, OPTIONS.absent_s), (Outcome.TIMED_OUT, OPTIONS.trouble_s)],
)
def test_how_long_an_answer_is_believed(outcome: Outcome, until_asked_again_s: float) -> None:
    bench = ExtentBench()
    bench.ask(SHORT)
    bench.answer(bench.take_sent()[0], outcome)
    bench.clock.advance(until_asked_again_s - 0.01)
    assert bench.ask(SHORT) is Sought.NOWHERE and not bench.sent
    bench.clock.advance(0.01)
    assert bench.ask(SHORT) is Sought.COMING and bench.sent


def test_one_bad_block_does_not_count_as_a_failed_store() -> None:
    bench = ExtentBench()
    for i in range(10):
        keys = chain(64, salt=i + 1)
        bench.in_host(keys)
        bench.offer(keys)
        for order in bench.take_sent():
            bench.answer(order, failed={3: Outcome.IO_ERROR})
    assert bench.tier.is_usable
    keys = chain(64, salt=100)
    for _ in range(3):
        bench.in_host(keys)
        bench.offer(keys)
        for order in bench.take_sent():
            bench.answer(order, Outcome.IO_ERROR)
    assert not bench.tier.is_usable


# ---------------------------------------------------------------- the way down


def test_extents_are_stored_when_all_of_their_blocks_are_in_the_host() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(40)
    bench.in_host(keys[:5])
    bench.tier.offer([BlockRun(keys, 0, 5)])
    assert bench.stored(bench.reply()) == [(keys[0], 1), (keys[1], 1), (keys[3], 2)]
    bench.in_host(keys[8:20])
    bench.tier.offer([BlockRun(keys, 8, 20)])
    assert not bench.sent, "blocks 5 to 7 came never, and without them nobody can use the others"
    bench.in_host(keys[5:8])
    bench.tier.offer([BlockRun(keys, 5, 8)])
    assert bench.stored(bench.reply()) == [(keys[7], 4)]
    bench.tier.offer([BlockRun(keys, 8, 20)])
    assert bench.stored(bench.reply()) == [(keys[15], 8)]
    for run in (BlockRun(keys, 0, 20), BlockRun(keys, 3, 4)):
        bench.tier.offer([run])
        bench.tier.hit([run])
    assert not bench.sent, "they are known to be there"
    bench.assert_idle()


def test_the_end_of_a_chain_is_stored_when_it_has_ended() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(23)
    bench.in_host(keys)
    bench.tier.offer([BlockRun(keys, 0, 23)])
    bench.reply()
    bench.tier.ended([BlockRun(keys, 0, 23)])
    assert bench.stored(bench.reply()) == [(keys[19], 4), (keys[21], 2), (keys[22], 1)]
    fresh = ExtentBench(full_blocks=8)
    fresh.has = bench.has
    assert fresh.bring(keys) == 23


def test_what_was_fetched_is_not_stored_again() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(32)
    bench.put(keys)
    bench.bring(keys)
    bench.tier.hit([BlockRun(keys, 0, 32)])
    bench.tier.ended([BlockRun(keys, 0, 32)])
    assert not bench.sent


def test_of_a_hot_prompt_one_extent_is_looked_for_and_all_are_stored_again_if_it_is_lost() -> None:
    bench, keys = ExtentBench(full_blocks=16), chain(100)
    bench.in_host(keys)
    bench.offer(keys)
    stored = bench.stored(bench.reply())
    assert (keys[95], 16) in stored
    for _ in range(3):
        bench.clock.advance(OPTIONS.present_s + 1.0)
        bench.hit(keys)
        (order,) = bench.reply()
        assert order.kind is OrderKind.FIND and names_of(order) == [(keys[95], 16)]
    bench.has.clear()  # its server was restarted
    bench.clock.advance(OPTIONS.present_s + 1.0)
    bench.hit(keys)
    bench.reply()
    bench.hit(keys)
    assert sorted(bench.stored(bench.reply())) == sorted(stored)
    bench.assert_idle()


def test_the_filter_goes_by_an_extents_last_block() -> None:
    bench, keys = ExtentBench(full_blocks=8, admission=FrequencyFilter(ManualClock())), chain(16)
    bench.in_host(keys)
    bench.tier.offer([BlockRun(keys, 0, 16)])
    assert not bench.sent
    bench.tier.hit([BlockRun(keys, 0, 8)])
    assert bench.stored(bench.reply()) == [(keys[0], 1), (keys[1], 1), (keys[3], 2), (keys[7], 4)]
    bench.tier.hit([BlockRun(keys, 0, 9)])
    assert bench.stored(bench.reply()) == [(keys[15], 8)], "a part of it was used"


def test_of_a_window_and_of_who_does_not_know_its_head_the_last_extents_are_stored_alone() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(32)
    bench.in_host(keys[16:])
    bench.tier.offer([BlockRun(keys, 16, 32)])
    assert not bench.sent
    bench.tier.offer([BlockRun(keys, 16, 32, has_window=True)])
    assert bench.stored(bench.reply()) == [(keys[23], 8), (keys[31], 8)]


def test_the_end_of_a_chain_is_not_stored_without_what_comes_before_it() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(23)
    bench.in_host(keys)
    bench.tier.ended([BlockRun(keys, 0, 23)])
    assert not bench.sent
    bench.tier.offer([BlockRun(keys, 0, 23)])
    bench.host.forget(keys[20:22])
    bench.tier.ended([BlockRun(keys, 0, 23)])
    assert bench.stored(bench.reply())[-1] == (keys[19], 4)


def test_blocks_that_two_extents_share_are_stored_by_two_orders_and_each_extent_once() -> None:
    storing = StoringOptions(max_storing_blocks=8)
    bench, keys, others = ExtentBench(full_blocks=8, storing=storing), chain(32), chain(64, salt=1)
    bench.in_host([*others, *keys])
    bench.tier.offer([BlockRun(keys, 0, 8)])
    bench.reply()
    bench.tier.offer([BlockRun(others, 0, 64)])  # the way is full
    full = bench.take_sent()
    for _ in range(2):
        bench.tier.ended([BlockRun(keys, 0, 12)])
        bench.tier.offer([BlockRun(keys, 8, 16)])
    assert not bench.sent
    for order in full:
        bench.answer(order)
    orders = bench.take_sent()
    assert [names_of(order) for order in orders] == [[(keys[11], 4)], [(keys[15], 8)]]
    for order in orders:
        order.check(bench.num_slots)
        bench.answer(order)
    bench.assert_idle()


def test_an_extent_that_is_coming_is_not_fetched_for_its_other_blocks() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(16)
    bench.in_host(keys[:12])
    bench.put(keys)
    bench.ask(keys, 12)
    bench.reply()
    assert bench.ask(keys, 12) is Sought.COMING
    fetch = bench.take_sent()[0]
    bench.host.forget([keys[11]])
    assert bench.ask(keys, 11) is Sought.COMING and not bench.sent
    bench.answer(fetch)
    assert bench.ask(keys, 11) is Sought.COMING
    fetch = bench.take_sent()[0]
    assert fetch.keys == tuple(keys[11:])
    bench.host.forget([keys[14]])
    assert bench.ask(keys, 14) is Sought.COMING and not bench.sent
    bench.answer(fetch)
    bench.assert_idle()


def test_what_waits_for_the_store_is_bounded_in_blocks() -> None:
    storing = StoringOptions(max_storing_blocks=8, max_waiting_blocks=80)
    bench, keys = ExtentBench(full_blocks=8, storing=storing), chain(512)
    bench.in_host(keys)
    bench.tier.offer([BlockRun(keys, 0, 512)])
    assert bench.tier.storing_blocks <= 80 + 64
    stored: list[tuple[BlockKey, int]] = []
    while orders := bench.reply():
        stored += bench.stored(orders)
    assert 64 <= sum(size for _, size in stored) <= 80
    bench.assert_idle()


def test_what_has_left_the_host_is_not_stored() -> None:
    storing = StoringOptions(max_storing_blocks=8)
    bench, keys = ExtentBench(full_blocks=8, storing=storing), chain(256)
    bench.in_host(keys)
    bench.tier.offer([BlockRun(keys, 0, 256)])
    orders = bench.take_sent()
    bench.host.forget(keys[200:202])
    stored = bench.stored(orders)
    for order in orders:
        bench.answer(order)
    while orders := bench.reply():
        stored += bench.stored(orders)
    assert stored[-1] == (keys[199], 8), "what is behind it is of no use"
    bench.assert_idle()


# ---------------------------------------------------------------- how many requests to expect

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
LONG_TOKENS = 131_072
STORES = {"bucket, Mooncake": "s3://bucket", "Valkey, Redis": "redis://host", "directory": "file:///mnt/kv"}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def rows_of_the_page() -> list[list[str]]:
    """The table of requests in docs/scale.md."""
    lines = PAGE.read_text(encoding="utf-8").partition("## Requests of a prompt")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines() if "|" in line
    ][2:]


def bytes_in(text: str) -> int:
    """Of a number with a unit."""
    number, unit = text.split()
    return int(number) * UNITS[unit]


def store_of(url: str, block_bytes: int) -> ExtentBench:
    """One with room for the whole prompt, of a store such as engines open."""
    full = extent_blocks(block_bytes, extent_bytes(url)) if extent_bytes(url) else 1
    bench = ExtentBench(1 << 16, full, extent_bytes=extent_bytes(url))
    bench.check = lambda: None  # type: ignore[method-assign] # thousands of times of thousands of blocks
    return bench


@pytest.mark.parametrize("row", rows_of_the_page(), ids=lambda row: " ".join(row[:2]))
def test_a_prompt_costs_the_requests_that_the_page_says(row: list[str]) -> None:
    store, block, full_blocks, nothing, look_ups, fetches, num_bytes = row
    tokens, size = block.split(", ")
    keys, url = chain(LONG_TOKENS // int(tokens)), STORES[store]
    assert len(keys) * bytes_in(size) == bytes_in(num_bytes)
    bench = store_of(url, bytes_in(size))
    assert bench.tier.full_blocks == int(full_blocks)
    assert bench.bring(keys) == 0 and len(bench.asked) == int(nothing)
    bench = store_of(url, bytes_in(size))
    bench.put(keys)
    assert bench.bring(keys) == len(keys)
    assert [len(bench.asked), len(bench.got)] == [int(n.replace(",", "")) for n in (look_ups, fetches)]


@pytest.mark.parametrize("url", ["s3://bucket", "mooncake://host:50051", "rediss://host"])
@pytest.mark.parametrize("block_tokens", [8, 16, 32, 64, 128, 256])
def test_a_prompt_of_32_extents_takes_at_most_50_requests_whatever_the_block_size(
    url: str, block_tokens: int
) -> None:
    keys = chain(LONG_TOKENS // block_tokens)
    for parts in (1, 4, 32):
        bench = store_of(url, parts * extent_bytes(url) // len(keys))
        bench.put(keys)
        assert bench.bring(keys) == len(keys)
        assert len(bench.asked) + len(bench.got) <= 50, (parts, len(bench.asked), len(bench.got))


@pytest.mark.parametrize("stored", [1, 2, 7, 100, 1023, 1024])
def test_blocks_as_large_as_an_extent_are_found_by_few_questions(stored: int) -> None:
    """Each of them is one object: not each of them is asked for."""
    bench = store_of("s3://bucket", 4 << 20)
    keys = chain(1024)
    bench.put(keys, stored)
    assert bench.bring(keys) == stored
    assert len(bench.asked) <= 60 and sorted(bench.got) == sorted(bench.has)
    lost = (keys[stored // 2], 1)
    bench = store_of("s3://bucket", 4 << 20)
    bench.put(keys, stored)
    bench.has.discard(lost)
    assert bench.bring(keys) == stored // 2, "what was believed to be there was read, and is not there"
