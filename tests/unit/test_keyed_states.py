"""A shared store and a model with states: each state is looked for, brought and kept alone, KV up to one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.storage.extents import EXTENT_BYTES, extents_within, tail_extents
from kvbm_core.tiers.keyed import STATES_AT_ONCE, KeyedOptions, KeyedTier
from kvbm_core.tiers.lower import Name, Seeker, Sought
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import ExtentPart, OrderKind, TierOrder
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key
from tests.unit.tier_bench import TierBench

TOKENS = 16
NUM_BLOCKS = 100


def keys_of(group: int, num_blocks: int = NUM_BLOCKS) -> list[BlockKey]:
    return [block_key(SequenceHash(number.to_bytes(32, "big")), group) for number in range(num_blocks)]


KV, STATES = keys_of(0), [keys_of(1), keys_of(2)]


class Bench(TierBench[KeyedTier]):
    """``has``: what is in the store; ``found``, ``got``: what it was asked for, in KV blocks and in ends of
    states.
    """

    def __init__(self, full_blocks: int, num_slots: int = 4096) -> None:
        given = KeyedOptions(extent_bytes=EXTENT_BYTES if full_blocks > 1 else 0)
        super().__init__(
            lambda around: KeyedTier("store", Tier.REMOTE, AdmitAll(), around, given), num_slots, 1
        )
        if full_blocks > 1:
            self.tier.expect(0, range(1), EXTENT_BYTES // full_blocks)
        assert self.tier.full_blocks == full_blocks
        self.has: set[Name] = set()
        self.found: list[Name] = []
        self.got: list[Name] = []

    def put(self, num_blocks: int, ends: Iterable[int]) -> None:
        """Somebody else has stored KV of so many blocks, and states after so many."""
        full = self.tier.full_blocks
        for span in (*extents_within(0, num_blocks, full), *tail_extents(num_blocks, full)):
            self.has.add((KV[span.stop - 1], len(span)))
        if full == 1:
            self.has.update((key, 1) for key in KV[:num_blocks])
        self.has.update((states[end - 1], 1) for states in STATES for end in ends)

    def runs(self, first: int = 0, end: int = NUM_BLOCKS) -> list[BlockRun]:
        """What a request wants that has ``first`` blocks."""
        states = [BlockRun(keys, first, end, TOKENS, is_state=True) for keys in STATES]
        return [*states, BlockRun(KV, first, end, TOKENS)]

    def reply(self) -> None:
        """The store does what was ordered."""
        for order in self.take_sent():
            order.check(4096)
            names = self._names(order)
            {OrderKind.FIND: self.found, OrderKind.FETCH: self.got}.get(order.kind, []).extend(names)
            if order.kind is OrderKind.STORE:
                self.has.update(names)
            wrong = [name not in self.has for name in names]
            if order.kind is OrderKind.FIND:
                places: Sequence[int] = [i for i, is_wrong in enumerate(wrong) if is_wrong]
            else:
                assert not any(wrong), "something is fetched that is not known to be there"
                places = ()
            self.answer(order, failed=dict.fromkeys(places, Outcome.MISS))

    def _names(self, order: TierOrder) -> list[Name]:
        names, end = [], 0
        for num_blocks, skipped in order.extents or [ExtentPart(1)] * len(order.keys):
            end += num_blocks - skipped
            names.append((order.keys[end - 1], num_blocks))
        return names

    def bring(self, runs: Sequence[BlockRun]) -> Sought:
        """Asks until nothing is coming any more; the last answer."""
        seeker = Seeker()
        for _ in range(200):
            sought = self.tier.wanted(runs, seeker)
            if sought is not Sought.COMING:
                return sought
            self.reply()
        raise AssertionError("it never ends")

    def ends(self) -> list[int]:
        """Where the host has all states."""
        return [end for end in range(1, NUM_BLOCKS + 1) if self.has_state(end)]

    def has_state(self, end: int) -> bool:
        return all(self.host.contains(states[end - 1]) for states in STATES)


BOTH = pytest.mark.parametrize("full_blocks", [1, 8])


@BOTH
def test_the_last_state_with_its_kv_comes_and_no_other(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(80, [10, 40, 70])
    assert bench.bring(bench.runs()) is Sought.NOWHERE, "all of it is in the host"
    assert bench.ends() == [70] and bench.host.match_prefix(KV) in range(70, 73)
    assert {name for name in bench.got if name[0] not in KV} == {(states[69], 1) for states in STATES}


@BOTH
def test_kv_without_a_state_is_not_brought(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(80, [])
    assert bench.bring(bench.runs()) is Sought.NOWHERE
    assert bench.host.resident_blocks == 0 and not bench.got


@BOTH
def test_a_state_beyond_the_kv_is_not_brought(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(32, [16, 70])
    bench.bring(bench.runs())
    assert bench.ends() == [16] and bench.host.match_prefix(KV) in range(16, 25)


@BOTH
def test_of_one_group_alone_no_state_is_brought(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(80, [16, 64])
    bench.has.discard((STATES[1][63], 1))
    bench.bring(bench.runs())
    assert bench.ends() == [16] and not bench.host.contains(STATES[0][63])


@BOTH
def test_where_the_host_has_the_kv_only_the_state_comes(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(80, [70])
    bench.in_host(KV)
    bench.bring(bench.runs(10))
    assert bench.ends() == [70] and {key for key, _ in bench.got} == {states[69] for states in STATES}


@BOTH
def test_states_in_the_host_need_only_their_kv(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    bench.put(80, [])
    bench.in_host([states[49] for states in STATES])
    bench.bring(bench.runs())
    assert bench.host.match_prefix(KV) in range(50, 57) and all(key in KV for key, _ in bench.got)


@BOTH
def test_a_new_prompt_is_not_looked_for_state_by_state(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    assert bench.bring(bench.runs()) is Sought.NOWHERE
    assert {key for key, _ in bench.found} <= set(KV[:8])


def test_states_are_looked_for_some_at_a_time_and_of_one_group() -> None:
    bench = Bench(8)
    bench.put(NUM_BLOCKS, [3])
    bench.bring(bench.runs())
    assert bench.ends() == [3]
    asked = [key for key, _ in bench.found if key not in KV]
    assert len(set(asked)) == len(asked) == NUM_BLOCKS + 1, "each end once; of one end the other group too"
    near = Bench(8)
    near.put(NUM_BLOCKS, [98])
    near.bring(near.runs())
    asked = [key for key, _ in near.found if key not in KV]
    assert len(asked) <= STATES_AT_ONCE + 1 < NUM_BLOCKS // 2, "none at the beginning is looked for"


def test_a_model_of_states_alone_is_brought_its_last_state() -> None:
    bench = Bench(1)
    bench.put(0, [30, 60])
    assert bench.bring(bench.runs()[:2]) is Sought.NOWHERE
    assert bench.ends() == [60]


@BOTH
def test_each_state_is_stored_alone(full_blocks: int) -> None:
    bench = Bench(full_blocks)
    kept = [*STATES[0][:8], *STATES[1][:8], *KV[:8]]
    bench.in_host(kept)
    bench.tier.offer(bench.runs(end=8))
    bench.reply()
    assert {(key, 1) for states in STATES for key in states[:8]} <= bench.has
    assert {size for key, size in bench.has if key in KV} == ({1} if full_blocks == 1 else {1, 2, 4})
    bench.tier.hit([BlockRun(STATES[0], 5, 6, TOKENS, is_state=True)])
    assert not bench.take_sent(), "it is there"
    bench.tier.check_integrity()


def test_what_a_state_would_make_room_for_is_not_the_path_but_the_one_that_is_wanted() -> None:
    bench = Bench(1, num_slots=64)
    bench.in_host([*STATES[0][:20], *STATES[1][:20], *KV[:24]])  # full; older states of the path make room
    bench.put(30, [30])
    bench.bring(bench.runs(20, 30))
    assert bench.has_state(30) and bench.host.match_prefix(KV[:30]) == 30
