"""Whose a request is: its adapter and its salt; and how many blocks they may have."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from kvbm_core.identity.roots import short_salt
from kvbm_core.tiers.chain import TierChain
from kvbm_core.types import SequenceHash, Tier

MIN_KEPT_TENANTS = 65_536
"""Beyond so many, those are forgotten that have no blocks and have not asked for long."""
MAX_QUOTAS = 256


class Tenant(NamedTuple):
    """``adapter``: its name, "" for none. ``salt`` None: unsalted."""

    adapter: str = ""
    salt: str | None = None

    @classmethod
    def of(cls, adapter: str, salt: str | None) -> Tenant:
        """As a request, or an operator, names it."""
        return cls(adapter, short_salt(salt))


class Chosen(NamedTuple):
    """Tenants with this adapter and this salt; None: with any."""

    adapter: str | None
    salt: str | None

    def has(self, tenant: Tenant) -> bool:
        """Whether it is one of them."""
        return self.adapter in (None, tenant.adapter) and self.salt in (None, tenant.salt)

    @classmethod
    def of(cls, adapter: str | None, salt: str | None) -> Chosen:
        """As an operator names them."""
        return cls(adapter, short_salt(salt))


class QuotaRule(NamedTuple):
    """Blocks in each tier; None: no limit there."""

    host_blocks: int | None
    disk_blocks: int | None

    def limit(self, tier: Tier) -> int | None:
        """In this tier."""
        return self.host_blocks if tier is Tier.HOST else self.disk_blocks


class TenantTable:
    """Of one leader, on its thread. ``on_root``: hears when a tenant's names begin at a root, which changes
    with the weights.

    Bounded by the blocks there are: who has none is forgotten some time after the last request, and is new
    with the next one. A new tenant costs the same however many there are.
    """

    def __init__(self, chain: TierChain, on_root: Callable[[Tenant, SequenceHash], None]) -> None:
        self._tiers = chain.books
        self._on_root = on_root
        self._numbers: dict[Tenant, int] = {}  # who has asked last is at the end
        self._roots: dict[Tenant, SequenceHash] = {}
        self._rules: dict[Chosen, QuotaRule] = {}
        self._members: dict[Chosen, set[int]] = {}  # of each rule: who shares its quota
        self._last_number = 0
        self._sweep_at = MIN_KEPT_TENANTS

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, tenant: Tenant, root: SequenceHash) -> int:
        """What its blocks are marked with."""
        number = self._numbers.pop(tenant, None)
        is_new = number is None
        if number is None:
            if len(self._numbers) >= self._sweep_at:
                self._sweep()
            self._last_number += 1
            number = self._last_number
        self._numbers[tenant] = number
        if self._roots.get(tenant) != root:
            self._roots[tenant] = root
            self._on_root(tenant, root)
        if is_new and self._rules:
            self._join(tenant, number)
        return number

    def root_of(self, tenant: Tenant) -> SequenceHash | None:
        """Where its names begin, if it has had a request."""
        return self._roots.get(tenant)

    def number_of(self, tenant: Tenant) -> int | None:
        """Of one that has had a request."""
        return self._numbers.get(tenant)

    def numbers_of(self, chosen: Chosen) -> frozenset[int]:
        """Of those that have had a request. Cost grows with their number."""
        return frozenset(number for tenant, number in self._numbers.items() if chosen.has(tenant))

    def _sweep(self) -> None:
        """Forgets who has no blocks, but for those who asked last: they may still run."""
        have_blocks = frozenset[int]().union(*(tier.owners_in_use() for tier in self._tiers))
        idle = list(self._numbers)[: len(self._numbers) - MIN_KEPT_TENANTS // 2]
        gone = [tenant for tenant in idle if self._numbers[tenant] not in have_blocks]
        numbers = [self._numbers.pop(tenant) for tenant in gone]
        for tenant in gone:
            del self._roots[tenant]
        for members in self._members.values():
            members.difference_update(numbers)
        for tier in self._tiers:
            tier.leave_quotas(numbers)
        self._sweep_at = max(MIN_KEPT_TENANTS, 2 * len(self._numbers))

    # ---------------------------------------------------------------- quotas

    def set_rule(self, chosen: Chosen, rule: QuotaRule | None) -> bool:
        """None: no quota any more. False if there are too many."""
        if rule is None and chosen not in self._rules:
            return True
        if rule is not None and chosen not in self._rules and len(self._rules) >= MAX_QUOTAS:
            return False
        before = dict.fromkeys(self._rules)
        self._rules.pop(chosen, None)
        if rule is not None:
            self._rules[chosen] = rule
        changed, loose = {chosen} & self._rules.keys(), list[int]()
        for tenant, number in self._numbers.items():
            if not chosen.has(tenant):
                continue
            old, new = _first(before, tenant), _first(self._rules, tenant)
            if old != new:
                changed |= {each for each in (old, new) if each in self._rules}
                self._move(number, old, new)
                if new is None:
                    loose.append(number)
        if rule is None:
            self._members.pop(chosen, None)
        for tier in self._tiers:
            tier.leave_quotas(loose)
        self._apply(changed)
        return True

    @property
    def num_quotas(self) -> int:
        """How many there are."""
        return len(self._rules)

    def used_blocks(self, chosen: Chosen) -> int:
        """Of the host, that count toward this quota."""
        return max(map(self._tiers[0].used_by, self._members.get(chosen, ())), default=0)

    def _move(self, number: int, old: Chosen | None, new: Chosen | None) -> None:
        if old is not None:
            self._members[old].discard(number)
        if new is not None:
            self._members.setdefault(new, set()).add(number)

    def _apply(self, changed: Iterable[Chosen]) -> None:
        for chosen in changed:
            members = self._members.setdefault(chosen, set())
            for tier in self._tiers if members else ():
                tier.set_quota(members, self._rules[chosen].limit(tier.tier))

    def _join(self, tenant: Tenant, number: int) -> None:
        chosen = _first(self._rules, tenant)
        if chosen is None:
            return
        members = self._members.setdefault(chosen, set())
        other = next(iter(members), None)
        members.add(number)
        for tier in self._tiers:
            if other is not None:
                tier.join_quota(number, other)
            else:
                tier.set_quota([number], self._rules[chosen].limit(tier.tier))


def _first(rules: Container[Chosen], tenant: Tenant) -> Chosen | None:
    """The rule that counts for it: the one of its salt before the one of its adapter."""
    adapter, salt = tenant
    by_salt = (Chosen(adapter, salt), Chosen(None, salt)) if salt is not None else ()
    return next((one for one in (*by_salt, Chosen(adapter, None)) if one in rules), None)
