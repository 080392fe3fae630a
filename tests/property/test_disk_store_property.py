"""The disk store against a dict, restarts included; a restored tier and pool against what they were told."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm_core.blocks.pool import SlotPool
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import as_slots
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.recovery import Found, batches_of
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.heard import Heard
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from kvbm_core.types import BlockKey, Tier
from tests.effort import tries

# ---------------------------------------------------------------- the store

PAYLOAD_BYTES = 4500
MAX_SLOTS = 6
UNIVERSE = [key_of(number) for number in range(9)] + [key_of(0, group=1)]
SOME_KEYS = st.lists(st.sampled_from(UNIVERSE), max_size=8)


def payload(key: BlockKey, version: int) -> bytes:
    """Bytes of no other key or version."""
    return Random(key + version.to_bytes(8, "little")).randbytes(PAYLOAD_BYTES)


class StoreMachine(RuleBasedStateMachine):
    """The twin: per key what may be answered. A MISS is always allowed but where nothing can have been
    evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvbm-store-property-")
        self.version = 0
        self.possible: dict[BlockKey, set[int]] = {}
        """Versions that may stand on the disk; after a restart any of them may be there again."""
        self.current: dict[BlockKey, int] = {}
        """The version that is there, where that is known."""
        self.num_slots = MAX_SLOTS
        self.open()

    def open(self) -> None:
        """The file as the last store left it."""
        geometry = Geometry(self.num_slots, PAYLOAD_BYTES, b"property".ljust(16))
        path = Path(self.folder.name, "property.blocks")
        self.store = DiskStore(path, geometry, FileOptions(is_direct=False))
        assert self.store.wait_recovered(LONG_S)

    def contained(self) -> set[BlockKey]:
        """By the store's own word."""
        outcomes = self.store.contains_many(UNIVERSE, deadline_s=LONG_S)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS}
        return {key for key, outcome in zip(UNIVERSE, outcomes, strict=True) if outcome is Outcome.OK}

    @rule(keys=SOME_KEYS, skew_bytes=st.sampled_from([0, 8]))
    def put(self, keys: list[BlockKey], skew_bytes: int) -> None:
        before = self.contained()
        self.version += 1
        payloads = buffers(len(keys), PAYLOAD_BYTES, skew_bytes=skew_bytes)
        for key, memory in zip(keys, payloads, strict=True):
            memory[:] = payload(key, self.version)
        outcomes = self.store.put_many(keys, payloads, deadline_s=LONG_S)
        new = set(keys) - before
        for key, outcome in zip(keys, outcomes, strict=True):
            if key in new:
                self.possible.setdefault(key, set()).add(self.version)
                self.current[key] = self.version
            assert outcome is Outcome.OK or (outcome is Outcome.NO_SPACE and key not in self.contained())
        after = self.contained()
        assert {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK} <= after
        assert after <= before | new
        if len(before) + len(new) <= self.num_slots:
            assert after == before | new, "nothing is evicted without need"
        else:
            assert len(after) == self.num_slots, "nor more than needed"

    @rule(keys=SOME_KEYS, skew_bytes=st.sampled_from([0, 8]))
    def get(self, keys: list[BlockKey], skew_bytes: int) -> None:
        here = self.contained()
        targets = buffers(len(keys), PAYLOAD_BYTES, skew_bytes=skew_bytes)
        outcomes = self.store.get_many(keys, targets, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK if key in here else Outcome.MISS for key in keys]
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            if outcome is Outcome.OK:
                allowed = {self.current[key]} if key in self.current else self.possible[key]
                found = {version for version in allowed if target == payload(key, version)}
                assert len(found) == 1, "other bytes than were put"
                self.current[key] = found.pop()

    @rule(keys=SOME_KEYS)
    def remove(self, keys: list[BlockKey]) -> None:
        here = self.contained()
        outcomes = self.store.remove_many(keys, deadline_s=LONG_S)
        assert {
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK
        } == here & set(keys)
        assert self.contained() == here - set(keys)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.possible, self.current = {}, {}
        assert not self.contained()

    @rule(num_slots=st.sampled_from([MAX_SLOTS, MAX_SLOTS, MAX_SLOTS, 4, 8]))
    def reopen(self, num_slots: int) -> None:
        here = self.contained()
        self.store.close()
        shrinks = num_slots < self.num_slots
        self.num_slots = num_slots
        self.current = {}
        self.open()
        if not shrinks:
            assert here <= self.contained(), "nothing that was there is lost"

    @invariant()
    def books_agree(self) -> None:
        here = self.contained()
        found = list(self.store.scan())
        assert set(found) == here and len(found) == len(here) == self.store.resident_blocks <= self.num_slots
        assert here <= set(self.possible)
        self.store._tier.check_integrity()
        assert self.store._tier.pending_blocks == self.store._tier.live_leases == 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=tries(10, nightly=80), stateful_step_count=20)
TestStoreAgainstADict = StoreMachine.TestCase

# ---------------------------------------------------------------- restore

Batches = list[list[tuple[BlockKey, int]]]
KEYS = [key_of(number) for number in range(40)]


@st.composite
def batches(draw: st.DrawFn, start: int, stop: int) -> Batches:
    """Blocks in some of the slots start .. stop-1, in batches; a key may be in several of them."""
    slots = (
        draw(st.lists(st.integers(start, stop - 1), unique=True, max_size=stop - start))
        if stop > start
        else []
    )
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=len(slots), max_size=len(slots)))
    made: Batches = [[]]
    for block in zip(keys, slots, strict=True):
        if draw(st.booleans()):
            made.append([])
        made[-1].append(block)
    return made


def evict_all(tier: BlockTier, gone: list[BlockKey]) -> list[BlockKey]:
    """The order in which a tier gives up its blocks."""
    fillers = (key_of(1000 + number) for number in range(10_000))
    while tier._pool.free_slots:  # until each new block costs an old one
        tier.reserve([next(fillers)], frozenset)
    gone.clear()
    while tier.resident_blocks:
        assert tier.reserve([next(fillers)], frozenset).slots
    return list(gone)


@given(data=st.data())
@settings(max_examples=tries(30, nightly=300))
def test_a_restored_tier_has_what_was_found_and_gives_up_the_oldest_first(data: st.DataObject) -> None:
    heard = Heard()
    gone = heard.gone
    tier = BlockTier(Tier.DISK, LruPolicy(), ManualClock(), heard)
    slot_of: dict[BlockKey, int] = {}
    order: list[BlockKey] = []  # the next to be evicted first
    capacity = 0
    for _ in range(data.draw(st.integers(1, 4))):
        end = capacity + data.draw(st.integers(0, 8))
        found = data.draw(batches(capacity, end))
        new: dict[BlockKey, int] = {}
        for batch in found:
            new.update((key, slot) for key, slot in batch if key not in slot_of)  # the last place counts
        for batch in found:
            order += [key for key, slot in reversed(batch) if new.get(key) == slot]
        assert tier.restore(end, found) == len(new)
        slot_of.update(new)
        capacity = end
        tier.check_integrity()
        assert tier.capacity_blocks == capacity and tier.resident_blocks == len(slot_of)
        if data.draw(st.booleans()):  # blocks that are put meanwhile
            key = data.draw(st.sampled_from(KEYS))
            reserved = tier.reserve([key], frozenset)
            assert tier.commit(reserved)
            for lost in gone:
                assert lost == order.pop(0)
                del slot_of[lost]
            gone.clear()
            if reserved.keys:
                assert reserved.slots[0] not in slot_of.values()
                slot_of[key] = reserved.slots[0]
                order.append(key)
            tier.check_integrity()
    lease = tier.lease("test", list(slot_of), 1.0)
    assert lease is not None and lease.slots == tuple(slot_of.values())
    tier.release(lease)
    tier.touch(order[::-1])  # the lease was a use of them all; head first
    assert evict_all(tier, gone) == order


def test_blocks_that_were_found_go_before_those_that_were_put_since() -> None:
    heard = Heard()
    gone = heard.gone
    tier = BlockTier(Tier.DISK, LruPolicy(), ManualClock(), heard)
    a, b, c, d, e = KEYS[:5]
    tier.restore(6, [[(a, 4), (b, 5)], [(c, 0)], [(d, 2), (e, 1)]])
    assert tier.commit(tier.reserve([KEYS[9]], frozenset))
    assert evict_all(tier, gone) == [b, a, c, e, d, KEYS[9]]


@pytest.mark.parametrize(
    "wrong", [[(KEYS[1], 3)], [(KEYS[1], 8)], [(KEYS[1], -1)], [(KEYS[1], 5), (KEYS[2], 2)]]
)
def test_blocks_in_slots_that_are_not_new_are_refused_and_change_nothing(
    wrong: list[tuple[BlockKey, int]],
) -> None:
    tier = BlockTier(Tier.DISK, LruPolicy(), ManualClock())
    tier.restore(4, [[(KEYS[0], 1)]])
    with pytest.raises(ValueError, match="slots in use"):
        tier.restore(8, [wrong])
    tier.check_integrity()
    assert tier.capacity_blocks == 4 and tier.keys() == [KEYS[0]]


@given(st.data())
@settings(max_examples=tries(30, nightly=300))
def test_batches_are_in_the_order_of_writing(data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, 50), unique=True, max_size=20))
    found = [Found(slot, data.draw(st.sampled_from(KEYS)), data.draw(st.integers(0, 4))) for slot in slots]
    made = batches_of(found)
    by_slot = {record.slot: record for record in found}
    flat = [(by_slot[slot].sequence, slot) for batch in made for _, slot in batch]
    assert flat == sorted((record.sequence, record.slot) for record in found)
    assert [len({by_slot[slot].sequence for _, slot in batch}) for batch in made] == [1] * len(made)
    assert len(made) == len({record.sequence for record in found})


# ---------------------------------------------------------------- the pool


class PoolMachine(RuleBasedStateMachine):
    """SlotPool against a set of used slots."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(2)
        self.capacity = 2
        self.used: set[int] = set()

    @rule(more=st.integers(0, 6), data=st.data())
    def grow(self, more: int, data: st.DataObject) -> None:
        new = range(self.capacity, self.capacity + more)
        used = data.draw(st.lists(st.sampled_from(new), unique=True)) if more else []
        self.pool.grow(self.capacity + more, as_slots(used) if data.draw(st.booleans()) or used else None)
        self.capacity += more
        self.used |= set(used)

    @rule(more=st.integers(1, 4))
    def grow_wrongly(self, more: int) -> None:
        for used in ([self.capacity - 1], [self.capacity + more], [-1]):
            with pytest.raises(ValueError, match="not all in"):
                self.pool.grow(self.capacity + more, as_slots(used))

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        slots = self.pool.allocate(count)
        if count > self.capacity - len(self.used):
            assert slots is None
            return
        assert slots is not None and _ascends(slots.tolist()) and len(slots) == count
        assert self.used.isdisjoint(slots.tolist()) and set(slots.tolist()) <= set(range(self.capacity))
        self.used |= set(slots.tolist())

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.pool.release(as_slots(slots))
        self.used -= set(slots)

    @invariant()
    def is_the_set(self) -> None:
        self.pool.check_integrity()
        assert self.pool.capacity_slots == self.capacity
        assert self.pool.free_slots == self.capacity - len(self.used)
        assert set(np.flatnonzero(self.pool._used).tolist()) == self.used


def _ascends(slots: Sequence[int]) -> bool:
    return list(slots) == sorted(set(slots))


PoolMachine.TestCase.settings = settings(max_examples=tries(20, nightly=160), stateful_step_count=30)
TestPoolAgainstASet = PoolMachine.TestCase
