"""What tiers said of which blocks can be matched."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.blocks.slot_tier import Residency
from kvbm_core.testing.verdicts import Wrong
from kvbm_core.types import BlockKey, Tier


class Heard(Residency):
    """``here``: what can be matched, by tier, if nothing but the truth was said. ``gone``: what could, in the
    order in which it was told.
    """

    def __init__(self) -> None:
        self.here: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
        self.gone: list[BlockKey] = []

    def stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        new = set(keys)
        if tier is Tier.REMOTE:  # others store there too
            self.here[tier] |= new
            return
        if len(new) < len(keys) or new & self.here[tier]:
            raise Wrong("a block was told twice")
        self.here[tier] |= new

    def removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        self.here[tier] -= set(keys)
        self.gone += keys

    def cleared(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        if self.here[tier] != set(keys):
            raise Wrong("other blocks were cleared than were there")
        self.removed(tier, keys)
