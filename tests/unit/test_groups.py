"""How far a prefix reaches when groups differ: arithmetic with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbm_core.tiers.groups import (
    GroupSpec,
    alignment_tokens,
    base_block_tokens,
    longest_prefix_tokens,
    needed_blocks,
)
from kvbm_core.types import BlockKey

FULL = GroupSpec(0, 4)
WIDE = GroupSpec(1, 8)
WINDOW = GroupSpec(2, 4, window_tokens=6)
STATE, STATE_TOO = GroupSpec(5, 4, is_state=True), GroupSpec(6, 4, is_state=True)


class There:
    """Residents: the named (group, block) pairs; counts what it is asked."""

    def __init__(self, **blocks: Sequence[int]) -> None:
        self.keys = {key(int(group[1:]), block) for group, numbers in blocks.items() for block in numbers}
        self.asked: list[BlockKey] = []

    def contains(self, wanted: BlockKey) -> bool:
        self.asked.append(wanted)
        return wanted in self.keys

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        for found, wanted in enumerate(keys):
            if not self.contains(wanted):
                return found
        return len(keys)


def key(group: int, block: int) -> BlockKey:
    """A readable key."""
    return BlockKey(bytes([group, block]))


def longest(
    groups: Sequence[GroupSpec], there: There, computed: int = 0, limit: int = 100, total: int = 100
) -> int:
    keys = [[key(g.index, block) for block in range(total // g.block_size_tokens)] for g in groups]
    return longest_prefix_tokens(groups, lambda position: keys[position], computed, limit, there)


def test_alignment_is_the_common_multiple_and_hashes_have_the_common_divisor() -> None:
    groups = (GroupSpec(0, 16), GroupSpec(1, 24))
    assert alignment_tokens(groups) == 48
    assert base_block_tokens(groups) == 8


@pytest.mark.parametrize(
    ("prefix_tokens", "first"), [(0, 0), (4, 0), (8, 0), (12, 1), (16, 2), (20, 3)], ids=str
)
def test_a_window_begins_with_what_the_next_token_sees(prefix_tokens: int, first: int) -> None:
    # The token at position p sees itself and the five before it: p-5 .. p.
    assert WINDOW.first_needed_block(prefix_tokens) == first
    assert needed_blocks(WINDOW, 0, prefix_tokens) == range(first, prefix_tokens // 4)


def test_needed_blocks_leave_out_what_the_device_has() -> None:
    assert needed_blocks(FULL, 8, 20) == range(2, 5)
    assert needed_blocks(WINDOW, 16, 20) == range(4, 5)
    assert len(needed_blocks(WINDOW, 40, 20)) == 0


def test_a_window_of_one_token_needs_nothing() -> None:
    alone = GroupSpec(3, 4, window_tokens=1)
    assert len(needed_blocks(alone, 0, 20)) == 0
    assert longest((alone,), There(), limit=21) == 20


def test_full_attention_ends_at_the_first_gap() -> None:
    assert longest((FULL,), There(g0=[0, 1, 3])) == 8
    assert longest((FULL,), There(g0=[2, 3]), computed=8) == 16
    assert longest((FULL,), There(g0=[3]), computed=8) == 8


def test_the_limit_and_the_known_tokens_bound_the_answer() -> None:
    everything = There(g0=range(25))
    assert longest((FULL,), everything, limit=99) == 96
    assert longest((FULL,), everything, limit=10) == 8
    assert longest((FULL,), everything, limit=3) == 0
    assert longest((FULL,), everything, total=20) == 20
    assert longest((WINDOW,), There(g2=range(25)), total=20) == 20


def test_groups_of_different_block_sizes_agree_on_multiples_of_both() -> None:
    assert longest((FULL, WIDE), There(g0=range(5), g1=range(3))) == 16
    assert longest((FULL, WIDE), There(g0=range(5), g1=[0])) == 8
    assert longest((FULL, WIDE), There(g0=range(3), g1=range(3)), computed=8) == 8


def test_a_window_needs_only_its_last_blocks() -> None:
    assert longest((WINDOW,), There(g2=[3, 4])) == 20
    assert longest((WINDOW,), There(g2=[4])) == 0
    assert longest((WINDOW,), There(g2=[0, 3])) == 4


def test_windowed_and_full_groups_agree() -> None:
    assert longest((FULL, WINDOW), There(g0=range(10), g2=[1, 2, 8])) == 12
    # The window would allow 40, the full group ends at 16 where the window is not there.
    assert longest((FULL, WINDOW), There(g0=range(4), g2=[8, 9])) == 0


def test_two_windows_push_each_other_down() -> None:
    other = GroupSpec(4, 4, window_tokens=6)
    there = There(g2=[0, 1, 4, 5], g4=[0, 1, 3, 4])
    assert longest((WINDOW, other), there) == 8


def test_a_hit_ends_exactly_where_a_state_is_and_needs_that_one() -> None:
    assert longest((STATE, FULL), There(g5=[1, 4, 7], g0=range(6))) == 20
    assert longest((FULL, STATE), There(g5=[1, 4, 7], g0=range(6)), limit=19) == 8
    assert longest((FULL, STATE), There(g5=[1], g0=range(6)), computed=8) == 8
    assert needed_blocks(STATE, 0, 20) == needed_blocks(STATE, 16, 20) == range(4, 5)
    assert len(needed_blocks(STATE, 20, 20)) == 0


def test_all_groups_with_states_agree() -> None:
    there = There(g5=[1, 3, 5], g6=[0, 3, 4], g0=range(10))
    assert longest((STATE, STATE_TOO, FULL), there) == 16


def test_neither_kv_nor_states_alone_are_a_hit() -> None:
    assert longest((STATE, FULL), There(g0=range(10))) == 0
    assert longest((STATE, FULL), There(g5=range(10))) == 0
    assert longest((STATE,), There(g5=[3])) == 16


def test_a_long_hole_is_walked_once() -> None:
    there = There(g2=[0])
    assert longest((WINDOW,), there, limit=1000, total=1000) == 4
    assert len(there.asked) <= 250 + 2


def test_a_wide_window_with_holes_is_walked_once() -> None:
    wide = GroupSpec(2, 4, window_tokens=33)  # nine blocks
    there = There(g2=[block for block in range(250) if block % 5])
    assert longest((wide,), there, limit=1000, total=1000) == 0
    assert len(there.asked) <= 250 + 2
