"""A stack of tiers against a twin that asks block by block, with real tiers and with runs longer than one
look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.tiers.groups import GroupSpec, longest_prefix_tokens
from kvbm_core.tiers.stack import FIRST_LOOKED_UP, TierStack
from kvbm_core.types import BlockKey, Tier

PRESENT = st.lists(st.sets(st.integers(0, 2)), max_size=40)
"""For each block of a prefix, the tiers that have it."""


def key_of(block: int) -> BlockKey:
    """A key like a real one."""
    return BlockKey(block.to_bytes(32, "big"))


def tier_with(keys: Sequence[BlockKey]) -> BlockTier:
    """A tier that has just these blocks."""
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    tier.grow(max(1, len(keys)))
    tier.commit(tier.reserve(keys, frozenset))
    return tier


def stack_of(present: Sequence[set[int]]) -> TierStack:
    """Three tiers."""
    return TierStack(
        [tier_with([key_of(b) for b, where in enumerate(present) if t in where]) for t in range(3)]
    )


def naive_prefix(present: Sequence[set[int]], start: int) -> int:
    """Block by block."""
    found = 0
    for where in present[start:]:
        if not where:
            break
        found += 1
    return found


class Counting:
    """Residents that note how many keys they are asked about."""

    def __init__(self, tier: BlockTier) -> None:
        self._tier = tier
        self.asked = 0

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """See Residents."""
        self.asked += len(keys)
        return self._tier.match_prefix(keys)

    def contains(self, key: BlockKey) -> bool:
        """See Residents."""
        return self._tier.contains(key)


@given(present=PRESENT, start=st.integers(0, 40))
def test_a_prefix_reaches_as_far_as_each_block_is_anywhere(present: list[set[int]], start: int) -> None:
    stack = stack_of(present)
    keys = [key_of(block) for block in range(len(present))]
    assert stack.match_prefix(keys[start:]) == naive_prefix(present, start)
    for key, where in zip(keys, present, strict=True):
        assert stack.contains(key) == bool(where)


@given(present=PRESENT)
def test_groups_see_the_stack_as_one_tier(present: list[set[int]]) -> None:
    """A window of two blocks, and full attention, over keys that lie in any tier."""
    stack = stack_of(present)
    keys = [key_of(block) for block in range(len(present))]
    one = tier_with([key for key, where in zip(keys, present, strict=True) if where])
    for groups in ((GroupSpec(0, 1),), (GroupSpec(0, 1, window_tokens=3),)):
        limit = len(present)
        through_stack = longest_prefix_tokens(groups, lambda position: keys, 0, limit, stack)
        assert through_stack == longest_prefix_tokens(groups, lambda position: keys, 0, limit, one)


def test_long_runs_in_changing_tiers(rng: Random) -> None:
    """Longer than a window of keys looked up at once, also by one and by a multiple."""
    lengths = (1, FIRST_LOOKED_UP - 1, FIRST_LOOKED_UP, FIRST_LOOKED_UP + 1, 3 * FIRST_LOOKED_UP, 400)
    for _ in range(20):
        present: list[set[int]] = []
        for _ in range(rng.randrange(1, 6)):
            present += [{rng.randrange(3)}] * rng.choice(lengths)
        end = len(present)
        present += [set(), {0, 1, 2}]
        stack = stack_of(present)
        keys = [key_of(block) for block in range(len(present))]
        assert stack.match_prefix(keys) == end
        assert stack.match_prefix(keys[:end]) == end
        assert stack.match_prefix(keys[end:]) == 0


def test_no_keys_match_nothing_and_one_tier_is_itself() -> None:
    keys = [key_of(block) for block in range(3)]
    assert stack_of([{0}]).match_prefix([]) == 0
    assert TierStack([tier_with(keys)]).match_prefix([*keys, key_of(9)]) == 3


def test_a_lower_tier_is_asked_about_little_more_than_it_has() -> None:
    """A long prompt of which the host has all but one block must not be looked up in the disk as a whole."""
    keys = [key_of(block) for block in range(20_000)]
    host, disk = tier_with(keys[:100] + keys[101:]), Counting(tier_with(keys[100:101]))
    assert TierStack([host, disk]).match_prefix(keys) == len(keys)
    assert disk.asked <= 4 * FIRST_LOOKED_UP
