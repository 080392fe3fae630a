"""A tier by key with extents, beside a naive twin: chains that part, evictions, faults, late answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import extent_at, extent_before
from kvbm_core.tiers.lower import Name, Seeker, Sought
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import NO_SLOT, OrderKind, TierOrder
from kvbm_core.types import BlockKey
from tests.effort import tries
from tests.unit.extent_bench import ExtentBench, chain, names_of

STEPS = tries(425, nightly=10_000)
MAX_BLOCKS = 60
TROUBLES = (Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.MISS, Outcome.CORRUPT, Outcome.BUSY)


def naive_end(has: set[Name], keys: list[BlockKey], first: int, end: int, full_blocks: int) -> int:
    """How far a chain can be brought up from block ``first`` on, one extent after the other."""
    position = first
    while position < end:
        whole = extent_at(position, full_blocks)
        if whole.stop > end or (keys[whole.stop - 1], len(whole)) not in has:
            break
        position = whole.stop
    if position == 0:
        return 0
    whole, size = extent_at(position, full_blocks), len(extent_at(position, full_blocks))
    while size > 1 and position < end:
        size //= 2
        start = whole.start + (position - whole.start) // size * size
        if start + size <= end and (keys[start + size - 1], size) in has:
            position = start + size
    return position


@dataclass
class Life:
    """``content``: what each host slot holds; a key, or nothing that anybody may see."""

    bench: ExtentBench
    random: Random
    has_faults: bool
    chains: list[list[BlockKey]]
    content: dict[int, BlockKey | None] = field(default_factory=dict)
    orders: list[TierOrder] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    seekers: list[Seeker] = field(default_factory=lambda: [Seeker() for _ in range(4)])
    num_fetched: int = 0
    num_stored: int = 0

    # ---------------------------------------------------------------- what may happen

    def want(self) -> None:
        keys = self.random.choice(self.chains)
        first = self.random.choice([0, 0, self.random.randrange(len(keys))])
        end = self.random.randint(first, len(keys))
        number = self.random.randrange(len(self.seekers))
        if self.random.random() < 0.2:
            self.seekers[number] = Seeker()
        if first < end:
            self.bench.ask(keys, first, end, self.seekers[number])

    def compute(self) -> None:
        """Some blocks of a chain come from the device."""
        keys = self.random.choice(self.chains)
        first = self.random.choice([0, 0, self.random.randrange(len(keys))])
        end = self.random.randint(first + 1, len(keys))
        host = self.bench.host
        reservation = host.reserve(keys[first:end], frozenset)
        self.content |= dict(zip(reservation.slots, reservation.keys, strict=True))
        host.commit(reservation)
        known = keys[: self.random.randint(end, len(keys))]
        runs = [BlockRun(known, first, end)]
        self.random.choice([self.bench.tier.offer, self.bench.tier.hit])(runs)
        if self.random.random() < 0.4:
            self.bench.tier.ended([BlockRun(known, 0, end)])

    def forget(self) -> None:
        keys = self.random.choice(self.chains)
        self.bench.host.forget(self.random.sample(keys, self.random.randint(1, 5)))

    def others(self) -> None:
        """Another engine stores a chain, or needs the room."""
        if self.random.random() < 0.5:
            keys = self.random.choice(self.chains)
            self.bench.put(keys, self.random.randint(1, len(keys)))
        elif self.bench.has:
            self.bench.has.discard(self.random.choice(sorted(self.bench.has)))

    def time_passes(self) -> None:
        self.bench.clock.advance(self.random.choice([0.1, 1.0, 5.0, 61.0]))
        self.bench.tier.mind()
        self.bench.host.expire_leases()

    def reset(self) -> None:
        self.bench.host.reset()
        self.bench.tier.reset()

    def answer(self) -> None:
        if self.orders:
            self._end(self.orders[self.random.randrange(len(self.orders))])

    # ---------------------------------------------------------------- the store

    def take(self) -> None:
        """Looks at what was ordered."""
        for order in self.bench.take_sent():
            order.check(self.bench.num_slots)
            names = names_of(order)
            assert len(set(names)) == len(names)
            asked = [name for other in self.orders if other.kind is order.kind for name in names_of(other)]
            assert not set(asked).intersection(names), f"{order.kind} of what is on its way"
            if order.kind is OrderKind.STORE:
                self.check_heads(names)
            if order.kind is OrderKind.FETCH:
                self.num_fetched += 1
                self.content |= {slot: None for slot in order.slots if slot != NO_SLOT}
            self.orders.append(order)

    def check_heads(self, names: list[Name]) -> None:
        """Nothing is stored of which the one before is neither in the store, as far as is known, nor on its
        way.
        """
        for key, size in names:
            chain = next(keys for keys in self.chains if key in keys)
            start = chain.index(key) + 1 - size
            if start:
                before = chain[start - 1], len(extent_before(start, self.bench.tier.full_blocks))
                assert self.bench.tier._is_there(before), "a tail without its head"

    def _end(self, order: TierOrder, *, is_well: bool = False) -> None:
        is_faulty = self.has_faults and not is_well and self.random.random() < 0.2
        if is_faulty and order.kind is OrderKind.FETCH and self.random.random() < 0.3:
            if order.job_id not in self.late:
                self.late.add(order.job_id)
                self.bench.answer(order, Outcome.TIMED_OUT, is_late=True)
            return
        self.orders.remove(order)
        if order.kind is OrderKind.STORE:
            self.num_stored += 1
            for key, slot in zip(order.keys, order.slots, strict=True):
                assert self.content[slot] == key, "a slot was given away while it was being stored"
        failed = self.bench._failures(order, {})
        if is_faulty:
            bad = self.random.choice(TROUBLES)
            places = [i for i, slot in enumerate(order.slots or order.keys) if slot != NO_SLOT]
            failed |= dict.fromkeys(self.random.sample(places, self.random.randint(1, len(places))), bad)
        if order.job_id in self.late:
            places = [i for i, slot in enumerate(order.slots) if slot != NO_SLOT]
            failed = dict.fromkeys(places, Outcome.TIMED_OUT)
        if order.kind is OrderKind.FETCH:
            for i, (key, slot) in enumerate(zip(order.keys, order.slots, strict=True)):
                if slot != NO_SLOT:
                    assert self.content[slot] is None, "a slot was given away while it was being fetched into"
                    self.content[slot] = None if i in failed else key
        self.bench.answer(order, failed=failed)

    def check(self) -> None:
        self.take()
        self.bench.check()
        host = self.bench.host
        keys = [key for key in self.content.values() if key is not None and host.contains(key)]
        lease = host.lease("check", list(dict.fromkeys(keys)), 1.0)
        assert lease is not None
        held = zip(lease.keys, lease.slots, strict=True)
        assert all(self.content[slot] == key for key, slot in held), "wrong bytes can be matched"
        host.release(lease)

    def settle(self) -> None:
        """All that is on its way ends well."""
        for _ in range(1000):
            if not self.orders:
                return
            self._end(self.orders[0], is_well=True)
            self.check()
        raise AssertionError("it never ends")

    def compare(self) -> None:
        """Nothing happens beside one request: it gets what the naive twin gets."""
        self.settle()
        self.late.clear()
        self.bench.clock.advance(1000.0)
        keys = self.random.choice(self.chains)
        first = self.bench.host.match_prefix(keys)
        expected = naive_end(self.bench.has, keys, first, len(keys), self.bench.tier.full_blocks)
        seeker = Seeker()
        for _ in range(100):
            is_coming = self.bench.ask(keys, seeker=seeker) is Sought.COMING
            self.check()
            if not is_coming:
                break
            self.settle()
        found = self.bench.host.match_prefix(keys)
        beyond = self.bench.host.absent_of(keys[found:])
        is_small = self.bench.num_slots < 8 * MAX_BLOCKS
        assert found >= expected or is_small, (first, found, expected, len(beyond))


@pytest.mark.parametrize("has_faults", [False, True])
@pytest.mark.parametrize("num_slots", [40, 600])
@pytest.mark.parametrize("full_blocks", [2, 8, 16])
def test_any_history(full_blocks: int, num_slots: int, has_faults: bool, seed: int) -> None:
    random = Random(seed)
    trunk = chain(MAX_BLOCKS)
    chains = [trunk]
    for salt in range(1, 5):
        parted = random.randrange(MAX_BLOCKS)
        own = chain(MAX_BLOCKS, salt)
        chains.append([*trunk[:parted], *own[parted : random.randint(parted + 1, MAX_BLOCKS)]])
    bench = ExtentBench(num_slots, full_blocks, max_known=random.choice([20, 10_000]))
    life = Life(bench, random, has_faults, chains)
    actions = [
        (life.want, 10),
        (life.answer, 10),
        (life.compute, 2),
        (life.forget, 2),
        (life.others, 3),
        (life.time_passes, 1),
        (life.reset, 0.1),
        (life.compare, 0.3),
    ]
    for number in range(STEPS):
        (action,) = random.choices([one for one, _ in actions], [weight for _, weight in actions])
        try:
            action()
            life.check()
        except Exception as error:
            raise AssertionError(f"step {number}, {action.__name__}: {error}") from error
    life.compare()
    life.settle()
    assert life.num_fetched > 10 and life.num_stored > 10, "hardly anything was moved"
    bench.assert_idle()
