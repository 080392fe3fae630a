"""A lower tier by key: a store that other engines share (directory, object store, pooled memory). It has no
slots of ours.

Only the store knows what it has, and a store that does not answer must not fail a request. So this tier
promises nothing. It looks for the blocks that a request wants and brings them into the host in the
background; the request finds them there when it asks again.

A store that keeps extents has a run of blocks under one name (storage/extents.py). Any other store has each
block under a name of its own: an extent of one block.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbm_core.blocks.slot_tier import Protected, Reservation
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.storage.extents import (
    Extent,
    extent_at,
    extent_before,
    extent_blocks,
    extents_within,
    tail_extents,
)
from kvbm_core.tiers.extent_search import Belief, ExtentSearch, Step
from kvbm_core.tiers.jobs import Job
from kvbm_core.tiers.known import Known, KnownOptions
from kvbm_core.tiers.lower import LowerTierMaker, Name, Seeker, Sought, Surroundings
from kvbm_core.tiers.pace import LoadPace
from kvbm_core.tiers.storing import STORE_BLOCKS, StoringOptions, StoringTier
from kvbm_core.tiers.written import Unread
from kvbm_core.tokens.runs import BlockRun, blocks_of
from kvbm_core.transfer.plan import NO_SLOT, ExtentPart, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Direction, Tier

HOST_SHARE = 8
"""At most one in so many of the host's slots is being fetched into. A single extent may take more, up to half
of the slots, if nothing else is being fetched.
"""
FETCH_EXTENTS = 4
"""Full extents in one order to fetch. Requests use what one order has brought while the next is under way."""
STATES_AT_ONCE = 32
"""So many ends of a prompt, the last ones first, are looked at for a state at once."""
MOVING_EXTENTS = 8
"""So many full extents may always be under way, also if that is more blocks than the options allow."""


@dataclass(frozen=True, slots=True)
class KeyedOptions(KnownOptions):
    """Of single blocks ``first_find_blocks`` are looked for at first; each find doubles it, up to
    ``most_find_blocks``. ``extent_bytes``: of the extents that the store is given; 0: single blocks.
    ``always_loads``: also what the engine computes sooner.
    """

    storing: StoringOptions = field(default_factory=StoringOptions)
    max_fetching_blocks: int = 1024
    first_find_blocks: int = 8
    most_find_blocks: int = 256
    extent_bytes: int = 0
    always_loads: bool = False


def keyed_tier(
    name: str, tier: Tier, admission: AdmissionPolicy, options: KeyedOptions | None = None
) -> LowerTierMaker:
    """Makes a KeyedTier."""
    return lambda around: KeyedTier(name, tier, admission, around, options or KeyedOptions())


class _Sight(NamedTuple):
    """``todo``: what to fetch now, in this order. ``is_coming``: more is under way, or looked for.
    ``is_stuck``: something is there that cannot be fetched now. ``missing``: of a run the first block that is
    neither in the host nor known to be here; ``is_open``: nor known not to be.
    """

    todo: Sequence[Extent]
    is_coming: bool
    is_stuck: bool = False
    missing: Sequence[BlockKey] = ()
    is_open: bool = False


class _Complete(NamedTuple):
    """An extent that is in the host as a whole, and where in its chain it begins."""

    extent: Extent
    run: BlockRun
    start: int


class _FindJob(Job):
    """``stand_for``: by names that stand for all that was stored of a run, that run."""

    __slots__ = ("names", "stand_for")
    names: tuple[Name, ...]
    stand_for: Mapping[Name, BlockRun]

    @property
    def num_blocks(self) -> int:
        return 0


class FetchJob(Job):
    """An order to fetch. ``reservation``: the host slots that are filled. ``extents``: with the keys of the
    blocks that are wanted. ``num_beside``: how many other orders were under way when it was sent.
    """

    __slots__ = ("extents", "num_beside", "reservation")
    reservation: Reservation
    num_beside: int
    extents: tuple[Extent, ...]

    @property
    def num_blocks(self) -> int:
        """See Job."""
        return len(self.reservation.keys)


class KeyedTier(StoringTier):
    """Every rank stores its own shard under the extent's name."""

    knows = False

    def __init__(
        self, name: str, tier: Tier, admission: AdmissionPolicy, around: Surroundings, options: KeyedOptions
    ) -> None:
        super().__init__(name, tier, admission, around, options.storing)
        self._keyed = options
        self._keeps_extents = False  # also if none has more than one block, as blocks are large
        self._known = Known[Name](around.clock, options)
        self._num_news = 0
        self._finding: set[Name] = set()
        self._fetching: dict[BlockKey, FetchJob] = {}
        self._fetching_extents: dict[Name, FetchJob] = {}
        self._storing: set[Name] = set()
        # Each with the name of the extent before it, without which it is of no use.
        self._waiting_extents: deque[tuple[Extent, Name | None]] = deque()
        self._num_waiting = 0
        self._unused: set[BlockKey] = set()
        """Blocks that were brought into the host and that no request has loaded yet."""
        self._unread = Unread[Name](options.max_known)
        self._pace = LoadPace(around.clock)
        self._log = RateLimitedLogger(clock=around.clock)

    def expect(self, num_places: int, ranks: Collection[int], block_bytes: int = 0) -> None:
        """See LowerTier. From the same bytes every engine makes extents of the same size."""
        super().expect(num_places, ranks, block_bytes)
        if self._keyed.extent_bytes and block_bytes:
            self._keeps_extents = True
            self.full_blocks = extent_blocks(block_bytes, self._keyed.extent_bytes)

    @property
    def news(self) -> object:
        """See LowerTier."""
        return self.off_reason, self._num_news

    @property
    def fetching_blocks(self) -> int:
        """See LowerTier."""
        return len(self._fetching)

    @property
    def waiting_blocks(self) -> int:
        """See LowerTier."""
        return super().waiting_blocks + self._num_waiting

    def judge(self, outcome: Outcome, kind: OrderKind = OrderKind.FETCH) -> None:
        """See LowerTier. Every end of an order comes by here."""
        self._num_news += 1
        super().judge(outcome, kind)

    def _is_news(self, outcome: Outcome) -> bool:
        # A store says itself what is wrong with it; that it does not answer, it cannot.
        return outcome is Outcome.TIMED_OUT

    # ---------------------------------------------------------------- the way up

    def wanted(self, runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        """See LowerTier."""
        if not self.is_usable:
            return Sought.NOWHERE
        seeker = seeker or Seeker()
        states = [run for run in runs if run.is_state]
        if states:
            sight, runs = self._seek_with_states(runs, states, seeker)
        else:
            sight = self._seek(runs, seeker)
        todo, is_coming, is_stuck = sight.todo, sight.is_coming, sight.is_stuck
        if not (todo or is_coming or is_stuck):
            return Sought.NOWHERE
        if not self._is_worth(runs, seeker):
            if is_coming and not (todo or is_stuck) and self._pace.answers_soon:
                return Sought.COMING  # first whether there is anything
            if todo and not seeker.is_computed:
                seeker.is_computed = True
                self._around.metrics.computed_instead()
                line = "kvbm: prompts are computed faster than the %s brings them: they do not wait for it"
                self._log.log(logging.INFO, "slow", line, self._words)
            return Sought.STUCK
        is_begun = self._fetch(todo, _own_keys(runs))
        return Sought.COMING if is_begun or is_coming else Sought.STUCK

    def _is_worth(self, runs: Sequence[BlockRun], seeker: Seeker) -> bool:
        """Whether loading ``runs``, if all of it is there, is faster than computing it."""
        if self._keyed.always_loads:
            return True
        num_blocks = sum(run.end - run.first for run in runs)
        num_tokens = max((run.end - run.first) * run.block_tokens for run in runs)
        return self._pace.is_worth(num_blocks, num_tokens, seeker.token_s)

    def _seek(self, runs: Sequence[BlockRun], seeker: Seeker) -> _Sight:
        return (self._seek_extents if self._keeps_extents else self._seek_blocks)(runs, seeker)

    def _seek_with_states(
        self, runs: Sequence[BlockRun], states: Sequence[BlockRun], seeker: Seeker
    ) -> tuple[_Sight, Sequence[BlockRun]]:
        """As ``_seek``; and what is sought of ``runs``: up to the last end at which there are ``states``, and
        these alone. Nothing is fetched before that is known.
        """
        others = [run for run in runs if not run.is_state]
        sight = self._seek(others, seeker)
        reach_tokens = min((_start_tokens(others, key) for key in sight.missing), default=_end_tokens(runs))
        end_tokens, is_open = 0, sight.is_open  # first how far there is KV: states are sought from there on
        if not is_open:
            end_tokens, is_open = self._last_states(states, reach_tokens, seeker)
        if not end_tokens:
            one_each = [run._replace(first=run.end - 1) for run in states]
            return _Sight((), is_open or sight.is_coming), [*others, *one_each]
        needed = [run._replace(end=min(run.end, end_tokens // run.block_tokens)) for run in others]
        needed = [run for run in needed if run.first < run.end]
        sight = self._seek(needed, seeker)
        places = [(run, end_tokens // run.block_tokens) for run in states]
        needed += [run._replace(first=end - 1, end=end) for run, end in places]
        keys = [run.keys[end - 1] for run, end in places]
        jobs = [self._fetching[key] for key in keys if key in self._fetching]
        todo = [*sight.todo, *(Extent(1, (key,)) for key in self._around.host.new_of(keys))]
        is_late = any(job.late_ranks for job in jobs)
        return _Sight(todo, sight.is_coming or bool(jobs), sight.is_stuck or is_late), needed

    def _last_states(self, states: Sequence[BlockRun], reach_tokens: int, seeker: Seeker) -> tuple[int, bool]:
        """The last end up to ``reach_tokens`` at which all groups have a state, in the host or here; 0: none
        is known. And whether answers are missing. All states of an end are stored at once: of most ends one
        group is looked for.
        """
        first, ask, is_open = states[0], list[Name](), False
        for block in range(min(first.end, reach_tokens // first.block_tokens) - 1, first.first - 1, -1):
            end_tokens = (block + 1) * first.block_tokens
            if any(end_tokens % run.block_tokens for run in states):
                continue
            for run in states:
                name = run.keys[end_tokens // run.block_tokens - 1], 1
                belief = self._state_belief(name, seeker)
                if belief is not Belief.PRESENT:
                    break
            else:
                if not is_open:
                    return end_tokens, False
                break
            if belief is Belief.ABSENT:
                continue
            is_open = True
            if belief is Belief.UNKNOWN:
                ask.append(name)
            if len(ask) == STATES_AT_ONCE or run is not first:  # where one group has a state the others have
                break
        if ask:
            self._find(ask)
        return 0, is_open

    def _state_belief(self, name: Name, seeker: Seeker) -> Belief:
        key, _ = name
        is_here = self._around.host.contains(key) or key in self._fetching
        return Belief.PRESENT if is_here else self._belief(name, seeker)

    def _seek_blocks(self, runs: Sequence[BlockRun], seeker: Seeker) -> _Sight:
        keys = self._around.host.absent_of(blocks_of(runs))
        todo, is_coming, is_open, missing = list[Extent](), False, False, list[BlockKey]()
        for i, key in enumerate(keys):
            fetching = self._fetching.get(key)
            if fetching is not None:
                if fetching.late_ranks:  # nobody knows when it will be over
                    return _Sight(todo, is_coming, True, [key])
                is_coming = True
                continue
            belief = self._belief((key, 1), seeker)
            if belief is Belief.UNKNOWN:
                most = min(max(self._keyed.first_find_blocks, 2 * i), self._keyed.most_find_blocks)
                names = ((key, 1) for key in keys[i : i + most] if key not in self._fetching)
                self._find([name for name in names if self._belief(name, seeker) is Belief.UNKNOWN])
            is_open = belief in {Belief.UNKNOWN, Belief.ASKED}
            is_coming = is_coming or is_open
            if belief is not Belief.PRESENT:
                missing.append(key)
                break
            todo.append(Extent(1, (key,)))
        return _Sight(todo, is_coming, missing=missing, is_open=is_open)

    def _seek_extents(self, runs: Sequence[BlockRun], seeker: Seeker) -> _Sight:
        there, ask, is_open = list[tuple[int, Extent]](), list[Name](), False
        missing = list[BlockKey]()
        for run in runs:
            keys, first = run.keys, run.first
            first += self._around.host.match_prefix(keys[first : run.end])
            if first >= run.end:
                continue
            step = self._search(run, first, seeker)
            ask += [(keys[extent.stop - 1], len(extent)) for extent in step.ask]
            is_open = is_open or step.is_open
            for span in step.there:
                part = Extent(len(span), tuple(keys[max(first, span.start) : span.stop]))
                there.append((span.stop * run.block_tokens, part))
            stop = max(first, step.there[-1].stop) if step.there else first
            if stop < run.end:
                missing.append(keys[stop])
            if not step.there:  # of other groups nothing is of use without this one
                break
        if ask:
            self._find(ask)
        there.sort(key=lambda one: one[0])
        todo, is_coming = list[Extent](), is_open
        for _, extent in there:
            jobs = [self._fetching[key] for key in extent.keys if key in self._fetching]
            if same := self._fetching_extents.get(_name_of(extent)):  # for other blocks of it
                jobs.append(same)
            if any(job.late_ranks for job in jobs):  # nobody knows when it will be over
                break
            is_coming = is_coming or bool(jobs)
            if not jobs and self._around.host.new_of(extent.keys):
                todo.append(extent)
        return _Sight(todo, is_coming, bool(there), missing, is_open)

    def _search(self, run: BlockRun, first: int, seeker: Seeker) -> Step:
        """The next step for ``run``, whose first missing block is ``first``."""
        keys, chain = run.keys, (self.name, run.keys[0])

        def belief(extent: range) -> Belief:
            return self._belief((keys[extent.stop - 1], len(extent)), seeker)

        for origin in (min(first, seeker.origins.get(chain, first)), first):
            seeker.origins[chain] = origin
            # One token of a prompt is always computed: its last block may lie just beyond what is wanted.
            search = ExtentSearch(origin, self._end_of(run), self.full_blocks, belief)
            step = search.step(first, self._most_fetching)
            if step.there or step.is_open or origin == first:
                break  # else what comes behind the end of what was found has come into the host otherwise
        return step

    def brought(self, keys: Sequence[BlockKey]) -> int:
        """See LowerTier."""
        used = self._unused.intersection(keys) if self._unused else ()
        self._unused.difference_update(used)
        return len(used)

    def _belief(self, name: Name, seeker: Seeker) -> Belief:
        if (self.name, name) in seeker.vain:
            return Belief.ABSENT
        if name in self._finding:
            return Belief.ASKED
        is_present = self._known.is_present(name)
        if is_present is None:
            return Belief.UNKNOWN
        if is_present:
            return Belief.PRESENT
        seeker.vain.add((self.name, name))
        return Belief.ABSENT

    def _find(self, names: Sequence[Name], stand_for: Mapping[Name, BlockRun] | None = None) -> None:
        jobs = self._around.jobs
        job_id = jobs.new_id()
        job = _FindJob(job_id, self._ranks(), jobs.now_s(), on_end=lambda: self._found(job))
        job.names, job.stand_for = tuple(dict.fromkeys(names)), stand_for or {}
        self._finding.update(job.names)
        jobs.add(job)
        extents = tuple(ExtentPart(size, size - 1) for _, size in job.names) if self.full_blocks > 1 else ()
        keys = tuple(key for key, _ in job.names)
        self._around.send(TierOrder(job_id, self.name, OrderKind.FIND, keys, extents=extents))

    def _found(self, job: _FindJob) -> None:
        self._finding.difference_update(job.names)
        places = range(len(job.names))
        failed = job.failures(places)
        self._known.learn({name: failed.get(i, Outcome.OK) for i, name in enumerate(job.names)})
        for name, run in job.stand_for.items():
            if not self._known.is_kept(name):
                self._known.doubt(self._names_backwards(run))
        self._pace.answered(max(result.seconds + result.queued_s for result in job.results))
        self.judge(job.verdict(places), OrderKind.FIND)
        self.on_news()

    # ---------------------------------------------------------------- fetches

    @property
    def _most_fetching(self) -> int:
        """Blocks that may be on their way into the host at once."""
        most = max(
            self._keyed.max_fetching_blocks, (self.full_blocks > 1) * MOVING_EXTENTS * self.full_blocks
        )
        return max(1, min(most, self._around.host.capacity_blocks // HOST_SHARE))

    def _with_room(self, extents: Sequence[Extent]) -> list[Extent]:
        """Those from the front that may be fetched now."""
        room, chosen = self._most_fetching - self.fetching_blocks, list[Extent]()
        for extent in extents:
            room -= len(extent.keys)
            if room < 0:
                break
            chosen.append(extent)
        is_small = bool(extents) and len(extents[0].keys) <= self._around.host.capacity_blocks // 2
        return list(extents[:1]) if not chosen and not self._fetching and is_small else chosen

    def _fetch(self, extents: Sequence[Extent], protected: Protected) -> bool:
        """False if there is no room for any of them."""
        host, chosen = self._around.host, self._with_room(extents)
        new_keys = host.new_of([key for extent in chosen for key in extent.keys])
        reservation = host.reserve(new_keys, protected)
        reserved = set(reservation.keys)
        lacking = set(new_keys) - reserved
        chosen = [e for e in chosen if lacking.isdisjoint(e.keys) and not reserved.isdisjoint(e.keys)]
        if lacking:
            reservation, gone = reservation.split(reserved.difference(*(extent.keys for extent in chosen)))
            host.abort(gone)
        begun = list[FetchJob]()
        for part in self._orders(chosen):
            reservation, own = reservation.split({key for extent in part for key in extent.keys})
            begun.append(self._send_fetch(part, own))
        num_fetches = len(self._around.jobs.jobs(FetchJob))
        for job in begun:
            job.num_beside = num_fetches - 1
        return bool(chosen)

    def _orders(self, extents: Sequence[Extent]) -> Iterator[list[Extent]]:
        """Divides extents among orders."""
        most = FETCH_EXTENTS * self.full_blocks if self.full_blocks > 1 else len(extents)
        part, num_blocks = list[Extent](), 0
        for extent in extents:
            if part and num_blocks + len(extent.keys) > most:
                yield part
                part, num_blocks = [], 0
            part.append(extent)
            num_blocks += len(extent.keys)
        if part:
            yield part

    def _send_fetch(self, extents: Sequence[Extent], reservation: Reservation) -> FetchJob:
        jobs = self._around.jobs
        job_id = jobs.new_id()
        job = FetchJob(job_id, self._ranks(), jobs.now_s(), on_end=lambda: self._fetch_ended(job))
        job.on_late = lambda result: self.judge(result.verdict(reservation.slots))
        job.reservation, job.extents = reservation, tuple(extents)
        self._fetching.update(dict.fromkeys(reservation.keys, job))
        self._fetching_extents.update(dict.fromkeys(map(_name_of, extents), job))
        jobs.add(job)
        keys, slots, parts = reservation.keys, reservation.slots, tuple[ExtentPart, ...]()
        if self.full_blocks > 1:
            slot_of = dict(zip(keys, slots, strict=True))
            keys = tuple(key for extent in extents for key in extent.keys)
            slots = tuple(slot_of.get(key, NO_SLOT) for key in keys)
            parts = tuple(ExtentPart(e.num_blocks, e.num_blocks - len(e.keys)) for e in extents)
        self._around.send(TierOrder(job_id, self.name, OrderKind.FETCH, keys, slots, extents=parts))
        return job

    def _fetch_ended(self, job: FetchJob) -> None:
        keys, slots = job.reservation.keys, job.reservation.slots
        for key in keys:
            del self._fetching[key]
        names = [_name_of(extent) for extent in job.extents]
        for name in names:
            del self._fetching_extents[name]
        bad = job.failures(slots)
        failed = {key: bad[slot] for key, slot in zip(keys, slots, strict=True) if slot in bad}
        there, lost = job.reservation.split(failed)
        host, metrics = self._around.host, self._around.metrics
        host.abort(lost)
        if host.commit(there):
            self._count_brought(len(there.keys))
            if len(self._unused) > host.capacity_blocks:
                self._unused = set(filter(host.contains, self._unused))
            self._unused.update(there.keys)
        else:
            metrics.dropped(DropReason.RESET, len(there.keys))
        num_bytes = sum(result.num_bytes for result in job.results)
        seconds = max(result.seconds for result in job.results)
        metrics.tier_transfer(self.tier, Tier.HOST, num_bytes, seconds)
        self._pace.brought(len(there.keys), seconds, job.num_beside)
        if failed:
            metrics.failure(f"{Direction.ONBOARD}_{job.outcome}")
            metrics.remote_failures(len(failed), is_write=False)
        ends = [_first_failure(extent.keys, failed) for extent in job.extents]
        self._known.learn(dict(zip(names, ends, strict=True)))
        came = [name for name, end in zip(names, ends, strict=True) if end is Outcome.OK]
        metrics.read_again(self.tier, self._unread.read(came))
        self.judge(job.verdict(slots))
        self.on_news()

    def _count_brought(self, num_blocks: int) -> None:
        self._around.metrics.onboarded_blocks(num_blocks, self.tier, Tier.HOST)

    # ---------------------------------------------------------------- the way down

    def hit(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier. The filter counts uses of an extent by its last block."""
        if self.full_blocks == 1:
            super().hit(runs)
        else:
            self._admission.hit([found.extent.keys[-1] for found in self._in_host(runs)])
            self.offer(runs)
        if self.is_usable:
            self._look_again(runs)

    def _look_again(self, runs: Sequence[BlockRun]) -> None:
        """What is kept there may be removed, or lost with its server, while the host has it: the last extent
        of each run is looked for now and then, in place of all.
        """
        stand_for = dict[Name, BlockRun]()
        for run in runs:
            last = next(filter(self._known.is_kept, self._names_backwards(run)), None)
            if last is not None and self._known.is_present(last) is None and last not in self._finding:
                stand_for[last] = run
        if stand_for:
            self._find(list(stand_for), stand_for)

    def _names_backwards(self, run: BlockRun) -> Iterator[Name]:
        """Of the extents that have a block of ``run``, the last one first."""
        keys = run.keys
        if run.is_state or self.full_blocks == 1:
            return ((keys[block], 1) for block in range(run.end - 1, run.first - 1, -1))
        return ((keys[span.stop - 1], len(span)) for span in reversed(list(self._spans_of(run))))

    def offer(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier. Offers extents that have a block of ``runs`` and are in the host as a whole."""
        if self.full_blocks == 1:
            super().offer(runs)
        elif self.is_usable:
            self._offer_extents(self._in_host(runs))

    def ended(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier. Blocks behind their last full extent go into smaller ones."""
        if self.full_blocks > 1 and self.is_usable:
            left = [(run, span) for run in runs for span in tail_extents(run.end, self.full_blocks)]
            self._offer_extents(self._complete(left))

    def _in_host(self, runs: Sequence[BlockRun]) -> list[_Complete]:
        return self._complete((run, span) for run in runs for span in self._spans_of(run))

    def _spans_of(self, run: BlockRun) -> Iterator[range]:
        """The extents that have a block of ``run``, as far as its keys are known. A state is alone in one."""
        if run.is_state:
            return (range(block, block + 1) for block in range(run.first, run.end))
        return extents_within(run.first, self._end_of(run), self.full_blocks)

    def _end_of(self, run: BlockRun) -> int:
        """The end of the last extent that has a block of the run, as far as keys are known."""
        return min(len(run.keys), extent_at(max(0, run.end - 1), self.full_blocks).stop)

    def _complete(self, spans: Iterable[tuple[BlockRun, range]]) -> list[_Complete]:
        host = self._around.host
        pieces = ((tuple(run.keys[span.start : span.stop]), run, span.start) for run, span in spans)
        return [
            _Complete(Extent(len(keys), keys), run, start)
            for keys, run, start in pieces
            if host.match_prefix(keys) == len(keys)
        ]

    def _offer_extents(self, complete: Sequence[_Complete]) -> None:
        new = {one.extent.keys[-1]: one for one in complete if not self._is_there(_name_of(one.extent))}
        for key in self._admission.admit(list(new)):
            extent, run, start = new[key]
            if self._num_waiting + extent.num_blocks > self._options.max_waiting_blocks:
                self._around.metrics.dropped(DropReason.QUEUE_FULL, extent.num_blocks)
                continue
            before = None
            if start and run.needs_head:
                before = run.keys[start - 1], len(extent_before(start, self.full_blocks))
            self._waiting_extents.append((extent, before))
            self._num_waiting += extent.num_blocks
        self._send_waiting()

    def _send_waiting(self) -> None:
        super()._send_waiting()
        while self.is_usable and (batch := self._next_batch()):
            self._storing.update(map(_name_of, batch))
            keys = tuple(key for extent in batch for key in extent.keys)
            self._store(dict.fromkeys(keys), tuple(ExtentPart(extent.num_blocks) for extent in batch))

    def _next_batch(self) -> list[Extent]:
        """Extents for one order to store, from those that wait: still in the host, and behind one that is in
        the store or on its way. Empty if as much as may be is under way.
        """
        most = max(self._options.max_storing_blocks, MOVING_EXTENTS * self.full_blocks)
        room, waiting = most - self.ordered_blocks, self._waiting_extents
        batch, keys = dict[Name, Extent](), set[BlockKey]()
        while waiting and len(keys) < max(STORE_BLOCKS, self.full_blocks):
            extent, before = waiting[0]
            # Those of chains of other lengths may have blocks in common: one order has each block once.
            if len(keys) + extent.num_blocks > room or not keys.isdisjoint(extent.keys):
                break
            waiting.popleft()
            self._num_waiting -= extent.num_blocks
            is_here = self._around.host.match_prefix(extent.keys) == extent.num_blocks
            has_head = before is None or before in batch or self._is_there(before)
            if is_here and has_head and not self._is_there(_name_of(extent)):
                batch[_name_of(extent)] = extent
                keys.update(extent.keys)
        return list(batch.values())

    def _drop_waiting(self) -> None:
        super()._drop_waiting()
        self._waiting_extents.clear()
        self._num_waiting = 0

    def _new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return [key for key in keys if not self._is_there((key, 1))]

    def _is_there(self, name: Name) -> bool:
        return name in self._storing or self._known.is_kept(name)

    def _begin_store(
        self, befores: Mapping[BlockKey, BlockKey | None]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        if self.full_blocks > 1:
            return list(befores), ()
        new_keys = self._new_of(list(befores))
        self._storing.update((key, 1) for key in new_keys)
        return new_keys, ()

    def _end_store(
        self,
        keys: Sequence[BlockKey],
        extents: Sequence[ExtentPart],
        outcomes: Sequence[Outcome],
        block_bytes: int,
    ) -> int:
        ends, there, start = dict[Name, Outcome](), list[BlockKey](), 0
        for num_blocks, _ in extents or [ExtentPart(1)] * len(keys):
            of_extent = outcomes[start : start + num_blocks]
            start += num_blocks
            outcome = next((o for o in of_extent if o is not Outcome.OK), Outcome.OK)
            ends[keys[start - 1], num_blocks] = outcome
            if outcome is Outcome.OK:
                there += keys[start - num_blocks : start]
        self._storing.difference_update(ends)
        stored = {name: outcome for name, outcome in ends.items() if outcome is Outcome.OK}
        if self._around.listener is not None and there:
            self._around.listener.stored(self.tier, there)
        num_stored = sum(num_blocks for _, num_blocks in stored)
        self._around.metrics.remote_failures(len(keys) - num_stored, is_write=True)
        self._known.learn(stored)
        self._unread.wrote([(name, name[1] * block_bytes) for name in stored])
        return num_stored

    # ---------------------------------------------------------------- ends

    def reset(self) -> None:
        """See LowerTier. Blocks stay in the store, which other engines share."""
        super().reset()
        self._known.clear()
        self._unused.clear()
        self._num_news += 1

    def check_integrity(self) -> None:
        """See LowerTier."""
        if sum(num_blocks for _, num_blocks in self._storing) != self.ordered_blocks:
            raise IntegrityError(f"the {self.name} tier stores blocks in no order in flight")
        jobs = set(self._fetching.values())
        if jobs != set(self._fetching_extents.values()):
            raise IntegrityError(f"the {self.name} tier fetches extents without blocks, or blocks of none")
        if sum(job.num_blocks for job in jobs) != len(self._fetching):
            raise IntegrityError(f"the {self.name} tier fetches blocks in no order in flight")
        if sum(extent.num_blocks for extent, _ in self._waiting_extents) != self._num_waiting:
            raise IntegrityError(f"blocks that wait for the {self.name} tier are counted wrong")


def _own_keys(runs: Sequence[BlockRun]) -> Protected:
    """All keys of the runs: fetching a request's later blocks must not evict its earlier ones. Of states
    those that are wanted.
    """
    return lambda new_keys: frozenset[BlockKey]().union(
        *(run.keys[run.first : run.end] if run.is_state else run.keys for run in runs)
    )


def _end_tokens(runs: Sequence[BlockRun]) -> int:
    """As far as all of them go."""
    return min(run.end * run.block_tokens for run in runs)


def _start_tokens(runs: Sequence[BlockRun], key: BlockKey) -> int:
    """Where the block of ``key`` begins, which is one of ``runs``."""
    return next(
        run.keys.index(key, run.first, run.end) * run.block_tokens
        for run in runs
        if key in run.keys[run.first : run.end]
    )


def _name_of(extent: Extent) -> Name:
    return extent.keys[-1], extent.num_blocks


def _first_failure(keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome]) -> Outcome:
    return next((failed[key] for key in keys if key in failed), Outcome.OK)
