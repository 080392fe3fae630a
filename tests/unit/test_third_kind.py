"""Whatever a lower tier is, the chain asks it the same: one that answers nothing, and one that has neither
slots nor keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

import kvbm
from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.config.remote_url import SCHEMES
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.chain import Held, TierChain
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.kinds import register_tier
from kvbm_core.tiers.lower import LowerTier, LowerTierMaker, Seeker, Sought
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.movers.opening import OPENERS, Site
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TierPlace
from kvbm_core.types import BlockKey, Tier
from tests.third_kind import SHELF, ShelfTier, register

KEYS = [BlockKey(number.to_bytes(32, "little")) for number in range(20)]


class Bench:
    """Host and disk of eight slots each, over one more tier."""

    def __init__(self, make: LowerTierMaker) -> None:
        self.clock, self.sent, self.metrics = ManualClock(), list[TierOrder](), Metrics()
        self.host = BlockTier(Tier.HOST, LruPolicy(), self.clock)
        self.host.grow(8)
        self.jobs = JobTable(1, self.clock)
        self.chain = TierChain(
            self.host,
            [slotted_tier("disk", Tier.DISK, AdmitAll()), make],
            self.jobs,
            send=self.sent.append,
            clock=self.clock,
            metrics=self.metrics,
        )
        self.disk, self.third = self.chain.lower
        self.disk.take_in(0, 8, [])

    def put(self, keys: Sequence[BlockKey]) -> None:
        """They are new in the host, and are offered."""
        assert self.chain.stored(self.chain.reserve(keys, protect_nothing), Outcome.OK)
        self.chain.offer([run_of(keys)])

    def take(self, name: str, kind: OrderKind) -> TierOrder:
        """The one order of this kind to this tier since the last call."""
        (order,) = (one for one in self.sent if (one.tier, one.kind) == (name, kind))
        self.sent.remove(order)
        return order

    def answer(self, order: TierOrder, *failed: int) -> None:
        """The rank has done it, but for the slots, or numbers, ``failed``."""
        outcome = Outcome.MISS if failed else Outcome.OK
        bad = tuple((number, outcome) for number in failed)
        self.jobs.acknowledge(0, JobResult(order.job_id, outcome, 1, 0.1, 0.0, failed=bad))


def test_a_tier_that_overrides_nothing_has_nothing() -> None:
    bench = Bench(partial(LowerTier, "nothing", Tier.REMOTE))
    chain, third = bench.chain, bench.third
    chain.direct("disk", False)
    third.expect(4, [0])
    third.take_in(0, 4, [Found(0, KEYS[0], 1)])
    assert chain.residents.match_prefix(KEYS) == 0 and not chain.residents.contains(KEYS[0])
    assert chain.hold("r", KEYS[:3]) == 0 and third.hold("r", KEYS, 1.0, 0) is None
    assert not chain.wanted([run_of(KEYS[:3])]) and chain.sought([run_of(KEYS[:3])]) is Sought.NOWHERE
    assert not chain.keeps_extents and not chain.fetching_blocks and third.usage == (0, 0)
    bench.put(KEYS[:4])
    assert {order.tier for order in bench.sent} == {"disk"}
    bench.answer(bench.take("disk", OrderKind.STORE))
    held = chain.hold("r", KEYS[:4])
    assert isinstance(held, Held) and not chain.reads(held, 1) and not held.num_brought
    chain.loaded(held, {})
    chain.used([run_of(KEYS[:4])])
    chain.ended([run_of(KEYS[:4])])
    chain.reset()
    chain.mind([])
    chain.publish_usage()
    chain.check_integrity()
    assert not chain.live_leases and not chain.storing_blocks and third.is_usable
    third.turn_off("it is of no use")
    assert not third.is_usable


def test_a_tier_without_slots_holds_blocks_where_they_lie() -> None:
    bench = Bench(partial(ShelfTier, SHELF))
    chain, shelf = bench.chain, bench.third
    assert isinstance(shelf, ShelfTier)
    bench.put(KEYS[:6])
    bench.answer(bench.take("disk", OrderKind.STORE), 0)
    stored = bench.take(SHELF, OrderKind.STORE)
    assert stored.keys == tuple(KEYS[:6]) and not stored.places
    bench.answer(stored)
    chain.forget(KEYS[:6])
    bench.disk.slots.forget(KEYS[1:4])
    assert chain.residents.match_prefix(KEYS) == 6
    held = chain.hold("r", KEYS[:6])
    assert isinstance(held, Held) and held.num_fetched == 6 and shelf.num_held == 1
    on_disk, on_shelf = chain.reads(held, 7)
    assert (on_disk.tier, len(on_disk.keys)) == ("disk", 2) and len(on_disk.places) == 2
    assert (on_shelf.tier, on_shelf.keys, on_shelf.places) == (SHELF, tuple(KEYS[:4]), ())
    assert chain.is_good(held)
    slot_of = dict(zip(held.keys, held.slots, strict=True))
    chain.loaded(held, {slot_of[KEYS[3]]: Outcome.CORRUPT})
    assert shelf.num_held == 0 and not shelf.contains(KEYS[3]) and shelf.contains(KEYS[2])
    assert chain.residents.match_prefix(KEYS) == 3 and bench.host.match_prefix(KEYS) == 3
    chain.check_integrity()


def test_what_is_held_and_forgotten_is_not_good_any_more() -> None:
    bench = Bench(partial(ShelfTier, SHELF))
    bench.put(KEYS[:3])
    stored = bench.take("disk", OrderKind.STORE)
    bench.answer(stored, *stored.slots)
    bench.answer(bench.take(SHELF, OrderKind.STORE))
    bench.chain.forget(KEYS[:3])
    held = bench.chain.hold("r", KEYS[:3])
    assert isinstance(held, Held) and bench.chain.is_good(held)
    bench.chain.renew(held)
    bench.chain.reset()
    assert not bench.chain.is_good(held)
    bench.chain.release(held)
    assert isinstance(bench.third, ShelfTier) and not bench.third.num_held


def test_it_is_asked_for_what_it_does_not_know_of() -> None:
    bench = Bench(partial(ShelfTier, SHELF))
    chain, seeker = bench.chain, Seeker()
    assert chain.is_asked and chain.wanted([run_of(KEYS[:3])], seeker)
    bench.answer(bench.take(SHELF, OrderKind.FIND), 2)
    assert chain.residents.match_prefix(KEYS) == 2
    assert not chain.wanted([run_of(KEYS[2:3])], seeker), "it was not there a moment ago"
    assert not bench.sent


def test_the_library_has_it_by_its_url() -> None:
    register()
    spec = kvbm.BlockSpec("third-kind", shape=(2, 16, 64), dtype="float16", tokens=16)
    tokens, blocks = list(range(64)), np.full((4, *spec.shape), 7, spec.dtype)
    with kvbm.open_cache(spec, host_bytes=1 << 24, remote="shelf://library") as cache:
        assert cache.put(tokens, blocks) == 4
    with kvbm.open_cache(spec, host_bytes=1 << 24, remote="shelf://library") as cache:
        out = np.zeros_like(blocks)
        assert cache.get(tokens, out) == 4 and (out == 7).all()


@pytest.mark.parametrize(
    ("error", "line"),
    [(OSError(), "OSError"), (OSError(5, "dust"), "dust"), (KeyError("of two\nlines"), "KeyError: .*of two")],
)
def test_what_an_opener_raises_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(site: Site, place: TierPlace) -> None:
        raise error

    register()
    monkeypatch.setitem(OPENERS, SHELF, fail)
    spec = kvbm.BlockSpec("third-kind", shape=(2, 16, 64), dtype="float16", tokens=16)
    with pytest.raises(ConfigError, match=f"^[^\n]*{line}[^\n]*$"):
        kvbm.open_cache(spec, host_bytes=1 << 24, remote="shelf://library")


@pytest.mark.parametrize("scheme", ["", "Shelf", "s3", "file", "store", SHELF])
def test_a_scheme_belongs_to_one_kind(scheme: str) -> None:
    register()
    openers, schemes = dict(OPENERS), set(SCHEMES)
    with pytest.raises(ValueError, match="is taken" if scheme.islower() else "is not the scheme of a URL"):
        register_tier(scheme, lambda name, url: partial(ShelfTier, name), lambda site, place: None)
    assert (openers, schemes) == (OPENERS, SCHEMES)


def test_a_rank_that_cannot_open_such_a_kind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.delitem(OPENERS, SHELF)
    spec = kvbm.BlockSpec("third-kind", shape=(2, 16, 64), dtype="float16", tokens=16)
    with pytest.raises(ConfigError, match="nothing in this process opens a tier of the kind 'shelf'"):
        kvbm.open_cache(spec, host_bytes=1 << 24, remote="shelf://library")
