"""Many tenants, long salts, quotas that come late: the table stays small, a new salt costs the same, and the
least recently used blocks go.
"""

from __future__ import annotations

import pytest

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.identity.roots import LONG_SALT_CHARS, Roots, Stamp, short_salt
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime import tenants as tenants_module
from kvbm_core.runtime.tenants import Chosen, QuotaRule, Tenant
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import SequenceHash, Tier

ROOT = SequenceHash(bytes(32))


def test_after_many_salts_one_that_comes_late_has_its_quota_and_can_be_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants_module, "MIN_KEPT_TENANTS", 64)
    bench = LeaderBench()
    table, host = bench.leader.tenants, bench.leader.chain.host
    with_blocks = table.number(Tenant("", "first"), ROOT)
    host.commit(host.reserve(sample_keys(0, 2), protect_nothing, tenants=with_blocks))
    assert table.set_rule(Chosen("a", None), QuotaRule(9, None))
    for number in range(5000):
        table.number(Tenant("a", f"salt {number}"), ROOT)
        assert len(table) <= 2 * 64 + 2
    assert table.set_rule(Chosen(None, "late"), QuotaRule(3, None))
    late = table.number(Tenant("", "late"), ROOT)
    quota = host._tenants.quota_of(late)
    assert quota is not None and quota.limit_blocks == 3
    assert table.numbers_of(Chosen(None, "late")) == {late}
    assert table.number_of(Tenant("", "first")) == with_blocks  # it has blocks
    assert table.number_of(Tenant("a", "salt 0")) is None and table.root_of(Tenant("a", "salt 0")) is None
    assert len(host._tenants._quotas) <= len(table)
    host.check_integrity()


def test_a_new_tenant_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, looks = LeaderBench(), list[object]()
    table, host = bench.leader.tenants, bench.leader.chain.host
    table.set_rule(Chosen("a", None), QuotaRule(9, None))
    table.number(Tenant("a", "first"), ROOT)
    in_use = host._in_use
    monkeypatch.setattr(host, "_in_use", lambda tenants: looks.append(tenants) or in_use(tenants))
    monkeypatch.setattr(Chosen, "has", lambda *_: pytest.fail("all tenants were looked at"))
    for number in range(100):
        table.number(Tenant("a", f"salt {number}"), ROOT)
    assert not looks


def test_quotas_come_and_go_and_each_tenant_is_in_the_right_one() -> None:
    bench = LeaderBench()
    table, host = bench.leader.tenants, bench.leader.chain.host
    tenants = [Tenant("a", "s"), Tenant("a", "t"), Tenant("b", "s"), Tenant("b"), Tenant("", "s"), Tenant()]
    numbers = [table.number(tenant, ROOT) for tenant in tenants]
    by_adapter, by_salt, by_both = Chosen("a", None), Chosen(None, "s"), Chosen("a", "s")

    def limits() -> list[int | None]:
        host.check_integrity()
        quotas = [host._tenants.quota_of(number) for number in numbers]
        return [None if quota is None else quota.limit_blocks for quota in quotas]

    table.set_rule(by_adapter, QuotaRule(9, None))
    assert limits() == [9, 9, None, None, None, None]
    table.set_rule(by_salt, QuotaRule(5, None))
    assert limits() == [5, 9, 5, None, 5, None]
    table.set_rule(by_both, QuotaRule(3, None))
    assert limits() == [3, 9, 5, None, 5, None]
    table.set_rule(by_salt, QuotaRule(4, None))
    assert limits() == [3, 9, 4, None, 4, None]
    table.set_rule(by_both, None)
    assert limits() == [4, 9, 4, None, 4, None]
    table.set_rule(by_salt, None)
    assert limits() == [9, 9, None, None, None, None]
    table.set_rule(by_adapter, QuotaRule(None, 7))  # of the disk alone
    assert limits() == [None] * 6
    table.set_rule(by_adapter, None)
    assert limits() == [None] * 6 and not table.used_blocks(by_adapter)


def test_a_quota_below_what_there_is_evicts_the_least_recently_used() -> None:
    clock = ManualClock()
    tier = BlockTier(Tier.HOST, LruPolicy(), clock)
    tier.grow(16)
    keys = sample_keys(0, 6)
    for key in reversed(keys):  # so that the slots' order is another one than that of use
        tier.commit(tier.reserve([key], protect_nothing, tenants=1))
    for key in keys:
        clock.advance(1.0)
        tier.touch([key])
    tier.set_quota([1], 2)
    assert set(tier.keys()) == set(keys[-2:])
    tier.check_integrity()


def test_a_long_salt_is_remembered_by_its_digest_and_still_tells_tenants_apart() -> None:
    one, two = "x" * 1_000_000 + "1", "x" * 1_000_000 + "2"
    short = [Tenant.of("a", salt).salt for salt in (one, two, "s", None)]
    assert short[0] != short[1] and all(len(salt or "") <= LONG_SALT_CHARS + 1 for salt in short)
    assert short[2:] == ["s", None]
    assert Chosen.of(None, one).has(Tenant.of("a", one)) and not Chosen.of(None, one).has(Tenant.of("a", two))
    roots = Roots(KeyNamespace("m", block_size_tokens=16), lambda: Stamp("w", is_lasting=True))
    made = [roots.of(Stamp("", is_lasting=True), salt, "layout") for salt in (one, two, one)]
    assert made[0].hash != made[1].hash and made[0] == made[2]
    its_name = roots.of(Stamp("", is_lasting=True), short_salt(one), "layout")
    assert made[0].hash != its_name.hash  # who knows the digest does not know the salt
    assert made[0].facts is not None and len(made[0].facts.salt or "") == LONG_SALT_CHARS + 1
    assert short_salt("\ud800" * 300) != short_salt("\ud801" * 300)  # no text in UTF-8


def test_what_nobody_has_stays_so_when_the_first_tenant_comes() -> None:
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    keys = sample_keys(0, 6)
    tier.restore(4, [[(keys[0], 0), (keys[1], 1)]])
    tier.commit(tier.reserve(keys[2:3], protect_nothing, tenants=7))
    tier.commit(tier.reserve(keys[3:4], protect_nothing, tenants=7))
    assert tier.owners(keys[:4]) == [0, 0, 7, 7]
    assert tier.owners_in_use() == {0, 7}


def test_one_tenant_has_all_until_another_one_comes() -> None:
    tier = BlockTier(Tier.HOST, LruPolicy(), ManualClock())
    keys = sample_keys(0, 8)
    tier.grow(4)
    for key in keys[:2]:
        tier.commit(tier.reserve([key], protect_nothing, tenants=7))
    tier.grow(8)
    assert tier.owners_in_use() == {7}
    tier.commit(tier.reserve(keys[2:4], protect_nothing, tenants=9))
    tier.commit(tier.reserve(keys[4:6], protect_nothing, tenants=[7, 9]))
    tier.commit(tier.reserve(keys[6:8], protect_nothing, tenants=7))
    assert tier.owners(keys) == [7, 7, 9, 9, 7, 9, 7, 7]
    assert tier.forget_of([9]) == 3
