"""The chain: what is held in which tier, how much of a prefix there is room for, and what a load leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.chain import Held, TierChain
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.slotted import SlottedTier, slotted_tier
from kvbm_core.transfer.plan import FIRST_DIRECT_SLOT, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier

KEYS = [BlockKey(number.to_bytes(32, "little")) for number in range(40)]
OTHERS = KEYS[20:]
TTL_S = 10.0


class Bench:
    """A host of ``num_slots`` slots over the tiers "fast" and "slow"."""

    def __init__(self, num_slots: int = 16) -> None:
        self.clock, self.sent = ManualClock(), list[TierOrder]()
        self.host = BlockTier(Tier.HOST, LruPolicy(), self.clock)
        self.host.grow(num_slots)
        makers = [slotted_tier(name, Tier.DISK, AdmitAll()) for name in ("fast", "slow")]
        self.chain = TierChain(
            self.host,
            makers,
            JobTable(1, self.clock),
            send=self.sent.append,
            clock=self.clock,
            metrics=Metrics(),
            lease_ttl_s=TTL_S,
        )

    def tier(self, name: str) -> SlottedTier:
        tier = self.chain.named(name)
        assert isinstance(tier, SlottedTier)
        return tier

    def put(self, keys: Sequence[BlockKey], *names: str) -> None:
        """They are in these tiers."""
        for name in names:
            if name == "host":
                assert self.host.commit(self.host.reserve(keys, protect_nothing))
            else:
                self.tier(name).take_in(0, len(keys), [Found(i, key, 1) for i, key in enumerate(keys)])

    def held(self, keys: Sequence[BlockKey], **how: bool) -> Held:
        held = self.chain.hold("r", keys, **how)
        assert isinstance(held, Held)
        assert list(held.keys) == list(keys) and len(set(held.slots)) == len(keys) == len(held.slots)
        return held

    def bring(
        self, held: Held, failed: Mapping[BlockKey, Outcome] | None = None, *, forgets: bool = True
    ) -> None:
        """The load of what is held ends."""
        slot_of = dict(zip(held.keys, held.slots, strict=True))
        self.chain.loaded(held, {slot_of[k]: how for k, how in (failed or {}).items()}, forgets=forgets)

    def where(self, key: BlockKey) -> set[str]:
        names = {name for name in ("fast", "slow") if self.tier(name).contains(key)}
        return names | ({"host"} if self.host.contains(key) else set())

    @judges
    def assert_idle(self) -> None:
        self.chain.check_integrity()
        assert not self.chain.live_leases and not self.host.pending_blocks


def test_two_tiers_of_one_name_are_refused() -> None:
    makers = [slotted_tier("disk", Tier.DISK, AdmitAll())] * 2
    host, clock = BlockTier(Tier.HOST, LruPolicy(), ManualClock()), ManualClock()
    with pytest.raises(ValueError, match="one name"):
        TierChain(host, makers, JobTable(1, clock), send=lambda order: None, clock=clock, metrics=Metrics())


def test_each_block_is_held_in_the_first_tier_that_has_it() -> None:
    bench = Bench()
    bench.put(KEYS[:1], "host")
    bench.put(KEYS[1:3], "fast")
    bench.put(KEYS[:5], "slow")
    held = bench.held(KEYS[:5])
    fast, slow = bench.chain.reads(held, 7)
    assert (fast.job_id, fast.tier, fast.kind) == (7, "fast", OrderKind.FETCH)
    assert fast.keys == tuple(KEYS[1:3]) and slow.keys == tuple(KEYS[3:5])
    slot_of = dict(zip(held.keys, held.slots, strict=True))
    assert fast.slots + slow.slots == tuple(slot_of[key] for key in KEYS[1:5])
    assert fast.places == (0, 1) and slow.places == (3, 4)
    assert held.num_fetched == 4 and bench.chain.live_leases == 3
    bench.bring(held)
    assert [bench.where(key) for key in KEYS[:5]] == [
        {"host", "slow"},
        {"host", "fast", "slow"},
        {"host", "fast", "slow"},
        {"host", "slow"},
        {"host", "slow"},
    ]
    bench.assert_idle()


def test_if_one_block_is_nowhere_nothing_is_held() -> None:
    bench = Bench()
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:4], "fast")
    bench.put(KEYS[5:7], "slow")
    assert bench.chain.hold("r", KEYS[:7]) == 4
    bench.assert_idle()
    bench.held(KEYS[:4])


@pytest.mark.parametrize(("room", "expected"), [(8, None), (6, 6), (3, 3), (1, 1), (0, 0)], ids=str)
def test_as_much_is_held_as_there_is_room_for(room: int, expected: int | None) -> None:
    bench = Bench(10)
    bench.put(OTHERS[: 10 - room], "host")
    pinned = bench.host.lease("other", OTHERS[: 10 - room], TTL_S)
    assert pinned is not None
    bench.put(KEYS[:8], "slow")
    found = bench.chain.hold("r", KEYS[:8])
    assert found == expected if expected is not None else isinstance(found, Held)
    if expected:
        bench.bring(bench.held(KEYS[:expected]))
        bench.host.release(pinned)
        bench.assert_idle()


def test_what_comes_last_makes_room_for_what_comes_first() -> None:
    bench = Bench(3)
    bench.put([KEYS[0], KEYS[3], KEYS[4]], "host")
    bench.put(KEYS[:5], "slow")
    assert bench.chain.hold("r", KEYS[:5]) == 3  # the two last give their slots to the two that are missing
    bench.bring(bench.held(KEYS[:3]))
    assert [key for key in KEYS[:5] if bench.host.contains(key)] == KEYS[:3]
    bench.assert_idle()


def test_what_somebody_else_holds_or_must_stay_makes_no_room() -> None:
    bench = Bench(3)
    bench.put([KEYS[0], KEYS[3], KEYS[4]], "host")
    bench.put(KEYS[:5], "slow")
    lease = bench.host.lease("other", KEYS[4:5], TTL_S)
    assert lease is not None
    assert bench.chain.hold("r", KEYS[:5]) == 2  # one slot can be had
    bench.host.release(lease)
    assert bench.chain.hold("r", KEYS[:5], lambda new_keys: frozenset(KEYS[:5])) == 1
    bench.assert_idle()


def test_what_somebody_else_brings_up_cuts_the_prefix() -> None:
    bench = Bench()
    bench.put(KEYS[:5], "slow")
    other = bench.chain.hold("other", KEYS[2:3])
    assert isinstance(other, Held)
    assert bench.chain.hold("r", KEYS[:5]) == 2
    mine = bench.held(KEYS[:2])
    bench.bring(other)
    bench.bring(mine)
    bench.bring(bench.held(KEYS[:5]))
    bench.assert_idle()


def test_of_what_is_of_no_use_in_part_nothing_is_evicted() -> None:
    bench = Bench(4)
    bench.put(OTHERS[:4], "host")
    bench.put(KEYS[:5], "slow")
    assert not isinstance(bench.chain.hold("r", KEYS[:5], all_or_none=True), Held)
    assert bench.host.resident_blocks == 4
    bench.assert_idle()


@pytest.mark.parametrize(
    ("outcome", "stays_below"),
    [
        (Outcome.CORRUPT, False),
        (Outcome.MISS, False),
        (Outcome.IO_ERROR, False),
        (Outcome.TIMED_OUT, True),
        (Outcome.REJECTED, True),
    ],
)
def test_of_a_load_that_failed_in_part_what_came_stays(outcome: Outcome, stays_below: bool) -> None:
    bench = Bench()
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:5], "slow")
    bench.bring(bench.held(KEYS[:5]), {KEYS[1]: outcome, KEYS[3]: outcome})
    below = {"slow"} if stays_below else set[str]()
    assert [bench.where(key) for key in KEYS[:5]] == [
        {"host"},
        set(),
        {"host", "slow"},
        below,
        {"host", "slow"},
    ]
    bench.assert_idle()


def test_a_load_that_was_given_up_forgets_nothing_and_keeps_only_what_came() -> None:
    bench = Bench()
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:5], "slow")
    lost = dict.fromkeys([KEYS[0], KEYS[3], KEYS[4]], Outcome.REJECTED) | {KEYS[2]: Outcome.CORRUPT}
    bench.bring(bench.held(KEYS[:5]), lost, forgets=False)
    assert [bench.where(key) for key in KEYS[:5]] == [{"host"}, {"host"}, {"slow"}, {"slow"}, {"slow"}]
    bench.assert_idle()


def test_what_comes_after_a_reset_is_dropped() -> None:
    bench = Bench()
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:5], "slow")
    held = bench.held(KEYS[:5])
    bench.chain.reset()
    assert not bench.chain.is_good(held)
    bench.bring(held)
    assert [bench.where(key) for key in KEYS[:5]] == [set()] * 5
    bench.assert_idle()


@pytest.mark.parametrize("spoils", ["host", "slow", "time"])
def test_a_promise_is_good_until_a_lease_ends_or_a_block_is_forgotten_in_any_tier(spoils: str) -> None:
    bench = Bench()
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:4], "slow")
    held = bench.held(KEYS[:4])
    assert bench.chain.is_good(held)
    if spoils == "host":
        bench.host.forget(KEYS[:1])
    elif spoils == "slow":
        bench.tier("slow").slots.forget(KEYS[2:3])
    else:
        bench.clock.advance(TTL_S)
        assert bench.chain.mind([]) == 2
    assert not bench.chain.is_good(held)
    bench.chain.release(held)
    bench.assert_idle()


def test_what_moves_is_held_in_all_tiers_however_long_it_takes() -> None:
    bench = Bench(4)
    bench.put(KEYS[:2], "host")
    bench.put(KEYS[2:4], "slow")
    held = bench.held(KEYS[:4])
    for pause_s in (TTL_S - 1, TTL_S - 1, 100 * TTL_S):
        bench.clock.advance(pause_s)
        assert bench.chain.mind([held]) == 0
    assert bench.chain.is_good(held) and bench.chain.live_leases == 2
    bench.bring(held)
    bench.assert_idle()


def test_what_goes_straight_to_the_device_needs_no_host_slot() -> None:
    """So a load may be larger than the host, and evicts nothing there."""
    bench = Bench(4)
    bench.put(OTHERS[:2], "host")
    bench.put(KEYS[:1], "host")
    bench.put(KEYS[1:13], "slow")
    bench.chain.direct("slow", True)
    bench.chain.direct("nowhere", True)
    held = bench.held(KEYS[:13])
    assert not bench.host.pending_blocks and held.num_fetched == 12
    (order,) = bench.chain.reads(held, 7)
    assert order.is_direct and order.keys == tuple(KEYS[1:13]) and order.places == tuple(range(12))
    assert order.slots == tuple(held.slots[1:]) == tuple(FIRST_DIRECT_SLOT + n for n in range(12))
    order.check_direct(12)
    bench.bring(held, {KEYS[3]: Outcome.CORRUPT, KEYS[4]: Outcome.MISS, KEYS[5]: Outcome.TIMED_OUT})
    gone = {KEYS[3], KEYS[4]}
    assert [bench.where(key) for key in KEYS[1:13]] == [set() if k in gone else {"slow"} for k in KEYS[1:13]]
    assert bench.where(OTHERS[0]) == bench.where(KEYS[0]) == {"host"}
    bench.assert_idle()
    bench.chain.direct("slow", False)
    assert bench.chain.hold("r", KEYS[6:13]) == 4, "again as much as the host has room for"
    bench.assert_idle()


@pytest.mark.parametrize("ends_as", ["released", "given up", "in vain"])
def test_a_direct_load_that_comes_to_nothing_changes_nothing(ends_as: str) -> None:
    bench = Bench(4)
    bench.put(KEYS[:6], "slow")
    bench.chain.direct("slow", True)
    held = bench.held(KEYS[:6])
    if ends_as == "released":
        bench.chain.release(held)
    elif ends_as == "given up":
        bench.bring(held, dict.fromkeys(KEYS[:6], Outcome.REJECTED), forgets=False)
    else:
        bench.bring(held, dict.fromkeys(KEYS[:6], Outcome.TIMED_OUT))
    assert all(bench.where(key) == {"slow"} for key in KEYS[:6])
    bench.assert_idle()


def test_what_is_to_be_in_the_host_in_the_end_does_not_go_straight() -> None:
    bench = Bench()
    bench.put(KEYS[:3], "slow")
    bench.chain.direct("slow", True)
    held = bench.held(KEYS[:3], needs_host=True)
    (order,) = bench.chain.reads(held, 7)
    assert not order.is_direct and max(held.slots) < 16 and bench.host.pending_blocks == 3
    bench.bring(held)
    assert bench.where(KEYS[0]) == {"host", "slow"}
    bench.assert_idle()


def test_of_two_tiers_one_goes_straight() -> None:
    """Numbers in place of slots are those of one tier's places."""
    bench = Bench()
    bench.put(KEYS[:2], "fast")
    bench.put(KEYS[:4], "slow")
    for name in ("fast", "slow"):
        bench.chain.direct(name, True)
    held = bench.held(KEYS[:4])
    fast, slow = bench.chain.reads(held, 7)
    assert fast.is_direct and not slow.is_direct
    bench.bring(held)
    assert [bench.where(KEYS[n]) for n in (0, 2)] == [{"fast", "slow"}, {"host", "slow"}]
    bench.assert_idle()


def test_what_comes_straight_from_below_is_not_stored_in_the_host_again() -> None:
    """It is on the device now, and is offered anew with each step. What is new there makes room for what
    comes after it, as soon as it is below.
    """
    bench = Bench(4)
    bench.chain.direct("slow", True)
    bench.put(KEYS[:8], "slow")
    assert list(bench.chain.new_of(KEYS[:10])) == KEYS[8:10]
    own = frozenset(KEYS[:14])
    reserved = bench.chain.reserve(KEYS[:12], lambda new: own)
    assert list(reserved.keys) == KEYS[8:12] and bench.chain.stored(reserved, Outcome.OK)
    assert not bench.chain.reserve(KEYS[:14], lambda new: own).keys, "what is nowhere else must stay"
    bench.tier("slow").take_in(0, 40, [Found(30 + i, key, 2) for i, key in enumerate(KEYS[8:11])])
    reserved = bench.chain.reserve(KEYS[:14], lambda new: own)
    assert list(reserved.keys) == KEYS[12:14] and bench.chain.stored(reserved, Outcome.OK)
    assert bench.where(KEYS[11]) == {"host"}
    assert all("slow" in bench.where(key) for key in KEYS[:11])
    bench.chain.direct("slow", False)
    assert list(bench.chain.new_of(KEYS[:8])) == KEYS[:8], "a block that comes by way of the host stays there"
    bench.assert_idle()
