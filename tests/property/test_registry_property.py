"""Random histories: the registry in C against its twin in Python, misuse included."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvbm_core.blocks.registry import BlockRegistry, PyIndex
from kvbm_core.native import native
from kvbm_core.policy.recency import as_slots
from kvbm_core.types import BlockKey, SequenceHash, block_key
from tests.effort import tries

pytestmark = pytest.mark.skipif(
    native is None,
    reason="NOT RUN: the registry in C (no C compiler when kvbm was installed, or KVBM_NATIVE=0)",
)

MAX_SLOTS = 60
# The first eight bytes choose the place in the table: few different ones make long runs of neighbours.
HASHES = [
    SequenceHash(bytes([first]) * 8 + bytes([last]) * 24)
    for first in (0, 1, 0x5A, 0x80, 0xFF)
    for last in range(4)
]
KEYS = [block_key(sequence_hash, group) for sequence_hash in HASHES for group in (0, 1, 255)]
SOME_KEYS = st.lists(st.sampled_from(KEYS), max_size=40)
DIFFERENT_KEYS = st.lists(st.sampled_from(KEYS), max_size=40, unique=True)
SOME_SLOTS = st.lists(st.integers(-1, MAX_SLOTS + 1), max_size=40)


def registry_in_c(seed: int) -> BlockRegistry:
    """Its table is made with this seed."""
    assert native is not None
    return BlockRegistry(native.Index(seed))


def plain(answer: object) -> object:
    """Arrays as lists, which can be compared."""
    return answer.tolist() if hasattr(answer, "tolist") else answer


class RegistryAndItsTwin(RuleBasedStateMachine):
    """The same calls to both: the same answers, the same kinds of error, the same contents after each."""

    @initialize(seed=st.integers(0, 2**64 - 1), capacity_slots=st.integers(0, 20))
    def begin(self, seed: int, capacity_slots: int) -> None:
        self.index = PyIndex()
        self.registry, self.twin = registry_in_c(seed), BlockRegistry(self.index)
        self.both("grow", capacity_slots)

    def both(self, name: str, *args: object) -> object:
        """What ``name`` answers on both, or None if both raise."""
        answers: list[object] = []
        for each in (self.registry, self.twin):
            try:
                answers.append(plain(getattr(each, name)(*args)))
            except (KeyError, ValueError, IndexError) as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (name, args)
        return None if isinstance(answers[0], type) else answers[0]

    @property
    def free(self) -> list[int]:
        """Slots that are not taken, the highest first."""
        return [slot for slot in reversed(range(len(self.index._key_at))) if not self.index._is_taken[slot]]

    @rule(capacity_slots=st.integers(0, MAX_SLOTS))
    def grow(self, capacity_slots: int) -> None:
        self.both("grow", capacity_slots)

    @rule(keys=SOME_KEYS, slots=SOME_SLOTS)
    def reserve_anything(self, keys: list[BlockKey], slots: list[int]) -> None:
        self.both("reserve", keys, as_slots(slots))

    @rule(keys=SOME_KEYS, spoil=st.integers(0, 40))
    def reserve_with_one_bad_slot(self, keys: list[BlockKey], spoil: int) -> None:
        slots = self.free[: len(keys)]
        if spoil < len(slots):
            slots[spoil] = slots[0]
        self.both("reserve", keys[: len(slots)], as_slots(slots))

    @rule(keys=SOME_KEYS)
    def reserve_new_ones(self, keys: list[BlockKey]) -> None:
        new = self.both("new_of", keys)
        assert isinstance(new, tuple)
        slots = self.free[: len(new)]
        self.both("reserve", new[: len(slots)], as_slots(slots))

    @rule(name=st.sampled_from(["commit", "cancel"]), keys=SOME_KEYS)
    def end_anything(self, name: str, keys: list[BlockKey]) -> None:
        self.both(name, keys)

    @rule(
        name=st.sampled_from(["commit", "commit", "cancel"]),
        keys=DIFFERENT_KEYS,
        more=st.lists(st.sampled_from(KEYS), max_size=1),
    )
    def end_pending_ones(self, name: str, keys: list[BlockKey], more: list[BlockKey]) -> None:
        self.both(name, [key for key in keys if self.twin.is_pending(key)] + more)

    @rule(slots=SOME_SLOTS)
    def drop_anything(self, slots: list[int]) -> None:
        self.both("drop", as_slots([slot for slot in slots if slot >= 0]))

    @rule(keys=DIFFERENT_KEYS, more=st.lists(st.integers(0, MAX_SLOTS), max_size=1))
    def drop_resident_ones(self, keys: list[BlockKey], more: list[int]) -> None:
        self.both("drop", as_slots([*self.twin.slots_of(keys).tolist(), *more]))

    @rule(keys=SOME_KEYS)
    def ask(self, keys: list[BlockKey]) -> None:
        for name in ("new_of", "find", "slots_of", "resident_of"):
            self.both(name, keys)

    @rule(slots=SOME_SLOTS)
    def ask_slots(self, slots: list[int]) -> None:
        self.both("keys_in", as_slots([slot for slot in slots if slot >= 0]))

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "twin"):
            return
        self.registry.check_integrity()
        self.twin.check_integrity()
        assert len(self.registry) == len(self.twin)
        assert self.registry.pending_blocks == self.twin.pending_blocks
        assert sorted(self.registry.keys()) == sorted(self.twin.keys())
        for key in KEYS:
            assert (key in self.registry) == (key in self.twin)
            assert self.registry.is_pending(key) == self.twin.is_pending(key)


@given(st.integers(0, 2**64 - 1))
def test_all_keys_fit_and_leave(seed: int) -> None:
    registry = registry_in_c(seed)
    registry.grow(len(KEYS))
    registry.reserve(KEYS, as_slots(range(len(KEYS))))
    registry.commit(KEYS)
    assert registry.find(KEYS).tolist() == list(range(len(KEYS)))
    for slot, key in enumerate(KEYS):
        assert registry.drop(as_slots([slot])) == [key]
        assert registry.slots_of(KEYS).tolist() == list(range(slot + 1, len(KEYS)))
    registry.check_integrity()


WALK = settings(max_examples=tries(25, nightly=300), stateful_step_count=40, deadline=None)
TestRegistryAndItsTwin = RegistryAndItsTwin.TestCase
TestRegistryAndItsTwin.settings = WALK
