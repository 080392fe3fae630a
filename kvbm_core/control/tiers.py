"""What a reset means for the tiers that an instance has."""

from __future__ import annotations

from collections.abc import Collection

from kvbm_core.control.messages import Order
from kvbm_core.types import Tier

_NAMED = {"host": Tier.HOST, "disk": Tier.DISK}


def tiers_of(order: Order, there: Collection[Tier]) -> frozenset[Tier]:
    """Of those that are ``there``, the ones to be reset. What machines share is never erased: of it, only
    what is known is forgotten.
    """
    named = _NAMED.get(order.tier)
    return frozenset(there) if named is None else frozenset({named}).intersection(there)


def refusal(order: Order) -> str:
    """Where ``tiers_of`` finds nothing."""
    return f"there is no {order.tier} tier here"


def told(tiers: Collection[Tier]) -> str:
    """What was reset."""
    names = ", ".join(tier.name.lower() for tier in sorted(tiers) if tier is not Tier.REMOTE)
    return f"forgotten: {names}" if names else "forgotten: what was known of the remote tier"
