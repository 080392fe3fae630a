"""Kinds of lower tier that do not come with kvbm, by the scheme of their URLs."""

from __future__ import annotations

from collections.abc import Callable

from kvbm_core.config.remote_url import SCHEMES, scheme_of
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.transfer.movers.opening import OPENERS, Opener
from kvbm_core.transfer.plan import STORE

TierMaker = Callable[[str, str], LowerTierMaker]
"""``make(name, url)``: the leader's part of the tier of this name."""

_MAKERS: dict[str, TierMaker] = {}


def register_tier(scheme: str, make: TierMaker, open_mover: Opener) -> None:
    """Makes URLs of this scheme usable in KVBM_REMOTE_URL, in this process: the leader's part of such a tier
    is made by ``make``, a rank's by ``open_mover``. ValueError for a scheme that no URL has in small letters,
    or that is taken by a store or by another kind.
    """
    if scheme_of(f"{scheme}://") != scheme or not scheme:
        raise ValueError(f"{scheme!r} is not the scheme of a URL, in small letters")
    is_of_store = scheme in SCHEMES and scheme not in _MAKERS
    if is_of_store or OPENERS.get(scheme, open_mover) is not open_mover:
        raise ValueError(f"{scheme}:// is taken")
    SCHEMES.add(scheme)
    _MAKERS[scheme], OPENERS[scheme] = make, open_mover


def kind_of(url: str) -> str:
    """The kind of the tier with this URL, as a TierPlace names it."""
    scheme = scheme_of(url)
    return scheme if scheme in _MAKERS else STORE


def registered_tier(name: str, url: str) -> LowerTierMaker | None:
    """Makes the tier with this URL; None: it is a store by key."""
    make = _MAKERS.get(scheme_of(url))
    return None if make is None else make(name, url)
