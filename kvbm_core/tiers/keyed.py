"""A lower tier by key: a store that others share and in which we do not allocate (directory, object store,
peer).

What it has is not known until it is asked, and a store that does not answer must cost nobody a request. So it
promises nothing: what a request wants is looked for and brought into the host in the background, and the
request finds it there when it asks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm_core.blocks.slot_tier import Reservation, protect_nothing
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.tiers.jobs import Job
from kvbm_core.tiers.lower import USELESS, LowerTier, LowerTierMaker, StoringOptions, Surroundings
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey, Direction, Tier

HOST_SHARE = 8
"""At most one slot in so many of the host tier is being fetched into."""


@dataclass(frozen=True, slots=True)
class KeyedOptions:
    """``present_s``, ``absent_s``: how long an answer is believed; ``trouble_s``: how long a key is not asked
    for again that could not be answered. ``first_find_blocks``: looked for at first; each find doubles it, up
    to ``most_find_blocks``.
    """

    storing: StoringOptions = field(default_factory=StoringOptions)
    max_fetching_blocks: int = 1024
    max_known_blocks: int = 1_000_000
    present_s: float = 60.0
    absent_s: float = 10.0
    trouble_s: float = 1.0
    first_find_blocks: int = 8
    most_find_blocks: int = 256


def keyed_tier(
    name: str, tier: Tier, admission: AdmissionPolicy, options: KeyedOptions | None = None
) -> LowerTierMaker:
    """Makes a KeyedTier."""
    return lambda around: KeyedTier(name, tier, admission, around, options or KeyedOptions())


class _Known(NamedTuple):
    is_present: bool
    until_s: float


class _FindJob(Job):
    __slots__ = ("keys",)
    keys: tuple[BlockKey, ...]

    @property
    def num_blocks(self) -> int:
        return 0


class FetchJob(Job):
    """Host slots that are being fetched into."""

    __slots__ = ("reservation",)
    reservation: Reservation

    @property
    def num_blocks(self) -> int:
        """See Job."""
        return len(self.reservation.keys)


class KeyedTier(LowerTier):
    """Every rank stores its own shard under the block's key."""

    def __init__(
        self, name: str, tier: Tier, admission: AdmissionPolicy, around: Surroundings, options: KeyedOptions
    ) -> None:
        super().__init__(name, tier, admission, around, options.storing)
        self._keyed = options
        self._known: dict[BlockKey, _Known] = {}
        self._finding: set[BlockKey] = set()
        self._fetching: dict[BlockKey, FetchJob] = {}
        self._storing: set[BlockKey] = set()
        self._unused: set[BlockKey] = set()
        """Brought into the host, and not loaded since."""
        self._is_fetch_failing = False

    @property
    def fetching_blocks(self) -> int:
        """Blocks on their way into the host."""
        return len(self._fetching)

    def _is_news(self, outcome: Outcome) -> bool:
        # A store says itself what is wrong with it; that it does not answer, it cannot.
        return outcome is Outcome.TIMED_OUT

    @property
    def usage(self) -> tuple[int, int]:
        """Not known: others use the store too."""
        return 0, 0

    # ---------------------------------------------------------------- the way up

    def wanted(self, keys: Sequence[BlockKey]) -> bool:
        """``keys``, in order, are nowhere above. Looks for the first ones that are not known, and fetches
        those known to be there. True if asking again soon is worth it.
        """
        if not self.is_usable:
            return False
        now_s, here, is_coming = self._around.clock.now_s(), list[BlockKey](), False
        for i, key in enumerate(keys):
            fetching = self._fetching.get(key)
            if fetching is not None:
                if fetching.late_ranks:  # nobody knows when it will be over
                    break
                is_coming = True
                continue
            if key in self._finding:
                is_coming = True
                break
            known = self._known.get(key)
            if known is None or known.until_s <= now_s:
                most = min(max(self._keyed.first_find_blocks, 2 * i), self._keyed.most_find_blocks)
                self._find([key for key in keys[i : i + most] if self._is_unknown(key, now_s)])
                is_coming = True
                break
            if not known.is_present:
                break
            here.append(key)
        return bool(here and self._fetch(here)) or is_coming

    def brought(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, which are being loaded now for the first time, it brought into the host."""
        used = self._unused.intersection(keys) if self._unused else ()
        self._unused.difference_update(used)
        return len(used)

    def _is_unknown(self, key: BlockKey, now_s: float) -> bool:
        known = self._known.get(key)
        is_moving = key in self._finding or key in self._fetching
        return not is_moving and (known is None or known.until_s <= now_s)

    def _find(self, keys: Sequence[BlockKey]) -> None:
        jobs = self._around.jobs
        job_id = jobs.new_id()
        job = _FindJob(job_id, self._ranks(), jobs.now_s(), on_end=lambda: self._found(job))
        job.keys = tuple(dict.fromkeys(keys))
        self._finding.update(job.keys)
        jobs.add(job)
        self._around.send(TierOrder(job_id, self.name, OrderKind.FIND, job.keys))

    def _found(self, job: _FindJob) -> None:
        self._finding.difference_update(job.keys)
        failed = job.failures(range(len(job.keys)))
        self._learn({key: failed.get(i, Outcome.OK) for i, key in enumerate(job.keys)})
        trouble = _trouble_of(job, range(len(job.keys)))
        if trouble is not Outcome.OK or not self._is_fetch_failing:
            self.judge(trouble)

    def _fetch(self, keys: Sequence[BlockKey]) -> bool:
        """False if there is no room for any of them."""
        host, jobs = self._around.host, self._around.jobs
        most = min(self._keyed.max_fetching_blocks, max(1, host.capacity_blocks // HOST_SHARE))
        room = max(0, most - self.fetching_blocks)
        reservation = host.reserve(keys[:room], protect_nothing)
        if not reservation.keys:
            return False
        job_id = jobs.new_id()
        job = FetchJob(job_id, self._ranks(), jobs.now_s(), on_end=lambda: self._fetch_ended(job))
        job.on_late = lambda result: self._judge_fetch(result.outcome)
        job.reservation = reservation
        self._fetching.update(dict.fromkeys(reservation.keys, job))
        jobs.add(job)
        order = TierOrder(job_id, self.name, OrderKind.FETCH, reservation.keys, reservation.slots)
        self._around.send(order)
        return True

    def _fetch_ended(self, job: FetchJob) -> None:
        keys, slots = job.reservation.keys, job.reservation.slots
        for key in keys:
            del self._fetching[key]
        failed = job.failures(slots)
        outcome_of = {key: failed.get(slot, Outcome.OK) for key, slot in zip(keys, slots, strict=True)}
        there, lost = job.reservation.split([keys[slots.index(slot)] for slot in failed])
        host, metrics = self._around.host, self._around.metrics
        host.abort(lost)
        if host.commit(there):
            metrics.onboarded_blocks(len(there.keys), self.tier, Tier.HOST)
            if len(self._unused) > host.capacity_blocks:
                self._unused = set(filter(host.contains, self._unused))
            self._unused.update(there.keys)
        else:
            metrics.dropped(DropReason.RESET, len(there.keys))
        num_bytes = sum(result.num_bytes for result in job.results)
        metrics.tier_transfer(self.tier, Tier.HOST, num_bytes, max(r.seconds for r in job.results))
        if failed:
            metrics.failure(f"{Direction.ONBOARD}_{job.outcome}")
            metrics.remote_failures(len(failed), is_write=False)
        self._learn(outcome_of)
        self._judge_fetch(_trouble_of(job, slots))

    def _learn(self, outcomes: Mapping[BlockKey, Outcome]) -> None:
        now_s, options = self._around.clock.now_s(), self._keyed
        for key, outcome in outcomes.items():
            is_answer = outcome in USELESS and outcome is not Outcome.IO_ERROR
            absent_s = options.absent_s if is_answer else options.trouble_s
            is_present = outcome is Outcome.OK
            self._known.pop(key, None)  # the newest answers are at the end
            self._known[key] = _Known(is_present, now_s + (options.present_s if is_present else absent_s))
        while len(self._known) > options.max_known_blocks:
            del self._known[next(iter(self._known))]

    def _judge_fetch(self, outcome: Outcome) -> None:
        """A store that knows what it has and does not give it fails, however well it is asked."""
        self._is_fetch_failing = outcome is not Outcome.OK
        self.judge(outcome)

    # ---------------------------------------------------------------- the way down

    def _new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return [key for key in keys if not self._is_there(key)]

    def _is_there(self, key: BlockKey) -> bool:
        known = self._known.get(key)
        is_known = known is not None and known.is_present and known.until_s > self._around.clock.now_s()
        return is_known or key in self._storing

    def _begin_store(self, keys: Sequence[BlockKey]) -> tuple[Sequence[BlockKey], Sequence[int]]:
        new_keys = self._new_of(keys)
        self._storing.update(new_keys)
        return new_keys, ()

    def _end_store(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> int:
        self._storing.difference_update(keys)
        stored = {k: o for k, o in zip(keys, outcomes, strict=True) if o is Outcome.OK}
        self._around.metrics.remote_failures(len(keys) - len(stored), is_write=True)
        self._learn(stored)
        return len(stored)

    # ---------------------------------------------------------------- ends

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """See LowerTier: they are not believed to be there for a while."""
        self._learn(dict.fromkeys(keys, Outcome.MISS))

    def reset(self) -> None:
        """See LowerTier. What others share stays in the store."""
        super().reset()
        self._known.clear()
        self._unused.clear()

    def check_integrity(self) -> None:
        """See LowerTier."""
        if len(self._storing) != self.ordered_blocks:
            raise IntegrityError(f"the {self.name} tier stores blocks in no order in flight")
        jobs = set(self._fetching.values())
        if sum(job.num_blocks for job in jobs) != len(self._fetching):
            raise IntegrityError(f"the {self.name} tier fetches blocks in no order in flight")


def _trouble_of(job: Job, places: Sequence[int]) -> Outcome:
    """The first outcome, on any rank, that is no answer; OK if all are."""
    outcomes = (outcome for result in job.results for outcome in result.failures(places).values())
    return next((o for o in outcomes if o not in {Outcome.MISS, Outcome.CORRUPT}), Outcome.OK)
