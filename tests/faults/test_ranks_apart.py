"""Ranks of one engine that find each other through etcd, or by an address: together, lost, strange, back."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet import session as sessions
from kvbm_core.fleet.keys import new_keys
from kvbm_core.runtime.endpoint import endpoint_apart
from tests.engines.etcd_server import EtcdServer
from tests.engines.freeze import freeze, thaw
from tests.engines.hosts import Host, two_hosts, why_not
from tests.engines.ports import HOST, free_port
from tests.faults.apart import (
    NUM_TOKENS,
    ApartEngine,
    Overrides,
    Place,
    Rank,
    in_process,
    own_environment,
)

pytestmark = pytest.mark.etcd

AWAY_S = 60.0


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own_environment()
    monkeypatch.setattr(sessions, "RETRY_S", 0.3)


def settings_of(folder: Path, name: str, **more: object) -> Overrides:
    """Of a machine called ``name``, whose key all others get."""
    allowed = folder / "keys"
    secret = allowed / f"{name}.key_secret"
    if not secret.exists():
        new_keys(allowed, name)
    return {
        "cpu_cache_override_num_blocks": 24,
        "curve_key_file": str(secret),
        "curve_allowed": str(allowed),
        "fleet_lease_s": 2.0,
        "disk_cache_dir": str(folder / "disk"),
        **more,
    }


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


def test_two_ranks_meet_through_etcd_store_and_load(tmp_path: Path, etcd: EtcdServer) -> None:
    overrides = settings_of(tmp_path, "one", etcd_endpoints=etcd.url)
    other = settings_of(tmp_path, "two", etcd_endpoints=etcd.url)
    with ApartEngine(overrides, [Place(overrides), Place(other)]) as engine:
        engine.wait_ready()
        engine.offload()
        for rank in engine.ranks:
            rank.tell("wipe")
        assert engine.onboard() == NUM_TOKENS
        assert len(etcd.names()) == 3
    assert etcd.names() == []


def test_without_etcd_they_meet_at_the_leaders_address(tmp_path: Path) -> None:
    """Whose key is in the file of that name."""
    address = {"leader_zmq_host": (host := own_address()), "leader_zmq_ack_port": free_port()}
    overrides = settings_of(tmp_path, host, **address)
    other = settings_of(tmp_path, "two", **address)
    with ApartEngine(overrides, [Place(overrides), Place(other)]) as engine:
        engine.wait_ready()
        engine.offload()
        for rank in engine.ranks:
            rank.tell("wipe")
        assert engine.onboard() == NUM_TOKENS


@pytest.mark.parametrize(
    ("given", "is_spread", "words"),
    [
        ({"leader_zmq_host": "0.0.0.0"}, False, "KVBM_CURVE_KEY_FILE"),
        ({}, True, "KVBM_CURVE_KEY_FILE"),
        ({"etcd_endpoints": "http://127.0.0.1:1"}, True, "KVBM_CURVE_KEY_FILE"),
        ({"keys": True}, True, "ETCD_ENDPOINTS"),
        ({"keys": True, "leader_zmq_host": "127.0.0.1"}, True, "ETCD_ENDPOINTS"),
        ({"keys": True, "leader_zmq_host": "0.0.0.0"}, False, "the leader's own address"),
        ({"keys": True, "etcd_endpoints": "http://10.0.0.1:2379"}, False, "KVBM_FLEET_INSECURE"),
    ],
)
def test_too_few_settings_are_one_line(tmp_path: Path, given: Overrides, is_spread: bool, words: str) -> None:
    given = dict(given)
    keys = settings_of(tmp_path, "one") if given.pop("keys", False) else {}
    with pytest.raises(ConfigError, match=words) as caught:
        endpoint_apart(KvbmSettings.from_env({**keys, **given}), "engine", 0, is_spread=is_spread)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [{}, {"etcd_endpoints": "http://10.0.0.1:2379"}, {"leader_zmq_host": "::1"}]
)
def test_without_keys_engines_on_one_machine_meet_as_before(given: Overrides) -> None:
    """Dynamo sets ETCD_ENDPOINTS for itself."""
    assert endpoint_apart(KvbmSettings.from_env(given), "engine", 0) is None


def test_a_leader_without_its_keys_on_the_list_is_not_believed(tmp_path: Path, etcd: EtcdServer) -> None:
    """Somebody who can write to etcd, and has no key."""
    real = settings_of(tmp_path / "fleet", "one", etcd_endpoints=etcd.url)
    thief = settings_of(tmp_path / "thief", "thief", etcd_endpoints=etcd.url)
    shutil.copy(tmp_path / "fleet" / "keys" / "one.key", tmp_path / "thief" / "keys")  # all are welcome there
    with ApartEngine(thief, [Place(real)]) as engine:
        engine.wait_for(lambda: len(etcd.names()) == 2)
        engine.wait_for(lambda: "rank 0 runs on" in engine.leader.readiness().reason)
        time.sleep(2.0)  # time enough to meet
        engine.leader.poll()
        assert not engine.leader.readiness().is_ready
        assert engine.ranks[0].ask("state") == (False, False)


def test_a_rank_without_its_key_on_the_list_stays_out_and_is_counted(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    overrides = settings_of(tmp_path / "fleet", "one", etcd_endpoints=etcd.url)
    stranger = settings_of(tmp_path / "other", "two", etcd_endpoints=etcd.url)
    stranger["curve_allowed"] = overrides["curve_allowed"]  # it believes the leader
    with ApartEngine(overrides, [Place(overrides), Place(stranger)]) as engine:
        engine.wait_for(lambda: engine.process.channel.refused_connections_total > 0)
        words = "rank 1 has not said hello: rank 1 runs on"
        engine.wait_for(lambda: words in engine.leader.readiness().reason)
        assert "does not reach us" in engine.leader.readiness().reason
        public = tmp_path / "other" / "keys" / "two.key"
        (tmp_path / "fleet" / "keys" / "two.key").write_bytes(public.read_bytes())
        engine.wait_ready()  # once it is on the list


def test_the_line_about_who_is_missing_says_what_etcd_knows(
    tmp_path: Path, etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = settings_of(tmp_path, "one", etcd_endpoints=etcd.url, leader_worker_init_timeout_s=3.0)
    with ApartEngine(overrides, [Place(overrides)] * 2) as engine:
        engine.ranks[1].kill()
        words = "rank 1 has not said hello: rank 1 has not registered"
        engine.wait_for(lambda: words in engine.leader.readiness().reason)
        engine.wait_for(lambda: "INIT_TIMEOUT" in caplog.text)
        assert "has not registered" in caplog.text, "also if rank 0 was late"
        engine.start(1)
        engine.wait_ready()


@pytest.mark.parametrize(
    ("place_name", "rank", "size", "words"),
    [
        ("another-engine", 1, 2, "of engine 'another-engine dp0'"),
        ("engine-apart", 1, 2, "another process that says that it is rank 1 is refused"),
    ],
    ids=["another engine", "a rank twice"],
)
def test_a_rank_that_is_none_of_ours_is_refused_by_name(
    tmp_path: Path,
    place_name: str,
    rank: int,
    size: int,
    words: str,
    *,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address: Overrides = {"leader_zmq_host": own_address(), "leader_zmq_ack_port": free_port()}
    overrides = settings_of(tmp_path, "one", **address)
    with ApartEngine(overrides, [Place(overrides)] * 2) as engine:
        engine.wait_ready()
        stranger = Rank(rank, size, Place(overrides, name=place_name))
        try:
            engine.wait_for(lambda: words in caplog.text)
            engine.wait_for(lambda: stranger.ask("state") == (False, True))
            engine.offload()
            assert engine.onboard() == NUM_TOKENS, "nothing changes for this engine"
        finally:
            stranger.close()


def own_address() -> str:
    """Not loopback, and of this machine alone: nothing leaves it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # for documentation; nothing is sent
        except OSError:
            pytest.skip("NOT RUN: this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_rank_that_dies_or_stands_still_costs_hits_and_may_come_back(
    tmp_path: Path, etcd: EtcdServer, how: str
) -> None:
    overrides = settings_of(tmp_path, "one", etcd_endpoints=etcd.url)
    with ApartEngine(overrides, [Place(overrides)] * 2) as engine:
        engine.wait_ready()
        engine.offload()
        assert engine.onboard() == NUM_TOKENS
        lose_rank(engine, how)
        engine.wait_for(lambda: len(etcd.names()) == 2)  # its lease has ended
        bring_rank_back(engine, how)
        engine.wait_for(lambda: len(etcd.names()) == 3)


@pytest.mark.nightly("ten seconds; tests/unit/test_fleet_meeting.py has it without processes")
def test_who_has_met_stays_whatever_is_written_to_etcd(tmp_path: Path, etcd: EtcdServer) -> None:
    """By somebody without a key, who knows all that is public; or by a second engine of the same name."""
    overrides = settings_of(tmp_path, "one", etcd_endpoints=etcd.url)
    with ApartEngine(overrides, [Place(overrides)] * 2) as engine, closing(etcd.client()) as client:
        engine.wait_ready()
        engine.offload()
        (name,) = [name for name in etcd.names() if "/leader/" in name]
        record = json.loads(client.get(name)[0])
        client.put(name, json.dumps({**record, "address": f"tcp://127.0.0.1:{free_port()}"}))
        ends_at_s = time.monotonic() + 2.5  # a rank has looked again
        while time.monotonic() < ends_at_s:
            assert engine.onboard() == NUM_TOKENS


@pytest.mark.nightly("ten seconds; tests/unit/test_fleet_meeting.py has it without processes")
def test_an_engine_that_is_started_before_the_old_one_has_ended_joins_then(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """Its ranks were refused by the old one's leader."""
    overrides = settings_of(tmp_path, "one", etcd_endpoints=etcd.url)
    with ExitStack() as engines:
        with ApartEngine(overrides, [Place(overrides)]) as old:
            old.wait_ready()
            new = engines.enter_context(ApartEngine(overrides, [Place(overrides)]))
            new.wait_for(lambda: new.ranks[0].ask("state") == (False, True))
            old.offload()
            assert old.onboard() == NUM_TOKENS
        new.wait_ready()
        new.offload()
        assert new.onboard() == NUM_TOKENS


def lose_rank(engine: ApartEngine, how: str) -> None:
    """Rank 1; a load that it does not answer ends as a miss."""
    victim = engine.ranks[1].process.pid
    if how == "kill":
        os.kill(victim, signal.SIGKILL)
    else:
        freeze(victim)


def bring_rank_back(engine: ApartEngine, how: str) -> None:
    if how == "freeze":
        thaw(engine.ranks[1].process.pid)
    else:
        engine.start(1)
    engine.wait_ready()

    def hits() -> bool:
        if not engine.leader.readiness().is_ready:
            return False
        engine.offload()
        return engine.onboard() == NUM_TOKENS

    engine.wait_for(hits)


# ---------------------------------------------------------------- two hosts


def on_two_hosts(folder: Path, url: str, one: Host, two: Host) -> None:
    """The leader's process on host ``one``, with rank 0 there and rank 1 on host ``two``."""
    logging.basicConfig(stream=sys.stderr)
    own_environment()
    one.enter()
    disk = {"disk_cache_override_num_blocks": 40, "disable_disk_offload_filter": True, "fleet_insecure": True}
    overrides = settings_of(folder, "one", etcd_endpoints=url, **disk)
    others = settings_of(folder, "two", etcd_endpoints=url, **disk)
    own_disk = folder / "disk-of-two"
    for path in (folder / "disk", own_disk):
        path.mkdir()
    with ApartEngine(overrides, [Place(overrides, one), Place(others, two, own_disk)]) as engine:
        engine.wait_ready()
        engine.offload()
        assert engine.onboard() == NUM_TOKENS
        disk_tier = engine.leader.chain.named("disk")
        engine.wait_for(lambda: disk_tier.slots.resident_blocks == 10)  # type: ignore[attr-defined]
        here, there = list((folder / "disk").rglob("*.blocks")), list(own_disk.rglob("*.blocks"))
        assert [path.name for path in here] == ["rank-0-of-2.blocks"]
        assert [path.name for path in there] == ["rank-1-of-2.blocks"]
        # Another engine, whose leader is on that machine, may have the folder of the leader's name there.
        assert here[0].parent.name != there[0].parent.name and (there[0].parent / "lock").exists()
        lose_rank(engine, "kill")
        bring_rank_back(engine, "kill")
        two.cut()
        time.sleep(3)
        two.mend()
        bring_rank_back(engine, "")
    with ApartEngine(overrides, [Place(overrides, one), Place(others, two, own_disk)]) as engine:
        engine.wait_ready()  # started anew: what was on both machines' disks is found again
        disk_tier = engine.leader.chain.named("disk")
        engine.wait_for(lambda: disk_tier.slots.resident_blocks == 10)  # type: ignore[attr-defined]
        assert engine.onboard() == NUM_TOKENS


def test_two_hosts_with_disks_of_their_own(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"NOT RUN: {reason}")
    with two_hosts() as (one, two), EtcdServer(tmp_path, host=one.address, prefix=one.prefix) as etcd:
        in_process(on_two_hosts, tmp_path, etcd.url, one, two)


def etcd_struck(folder: Path, how: str, one: Host | None, two: Host | None) -> None:
    """The leader, rank 0 and etcd on host ``one``, rank 1 on host ``two``."""
    own_environment()
    sessions.RETRY_S = 0.3
    if one is not None:
        one.enter()
    with EtcdServer(folder, host=one.address if one is not None else HOST) as etcd:
        overrides = settings_of(folder, "one", etcd_endpoints=etcd.url, fleet_insecure=True)
        others = settings_of(folder, "two", etcd_endpoints=etcd.url, fleet_insecure=True)
        with ApartEngine(overrides, [Place(overrides, one), Place(others, two)]) as engine:
            engine.wait_ready()
            engine.offload()
            etcd.freeze() if how == "frozen" else etcd.stop()
            if how == "restarted empty":
                etcd.lose_all()
                etcd.start()
            ends_at_s = time.monotonic() + AWAY_S  # many leases, and calls that take as long as they may
            while time.monotonic() < ends_at_s:
                assert engine.onboard() == NUM_TOKENS
                assert engine.leader.readiness().is_ready
            if how == "frozen":
                etcd.thaw()
            elif how == "stopped":
                etcd.start()
            engine.wait_for(lambda: len(etcd.names()) == 3)
            engine.start(1)  # and a new process of a rank finds its leader
            engine.wait_for(lambda: engine.ranks[1].ask("state") == (True, False))
            bring_rank_back(engine, "")


@pytest.mark.nightly("a minute and more each; a session through all of it is tried always")
@pytest.mark.timeout(700)
@pytest.mark.parametrize("how", ["stopped", "frozen", "restarted empty"])
def test_whatever_becomes_of_etcd_hits_go_on_and_all_is_met_again(tmp_path: Path, how: str) -> None:
    """On two hosts, where this machine can have them."""
    hosts = two_hosts() if not why_not() else nullcontext((None, None))
    with hosts as (one, two):
        in_process(etcd_struck, tmp_path, how, one, two, patience_s=600.0)
