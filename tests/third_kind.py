"""A third kind of lower tier, which only tests have: the shelf. It has no slots, as a store by key, and its
blocks are held where they lie, as on a disk. It knows what this engine has put there, and looks for the rest.

``register()`` makes ``shelf://NAME`` usable in KVBM_REMOTE_URL; shelves of one name in one process have their
blocks in common.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from kvbm_core.blocks.lease import Lease
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.tiers.jobs import Job
from kvbm_core.tiers.kinds import register_tier
from kvbm_core.tiers.lower import Seeker, Sought, Surroundings
from kvbm_core.tiers.storing import USELESS, StoringOptions, StoringTier
from kvbm_core.tokens.runs import BlockRun, blocks_of
from kvbm_core.transfer.movers.base import OnBlocks, OnResult
from kvbm_core.transfer.movers.opening import Site
from kvbm_core.transfer.plan import ExtentPart, JobResult, OrderKind, TierOrder, TierPlace, rejected
from kvbm_core.types import BlockKey, Tier

SHELF = "shelf"
FIND_BLOCKS = 64


class _FindJob(Job):
    @property
    def num_blocks(self) -> int:
        return 0


class ShelfTier(StoringTier):
    """A block is there once every rank has put its shard there."""

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, Tier.REMOTE, AdmitAll(), around, StoringOptions())
        self._here: dict[BlockKey, None] = {}
        self._coming: set[BlockKey] = set()
        self._finding: set[BlockKey] = set()
        self._leases: dict[int, Lease] = {}
        self._num_leases = self._num_resets = 0

    @property
    def usage(self) -> tuple[int, int]:
        return len(self._here), 0

    @property
    def num_held(self) -> int:
        """Leases that were not given back."""
        return len(self._leases)

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if not self.contains(key)), len(keys))

    def contains(self, key: BlockKey) -> bool:
        return self.is_usable and key in self._here

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return list(filter(self.contains, keys))

    def hold(self, owner: str, keys: Sequence[BlockKey], ttl_s: float, tenant: int) -> Lease | None:
        found = self.resident_of(keys)
        if not found:
            return None
        self._num_leases += 1
        lease = Lease(self._num_leases, owner, tuple(found), (), float("inf"))
        self._leases[lease.lease_id] = lease
        return lease

    def is_good(self, lease: Lease) -> bool:
        return self._here.keys() >= set(lease.keys)

    def release(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]

    def fetched(self, outcomes: Sequence[tuple[BlockKey, Outcome]]) -> None:
        self.forget([key for key, outcome in outcomes if outcome in USELESS])
        for outcome in {outcome for _, outcome in outcomes}:
            self.judge(outcome)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._here.pop(key, None)

    def wanted(self, runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        seeker = seeker or Seeker()
        lacking = [key for key in self._around.host.absent_of(blocks_of(runs)) if key not in self._here]
        keys = [key for key in lacking if (self.name, (key, 1)) not in seeker.vain][:FIND_BLOCKS]
        if not self.is_usable or keys[:1] != lacking[:1] or not keys:
            return Sought.NOWHERE
        if new := [key for key in keys if key not in self._finding]:
            self._find(tuple(new), seeker)
        return Sought.COMING

    def _find(self, keys: tuple[BlockKey, ...], seeker: Seeker) -> None:
        jobs, num_resets = self._around.jobs, self._num_resets

        def end() -> None:
            self._finding.difference_update(keys)
            failed = job.failures(range(len(keys)))
            self.judge(job.verdict(range(len(keys))), OrderKind.FIND)
            there = [key for i, key in enumerate(keys) if i not in failed]
            seeker.vain.update((self.name, (key, 1)) for key in keys if key not in there)
            if num_resets == self._num_resets:
                self._here.update(dict.fromkeys(there))
            self.on_news()

        job = _FindJob(jobs.new_id(), self._ranks(), jobs.now_s(), end)
        self._finding.update(keys)
        jobs.add(job)
        self._around.send(TierOrder(job.job_id, self.name, OrderKind.FIND, keys))

    def reset(self) -> None:
        super().reset()
        self._here.clear()
        self._num_resets += 1

    def check_integrity(self) -> None:
        if len(self._coming) != self.ordered_blocks:
            raise IntegrityError("blocks are on their way to the shelf in no order")

    def _new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return [key for key in keys if key not in self._here and key not in self._coming]

    def _begin_store(
        self, befores: Mapping[BlockKey, BlockKey | None]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        new = self._new_of(list(befores))
        self._coming.update(new)
        return new, ()

    def _end_store(
        self,
        keys: Sequence[BlockKey],
        extents: Sequence[ExtentPart],
        outcomes: Sequence[Outcome],
        block_bytes: int,
    ) -> int:
        self._coming.difference_update(keys)
        there = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
        self._here.update(dict.fromkeys(there))
        return len(there)


# ---------------------------------------------------------------- a rank's part

SHELVES: dict[str, dict[tuple[str, int, BlockKey], bytes]] = {}
"""By the URL: blocks by what they mean, the rank and the key."""


class ShelfMover:
    """Mover of one rank's part of a shelf, in a thread of its own."""

    def __init__(self, site: Site, place: TierPlace) -> None:
        self._site = site
        self._blocks = SHELVES.setdefault(place.location, {})
        self._calls: SimpleQueue[tuple[TierOrder, OnResult, OnBlocks | None] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"kvbm-{place.name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        order.check(self._site.slab.ready_slots)
        if self._is_closed:
            on_result(rejected(order.job_id, "the mover is closed"))
        else:
            self._calls.put((order, on_result, on_blocks))

    def cancel(self, job_id: int) -> bool:
        return False

    def close(self) -> None:
        self._is_closed = True
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            order, on_result, on_blocks = call
            outcomes = [self._do(order, number) for number in range(len(order.keys))]
            if on_blocks is not None:
                on_blocks(range(len(outcomes)), outcomes)
            places = order.slots or range(len(order.keys))
            failed = {
                place: how for place, how in zip(places, outcomes, strict=True) if how is not Outcome.OK
            }
            num_bytes = (len(outcomes) - len(failed)) * self._site.slab.slot_bytes if order.slots else 0
            outcome = next(iter(failed.values()), Outcome.OK)
            on_result(JobResult(order.job_id, outcome, num_bytes, 0.0, 0.0, failed=tuple(failed.items())))

    def _do(self, order: TierOrder, number: int) -> Outcome:
        shard, slab = self._site.shard, self._site.slab
        name = shard.fingerprint, shard.rank, order.keys[number]
        if order.kind is OrderKind.STORE:
            at = order.slots[number] * slab.slot_bytes
            self._blocks[name] = slab.array[at : at + slab.slot_bytes].tobytes()
        elif name not in self._blocks:
            return Outcome.MISS
        elif order.kind is OrderKind.FETCH:
            at = order.slots[number] * slab.slot_bytes
            slab.array[at : at + slab.slot_bytes] = np.frombuffer(self._blocks[name], np.uint8)
        return Outcome.OK


def _open(site: Site, place: TierPlace) -> None:
    site.join(place.name, ShelfMover(site, place), None)


def register() -> None:
    """See above."""
    register_tier(SHELF, lambda name, url: partial(ShelfTier, name), _open)
