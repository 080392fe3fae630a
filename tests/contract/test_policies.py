"""Every eviction policy, and the naive twin, keeps the contract."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.guarded import GuardedPolicy
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import Slots, as_slots
from kvbm_core.testing.naive import NaiveLru
from kvbm_core.testing.policy_contract import EvictionPolicyContract, ListPolicy


class TestLruPolicy(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()


class TestNaiveLru(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return NaiveLru()

    test_no_step_grows_with_the_resident_blocks = None  # the twin is slow on purpose


class TestGuarded(EvictionPolicyContract):
    """One of a package, which is asked to the end."""

    def make_policy(self) -> EvictionPolicy:
        return GuardedPolicy(LruPolicy(), "a good policy")


class EvictsOneTooMany(LruPolicy):
    def evict(self, count_blocks: int, spare: object = None) -> Slots | None:
        return super().evict(count_blocks + 1)


class LooksAtEverything(LruPolicy):
    def touch(self, slots: Slots) -> None:
        everything = [slot for part in self._queue.oldest() for slot in part.tolist()]
        super().touch(slots[np.isin(slots, everything)])


class HeadFirst(LruPolicy):
    def insert(self, slots: Slots) -> None:
        super().insert(slots[::-1])


class CountsTouches(LruPolicy):
    """What was touched more often goes later, whatever is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()

    def touch(self, slots: Slots) -> None:
        self._uses.update(slots.tolist())
        super().touch(as_slots(sorted(slots.tolist(), key=lambda slot: -self._uses[slot])))


class UnpinsHeadFirst(LruPolicy):
    def unpin(self, slots: Slots) -> None:
        for slot in slots:
            super().unpin(as_slots([slot]))


class DemotesAgain(LruPolicy):
    def demote(self, slots: Slots) -> None:
        self.touch(slots)
        super().demote(slots)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (CountsTouches, "test_what_was_used_more_often_goes_before_its_head_too"),
        (UnpinsHeadFirst, "test_demoted_keys_go_tail_first_after_their_last_unpin"),
        (DemotesAgain, "test_a_key_that_is_demoted_again_stays_where_it_is"),
        (EvictsOneTooMany, "test_evict_takes_exactly_n"),
        (EvictsOneTooMany, "test_a_random_walk_keeps_the_books"),
        (LooksAtEverything, "test_no_step_grows_with_the_resident_blocks"),
        (HeadFirst, "test_the_tail_goes_before_the_head"),
    ],
)
def test_the_contract_catches_a_broken_policy(broken: type[LruPolicy], test: str) -> None:
    class Suite(EvictionPolicyContract):
        def make_policy(self) -> EvictionPolicy:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


def test_lru_evicts_the_least_recently_used_sequence_first() -> None:
    old, mid, new = [0, 1, 2], [3, 4, 5], [6, 7, 8]
    policy = ListPolicy(LruPolicy())
    for slots in (old, mid, new):
        policy.insert(slots)
    policy.touch(old)
    policy.pin(mid)
    policy.unpin(mid)
    assert policy.evict(9) == [*new[::-1], *old[::-1], *mid[::-1]]


def test_lru_passes_over_protected_slots_without_moving_them() -> None:
    policy = ListPolicy(LruPolicy())
    policy.insert([0, 1, 2, 3, 4])
    assert policy.evict(1, {4, 3}) == [2]
    assert policy.evict(4) == [4, 3, 1, 0]
