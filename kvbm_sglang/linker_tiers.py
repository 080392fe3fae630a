"""The direct linker without SGLang: pages by SGLang's keys between its device pool and kvbm's tiers.

What SGLang compares between ranks (whether something was queued, how many ended) is the same on each of them,
whatever goes wrong on one: a load or store that cannot be is queued too, and ends as failed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kvbm_core.control.desk import AtOnce
from kvbm_core.errors import LayoutError, Outcome, StuckCopyError
from kvbm_core.identity.roots import NO_ADAPTER, Root, Roots
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_core.observe.labels import DropReason, FailureKind, MissReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.why import Account
from kvbm_core.runtime.local import Claim, LocalTiers
from kvbm_core.runtime.sharing import turn_of
from kvbm_core.runtime.why import Why
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key
from kvbm_sglang.device_pool import DevicePages
from kvbm_sglang.events import EventFeed
from kvbm_sglang.following import FollowingTiers
from kvbm_sglang.identity import page_keys
from kvbm_sglang.load_counter import LoadCounter

log = logging.getLogger("kvbm")

MAX_WAITING_STORES = 1024
"""Each keeps its device pages from being evicted."""
MAX_SOUGHT = 256
"""Pages of a prompt that a store by key is asked for while the first one is not here: a request that waits is
looked up again and again, on the scheduler's thread.
"""
MAX_QUERIED = 4096
"""Requests of which it is remembered that they were looked up, so that each counts once; and first pages."""
QUIESCE_TIMEOUT_S = 60.0
WRITE_OUT_TIMEOUT_S = 3.0

WaitReady = Callable[[], None]
"""Waits until the device pages may be read, or written."""


class PageRoots:
    """The root of pages' keys. It changes when it is known which weights these are, and when they change.
    Asked from the scheduler's thread alone.
    """

    def __init__(self, namespace: KeyNamespace, weights: WeightsIdentity, *, is_lasting: bool) -> None:
        self.digest = namespace.digest
        self._roots = Roots(namespace, weights.stamp, is_lasting=is_lasting)
        self._layout = namespace.layout
        self._weights = weights

    @property
    def generation(self) -> int:
        """How often the weights have changed: what was found with those before is not to be loaded."""
        return self._weights.generation

    def on_change(self, call: Callable[[], None]) -> None:
        """``call``: when pages that were named before are not asked for any more."""
        self._roots.on_change = call

    def now(self) -> Root:
        """For pages that are computed or looked up now."""
        return self._roots.of(NO_ADAPTER, None, self._layout)


class _Query(NamedTuple):
    """How many pages were looked up under which root, and in which generation of the weights. ``is_counted``:
    as a miss.
    """

    num_pages: int
    root: Root
    generation: int
    is_counted: bool = False


class _Told(NamedTuple):
    """What is told of a request, and how many pages it had found then."""

    account: Account
    num_found: int


def _again(*, is_renamed: bool) -> Why:
    """Of a beginning that was asked for before, and that no tier knows."""
    if is_renamed:
        return (
            MissReason.OTHER_WEIGHTS,
            "the same beginning came under other weights, or before they were known",
        )
    return (
        MissReason.NOT_KEPT,
        "it was asked for before: it is being computed, or SGLang has not stored it yet",
    )


@dataclass(eq=False)
class _Load:
    """A load of one request. ``claim`` None: it has failed already. ``index``: of its batch, and ``turn``:
    what ranks that share it call it. Of its pages ``num_queried`` were looked up, and ``num_read`` come from
    the disk.

    ``state``: the slot of the state behind the last page, None for models without. ``is_begun``: the tiers
    have it. ``is_over``: it was given up before that.
    """

    claim: Claim | None
    indices: Any
    state: Any = None
    num_queried: int = 0
    num_read: int = 0
    is_lasting: bool = False
    account: Account | None = None
    index: int = -1
    turn: int = 0
    is_begun: bool = False
    is_over: bool = False


@dataclass
class _Store:
    """A store in the order in which it was asked for. ``outcome`` None: not over."""

    outcome: Outcome | None = None


class LinkerTiers:
    """``tiers``, ``pages`` and ``roots`` None: nothing is cached. Called from the scheduler's thread; nothing
    waits for a device or for I/O but ``finish``, ``reset`` and ``close``. Two threads of its own wait for the
    device, and hand on.
    """

    def __init__(
        self,
        tiers: LocalTiers | FollowingTiers | None,
        pages: DevicePages | None,
        roots: PageRoots | None,
        *,
        counter: LoadCounter,
        metrics: Metrics,
        on_close: Callable[[], None] | None = None,
        events: EventFeed | None = None,
    ) -> None:
        self.counter = counter
        self._events = events
        if roots is not None and events is not None:
            roots.on_change(events.renamed)
        self._on_close = on_close
        self._tiers = tiers
        self._pages = pages
        self._num_parts = 0 if pages is None else pages.num_parts
        self._roots = roots
        self._metrics = metrics
        self._pending: dict[str, _Load] = {}
        self._queried: dict[str, _Query] = {}
        self._why: dict[str, _Told] = {}
        self._firsts: dict[str, SequenceHash] = {}  # under which root the first page was last asked for
        self._stores: deque[_Store] = deque()
        self._changed = threading.Condition()
        self._loading: set[_Load] = set()
        self._num_storing = 0
        self._num_begun = 0  # loads, in the order that all ranks begin them in
        self._life = 0  # stores that were asked for in an earlier one are void
        self._loader = ThreadPoolExecutor(1, "kvbm-linker-load")
        self._storer = ThreadPoolExecutor(1, "kvbm-linker-store")
        counter.give_up = self._give_up_batch
        self.control = AtOnce(self._tiers_there, self._reset_tiers)
        if isinstance(tiers, LocalTiers):
            tiers.hold_back_while(lambda: self.control.is_draining)

    # ---------------------------------------------------------------- the way up

    def lookup(self, rid: str, keys: Sequence[str]) -> list[int]:
        """The lengths, in pages, of the prefixes of ``keys`` that can be loaded; held for the request for a
        while.
        """
        if self._tiers is None or self._roots is None or not keys or self.control.is_draining:
            if keys and rid not in self._why:
                text = "it is drained" if self.control.is_draining else "nothing is cached; the log says why"
                self._note_why(rid, len(keys), 0, (MissReason.NOT_READY, text))
            return []
        root = self._roots.now()
        (first,) = page_keys(root.hash, [keys[0]])
        num_found = 0
        sought = keys
        if not self._tiers.contains(first):  # most prompts that are new are new from their first page on
            sought = keys[:MAX_SOUGHT] if self._tiers.is_asked else ()
        lengths: list[int] = []
        if sought:
            named = page_keys(root.hash, list(sought))
            lengths = self._match(rid, named)
            num_found = max(lengths, default=0)
            if self._events is not None and num_found:
                self._events.wanted(named[:num_found], sought[:num_found])
        self._note_query(rid, _Query(len(keys), root, self._roots.generation), is_hit=num_found > 0)
        self._find_why(rid, keys, num_found, root)
        return lengths

    def _find_why(self, rid: str, keys: Sequence[str], num_found: int, root: Root) -> None:
        """Notes what a request got, at its first lookup, and anew when a later one finds more."""
        known = self._why.get(rid)
        if known is not None and known.num_found >= num_found:
            return
        why: Why | None = None
        if num_found < len(keys) and isinstance(self._tiers, LocalTiers):
            (key,) = page_keys(root.hash, [keys[num_found]])
            why = self._tiers.why_missed(key)
            other = self._firsts.get(keys[0])
            if why[0] is MissReason.NEVER_SEEN and not num_found and other is not None:
                why = _again(is_renamed=other != root.hash)
        self._firsts[keys[0]] = root.hash
        if len(self._firsts) > MAX_QUERIED:
            del self._firsts[next(iter(self._firsts))]
        self._note_why(rid, len(keys), num_found, why)

    def _note_why(self, rid: str, num_pages: int, num_found: int, why: Why | None) -> None:
        page_tokens = 0 if self._pages is None else self._pages.page_tokens
        missed, (reason, text) = (num_pages - num_found) * page_tokens, why or (None, "")
        account = Account(rid, num_pages * page_tokens, 0, missed, reason, text)
        account.host_tokens = num_found * page_tokens
        if reason is not None and rid not in self._why:
            self._metrics.missed(reason, missed)
        self._why[rid] = _Told(account, num_found)
        if len(self._why) > MAX_QUERIED:
            del self._why[next(iter(self._why))]
        self._metrics.why.add(account)

    def _match(self, rid: str, named: list[BlockKey]) -> list[int]:
        """The lengths that can be loaded; the longest is held. With states: those that end at one."""
        if isinstance(self._tiers, FollowingTiers) or not self._num_parts:
            return list(range(1, self._tiers.match(rid, named) + 1)) if self._tiers is not None else []
        if self._tiers is None:
            return []
        is_there = self._tiers.contains
        whole = range(1, self._tiers.leading(named) + 1)
        lengths = [length for length in whole if all(map(is_there, self._parts_of(named[length - 1])))]
        wanted = self._with_state(named[: max(lengths, default=0)])
        return lengths if self._tiers.match(rid, wanted) == len(wanted) else []

    def _parts_of(self, page: BlockKey) -> list[BlockKey]:
        """Of the state behind a page."""
        return [block_key(SequenceHash(page), part) for part in range(1, self._num_parts + 1)]

    def _with_state(self, pages: list[BlockKey]) -> list[BlockKey]:
        """The state last: it is of use for longer than a page of its prefix."""
        return [*pages, *self._parts_of(pages[-1])] if pages else []

    def _note_query(self, rid: str, query: _Query, *, is_hit: bool) -> None:
        """A request that waits is looked up again and again; a hit counts when it has been loaded."""
        before = self._queried.get(rid)
        is_miss = before is None and not is_hit
        self._queried[rid] = query._replace(is_counted=is_miss or (before is not None and before.is_counted))
        if len(self._queried) > MAX_QUERIED:
            del self._queried[next(iter(self._queried))]
        if is_miss:
            self._metrics.request_hits(0, 0, query.num_pages)

    def load(self, rid: str, keys: Sequence[str], indices: Any, state: Any = None) -> None:
        """Queues a load into the pages of ``indices`` and the slot ``state``, for the next ``start``. What
        cannot be loaded fails there.
        """
        self.cancel(rid)
        if self._tiers is None or self._roots is None:
            self._pending[rid] = _Load(None, None)
            return
        root, num_queried = self._roots.now(), len(keys)
        query = self._queried.get(rid)
        if query is not None and query.generation == self._roots.generation:
            # What was found is to be loaded, also if it has become known meanwhile which weights these are.
            root, num_queried = query.root, max(num_queried, query.num_pages)
            if query.is_counted:  # as a miss, before a store brought it
                num_queried = 0
                self._queried[rid] = query._replace(is_counted=False)
        named = page_keys(root.hash, list(keys))
        claim = self._tiers.claim(rid, named if state is None else self._with_state(named))
        load = _Load(claim, indices, state, num_queried, is_lasting=root.is_lasting)
        load.account = told.account if (told := self._why.get(rid)) is not None else None
        self._pending[rid] = load

    def fail_load(self, rid: str) -> None:
        """Queues a load that fails."""
        self.cancel(rid)
        self._pending[rid] = _Load(None, None)

    def cancel(self, rid: str) -> bool:
        """Takes back a load that has not started; False if there is none."""
        load = self._pending.pop(rid, None)
        if load is not None and load.claim is not None and self._tiers is not None:
            self._tiers.drop(load.claim)
        return load is not None

    def start(self, wait_ready: WaitReady) -> int:
        """Starts what is queued as soon as ``wait_ready`` returns; the batch's index, or -1 if nothing is
        queued.
        """
        if not self._pending:
            return -1
        loads, self._pending = self._pending, {}
        index = self.counter.begin(len(loads))
        for rid, load in loads.items():
            load.turn = turn_of(self._num_begun, rid)
            self._num_begun += 1
            if load.claim is None:
                self._metrics.failure(FailureKind.LEASE_EXPIRED)
                self.counter.end_load(index, has_landed=False)
                if self._tiers is not None:  # in its turn
                    self._loader.submit(self._tiers.skip, load.turn, 0)
            else:
                load.index = index
                with self._changed:
                    self._loading.add(load)
                self._loader.submit(self._load, load, wait_ready)
        return index

    def finish(self, index: int) -> bool:
        """Waits until the batch writes no more to device pages; True if all of it is there."""
        return self.counter.finish(index)

    def _load(self, load: _Load, wait_ready: WaitReady) -> None:
        """In the loading thread."""
        if self._tiers is None or self._pages is None or load.claim is None:
            return
        blocks: tuple[int, ...] | None = None
        try:
            wait_ready()
            blocks = self._blocks_of(self._pages, load.indices, load.state)
        except Exception:
            log.exception("kvbm: pages cannot be loaded")
            self._metrics.failure(FailureKind.OTHER)
        with self._changed:
            was_over, load.is_over = load.is_over, blocks is None or load.is_over
            if blocks is not None and not was_over:
                load.is_begun, load.num_read = True, load.claim.held.num_from_disk
                on_end = partial(self._load_ended, load)
                self._tiers.load(load.claim, blocks, on_end, turn=load.turn, is_lasting=load.is_lasting)
                return
        self._tiers.skip(load.turn, len(load.claim.keys))
        if not was_over:
            self._tiers.drop(load.claim)
            self._load_ended(load, Outcome.REJECTED)

    def _load_ended(self, load: _Load, outcome: Outcome) -> None:
        self.counter.end_load(load.index, has_landed=outcome is Outcome.OK)
        if outcome is Outcome.OK and self._pages is not None and load.claim is not None:
            num_parts = 0 if load.state is None else self._num_parts
            num_pages, page_tokens = len(load.claim.keys) - num_parts, self._pages.page_tokens
            num_read, num_brought = min(load.num_read, num_pages), load.claim.held.num_from_elsewhere
            self._metrics.matched_tokens(
                num_pages * page_tokens,
                disk_tokens=num_read * page_tokens,
                remote_tokens=num_brought * page_tokens,
            )
            num_hosted = num_pages - num_read - num_brought
            self._metrics.request_hits(num_hosted, num_read, load.num_queried, num_brought)
            if load.account is not None:
                load.account.host_tokens = num_hosted * page_tokens
                load.account.disk_tokens = num_read * page_tokens
                load.account.remote_tokens = num_brought * page_tokens
        elif load.account is not None:
            lost_tokens = load.account.host_tokens
            load.account.failed(lost_tokens, f"its load failed: {outcome}")
            self._metrics.missed(MissReason.FAILED, lost_tokens)
        with self._changed:
            self._loading.discard(load)
            self._changed.notify_all()

    def _give_up_batch(self, index: int | None) -> None:
        """Ends the loads of a batch (None: all): at once what has not begun to copy, by itself the rest."""
        with self._changed:
            loads = [load for load in self._loading if index in {None, load.index}]
        for load in loads:
            if self._tiers is None or load.claim is None:
                continue
            with self._changed:
                was_over, load.is_over = load.is_over, not load.is_begun
            if load.is_begun:
                self._tiers.cancel(load.claim)
            elif not was_over:
                self._tiers.drop(load.claim)
                self._load_ended(load, Outcome.REJECTED)

    # ---------------------------------------------------------------- the way down

    def store(self, keys: Sequence[str], indices: Any, wait_ready: WaitReady, state: Any = None) -> None:
        """Keeps the pages of ``indices``, and the slot ``state`` that is behind the last of them. They may be
        read when ``wait_ready`` returns, until the store has ended.
        """
        store = _Store()
        is_off = self._tiers is None or self._roots is None or self.control.is_draining
        with self._changed:
            is_refused = self._num_storing >= MAX_WAITING_STORES or is_off
            self._num_storing += not is_refused
        self._stores.append(store)
        if is_refused or self._roots is None:
            store.outcome = Outcome.BUSY
            self._metrics.dropped(DropReason.TIER_NOT_READY if is_off else DropReason.QUEUE_FULL, len(keys))
            return
        root, pages = self._roots.now(), tuple(keys)
        named = page_keys(root.hash, list(keys))
        on_end = partial(self._stored, store, named, pages, self._events.generation if self._events else 0)
        kept = named if state is None else self._with_state(named)
        job = partial(self._store, store, kept, state=state, on_end=on_end, is_lasting=root.is_lasting)
        self._storer.submit(job, indices, self._life, wait_ready)

    def fail_store(self) -> None:
        """A store that fails."""
        self._stores.append(_Store(Outcome.REJECTED))

    def num_ended_stores(self) -> int:
        """Of the oldest stores, how many have ended."""
        return next((i for i, store in enumerate(self._stores) if store.outcome is None), len(self._stores))

    def take_ended_store(self) -> bool:
        """Whether the oldest store, which has ended, ended with all its pages kept."""
        return self._stores.popleft().outcome is Outcome.OK

    def _store(
        self,
        store: _Store,
        keys: list[BlockKey],
        indices: Any,
        life: int,
        wait_ready: WaitReady,
        *,
        state: Any,
        on_end: Callable[[Outcome], None],
        is_lasting: bool,
    ) -> None:
        """In the storing thread."""
        if self._tiers is None or self._pages is None:
            return
        blocks: tuple[int, ...] | None = None
        try:
            wait_ready()
            blocks = self._blocks_of(self._pages, indices, state)
            if len(blocks) != len(keys):
                raise LayoutError(f"kvbm: {len(blocks)} pages, {len(keys)} keys")
        except Exception:
            log.exception("kvbm: pages cannot be stored")
            self._metrics.failure(FailureKind.OTHER)
            blocks = None
        with self._changed:
            if blocks is not None and life == self._life:
                self._tiers.store(keys, blocks, on_end, is_lasting=is_lasting)
                return
        self._store_ended(store, Outcome.REJECTED)

    def _blocks_of(self, pages: DevicePages, indices: Any, state: Any) -> tuple[int, ...]:
        """Of the pages, and of the parts of the state."""
        parts = () if state is None else (pages.state_number(state),) * self._num_parts
        return (*pages.numbers(indices), *parts)

    def _stored(
        self,
        store: _Store,
        keys: Sequence[BlockKey],
        pages: Sequence[str],
        generation: int,
        outcome: Outcome,
    ) -> None:
        if self._events is not None and outcome in {Outcome.OK, Outcome.NO_SPACE}:
            self._events.kept(keys, pages, generation)
        self._store_ended(store, outcome)

    def _store_ended(self, store: _Store, outcome: Outcome) -> None:
        store.outcome = outcome
        with self._changed:
            self._num_storing -= 1
            self._changed.notify_all()

    # ---------------------------------------------------------------- an operator's orders; any thread

    @property
    def namespace(self) -> str:
        """See About."""
        return "" if self._roots is None else self._roots.digest

    def _tiers_there(self) -> frozenset[Tier]:
        return frozenset() if self._tiers is None else self._tiers.tiers

    def _reset_tiers(self, tiers: frozenset[Tier]) -> bool:
        return self._tiers is None or self._tiers.reset(tiers, QUIESCE_TIMEOUT_S)

    # ---------------------------------------------------------------- ends

    def quiesce(self) -> bool:
        """No load or store is queued or under way after this. False if a store did not end: it is not kept.

        Loads are given up. StuckCopyError if one does not end: its pages may be given to nobody.
        """
        for rid in list(self._pending):
            self.cancel(rid)
        self._give_up_batch(None)
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: not self._loading and not self._num_storing, QUIESCE_TIMEOUT_S
            )
            self._life += 1
            if self._loading:
                raise StuckCopyError(
                    f"kvbm: loads of pages have been copying for {QUIESCE_TIMEOUT_S:.0f} s, and they must "
                    "not be used: look for errors of the GPU or its driver, and start SGLang again"
                )
        if not is_idle and self._tiers is not None:
            log.error("kvbm: transfers did not end in %.0f s; what they store is not kept", QUIESCE_TIMEOUT_S)
            self._tiers.disown()
        self._stores.clear()
        self.counter.reset()
        return is_idle

    def close(self) -> None:
        """Ends threads and tiers; idempotent. What is on its way to the disk has WRITE_OUT_TIMEOUT_S to get
        there.
        """
        self.quiesce()
        for thread in (self._loader, self._storer):
            thread.shutdown()
        if self._tiers is not None:
            self._tiers.wait_stored(WRITE_OUT_TIMEOUT_S)
            self._tiers.close()
        if self._on_close is not None:
            self._on_close()
