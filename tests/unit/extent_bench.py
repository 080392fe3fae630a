"""A tier by key whose store keeps extents, without a leader: the store is a set of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.storage.extents import EXTENT_BYTES, extents_within, tail_extents
from kvbm_core.tiers.keyed import KeyedOptions, KeyedTier
from kvbm_core.tiers.lower import Name, Seeker, Sought
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import NO_SLOT, ExtentPart, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier
from tests.unit.tier_bench import TierBench


def chain(num_blocks: int, salt: int = 0) -> list[BlockKey]:
    """Keys of a chain; another one for each ``salt``."""
    return [BlockKey((salt << 32 | number).to_bytes(32, "little")) for number in range(num_blocks)]


def parts_of(order: TierOrder) -> Sequence[ExtentPart]:
    """The extents of an order; without any, each block is one."""
    return order.extents or [ExtentPart(1)] * len(order.keys)


def names_of(order: TierOrder) -> list[Name]:
    """The names of its extents."""
    names, end = [], 0
    for num_blocks, skipped in parts_of(order):
        end += num_blocks - skipped
        names.append((order.keys[end - 1], num_blocks))
    return names


class ExtentBench(TierBench[KeyedTier]):
    """``has``: what is in the store. ``asked`` and ``got``: the names that it was asked for so far."""

    def __init__(
        self,
        num_slots: int = 1 << 14,
        full_blocks: int = 64,
        *,
        admission: AdmissionPolicy | None = None,
        num_ranks: int = 1,
        extent_bytes: int = EXTENT_BYTES,
        **options: Any,
    ) -> None:
        given = KeyedOptions(extent_bytes=extent_bytes, **options)
        super().__init__(
            lambda around: KeyedTier(
                "store", Tier.REMOTE, AdmitAll() if admission is None else admission, around, given
            ),
            num_slots,
            num_ranks,
        )
        self.tier.expect(0, range(num_ranks), extent_bytes // full_blocks)
        assert self.tier.full_blocks == full_blocks
        self.num_slots = num_slots
        self.has: set[Name] = set()
        self.asked: list[Name] = []
        self.got: list[Name] = []

    def put(self, keys: Sequence[BlockKey], end: int | None = None) -> None:
        """Somebody else has stored a chain that has ended after ``end`` blocks."""
        end, full = len(keys) if end is None else end, self.tier.full_blocks
        for span in (*extents_within(0, end, full), *tail_extents(end, full)):
            self.has.add((keys[span.stop - 1], len(span)))

    def ask(
        self, keys: Sequence[BlockKey], first: int = 0, end: int | None = None, seeker: Seeker | None = None
    ) -> Sought:
        """A request wants these blocks."""
        return self.tier.wanted([BlockRun(keys, first, len(keys) if end is None else end)], seeker)

    def reply(self, failed: Mapping[BlockKey, Outcome] | None = None) -> list[TierOrder]:
        """The store does what was ordered; ``failed``: what cannot be read. Returns the orders."""
        orders = self.take_sent()
        for order in orders:
            order.check(self.num_slots)
            self.answer(order, failed=self._failures(order, failed or {}))
        return orders

    def _failures(self, order: TierOrder, failed: Mapping[BlockKey, Outcome]) -> dict[int, Outcome]:
        names = names_of(order)
        if order.kind is OrderKind.STORE:
            self.has.update(names)
            return {}
        if order.kind is OrderKind.FIND:
            self.asked += names
            return {i: Outcome.MISS for i, name in enumerate(names) if name not in self.has}
        self.got += names
        bad, start = dict[int, Outcome](), 0
        for name, (num_blocks, skipped) in zip(names, parts_of(order), strict=True):
            end = start + num_blocks - skipped
            places = [i for i in range(start, end) if order.slots[i] != NO_SLOT]
            bad |= {i: failed[order.keys[i]] for i in places if order.keys[i] in failed}
            if name not in self.has:
                bad |= dict.fromkeys(places, Outcome.MISS)
            start = end
        return bad

    def bring(self, keys: Sequence[BlockKey], end: int | None = None, seeker: Seeker | None = None) -> int:
        """Asks until nothing is coming any more; how many leading blocks are in the host then."""
        seeker = seeker or Seeker()
        for _ in range(1000):
            if self.ask(keys, end=end, seeker=seeker) is not Sought.COMING:
                break
            self.reply()
        else:
            raise AssertionError("it never ends")
        return self.host.match_prefix(keys)

    def stored(self, orders: Iterable[TierOrder]) -> list[Name]:
        """What orders to store were about."""
        return [name for order in orders if order.kind is OrderKind.STORE for name in names_of(order)]
