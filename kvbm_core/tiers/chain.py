"""The chain of tiers: the host, and the tiers below it in the order of the search.

The host is the hub: every block goes down from a host slot and comes up into one; unless there is no host
tier and ranks read the disk straight into their devices' memory. Leader and local path are its two users. No
bytes here; one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier, Protected, Reservation, protect_nothing
from kvbm_core.blocks.tenants import NOBODY, Tenants, tenants_of
from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.tiers.groups import Residents
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.lower import LowerTier, LowerTierMaker, Seeker, Sought, Surroundings
from kvbm_core.tiers.stack import TierStack
from kvbm_core.tiers.written import Chains
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import FIRST_DIRECT_SLOT, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier

MOST_ERRANDS = 16
"""So many prompts are brought up at once for requests that do not ask again; the newest ones."""
ERRAND_S = 30.0
"""For so long, at most."""
ERRAND_FETCHES = 2
"""Of each of its blocks, on average: what one store fails to bring another one may have."""
ERRAND_BLOCKS = 4096
"""At one piece of news prompts with so many blocks are looked through that are not there yet, and at least
one: whoever calls serves an engine. Those that were left out come first at the next one.
"""


class _Errand(NamedTuple):
    """What a request that does not ask again wants to be brought up; ``left_blocks`` more may be fetched."""

    runs: Sequence[BlockRun]
    seeker: Seeker
    ends_at_s: float
    left_blocks: int

    @property
    def name(self) -> BlockKey:
        """The last block that is wanted."""
        run = self.runs[0]
        return run.keys[run.end - 1]


@dataclass(slots=True)
class Below:
    """Blocks that are held in one lower tier, and not in the host. ``is_direct``: they need no host slots."""

    tier: LowerTier
    lease: Lease
    is_direct: bool = False


@dataclass(slots=True)
class Held:
    """``keys``, each with its host slot, held until they are released or their leases end.

    ``lease`` holds those that are in the host. The others are held where they lie (``below``), and have slots
    reserved to be fetched into; or numbers in place of slots (see plan.FIRST_DIRECT_SLOT).
    """

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    lease: Lease | None = None
    below: tuple[Below, ...] = ()
    reservation: Reservation | None = None
    num_brought: int = 0
    """Of a load: blocks in the host that a lower tier has brought there, and nobody loaded before."""

    def expires_at_s(self) -> float:
        """When the first of its leases ends."""
        ends_at_s = float("inf") if self.lease is None else self.lease.expires_at_s
        for below in self.below:
            ends_at_s = min(ends_at_s, below.lease.expires_at_s)
        return ends_at_s

    @property
    def num_fetched(self) -> int:
        """Blocks that the load itself reads in lower tiers."""
        return sum([len(below.lease.keys) for below in self.below])

    @property
    def num_from_disk(self) -> int:
        """Those of them that a disk has."""
        return sum([len(below.lease.keys) for below in self.below if below.tier.tier is Tier.DISK])

    @property
    def num_from_elsewhere(self) -> int:
        """Of a load: blocks that came from remote tiers, in it or just before."""
        return self.num_brought + self.num_fetched - self.num_from_disk


class TierChain:
    """``send``: an order to every worker that stores. ``makers``: of the lower tiers, in the order of the
    search. Who listens to the host hears of lower tiers too. Times in seconds.
    """

    def __init__(
        self,
        host: BlockTier,
        makers: Sequence[LowerTierMaker],
        jobs: JobTable,
        *,
        send: Callable[[TierOrder], None],
        clock: Clock,
        metrics: Metrics,
        lease_ttl_s: float = 30.0,
    ) -> None:
        self.host = host
        around = Surroundings(host, jobs, send, clock, metrics, lease_ttl_s, host.listener)
        self.lower: tuple[LowerTier, ...] = tuple(make(around) for make in makers)
        self._by_name = {tier.name: tier for tier in self.lower}
        if len(self._by_name) < len(self.lower):
            raise ValueError("two tiers of a chain have one name")
        self._known = tuple(tier for tier in self.lower if tier.knows)
        self._asked = tuple(tier for tier in self.lower if tier.is_asked)
        self.is_asked = bool(self._asked)
        """Whether there may be more below than ``residents`` knows of."""
        self.residents: Residents = TierStack((host, *self._known)) if self._known else host
        below = [tier.slots for tier in self.lower if tier.slots is not None]
        self.books: tuple[BlockTier, ...] = (host, *below)
        """Of the host, and of those below that have numbered slots."""
        self._told = tuple(slots for slots in self.books if slots.takes_runs)
        self._counting: tuple[BlockTier, ...] = ()
        self._errands: dict[BlockKey, _Errand] = {}  # by their names
        for tier in self._asked:
            tier.on_news = self._go_on
        self.holds_back: Callable[[], bool] = lambda: False
        """Whether an operator wants nothing new to be brought up; what nobody asks for any more ends then."""
        self._clock = clock
        self._metrics = metrics
        self._ttl_s = lease_ttl_s

    def named(self, name: str) -> LowerTier | None:
        """The lower tier of this name."""
        return self._by_name.get(name)

    def direct(self, name: str, is_direct: bool) -> None:
        """Whether every rank that stores reads this tier straight into its device's memory."""
        tier = self._by_name.get(name)
        if tier is not None:
            tier.is_direct = is_direct

    def tier_of(self, name: str) -> Tier:
        """What metrics count the lower tier of this name as."""
        return self._by_name[name].tier

    # ---------------------------------------------------------------- the way up

    def hold(
        self,
        owner: str,
        keys: Sequence[BlockKey],
        protected: Protected = protect_nothing,
        *,
        all_or_none: bool = False,
        needs_host: bool = False,
        tenant: int = NOBODY,
    ) -> Held | int:
        """Holds all of ``keys``; or nothing, and says how many leading ones could be held instead.

        ``all_or_none``: a part is of no use to the caller, and nothing is evicted for it. ``protected``: what
        must not be evicted to make room. ``needs_host``: all of them are to be in the host in the end.
        ``tenant``: whose they are.
        """
        lease = self.host.lease(owner, keys, self._ttl_s)
        if lease is not None:
            return Held(keys, lease.slots, lease)
        if not self._known:
            return 0
        here = self.host.resident_of(keys)
        left, held = _without(keys, here), Held(keys, ())
        for tier in self._known:
            lease = tier.hold(owner, left, self._ttl_s, tenant)
            if lease is not None:
                # Of one tier only: numbers in place of slots follow from its places alone.
                others = any(below.is_direct for below in held.below)
                held.below += (Below(tier, lease, tier.is_direct and not needs_host and not others),)
                left = _without(left, lease.keys)
        if left:
            self.release(held)
            return keys.index(left[0])
        # Before slots are made free for the rest.
        held.lease = self.host.lease(owner, here, self._ttl_s) if here else None
        slot_of: dict[BlockKey, int] = {}
        for below in held.below:
            if below.is_direct:
                numbers = (FIRST_DIRECT_SLOT + place for place in below.lease.slots)
                slot_of.update(zip(below.lease.keys, numbers, strict=True))
        fetched = [key for below in held.below if not below.is_direct for key in below.lease.keys]
        if len(held.below) > 1:  # the head first, wherever it lies
            order = {key: i for i, key in enumerate(keys)}
            fetched.sort(key=order.__getitem__)
        if fetched:
            held.reservation = self.host.reserve(fetched, protected, all_or_none=all_or_none, tenants=tenant)
            slot_of.update(zip(held.reservation.keys, held.reservation.slots, strict=True))
        if held.lease is not None:
            slot_of.update(zip(held.lease.keys, held.lease.slots, strict=True))
        if len(slot_of) < len(set(keys)):
            self.release(held)
            return self._could_hold(keys, slot_of, protected(keys))
        held.slots = [slot_of[key] for key in keys]
        return held

    def _could_hold(
        self, keys: Sequence[BlockKey], slot_of: Mapping[BlockKey, int], protected: Collection[BlockKey]
    ) -> int:
        """How many leading ``keys``, of which those in ``slot_of`` got slots: what comes last makes room for
        what comes first. Nobody else makes room, and what somebody else brings up is not waited for.
        """
        new_keys = set(self.host.new_of(keys))
        end = next((i for i, key in enumerate(keys) if key not in slot_of and key not in new_keys), len(keys))
        num_short = sum(key not in slot_of for key in keys[:end])
        spare = new_keys.union(key for key in self.host.evictable_of(keys) if key not in protected)
        while num_short > 0:
            end -= 1
            num_short -= keys[end] in spare
        return end

    def is_good(self, held: Held) -> bool:
        """Whether no lease has ended, and no block was forgotten since: such a one is not to be trusted any
        more.
        """
        if held.lease is not None and not (
            self.host.is_live(held.lease) and self.host.match_prefix(held.lease.keys) == len(held.lease.keys)
        ):
            return False
        return all(below.tier.is_good(below.lease) for below in held.below)

    def renew(self, held: Held) -> None:
        """Its leases last for another while. One that has ended stays so: see ``is_good``."""
        if held.lease is not None:
            held.lease = self.host.renew(held.lease, self._ttl_s) or held.lease
        for below in held.below:
            below.lease = below.tier.renew(below.lease, self._ttl_s)

    def renew_due(self, held: Iterable[Held]) -> None:
        """A slot is not reused while a worker may still touch it: what moves is renewed in time."""
        soon_s = self._clock.now_s() + self._ttl_s / 2
        for one in held:
            if one.expires_at_s() < soon_s:
                self.renew(one)

    def release(self, held: Held) -> None:
        """Gives back what is held; slots that were to be fetched into are free again."""
        if held.lease is not None:
            self.host.release(held.lease)
        for below in held.below:
            below.tier.release(below.lease)
        if held.reservation is not None:
            self.host.abort(held.reservation)
            held.reservation = None

    def reads(self, held: Held, job_id: int) -> tuple[TierOrder, ...]:
        """``held`` is loaded: what lower tiers have to bring into its slots, as a part of job ``job_id``."""
        held.num_brought = sum([tier.brought(held.keys) for tier in self._asked])
        slot_of = dict(zip(held.keys, held.slots, strict=True)) if held.below else {}
        return tuple(
            TierOrder(
                job_id,
                below.tier.name,
                OrderKind.FETCH,
                below.lease.keys,
                tuple([slot_of[key] for key in below.lease.keys]),
                below.lease.slots,
            )
            for below in held.below
        )

    def loaded(self, held: Held, failed: Mapping[int, Outcome], *, forgets: bool = True) -> None:
        """A load has ended: of the slots of ``held`` those in ``failed`` do not have their bytes. What came
        from lower tiers stays in the host. ``held`` is released.

        ``forgets``: what failed is never offered again; False if the load was given up.
        """
        lost: list[BlockKey] = []
        if failed:
            lost = [key for key, slot in zip(held.keys, held.slots, strict=True) if slot in failed]
        if held.reservation is not None:
            there, gone = held.reservation.split(lost and set(lost).intersection(held.reservation.keys))
            held.reservation = None
            if gone.keys:
                self.host.abort(gone)
            self.host.commit(there)
        if lost and forgets:
            self.host.forget(lost)
        slot_of = dict(zip(held.keys, held.slots, strict=True)) if held.below else {}
        for below in held.below:
            ends = [(key, failed.get(slot_of[key], Outcome.OK)) for key in below.lease.keys]
            below.tier.fetched(ends if forgets else [end for end in ends if end[1] is Outcome.OK])
        self.release(held)

    def gave_up(self, held: Held, failed: Mapping[int, Outcome]) -> None:
        """Nobody needs what ``held`` was for; what lower tiers were to bring into the slots in ``failed`` did
        not come. ``held`` is released.
        """
        slot_of = dict(zip(held.keys, held.slots, strict=True)) if failed else {}
        for below in held.below if failed else ():
            ends = [(key, failed[slot_of[key]]) for key in below.lease.keys if slot_of[key] in failed]
            below.tier.fetched(ends)
        self.release(held)

    def note_late(self, held: Held, outcome: Outcome) -> None:
        """A rank has given up to fetch, and it is not over."""
        for below in held.below:
            below.tier.judge(outcome)

    def used(self, runs: Sequence[BlockRun]) -> None:
        """``runs``, whose keys mean the same in other processes, were used, wherever they lay, or found and
        audited.
        """
        for tier in self.lower:
            tier.hit(runs)

    def wanted(
        self, runs: Sequence[BlockRun], seeker: Seeker | None = None, *, asks_again: bool = True
    ) -> bool:
        """What of ``runs`` is not in the host can be held nowhere: True if a lower tier is looking for it or
        bringing it up. ``seeker``: see LowerTier.wanted. ``asks_again``: False if nobody will; then what is
        found is brought up all the same, for the next request.
        """
        seeker = seeker or Seeker()
        if asks_again:
            return self.sought(runs, seeker) is Sought.COMING
        left_blocks = ERRAND_FETCHES * _num_blocks(runs)
        return self._send_out(_Errand(runs, seeker, self._clock.now_s() + ERRAND_S, left_blocks))

    @property
    def news(self) -> object:
        """See LowerTier; of the host too."""
        return [self.host.num_changes, *[tier.news for tier in self.lower]]

    def _send_out(self, errand: _Errand) -> bool:
        """Whether something is coming. Goes on with it at the next news, if there is something to wait for.
        Errands for which the host is too small would fetch the same blocks again and again: each has so many
        fetches and no more.
        """
        before = self.fetching_blocks
        sought = self.sought(errand.runs, errand.seeker)
        now = self.fetching_blocks
        errand = errand._replace(left_blocks=errand.left_blocks - now + before)
        is_full = sought is Sought.STUCK and now > 0
        if errand.left_blocks > 0 and (sought is Sought.COMING or is_full):
            self._errands[errand.name] = errand
            while len(self._errands) > MOST_ERRANDS:
                oldest = min(self._errands.values(), key=lambda one: one.ends_at_s)
                del self._errands[oldest.name]
        return sought is Sought.COMING

    @property
    def fetching_blocks(self) -> int:
        """Blocks that lower tiers bring into host slots of their own; not those of loads."""
        return sum([tier.fetching_blocks for tier in self._asked])

    def _go_on(self) -> None:
        """A lower tier has found or brought something."""
        waiting, self._errands = deque(self._errands.values()), {}
        room_blocks = ERRAND_BLOCKS
        while waiting and room_blocks > 0:
            errand = waiting.popleft()
            if errand.ends_at_s > self._clock.now_s() and not self.holds_back():
                self._send_out(errand)
                if errand.name in self._errands:  # there will be more news
                    room_blocks -= _num_blocks(errand.runs)
        self._errands = {errand.name: errand for errand in waiting} | self._errands

    def sought(self, runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        """As ``wanted``, and whether it is there but stuck. A tier is asked when those before it do not have
        the first of it.
        """
        for tier in self._asked if runs else ():
            sought = tier.wanted(runs, seeker)
            if sought is not Sought.NOWHERE:
                return sought
        return Sought.NOWHERE

    # ---------------------------------------------------------------- the way down

    def new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those of ``keys`` that are to be stored: the host lacks them, and what it lacks alone is not what a
        tier has from which blocks go straight to the device.
        """
        new, below = self.host.new_of(keys), self._read_straight
        return new if below is None else _without(new, below.resident_of(new))

    def reserve(
        self, keys: Sequence[BlockKey], protected: Protected, tenants: Tenants = NOBODY
    ) -> Reservation:
        """Host slots for those of ``keys`` that are to be stored; see BlockTier.reserve."""
        below = self._read_straight
        if below is None:
            reservation = self.host.reserve(keys, protected, tenants=tenants)
        else:  # what is there makes room: it need not be in the host to be of use
            new_keys = self.new_of(keys)
            reservation = self.host.reserve(
                new_keys,
                lambda new: {key for key in protected(new) if not below.contains(key)},
                tenants=tenants_of(tenants, keys, new_keys),
            )
        return reservation

    @property
    def _read_straight(self) -> LowerTier | None:
        """The tier from which blocks go straight to the device."""
        return next((tier for tier in self._known if tier.is_direct), None)

    def stored(self, reservation: Reservation, outcome: Outcome) -> bool:
        """What was to be stored in the host has ended. True if it is there."""
        if outcome is not Outcome.OK:
            self.host.abort(reservation)
            return False
        if not self.host.commit(reservation):
            self._metrics.dropped(DropReason.RESET, len(reservation.keys))
            return False
        self._metrics.offloaded_blocks(len(reservation.keys), Tier.DEVICE, Tier.HOST)
        return True

    def offer(self, runs: Sequence[BlockRun]) -> None:
        """``runs``, whose keys mean the same in other processes, are new in the host."""
        for tier in self.lower:
            tier.offer(runs)

    @property
    def needs_runs(self) -> bool:
        """Whether somebody wants to know where in their chains blocks lie."""
        return bool(self.lower or self._told) or self.host.listener is not None

    def tell(self, runs: Sequence[BlockRun]) -> None:
        """The blocks of ``runs`` were stored or loaded just now, see TakesRuns."""
        for slots in self._told:
            slots.tell(runs)

    @property
    def keeps_extents(self) -> bool:
        """Whether some tier wants to know where chains end."""
        return any(tier.full_blocks > 1 for tier in self._asked)

    def ended(self, runs: Sequence[BlockRun]) -> None:
        """The chains of ``runs``, whose keys mean the same in other processes, will not go on."""
        for tier in self._asked:
            tier.ended(runs)

    @property
    def storing_blocks(self) -> int:
        """Blocks on their way to lower tiers, or waiting for that."""
        return sum(tier.storing_blocks for tier in self.lower)

    # ---------------------------------------------------------------- time, ends, state

    @property
    def live_leases(self) -> int:
        """In all tiers."""
        return sum([slots.live_leases for slots in self.books])

    def mind(self, moving: Iterable[Held]) -> int:
        """Time has passed; ``moving``: what workers may still touch. Returns how many other leases ended."""
        # First: those of copies that are under way hold, however long nobody has called.
        self.renew_due(moving)
        for tier in self.lower:
            tier.mind()
        return sum([slots.expire_leases() for slots in self.books])

    def forget(self, keys: Collection[BlockKey]) -> None:
        """Makes ``keys`` a miss in the host."""
        self.host.forget(list(keys))

    def demote(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` go before all others, in the host and in tiers with slots, until they are used again."""
        for slots in self.books:
            slots.demote(keys)

    def count_states(self, groups: Collection[int]) -> None:
        """The blocks of these groups are states."""
        self._counting = self.books
        for slots in self._counting:
            slots.state_groups = frozenset(groups)

    def forget_of(self, tenants: Collection[int], tiers: Container[Tier]) -> int:
        """Forgets all blocks of these tenants in the host and in tiers with slots, of those that are meant;
        how many.
        """
        self._errands.clear()
        return sum([slots.forget_of(tenants) for slots in self.books if slots.tier in tiers])

    def forget_prompt(self, keys: Sequence[BlockKey], tiers: Container[Tier]) -> int:
        """As ``forget_of``, of what has these names."""
        self._errands.clear()
        return sum([slots.forget_prompt(keys) for slots in self.books if slots.tier in tiers])

    def reset(self, tiers: Container[Tier] = frozenset(Tier)) -> None:
        """Forgets every block of these tiers; what is on its way there will not be committed."""
        self._errands.clear()
        if Tier.HOST in tiers:
            self.host.reset()
        for tier in self.lower:
            if tier.tier in tiers:
                tier.reset()

    def publish_usage(self) -> None:
        """Tells the metrics how full each tier is, and what is on its way there."""
        waiting: dict[Tier, int] = {}
        self._metrics.tier_usage(Tier.HOST, self.host.resident_blocks, self.host.capacity_blocks)
        for tier in self.lower:
            self._metrics.tier_usage(tier.tier, *tier.usage)
            waiting[tier.tier] = waiting.get(tier.tier, 0) + tier.storing_blocks
        for slots in self._counting:
            self._metrics.state_blocks(slots.tier, slots.resident_states)
        for which, num_blocks in waiting.items():
            self._metrics.waiting_blocks(which, num_blocks)

    def chains(self) -> list[tuple[Tier, Chains]]:
        """See LowerTier, of those that know. Whoever counts in it need not keep others from changing it."""
        return [(tier.tier, chains) for tier in self.lower if (chains := tier.chains) is not None]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books of all tiers agree."""
        self.host.check_integrity()
        for tier in self.lower:
            tier.check_integrity()


def _without(keys: Sequence[BlockKey], found: Sequence[BlockKey]) -> list[BlockKey]:
    gone = frozenset(found)
    return [key for key in keys if key not in gone]


def _num_blocks(runs: Sequence[BlockRun]) -> int:
    return sum(run.end - run.first for run in runs)
