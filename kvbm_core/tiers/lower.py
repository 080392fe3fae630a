"""A tier below the host, as the leader knows it: the one protocol that every kind of tier answers.

The chain calls nothing else, and nobody asks of which kind a tier is. What a kind does not override means
that nothing is here: no block is found, none comes, none is taken in. There are SlottedTier (slotted.py),
KeyedTier (keyed.py) and PeerTier (peers/tier.py). The first two share the way down (storing.py). A rank's
part of a tier is its mover (transfer/movers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier, Residency
from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.written import Chains
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier

PEERS = "peers"
"""The name of the tier that other instances are."""

Name = tuple[BlockKey, int]
"""The name of an extent: its last key, and how many blocks it has."""

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a lower tier is put into. ``send`` reaches every worker that stores, and does not wait.
    ``listener`` hears what can be matched.
    """

    host: BlockTier
    jobs: JobTable
    send: Callable[[TierOrder], None]
    clock: Clock
    metrics: Metrics
    lease_ttl_s: float = 30.0
    listener: Residency | None = None


@dataclass(slots=True)
class Seeker:
    """What one request has learned of tiers that are asked, which it keeps by their names. ``vain``:
    extents that are not there, or could not be read. ``origins``: the block at which the search began, for
    each chain by its first key. ``token_s``: seconds that the engine takes to compute a token; None: not
    known. ``is_computed``: the request does not wait, as computing was found to be faster.
    ``source``: the peer that a router has named; empty: none.
    """

    token_s: float | None = None
    is_computed: bool = False
    source: str = ""
    vain: set[tuple[str, Name]] = field(default_factory=set)
    origins: dict[tuple[str, BlockKey], int] = field(default_factory=dict)


class Sought(Enum):
    """What a tier says of blocks that are wanted."""

    COMING = "coming"
    """Asking again soon is worth it."""
    STUCK = "stuck"
    """They are there, and cannot be brought up now."""
    NOWHERE = "nowhere"
    """The tier does not have the first of them, or nobody knows."""


class LowerTier:
    """One tier below the host. On the leader's thread; no method waits, or raises for what happens below.

    ``name``: one word, unique in a chain, which orders and log lines carry. ``tier``: what metrics count it
    as. ``knows`` and ``is_asked`` say which calls are of use; they never change.
    """

    knows = True
    """Whether it can say what it has. If not, ``match_prefix``, ``contains``, ``resident_of`` and ``hold``
    are not called.
    """
    is_asked = True
    """Whether it may have more than it can say. If not, ``wanted``, ``brought`` and ``ended`` are not
    called.
    """
    slots: BlockTier | None = None
    """The books of its slots, if it has numbered ones. Pins, quotas, and what is cleared by tenant or prompt
    concern these books; a tier without them is passed by, as others may share it.
    """
    is_direct = False
    """Whether every rank that stores reads blocks straight into its device's memory. Whoever hears it from
    the ranks sets it.
    """
    is_filtered = False
    """Whether not every block that is offered is to be stored."""
    full_blocks = 1
    """Blocks in a full extent; 1: every block is stored alone, and nobody needs to call ``ended``."""
    on_news: Callable[[], None] = staticmethod(lambda: None)
    """The tier calls it when a look-up or a fetch of its own has ended; the chain sets it."""

    def __init__(self, name: str, tier: Tier, around: Surroundings) -> None:
        self.name = name
        self.tier = tier
        self._around = around
        self._storing_ranks: frozenset[int] = frozenset()  # empty: all
        self.off_reason: str | None = None
        """Why it cannot be used in this process."""

    # ---------------------------------------------------------------- state

    @property
    def is_usable(self) -> bool:
        """Whether blocks can be stored and fetched now. One that cannot be used answers as an empty one; what
        is under way goes on to its end.
        """
        return self.off_reason is None

    @property
    def news(self) -> object:
        """Another answer when something may have changed what is here or coming; the same one spares whoever
        waits a search. Here: always another one.
        """
        return object()

    @property
    def usage(self) -> tuple[int, int]:
        """Blocks in use, and in all; 0, 0: not known, as others use it too."""
        return 0, 0

    @property
    def storing_blocks(self) -> int:
        """Blocks on their way to the tier, or waiting for that."""
        return 0

    @property
    def fetching_blocks(self) -> int:
        """Blocks on their way into host slots that the tier itself has reserved; not those of loads."""
        return 0

    @property
    def chains(self) -> Chains | None:
        """What is here, and what it needs before it; None: it cannot know, as others use it too."""
        return None

    def expect(self, num_places: int, ranks: Collection[int], block_bytes: int = 0) -> None:
        """So many places will be found on each of these ranks, which store, of blocks that have
        ``block_bytes`` on each of them (0: not known yet). May come several times; no place can be used
        before ``take_in`` says so.
        """
        self._storing_ranks = frozenset(ranks)

    def take_in(self, rank: int, end: int, found: Sequence[Found]) -> None:
        """The places of ``rank`` below ``end`` can be used; ``found``: what is in them from before. One rank
        alone proves nothing: a block is there if all have it.
        """

    def judge(self, outcome: Outcome, kind: OrderKind = OrderKind.FETCH) -> None:
        """How an order of this kind ended, or that it was given up. Nothing is let go by it."""

    def turn_off(self, reason: str) -> None:
        """It cannot be used in this process; the engine serves without it."""
        if self.off_reason is None:
            log.error("kvbm: the %s tier is off, the engine serves without it: %s", self.name, reason)
        self.off_reason = reason

    def mind(self) -> None:
        """Time has passed. A host slot is not reused while a worker may still read it."""

    def reset(self) -> None:
        """Forgets every block; what waits is not stored, what is on its way will not be found."""

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books agree."""

    # ---------------------------------------------------------------- the way up, of what it knows to have

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` are here. Nothing is held by it: they may go before ``hold``."""
        return 0

    def contains(self, key: BlockKey) -> bool:
        """Whether ``key`` is here."""
        return False

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are here, in order."""
        return []

    def hold(self, owner: str, keys: Sequence[BlockKey], ttl_s: float, tenant: int) -> Lease | None:
        """Holds those of ``keys`` that are here, where they lie, for ``ttl_s`` at least; None if none is.
        They are not in the host: a load reads them, by an order of kind FETCH that has the lease's slots as
        places, and tells the end by ``fetched``. ``tenant``: whose they are from now on, if nobody knew.
        """
        return None

    def is_good(self, lease: Lease) -> bool:
        """Whether a lease of ``hold`` has not ended, and none of its blocks was forgotten since."""
        return True

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """A new lease in place of ``lease``; the same one if that has ended."""
        return lease

    def release(self, lease: Lease) -> None:
        """Gives back what was held, whether or not it was fetched; once."""

    def fetched(self, outcomes: Sequence[tuple[BlockKey, Outcome]]) -> None:
        """How the fetch of held blocks ended; still held. Those that were given up may be left out."""

    # ---------------------------------------------------------------- the way up, of what must be asked for

    def wanted(self, runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        """A request wants the blocks of ``runs`` that are not in the host, the first ones first. Looks for
        those of which nothing is known, and fetches into the host those that are there. It promises nothing
        and holds nothing for the request, which finds in the host what has come when it asks again.
        ``seeker``: the request's own; what it has found to be absent is not looked for again.
        """
        return Sought.NOWHERE

    def brought(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, which are being loaded now for the first time, it brought into the host."""
        return 0

    # ---------------------------------------------------------------- the way down

    def offer(self, runs: Sequence[BlockRun]) -> None:
        """They are in the host: those that the tier lacks and admits are stored, as soon as there is room on
        the way. It may refuse all; whoever offers keeps nothing for it.
        """

    def hit(self, runs: Sequence[BlockRun]) -> None:
        """They were used, wherever they lay: they may have become worth a place here."""

    def ended(self, runs: Sequence[BlockRun]) -> None:
        """The chains of ``runs`` will not go on."""


LowerTierMaker = Callable[[Surroundings], LowerTier]
