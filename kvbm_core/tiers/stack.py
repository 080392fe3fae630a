"""Several tiers seen as one: a block is there if any of them has it."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.tiers.groups import Residents
from kvbm_core.types import BlockKey

FIRST_LOOKED_UP = 64


class TierStack:
    """Residents over ``tiers``, fastest first. A prefix may lie in them in any mixture."""

    def __init__(self, tiers: Sequence[Residents]) -> None:
        self._tiers = tuple(tiers)

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """See Residents. Cost grows with the blocks found, and with how often the tier changes on the way."""
        found = self._tiers[0].match_prefix(keys)
        while found < len(keys):
            before = found
            for tier in self._tiers:
                found += _run(tier, keys, found)
            if found == before:
                break
        return found

    def contains(self, key: BlockKey) -> bool:
        """See Residents."""
        return any(tier.contains(key) for tier in self._tiers)


def _run(tier: Residents, keys: Sequence[BlockKey], start: int) -> int:
    """How many keys from ``start`` on are in ``tier``; looks further ahead only as it finds."""
    found, window = 0, FIRST_LOOKED_UP
    while start + found < len(keys):
        step = tier.match_prefix(keys[start + found : start + found + window])
        found += step
        if step < window:
            break
        window *= 2
    return found
