"""Which eviction policy a tier has: by name, of ours or of an installed package; and what it is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvbm
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.cli.main import app
from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.config.installed import POLICIES, STORES
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.guarded import GuardedPolicy
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.named import make_policy
from kvbm_core.policy.recency import as_slots
from kvbm_core.runtime.assembly import evicting, lower_makers
from kvbm_core.testing import leader_bench
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.slotted import SlottedTier, slotted_tier
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import Tier
from tests import outside
from tests.policies import Careless, Failing, Listening, installed
from tests.unit.test_tier_chain import KEYS
from tests.unit.tier_bench import TierBench


def theirs(policy: EvictionPolicy) -> EvictionPolicy | None:
    """What a package made; else ours."""
    return policy.policy if isinstance(policy, GuardedPolicy) else policy


def test_the_least_recently_used_goes_unless_a_name_says_otherwise(tmp_path: Path) -> None:
    assert isinstance(make_policy(), LruPolicy) and isinstance(make_policy("lru"), LruPolicy)
    with installed(tmp_path, listening="tests.policies:Listening"):
        assert isinstance(theirs(make_policy("listening")), Listening)


def test_a_policy_that_cannot_be_had_is_told_with_those_that_can(tmp_path: Path) -> None:
    names = {
        "listening": "tests.policies:Listening",
        "broken": "tests.policies:broken",
        "gone": "no.such:thing",
        "nothing": "tests.policies:nothing",
        "leave": "tests.policies:leave",
    }
    with installed(tmp_path, **names):
        for name, said in (
            ("other", "no such policy is installed; there are: broken, gone, leave, listening, lru, nothing"),
            ("broken", "RuntimeError: out of order, in two lines"),
            ("nothing", "TypeError: it makes no EvictionPolicy, but a NoneType"),
            ("gone", "ModuleNotFoundError: No module named 'no'"),
            ("leave", "SystemExit: 3"),
        ):
            what = f"{names.get(name)} of the package of_somebody"
            why = (
                said if name == "other" else f"{what} cannot be used: {said}; mend or reinstall that package"
            )
            with pytest.raises(ConfigError) as caught:
                make_policy(name)
            assert str(caught.value) == f"kvbm: KVBM_EVICTION_POLICY={name}: {why}"


@pytest.mark.shows("KVBM_EVICTION_POLICY")
@pytest.mark.parametrize(("name", "kind"), [("lru", LruPolicy), ("listening", Listening)])
def test_a_setting_says_which_one_host_and_disk_have(name: str, kind: type, tmp_path: Path) -> None:
    with installed(tmp_path, listening="tests.policies:Listening"):
        settings = KvbmSettings.from_env({"disk_cache_gb": 1, "cpu_cache_gb": 1, "eviction_policy": name})
        disk = TierBench(lower_makers(settings, ManualClock())["disk"]).tier
        assert isinstance(disk, SlottedTier)
        assert type(theirs(evicting(settings)())) is type(theirs(disk.slots._policy)) is kind


def test_a_policy_that_wants_to_know_is_told_of_prompts() -> None:
    policy, clock = Listening(), ManualClock()
    host = BlockTier(Tier.HOST, policy, clock)
    host.grow(4)
    below = Listening()
    chain = TierChain(
        host,
        [slotted_tier("disk", Tier.DISK, AdmitAll(), lambda: below)],
        JobTable(1, clock),
        send=lambda order: None,
        clock=clock,
        metrics=Metrics(),
    )
    assert chain.needs_runs
    reservation = chain.reserve(KEYS[:3], lambda new: frozenset())
    assert chain.stored(reservation, Outcome.OK)
    run = BlockRun(KEYS[:6], 1, 5)
    chain.tell([run])
    slots = reservation.slots
    assert policy.told == [(run, [slots[1], slots[2], -1, -1])]
    assert below.told == [(run, [-1] * 4)]


def test_a_leader_tells_of_what_is_stored_and_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Listening()
    monkeypatch.setattr(leader_bench, "make_policy", lambda: policy)
    bench = LeaderBench()
    tokens = list(range(13))
    bench.store(tokens)
    keys = bench.keys(tokens)
    ((run, slots),) = policy.told
    assert (list(run.keys), run.first, run.end) == (keys, 0, 3) and len(set(slots)) == 3
    state = bench.open()
    assert bench.match(state, tokens) == 12
    bench.answer(bench.leader.onboard(state, 12, [[4, 5, 6]]))
    (_, (loaded, again)) = policy.told
    assert (list(loaded.keys), loaded.first, loaded.end, again) == (keys, 0, 3, slots)


def test_the_library_has_the_policy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_EVICTION_POLICY", "listening")
    spec = kvbm.BlockSpec("policies", shape=(2, 16, 64), dtype="float16", tokens=16)
    sizes = {"host_bytes": 1 << 24, "disk_bytes": 1 << 24}
    with (
        installed(tmp_path / "installed", listening="tests.policies:Listening"),
        kvbm.open_cache(spec, **sizes, disk=tmp_path / "disk") as cache,
    ):
        assert cache.put(list(range(64)), np.zeros((4, *spec.shape), spec.dtype)) == 4
        host, disk = (theirs(slots._policy) for slots in cache._tiers._chain.books)
        assert isinstance(host, Listening) and isinstance(disk, Listening)
        assert [len(slots) for _, slots in host.told] == [4]


def lived(policy: EvictionPolicy) -> list[object]:
    """What a tier with this policy answers to all that may be asked."""
    tier, found = BlockTier(Tier.HOST, policy, ManualClock()), list[object]()
    tier.grow(6)
    for batch in (KEYS[:3], KEYS[3:6]):
        assert tier.commit(tier.reserve(batch, lambda new: frozenset()))
    tier.touch(KEYS[:2])
    lease = tier.lease("reader", KEYS[:1], 60.0)
    assert lease is not None
    tier.demote(KEYS[3:4])
    tier.tell([BlockRun(KEYS[:6], 0, 6)])
    tier.check_integrity()
    found.append(tier.reserve(KEYS[6:9], lambda new: frozenset(KEYS[5:6])).slots)
    tier.release(lease)
    tier.forget(KEYS[5:6])
    found.append(tier.reserve(KEYS[9:14], lambda new: frozenset()).slots)
    tier.check_integrity()
    return found


ASKED = {name for name in vars(EvictionPolicy) if not name.startswith("_")} - {"is_pinned"} | {"tell"}


@pytest.mark.parametrize("name", sorted(ASKED))
def test_a_policy_that_raises_is_not_asked_any_more(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert lived(GuardedPolicy(Failing(name), "my policy")) == lived(LruPolicy())
    (line,) = caplog.messages
    assert line == (
        f"kvbm: my policy: {name} raised RuntimeError: no, not today; it is not asked any more, and the "
        "least recently used go; run kvbm_core.testing.policy_contract on it"
    )


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("evict", lambda *ignored: None, "answered None where 3 slots that are there and not pinned were"),
        ("evict", lambda *ignored: "abc", "answered 'abc' where 3 slots that are there and not pinned were"),
        ("evictable_blocks", -7, "answered -7 where 5 was"),
    ],
)
def test_a_policy_that_answers_nonsense_is_not_asked_any_more(
    name: str, answer: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert lived(GuardedPolicy(Failing(name, answer), "my policy")) == lived(LruPolicy())
    (line,) = caplog.messages
    assert line.startswith(f"kvbm: my policy: {name} {said} expected; it is not asked any more")


def test_a_policy_that_raises_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVBM_EVICTION_POLICY", "mine")
    spec = kvbm.BlockSpec("policies", shape=(2, 16, 64), dtype="float16", tokens=16)
    blocks = np.ones((4, *spec.shape), spec.dtype)
    with (
        installed(tmp_path, mine="tests.policies:Full"),
        kvbm.open_cache(spec, host_bytes=1 << 24) as cache,
    ):
        assert cache.put(list(range(64)), blocks) == cache.get(list(range(64)), blocks) == 4
    (line,) = [line for line in caplog.messages if "policy" in line]
    assert line.startswith("kvbm: the eviction policy mine of the package of_somebody: insert raised Runtime")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(as_slots([0, 3]), id="one that is leased"),
        pytest.param(as_slots([3, 1]), id="one that an operator keeps"),
        pytest.param(as_slots([2, 3]), id="one that is spared"),
        pytest.param(as_slots([3, 3]), id="one twice"),
        pytest.param(as_slots([3]), id="too few"),
        pytest.param(as_slots([3, 6]), id="one on its way"),
        pytest.param(as_slots([3, 7]), id="one beyond the tier"),
        pytest.param(as_slots([3, -1]), id="one before it"),
        pytest.param("3, 4", id="no slots"),
    ],
)
def test_a_policy_that_chooses_what_must_stay_is_not_asked_any_more(
    chosen: object, caplog: pytest.LogCaptureFixture
) -> None:
    policy, clock = Careless(), ManualClock()
    tier = BlockTier(Tier.HOST, GuardedPolicy(policy, "my policy"), clock)
    tier.grow(7)
    for key in KEYS[:6]:
        assert tier.commit(tier.reserve([key], lambda new: frozenset()))
        clock.advance(1.0)
    on_its_way = tier.reserve(KEYS[6:7], lambda new: frozenset())
    lease = tier.lease("reader", KEYS[:1], 60.0)
    assert lease is not None and lease.slots == (0,)
    tier.keep(KEYS[1:2])
    policy.chooses = chosen
    reservation = tier.reserve(KEYS[7:9], lambda new: frozenset(KEYS[2:3]))
    assert reservation.slots == (3, 4), "the oldest of those that may go"
    assert tier.commit(reservation) and tier.commit(on_its_way)
    assert tier.reserve(KEYS[9:12], lambda new: frozenset()).slots == (2, 4, 5)
    tier.check_integrity()
    assert tier.resident_of(KEYS[:2]) == KEYS[:2], "who holds them may read them still"
    tier.release(lease)
    tier.unkeep(KEYS[1:2])
    tier.check_integrity()
    (line,) = caplog.messages
    assert line.startswith("kvbm: my policy: evict answered ")
    assert "where 2 slots that are there and not pinned were expected" in line


def test_of_two_packages_with_one_policy_neither_is_taken(tmp_path: Path) -> None:
    points = {"listening": "tests.policies:Listening"}
    with (
        outside.installed(tmp_path / "a", POLICIES, points, "mine"),
        outside.installed(tmp_path / "b", POLICIES, points, "yours"),
        pytest.raises(ConfigError) as caught,
    ):
        make_policy("listening")
    line = "kvbm: KVBM_EVICTION_POLICY=listening: is a policy of mine and yours; uninstall all but one"
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("group", "name", "given"),
    [(POLICIES, "lru", {"eviction_policy": "lru"}), (STORES, "s3", {"remote_url": "S3://bucket"})],
)
def test_what_a_package_has_under_a_name_of_ours_is_said_to_be_unused(
    group: str, name: str, given: dict[str, str], tmp_path: Path
) -> None:
    with outside.installed(tmp_path, group, {name: "no.such:thing", "other": "no.such:thing"}, "mine"):
        (line,) = KvbmSettings.from_env({"cpu_cache_gb": 1, **given}).warnings
    why = f"{name} is kvbm's own; that of mine is not used: it needs another name"
    assert line.startswith("kvbm: KVBM_") and line.endswith(f": {why}")


def test_the_replay_names_its_option(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    result = CliRunner().invoke(app, ["replay", str(trace), "--eviction", "nobody"])
    line = "kvbm replay: --eviction=nobody: no such policy is installed; there are: lru\n"
    assert (result.exit_code, result.stderr) == (2, line)


def test_who_does_not_want_to_know_costs_nothing() -> None:
    bench = LeaderBench()
    assert not bench.tier.takes_runs and not bench.leader.chain.needs_runs
