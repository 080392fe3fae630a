"""Why a request missed, of a leader that is told what its workers do; and the memory of what has left."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvbm_core.blocks import departures
from kvbm_core.blocks.departures import Departures, Leave
from kvbm_core.clock import ManualClock
from kvbm_core.control.messages import MAX_ANSWER_BYTES, Answer, Result, decode
from kvbm_core.control.why_rows import MAX_ROWS, rows_of
from kvbm_core.errors import Outcome
from kvbm_core.identity.roots import NO_ADAPTER, Root, Roots, Stamp
from kvbm_core.observe.labels import MissReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.why import MAX_ID_CHARS, Account, WhyBook, told_s
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.runtime.tenants import Chosen, QuotaRule, Tenant
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey, SequenceHash, block_key
from tests.unit.disk_bench import OTHER, PROMPT, bench_of, leave_host, on_disk, stored
from tests.unit.states_bench import StatesBench

TOKENS = list(range(33))


def key_of(number: int, group: int = 0) -> BlockKey:
    return block_key(SequenceHash(random.Random(number).randbytes(32)), group)


# ---------------------------------------------------------------- what has left


def test_what_has_left_is_told_with_its_times_and_the_last_reason_counts() -> None:
    clock = ManualClock(1000.0)
    gone = Departures(clock)
    keys = [key_of(number) for number in range(100)]
    gone.note(keys, Leave.EVICTED, np.arange(100, dtype=np.float32))
    clock.advance(30.0)
    gone.note(keys[:1], Leave.RESET, 3.0)
    gone.note([], Leave.RESET)
    assert gone.find(keys[7]) == (Leave.EVICTED, 30.0, 7.0)
    assert gone.find(keys[0]) == (Leave.RESET, 0.0, 3.0)
    assert gone.find(key_of(100)) is None


def test_groups_of_one_block_leave_apart() -> None:
    gone = Departures(ManualClock())
    gone.note([key_of(1), key_of(1, 2)], Leave.EVICTED)
    assert gone.find(key_of(1)) and gone.find(key_of(1, 2)) and gone.find(key_of(1, 1)) is None


def test_the_memory_is_bounded_and_the_newest_stay() -> None:
    gone = Departures(ManualClock())
    rng, total = np.random.default_rng(1), 4 * departures.PLACES
    raw = rng.integers(0, 256, (total, 32), np.uint8)
    keys = [BlockKey(row.tobytes()) for row in raw]
    for start in range(0, total, 4096):
        gone.note(keys[start : start + 4096], Leave.EVICTED)
    known = [gone.find(key) is not None for key in keys[:: total // 4096]]
    late, early = np.mean(known[-256:]), np.mean(known[:1024])
    assert late > 0.7  # exp(-1/4) and more
    assert early < 0.2  # exp(-3) and less


# ---------------------------------------------------------------- reasons of the leader


def told(bench: LeaderBench, request_id: str) -> Account:
    (found,) = bench.leader.metrics.why.find(request_id)
    return found


def made_bench(num_slots: int = 64) -> LeaderBench:
    bench = LeaderBench(num_slots)
    bench.leader.metrics.why = WhyBook(100)
    return bench


def test_blocks_on_their_way_to_the_host() -> None:
    bench = made_bench()
    first = bench.open("first")
    plan = bench.offload(first, TOKENS)
    bench.leader.finish(first)
    assert bench.match(bench.open("again"), TOKENS) == 0
    found = told(bench, "again")
    assert found.reason is MissReason.IN_FLIGHT and "copied to the host" in found.text
    bench.answer(plan)


def test_another_request_is_computing_it() -> None:
    bench = made_bench()
    first = bench.open("first")
    assert bench.match(first, TOKENS) == 0
    assert bench.match(bench.open("again"), TOKENS) == 0
    found = told(bench, "again")
    assert found.reason is MissReason.IN_FLIGHT and "another request" in found.text
    bench.leader.finish(first)
    bench.match(bench.open("later"), TOKENS)
    found = told(bench, "later")
    assert found.reason is MissReason.IN_FLIGHT  # "again" is still there
    bench.leader.finish(bench.leader.request("again") or first)
    bench.leader.finish(bench.leader.request("later") or first)
    bench.match(bench.open("last"), TOKENS)
    found = told(bench, "last")
    assert found.reason is MissReason.NOT_KEPT and "was not kept" in found.text


def test_a_copy_that_failed_on_its_way_down() -> None:
    bench = made_bench()
    first = bench.open("first")
    bench.answer(bench.offload(first, TOKENS), Outcome.IO_ERROR)
    bench.leader.finish(first)
    bench.match(bench.open("again"), TOKENS)
    found = told(bench, "again")
    assert found.reason is MissReason.FAILED and "a copy of it failed" in found.text


def test_ages_of_what_was_evicted() -> None:
    bench = made_bench(num_slots=8)
    bench.store(TOKENS)
    bench.clock.advance(60.0)
    bench.leader.poll()
    bench.store(range(1000, 1033), "other")
    bench.clock.advance(600.0)
    bench.leader.poll()
    bench.match(bench.open("again"), TOKENS)
    assert told(bench, "again").text.endswith(
        "evicted from the host tier 10 min ago, to make room, 60 s after its last use"
    )


def test_a_request_is_counted_once_however_often_it_asks() -> None:
    bench = made_bench()
    state = bench.open("first")
    for _ in range(5):
        bench.match(state, TOKENS)
    assert bench.metric('kvbm_missed_requests_total{reason="never_seen"}') == 0
    bench.leader.finish(state)
    assert bench.metric('kvbm_missed_requests_total{reason="never_seen"}') == 1
    assert bench.metric('kvbm_missed_tokens_total{reason="never_seen"}') == 32
    assert len(bench.leader.metrics.why.last(10)) == 1


def test_a_load_that_cannot_begin() -> None:
    bench = made_bench()
    bench.store(TOKENS)
    state = bench.open("again")
    assert bench.match(state, TOKENS) == 32
    bench.leader.chain.forget(bench.keys(TOKENS))
    assert bench.leader.onboard(state, 32, [range(1, 9)]) is None
    found = told(bench, "again")
    assert found.reason is MissReason.FAILED and found.missed_tokens == 32


def asked(bench: LeaderBench, request_id: str, root: Root, *, has_facts: bool = True) -> Account:
    """What is told of a request that begins from this root, is computed and ends."""
    facts = root.facts if has_facts else None
    state = bench.leader.open(request_id, root.hash, None, facts=facts)
    bench.match(state, TOKENS)
    plan = bench.offload(state, TOKENS)
    if plan is not None:
        bench.answer(plan)
    bench.leader.finish(state)
    return told(bench, request_id)


def test_another_layout_of_the_cache_and_a_name_of_which_nothing_is_known() -> None:
    """Ranks in place of those that were there may keep their KV in another way."""
    bench = made_bench()
    roots = Roots(KeyNamespace("engine"), lambda: Stamp("weights", is_lasting=True))
    for layout in ("of the first ranks", "of the second ranks"):
        found = asked(bench, layout, roots.of(NO_ADAPTER, None, layout))
    assert found.reason is MissReason.OTHER_NAMESPACE and found.missed_tokens == 32
    assert found.text.endswith("with another layout of the KV cache")
    series = 'kvbm_missed_requests_total{reason="other_namespace"}'
    assert bench.metric(series) == 1
    found = asked(bench, "unknown", roots.of(NO_ADAPTER, "a salt", "of the first ranks"), has_facts=False)
    assert (
        found.reason is MissReason.OTHER_NAMESPACE and "under another salt, adapter or weights" in found.text
    )
    assert bench.metric(series) == 2
    found = asked(bench, "again", roots.of(NO_ADAPTER, None, "of the second ranks"))
    assert found.reason is None and bench.metric(series) == 2


def test_blocks_on_disk_that_no_host_slot_is_free_for() -> None:
    bench = bench_of(5)
    bench.leader.metrics.why = WhyBook(100)
    stored(bench)
    bench.store(OTHER)
    bench.write_to_disk()  # OTHER is in the host, and both are on the disk
    state = bench.open("reads")
    assert bench.match(state, OTHER) == 16
    last = bench.open("pins the last slot")
    lease = bench.tier.lease("pin", bench.keys(OTHER), 100.0)
    assert lease is not None
    assert bench.match(last, PROMPT) == 0
    found = told(bench, "pins the last slot")
    assert found.reason is MissReason.NO_ROOM and found.missed_tokens == 16
    assert "from token 0 on: it is there, and could not be held" in found.text
    bench.leader.finish(last)
    assert bench.metric('kvbm_missed_requests_total{reason="no_room"}') == 1
    bench.tier.release(lease)
    bench.leader.finish(state)
    assert bench.match(bench.open("later"), PROMPT) == 16 and told(bench, "later").reason is None


class AdmitWhileOpen(AdmitAll):
    """Takes everything, until ``is_open`` is False."""

    is_open = True

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """All, or none."""
        return list(keys) if self.is_open else []


def test_the_newest_departure_counts_whatever_tier_it_is_of() -> None:
    policy = AdmitWhileOpen()
    bench = bench_of(5, BenchDisk(5, make_admission=lambda clock: policy))
    bench.leader.metrics.why = WhyBook(100)
    stored(bench)
    bench.store(OTHER)
    bench.clock.advance(1.0)
    bench.write_to_disk()  # PROMPT has left the host, and now the disk
    bench.match(bench.open("first"), PROMPT)
    assert "evicted from the disk tier" in told(bench, "first").text
    policy.is_open = False
    bench.clock.advance(3600.0)
    bench.store(PROMPT, "computed again")
    bench.clock.advance(60.0)
    bench.store(OTHER, "computed again too")
    bench.match(bench.open("again"), PROMPT)
    found = told(bench, "again")
    assert found.reason is MissReason.EVICTED and "evicted from the host tier 0 ms ago" in found.text


def broken_disk() -> LeaderBench:
    """PROMPT is on the disk alone, and the disk fails."""
    bench = bench_of(5)
    bench.leader.metrics.why = WhyBook(100)
    stored(bench)
    bench.store(OTHER)
    bench.take_sent()
    for _ in range(FAILURES_IN_A_ROW):
        bench.disk.judge(Outcome.IO_ERROR)
    assert not bench.disk.is_usable
    return bench


def test_while_the_disk_fails_only_what_it_has_is_missed_for_that() -> None:
    bench = broken_disk()
    bench.match(bench.open("on disk"), PROMPT)
    found = told(bench, "on disk")
    assert found.reason is MissReason.FAILED and "the disk tier is not asked: it fails" in found.text
    bench.match(bench.open("new"), range(900, 920))
    found = told(bench, "new")
    assert found.reason is MissReason.NEVER_SEEN
    evicted = bench_of(5)
    evicted.leader.metrics.why = WhyBook(100)
    for _ in range(FAILURES_IN_A_ROW):
        evicted.disk.judge(Outcome.IO_ERROR)
    evicted.store(PROMPT)
    evicted.store(OTHER)
    evicted.match(evicted.open("again"), PROMPT)
    found = told(evicted, "again")
    assert found.reason is MissReason.EVICTED and "evicted from the host tier" in found.text
    assert found.text.endswith("; the disk tier takes nothing: it fails, and is left alone for a while")


def quota_bench() -> tuple[LeaderBench, Tenant]:
    """Its one tenant may have two blocks in the host, of many."""
    bench, tenant = made_bench(16), Tenant("", "s")
    bench.leader.tenants.set_rule(Chosen.of(None, "s"), QuotaRule(2, None))
    return bench, tenant


def test_a_full_quota_is_not_a_full_host() -> None:
    bench, tenant = quota_bench()
    first = bench.open("first", tenant)
    bench.answer(bench.offload(first, PROMPT))
    bench.leader.finish(first)
    bench.match(bench.open("again", tenant), PROMPT)
    found = told(bench, "again")
    assert found.reason is MissReason.QUOTA and found.missed_tokens == 8
    assert "from token 8 on: computed when its salt or adapter had all that its quota" in found.text
    assert bench.metric('kvbm_dropped_blocks_total{reason="quota"}') == 3
    assert bench.metric('kvbm_dropped_blocks_total{reason="no_space"}') == 0
    bench.leader.finish(bench.leader.request("again") or first)
    assert bench.metric('kvbm_missed_requests_total{reason="quota"}') == 1


def test_what_a_quota_evicts_a_larger_tier_would_not_keep() -> None:
    bench, tenant = quota_bench()
    for request_id, tokens in (("first", PROMPT[:8]), ("other", OTHER[:8])):
        state = bench.open(request_id, tenant)
        bench.answer(bench.offload(state, tokens))
        bench.leader.finish(state)
    bench.match(bench.open("again", tenant), PROMPT[:9])
    found = told(bench, "again")
    assert found.reason is MissReason.QUOTA and "evicted from the host tier, as its salt" in found.text


def test_a_quota_of_the_disk_and_one_that_lets_nothing_up() -> None:
    bench, tenant = bench_of(16), Tenant("", "s")
    bench.leader.metrics.why = WhyBook(100)
    bench.leader.tenants.set_rule(Chosen.of(None, "s"), QuotaRule(None, 2))
    first = bench.open("first", tenant)
    bench.answer(bench.offload(first, PROMPT))
    bench.leader.finish(first)
    bench.write_to_disk()
    assert on_disk(bench, PROMPT) == 2 and bench.metric('kvbm_dropped_blocks_total{reason="quota"}') == 3
    assert bench.metric('kvbm_dropped_blocks_total{reason="no_space"}') == 0
    leave_host(bench, range(5))
    bench.leader.tenants.set_rule(Chosen.of(None, "s"), QuotaRule(0, 2))
    assert bench.match(bench.open("again", tenant), PROMPT) == 0
    found = told(bench, "again")
    assert found.reason is MissReason.QUOTA and "it is there, and could not be held" in found.text


def states_bench(num_slots: int = 64) -> StatesBench:
    bench = StatesBench(num_slots)
    bench.leader.metrics.why = WhyBook(100)
    return bench


def test_kv_without_a_state() -> None:
    bench = states_bench()
    bench.serve(PROMPT, [8], request_id="first")
    bench.match(bench.open("again"), PROMPT)
    found = told(bench, "again")
    assert found.reason is MissReason.NO_STATE and found.missed_tokens == 8
    assert found.text == (
        "from token 8 on: its KV is there up to token 16, but no state: none that is known was kept "
        "(KVBM_STATE_EVERY_TOKENS)"
    )
    bench.clock.advance(30.0)
    bench.leader.poll()
    bench.serve(PROMPT, [8], request_id="once more")
    bench.next_to_go(3)  # the KV behind the state; then the state
    bench.next_to_go(2)
    bench.match(bench.open("later"), PROMPT)
    found = told(bench, "later")
    assert found.reason is MissReason.NO_STATE
    assert "from token 0 on: its KV is there up to token 8, but no state: evicted from the host" in found.text


def test_a_state_on_its_way_and_one_that_cannot_be_held() -> None:
    bench = states_bench()
    state = bench.open("first")
    bench.match(state, PROMPT)
    bench.answer(bench.computes(state, PROMPT, 0, 16, prompt=20, hands_off=False))
    plan = bench.computes(state, PROMPT, 16, 16, prompt=20)
    bench.match(bench.open("again"), PROMPT)
    found = told(bench, "again")
    assert found.reason is MissReason.IN_FLIGHT and "its state is being copied" in found.text
    bench.answer(plan)
    bench.match(bench.open("later"), PROMPT)
    assert told(bench, "later").reason is None


def test_kv_that_was_never_there_is_what_is_missing_not_its_state() -> None:
    bench = states_bench()
    bench.serve(PROMPT, [8], request_id="first")
    bench.match(bench.open("longer"), [*PROMPT[:8], *range(40)])
    found = told(bench, "longer")
    assert found.reason is MissReason.NEVER_SEEN and "from token 8 on" in found.text
    alone = StatesBench(groups=(GroupSpec(0, 4, is_state=True),))
    alone.leader.metrics.why = WhyBook(100)
    alone.match(alone.open("new"), PROMPT)
    found = told(alone, "new")
    assert found.reason is MissReason.NEVER_SEEN
    alone.serve(PROMPT, [8])
    alone.clock.advance(1.0)
    alone.leader.poll()
    alone.next_to_go(1)
    alone.match(alone.open("again"), PROMPT)
    found = told(alone, "again")
    assert found.reason is MissReason.NO_STATE and "no state: evicted from the host tier" in found.text


def test_each_reason_is_provoked_by_a_test_and_explained_on_the_page() -> None:
    tests = Path(__file__).parents[1]
    texts = [(tests / folder / "test_why.py").read_text(encoding="utf-8") for folder in ("unit", "vllm")]
    asserted = set(re.findall(r"assert \w+\.reason is MissReason\.(\w+)", "\n".join(texts)))
    page = (tests.parent / "docs" / "why.md").read_text(encoding="utf-8")
    for reason in set(MissReason) - {MissReason.OTHER}:
        assert reason.name in asserted, f"no test provokes {reason}"
        assert f"* **`{reason}`**: " in page, f"docs/why.md does not explain {reason}"


# ---------------------------------------------------------------- the book


def test_the_book_finds_a_request_by_a_part_of_its_id() -> None:
    book = WhyBook(3)
    for number in range(5):
        book.add(Account(f"chatcmpl-{number}-0", 10, 0, 0, None, ""))
    assert [one.request_id for one in book.last(2)] == ["chatcmpl-4-0", "chatcmpl-3-0"]
    assert [one.request_id for one in book.find("chatcmpl-2")] == ["chatcmpl-2-0"]
    assert not book.find("chatcmpl-1") and not book.last(0)
    off = WhyBook(0)
    off.add(Account("a", 1, 0, 0, None, ""))
    assert not off.last(5)


def test_ids_that_clients_make_long_cost_little_and_an_answer_is_never_too_long_to_be_read() -> None:
    book = WhyBook(500)
    for number in range(300):
        request_id = f"{number} " + "\x01" * 100_000
        book.add(Account(request_id, 10, 0, 10, MissReason.NEVER_SEEN, "\x1b" * 1000))
    found = book.find("299 " + "\x01" * 100_000)
    assert [account.request_id[:4] for account in found] == ["299 "]
    assert all(len(account.request_id) <= MAX_ID_CHARS for account in book.last(300))
    rows = rows_of(book, "", MAX_ROWS)
    answer = Answer(instance="one", rank=0, result=Result.DONE, why=rows)
    assert len(rows) > 20 and rows[0].request.startswith("299 ")
    assert decode(msgspec.json.encode(answer), Answer, MAX_ANSWER_BYTES) == answer


def test_the_beginning_of_a_prompt_is_remembered_without_a_long_id() -> None:
    bench = made_bench()
    bench.match(bench.open("i" * 100_000), TOKENS)
    (beginning,) = bench.leader._why._beginnings.values()
    assert not beginning[0].request_id


def test_an_unknown_reason_counts_as_other() -> None:
    metrics = Metrics()
    metrics.missed("no such reason", 5)
    assert metrics.snapshot()['kvbm_missed_tokens_total{reason="other"}'] == 5


def test_spans_of_time_are_told_in_words() -> None:
    assert [told_s(s) for s in (0.25, 5.2, 119, 600, 9000)] == ["250 ms", "5 s", "119 s", "10 min", "2.5 h"]
