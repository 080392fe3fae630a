"""Peers as a lower tier: for a request with a hint, what its host tier lacks is looked for at that instance
and brought into the host, as from a store that others share. Without a hint nobody is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.storage.extents import Extent
from kvbm_core.tiers.breaker import Breaker
from kvbm_core.tiers.keyed import KeyedOptions, KeyedTier
from kvbm_core.tiers.lower import PEERS, LowerTier, LowerTierMaker, Seeker, Sought, Surroundings
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import BlockKey, Tier

MAX_SOURCES = 64
"""Of whom something is known. The one that was not hinted at for the longest time makes room."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""How long a peer that did not answer is left alone."""


def peer_tier(options: KeyedOptions | None = None) -> LowerTierMaker:
    """Makes a PeerTier."""
    return lambda around: PeerTier(around, options or KeyedOptions())


class PeerTier(LowerTier):
    """All peers; nothing is stored there. Each has a KeyedTier of its own: what is known of it, and whether
    it answers.
    """

    knows = False

    def __init__(self, around: Surroundings, options: KeyedOptions) -> None:
        super().__init__(PEERS, Tier.REMOTE, around)
        self._keyed = options
        self._sources: OrderedDict[str, _Source] = OrderedDict()

    @property
    def fetching_blocks(self) -> int:
        """See LowerTier."""
        return sum(source.fetching_blocks for source in self._sources.values())

    def wanted(self, runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        """See LowerTier. The request's peer is asked, if it has one."""
        if seeker is None or not seeker.source or not self.is_usable:
            return Sought.NOWHERE
        source = self._source(seeker.source)
        return Sought.NOWHERE if source is None else source.wanted(runs, seeker)

    def _source(self, address: str) -> _Source | None:
        """None if there are too many with something under way."""
        source = self._sources.get(address)
        if source is None:
            if len(self._sources) >= MAX_SOURCES:
                idle = next((name for name, one in self._sources.items() if one.is_idle), None)
                if idle is None:
                    return None
                del self._sources[idle]
            source = self._sources[address] = _Source(self, address, self._around, self._keyed)
            source.expect(0, self._storing_ranks)
        self._sources.move_to_end(address)
        return source

    def brought(self, keys: Sequence[BlockKey]) -> int:
        """See LowerTier."""
        return sum(source.brought(keys) for source in self._sources.values())

    def reset(self) -> None:
        """See LowerTier. Peers keep their blocks."""
        for source in self._sources.values():
            source.reset()

    def check_integrity(self) -> None:
        """See LowerTier."""
        for source in self._sources.values():
            source.check_integrity()


class _Source(KeyedTier):
    """One peer. It is left alone as soon as it has not answered once: others have the blocks too, and all
    can be computed.
    """

    def __init__(self, owner: PeerTier, address: str, around: Surroundings, options: KeyedOptions) -> None:
        own = replace(around, send=lambda order: around.send(replace(order, source=address)))
        super().__init__(owner.name, owner.tier, AdmitAll(), own, options)
        self._owner = owner
        self._address = address
        self.on_news = owner.on_news
        self._breaker = Breaker(
            around.clock, failures_in_a_row=1, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is looked for there, or on its way from there."""
        return not self._fetching and not self._finding

    def _with_room(self, extents: Sequence[Extent]) -> list[Extent]:
        # What all peers together bring is bounded as what one store brings.
        room = self._most_fetching - self._owner.fetching_blocks
        return super()._with_room(extents)[: max(0, room)]

    @property
    def _words(self) -> str:
        return f"peer {self._address}"

    def _is_news(self, outcome: Outcome) -> bool:
        return True

    def _count_brought(self, num_blocks: int) -> None:
        super()._count_brought(num_blocks)
        self._around.metrics.fetched_from_peers(num_blocks)
