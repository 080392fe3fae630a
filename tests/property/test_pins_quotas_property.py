"""Pins and quotas of one tier against a twin that is so plain that it can be seen to be right."""

from __future__ import annotations

import random

import pytest

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.types import BlockKey, Tier

SLOTS, KEYS, TENANTS, STEPS = 24, 60, 3, 250


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


class Twin:
    """``blocks``: the least recently used first, and whose each is."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, int] = {}
        self.pins: list[list[BlockKey]] = []
        self.limits: dict[int, int] = {}

    def is_pinned(self, key: BlockKey) -> bool:
        return any(key in pin for pin in self.pins)

    def of(self, tenant: int) -> list[BlockKey]:
        return [key for key, owner in self.blocks.items() if owner == tenant]

    def use(self, keys: list[BlockKey]) -> None:
        for key in reversed(keys):
            if key in self.blocks and not self.is_pinned(key):
                self.blocks[key] = self.blocks.pop(key)

    def store(self, keys: list[BlockKey], tenant: int) -> None:
        keys = [key for key in keys if key not in self.blocks]
        limit = self.limits.get(tenant, SLOTS)
        if tenant in self.limits:
            self.evict(len(self.of(tenant)) + len(keys) - limit, self.of(tenant))
            keys = keys[: max(0, limit - len(self.of(tenant)))]
        missing = len(self.blocks) + len(keys) - SLOTS
        self.evict(missing, list(self.blocks))
        for key in reversed(keys[: SLOTS - len(self.blocks)]):
            self.blocks[key] = tenant

    def evict(self, count: int, candidates: list[BlockKey]) -> None:
        loose = [key for key in candidates if not self.is_pinned(key)]
        for key in loose[: max(0, count)]:
            del self.blocks[key]

    def unpin(self, pin: list[BlockKey]) -> None:
        """What nobody pins any more counts as just used."""
        self.pins.remove(pin)
        self.use([key for key in dict.fromkeys(pin) if key in self.blocks])

    def limit(self, tenant: int, limit: int | None) -> None:
        if limit is None:
            self.limits.pop(tenant, None)
            return
        self.limits[tenant] = limit
        self.evict(len(self.of(tenant)) - limit, self.of(tenant))


def keys_by_tenant(rng: random.Random) -> tuple[list[BlockKey], int]:
    tenant = rng.randrange(TENANTS)
    first = rng.randrange(KEYS)
    numbers = range(first, min(KEYS, first + rng.randrange(1, 8)))
    return [key_of(1000 * tenant + number) for number in numbers], tenant + 1


def act(tier: BlockTier, twin: Twin, rng: random.Random) -> None:
    keys, tenant = keys_by_tenant(rng)
    what = rng.random()
    if what < 0.55:
        tier.commit(tier.reserve(keys, protect_nothing, tenants=tenant))
        twin.store(keys, tenant)
    elif what < 0.7:
        tier.touch(keys)
        twin.use(keys)
    elif what < 0.78 and sum(map(len, twin.pins)) < SLOTS // 2:
        tier.keep(keys)
        twin.pins.append(keys)
    elif what < 0.86 and twin.pins:
        pin = rng.choice(twin.pins)
        tier.unkeep(pin)
        twin.unpin(pin)
    elif what < 0.94:
        limit = rng.choice([None, 2, 5, 9])
        if limit is None or (tenant not in twin.limits and limit >= len(twin.of(tenant))):
            tier.set_quota([tenant], limit)
            twin.limit(tenant, limit)
    elif what < 0.97:
        tier.forget(keys)
        for key in keys:
            twin.blocks.pop(key, None)
    else:
        tier.forget_of([tenant])
        for key in twin.of(tenant):
            del twin.blocks[key]


@pytest.mark.parametrize("seed", range(10))
def test_a_tier_with_pins_and_quotas_has_what_its_twin_has(seed: int) -> None:
    rng = random.Random(seed)
    tier, twin = BlockTier(Tier.HOST, LruPolicy(), ManualClock()), Twin()
    tier.grow(SLOTS)
    for tenant in range(1, TENANTS + 1):  # from the start, so that the order of use is the quota's too
        if rng.random() < 0.5:
            tier.set_quota([tenant], 6)
            twin.limit(tenant, 6)
    for step in range(STEPS):
        before = set(twin.limits)
        act(tier, twin, rng)
        assert set(tier.keys()) == twin.blocks.keys(), f"step {step}"
        assert all(tier.used_by(tenant) <= limit or twin.pins for tenant, limit in twin.limits.items())
        tier.check_integrity()
        if twin.limits.keys() - before:  # its order of use begins anew: so does the twin's
            _same_order(tier, twin)


def _same_order(tier: BlockTier, twin: Twin) -> None:
    """A quota that is set later knows no order: all of the tier's blocks are used once, in the same order."""
    for key in list(twin.blocks):
        tier.touch([key])
        twin.use([key])


def test_blocks_on_their_way_count_and_are_forgotten_with_their_tenant() -> None:
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    tier.grow(SLOTS)
    tier.set_quota([1], 4)
    first, second = [key_of(i) for i in range(3)], [key_of(i) for i in range(3, 6)]
    writing = tier.reserve(first, protect_nothing, tenants=1)
    assert tier.reserve(second, protect_nothing, tenants=1).keys == (key_of(3),)  # nothing can go
    assert tier.used_by(1) == 4
    assert tier.forget_of([1]) == 0
    tier.commit(writing)
    assert tier.keys() == [] and tier.used_by(1) == 1
    tier.check_integrity()


def test_a_step_of_several_tenants_gives_each_its_own() -> None:
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    tier.grow(SLOTS)
    tier.set_quota([2], 1)
    keys = [key_of(i) for i in range(6)]
    tier.commit(tier.reserve([keys[1]], protect_nothing, tenants=1))
    tier.commit(tier.reserve(keys, protect_nothing, tenants=[1, 1, 2, 2, 3, 1]))
    assert tier.owners([keys[0], keys[1], keys[2], keys[4], keys[5]]) == [1, 1, 2, 3, 1]
    assert not tier.contains(keys[3]) and tier.used_by(2) == 1
    tier.check_integrity()


def test_all_or_none_evicts_nothing_for_what_a_quota_has_no_room_for() -> None:
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    tier.grow(SLOTS)
    tier.set_quota([1], 2)
    tier.commit(tier.reserve([key_of(0), key_of(1)], protect_nothing, tenants=1))
    more = [key_of(i) for i in range(2, 5)]
    assert not tier.reserve(more, protect_nothing, all_or_none=True, tenants=1).keys
    assert sorted(tier.keys()) == [key_of(0), key_of(1)]
    tier.check_integrity()
