"""What every EvictionPolicy must do: subclass the class, say how to make a policy, run pytest."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np

from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.recency import as_slots
from kvbm_core.types import BlockKey, SequenceHash, block_key

CAPACITY_SLOTS = 100_000


def sample_keys(start: int, stop: int) -> list[BlockKey]:
    """Distinct keys, one per number in ``start .. stop-1``."""
    return [block_key(SequenceHash(number.to_bytes(32, "little")), 0) for number in range(start, stop)]


class ListPolicy:
    """A policy whose slots go in and come out as lists."""

    def __init__(self, policy: EvictionPolicy) -> None:
        policy.grow(CAPACITY_SLOTS)
        self.policy = policy
        self.check_integrity = policy.check_integrity
        self.is_pinned = policy.is_pinned

    def insert(self, slots: Sequence[int]) -> None:
        """As the policy's."""
        self.policy.insert(as_slots(slots))

    def touch(self, slots: Sequence[int]) -> None:
        """As the policy's."""
        self.policy.touch(as_slots(slots))

    def demote(self, slots: Sequence[int]) -> None:
        """As the policy's."""
        self.policy.demote(as_slots(slots))

    def pin(self, slots: Sequence[int]) -> None:
        """As the policy's."""
        self.policy.pin(as_slots(slots))

    def unpin(self, slots: Sequence[int]) -> None:
        """As the policy's."""
        self.policy.unpin(as_slots(slots))

    def remove(self, *slots: int) -> None:
        """As the policy's."""
        self.policy.remove(as_slots(slots))

    def evict(self, count_blocks: int, protected: Iterable[int] = ()) -> list[int] | None:
        """As the policy's."""
        spared = as_slots(list(protected))
        victims = self.policy.evict(
            count_blocks, (lambda slots: np.isin(slots, spared)) if len(spared) else None
        )
        return None if victims is None else victims.tolist()

    @property
    def evictable_blocks(self) -> int:
        """As the policy's."""
        return self.policy.evictable_blocks


def _slots(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def _expect(is_true: bool, promise: str) -> None:
    if not is_true:
        raise AssertionError(promise)


def _expect_raises(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def _least_seconds(step: Callable[[], object], repeats: int = 50) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


class EvictionPolicyContract(ABC):
    """The promises of ``policy.base.EvictionPolicy``; which key is worth least is a policy's own affair."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new, empty policy."""

    def new(self) -> ListPolicy:
        """``make_policy`` with room for every slot used here."""
        return ListPolicy(self.make_policy())

    def filled(self, slots: Sequence[int]) -> ListPolicy:
        """A policy that holds ``slots``, inserted as one sequence."""
        policy = self.new()
        policy.insert(slots)
        return policy

    def all_evictable(self, policy: ListPolicy) -> list[int]:
        """Empties ``policy`` of what is not pinned; the keys in the order they went."""
        victims = policy.evict(policy.evictable_blocks)
        _expect(victims is not None, "as many as are evictable can be evicted")
        return victims or []

    def test_a_new_policy_is_empty(self) -> None:
        policy = self.new()
        _expect(policy.evictable_blocks == 0, "a new policy is empty")
        _expect(policy.evict(0) == [], "nothing can always be evicted")
        _expect(policy.evict(1) is None, "an empty policy has no victim")
        policy.check_integrity()

    def test_evict_takes_exactly_n(self) -> None:
        keys = _slots(0, 10)
        policy = self.filled(keys)
        first = policy.evict(4) or []
        _expect(len(set(first)) == 4 and set(first) <= set(keys), "four of the keys")
        _expect(policy.evictable_blocks == 6, "six are left")
        _expect(sorted(first + self.all_evictable(policy)) == keys, "every key goes once")

    def test_evict_of_too_many_changes_nothing(self) -> None:
        keys = _slots(0, 6)
        policy, twin = self.filled(keys), self.filled(keys)
        _expect(policy.evict(7) is None, "six keys are not seven")
        _expect(policy.evict(5, {keys[0], keys[1]}) is None, "two of six are protected: five cannot go")
        _expect(policy.evictable_blocks == 6, "nothing has gone")
        _expect(self.all_evictable(policy) == self.all_evictable(twin), "nor has the order changed")

    def test_a_negative_count_is_refused(self) -> None:
        policy = self.filled(_slots(0, 2))
        _expect_raises(ValueError, lambda: policy.evict(-1))

    def test_the_tail_goes_before_the_head(self) -> None:
        keys = _slots(0, 8)
        _expect(self.all_evictable(self.filled(keys)) == keys[::-1], "after insert the tail goes first")
        touched = self.filled(keys)
        touched.touch(keys)
        _expect(self.all_evictable(touched) == keys[::-1], "after touch the tail goes first")
        released = self.filled(keys)
        released.pin(keys)
        released.unpin(keys)
        _expect(self.all_evictable(released) == keys[::-1], "after unpin the tail goes first")

    def test_what_was_used_more_often_goes_before_its_head_too(self) -> None:
        keys = _slots(0, 8)
        policy = self.filled(keys)
        for _ in range(20):
            policy.touch(keys[4:])
        policy.touch(keys)
        _expect(self.all_evictable(policy) == keys[::-1], "a tail that was used more often goes first")

    def test_demoted_keys_go_tail_first_after_their_last_unpin(self) -> None:
        keys = _slots(0, 4)
        policy = self.filled(keys)
        policy.pin(keys)
        policy.demote(keys)
        policy.insert([9])
        policy.unpin(keys)
        _expect(policy.evict(4) == keys[::-1], "demoted keys go first, the tail before the head")

    def test_a_key_that_is_demoted_again_stays_where_it_is(self) -> None:
        keys = _slots(0, 4)
        policy = self.filled(keys)
        for some in (keys[:1], keys[1:2], keys[:1]):
            policy.demote(some)
        _expect(policy.evict(2) == keys[:2], "what was demoted first goes first")

    def test_pinned_keys_stay_until_the_last_unpin(self) -> None:
        keys = _slots(0, 5)
        policy = self.filled(keys)
        policy.pin(keys[:2])
        policy.pin(keys[:1])
        _expect(policy.evictable_blocks == 3, "two are pinned")
        _expect(policy.evict(4) is None, "a pinned key is no victim")
        _expect(set(self.all_evictable(policy)) == set(keys[2:]), "the others are")
        policy.unpin(keys[:2])
        _expect(policy.is_pinned(keys[0]) and not policy.is_pinned(keys[1]), "pins are counted")
        _expect(self.all_evictable(policy) == [keys[1]], "one is free again")
        policy.unpin(keys[:1])
        _expect(self.all_evictable(policy) == [keys[0]], "and then the other")

    def test_a_key_given_twice_is_pinned_twice(self) -> None:
        (key,) = _slots(0, 1)
        policy = self.filled([key])
        policy.pin([key, key])
        policy.unpin([key])
        _expect(policy.is_pinned(key), "one of two pins is left")
        policy.pin([key])
        policy.unpin([key, key])
        _expect(not policy.is_pinned(key) and policy.evictable_blocks == 1, "no pin is left")

    def test_protected_keys_stay(self) -> None:
        keys = _slots(0, 6)
        policy = self.filled(keys)
        victims = policy.evict(3, {keys[5], keys[3], keys[0]})
        _expect(victims is not None and set(victims) == {keys[1], keys[2], keys[4]}, "the unprotected go")
        _expect(policy.evict(1, set(keys)) is None, "if all are protected none goes")
        _expect(len(self.all_evictable(policy)) == 3, "protection ends with the call")

    def test_unknown_and_pinned_keys_are_ignored_by_touch(self) -> None:
        known, unknown = _slots(0, 3), _slots(3, 5)
        policy = self.filled(known)
        policy.pin(known[:1])
        policy.touch([*unknown, *known])
        _expect(policy.evictable_blocks == 2 and policy.is_pinned(known[0]), "touch neither adds nor unpins")
        policy.check_integrity()

    def test_demoted_keys_go_first_until_they_are_touched(self) -> None:
        keys = _slots(0, 6)
        policy = self.filled(keys)
        policy.demote([keys[0], keys[1], 7])
        policy.demote([keys[3]])
        policy.insert([6])
        _expect(policy.evictable_blocks == 7, "a demoted key can be evicted")
        policy.touch([keys[3]])
        _expect(policy.evict(2) == [keys[1], keys[0]], "demoted keys go first, the tail before the head")
        _expect(set(policy.evict(3) or []) == {keys[5], keys[4], keys[2]}, "what was touched is as any other")
        policy.demote([6])
        policy.remove(6)
        policy.insert([6])
        policy.demote([keys[3]])
        _expect(policy.evict(1) == [keys[3]], "what comes again is not demoted")

    def test_a_pinned_key_is_demoted_with_its_last_unpin(self) -> None:
        keys = _slots(0, 4)
        policy = self.filled(keys)
        policy.demote([keys[0]])
        policy.pin([keys[0], keys[1], keys[2]])
        policy.pin([keys[0]])
        policy.demote([keys[1], keys[2]])
        policy.touch([keys[2]])
        _expect(policy.evictable_blocks == 1, "what is pinned stays")
        policy.unpin([keys[0], keys[1], keys[2]])
        policy.unpin([keys[0]])
        _expect(set(policy.evict(2) or []) == {keys[0], keys[1]}, "a pin is not a use")
        _expect(policy.evict(1) == [keys[3]], "touched while it was pinned: as any other")
        policy.check_integrity()

    def test_remove(self) -> None:
        keys = _slots(0, 3)
        policy = self.filled(keys)
        policy.pin(keys[:1])
        _expect_raises(ValueError, lambda: policy.remove(keys[0]))
        policy.remove(keys[1])
        _expect_raises(KeyError, lambda: policy.remove(keys[1]))
        _expect(self.all_evictable(policy) == [keys[2]], "the removed one is gone, the pinned one stays")
        _expect_raises(KeyError, lambda: policy.remove(keys[2]))
        policy.insert([keys[1]])
        _expect(policy.evictable_blocks == 1, "what was removed can come again")

    def test_a_call_that_raises_changes_nothing(self) -> None:
        keys, unknown = _slots(0, 4), _slots(4, 6)
        policy = self.filled(keys)
        policy.pin(keys[:1])
        _expect_raises(ValueError, lambda: policy.insert([unknown[0], keys[2]]))
        _expect_raises(ValueError, lambda: policy.insert([unknown[0], keys[0]]))
        _expect_raises(ValueError, lambda: policy.insert([unknown[0], unknown[0]]))
        _expect_raises(KeyError, lambda: policy.pin([keys[1], unknown[0]]))
        _expect_raises(KeyError, lambda: policy.unpin([keys[0], keys[1]]))
        _expect_raises(KeyError, lambda: policy.unpin([keys[0], keys[0]]))
        _expect_raises(KeyError, lambda: policy.unpin([keys[0], unknown[0]]))
        policy.check_integrity()
        pinned = [key for key in keys if policy.is_pinned(key)]
        _expect(pinned == keys[:1], "the pins are as before")
        _expect(self.all_evictable(policy) == keys[:0:-1], "the rest is as before")

    def test_a_random_walk_keeps_the_books(self) -> None:
        for seed in range(8):
            self._walk(Random(seed))  # noqa: S311 (a test's randomness)

    def _walk(self, rng: Random) -> None:
        policy, pins = self.new(), dict[int, int]()
        universe = _slots(0, 40)
        for _ in range(300):
            some = rng.sample(universe, rng.randint(0, 6))
            match rng.randrange(6):
                case 0:
                    some = [key for key in some if key not in pins]
                    policy.insert(some)
                    pins.update(dict.fromkeys(some, 0))
                case 1:
                    policy.touch(some)
                case 2:
                    some = [key for key in some if key in pins]
                    policy.pin(some)
                    pins.update({key: pins[key] + 1 for key in some})
                case 5:
                    policy.demote(some)
                case 3:
                    some = [key for key in some if pins.get(key)]
                    policy.unpin(some)
                    pins.update({key: pins[key] - 1 for key in some})
                case _:
                    self._evict_some(policy, pins, set(some), rng.randint(0, 12))
            policy.check_integrity()
            unpinned = list(pins.values()).count(0)
            _expect(policy.evictable_blocks == unpinned, "evictable is what is not pinned")
            _expect(all(policy.is_pinned(k) == (pins.get(k, 0) > 0) for k in universe), "pins are counted")

    def _evict_some(self, policy: ListPolicy, pins: dict[int, int], protected: set[int], count: int) -> None:
        allowed = {key for key, pinned in pins.items() if not pinned} - protected
        victims = policy.evict(count, protected)
        _expect((victims is None) == (count > len(allowed)), "None if and only if there are too few")
        if victims is not None:
            _expect(len(set(victims)) == len(victims) == count, "exactly as many as asked for")
            _expect(set(victims) <= allowed, "neither pinned nor protected")
            for key in victims:
                del pins[key]

    def test_no_step_grows_with_the_resident_blocks(self) -> None:
        few, many = self._step_seconds(500), self._step_seconds(100_000)
        for name, seconds in many.items():
            # 200 times the blocks: a step that looks at all of them would be far beyond this.
            _expect(seconds < 20 * few[name], f"{name} takes {seconds} s among many, {few[name]} s among few")

    def _step_seconds(self, resident_blocks: int) -> dict[str, float]:
        keys = _slots(0, resident_blocks)
        policy = self.filled(keys)
        policy.pin(keys[: resident_blocks // 4])
        some = keys[resident_blocks // 2 :][:16]
        protected = set(keys[-8:])

        def evict_and_insert() -> None:
            policy.insert(policy.evict(16, protected) or [])

        def pin_and_unpin() -> None:
            policy.pin(some)
            policy.unpin(some)

        def demote_and_touch() -> None:
            policy.demote(some)
            policy.touch(some)

        return {
            "touch": _least_seconds(lambda: policy.touch(some)),
            "demote and touch": _least_seconds(demote_and_touch),
            "pin and unpin": _least_seconds(pin_and_unpin),
            "evict and insert": _least_seconds(evict_and_insert),
            "refused evict": _least_seconds(lambda: policy.evict(resident_blocks)),
            "evictable_blocks": _least_seconds(lambda: policy.evictable_blocks),
        }
