"""Which address a leader binds, and which it tells others. No etcd runs."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path
from queue import Queue

import msgspec
import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.keys import new_keys
from kvbm_core.fleet.meeting import LeaderRecord, RankRecord
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import LeaderProcess, rank_options
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint, endpoint_apart
from kvbm_core.runtime.messages import Configure, Hello, Message, Ready, Refused
from kvbm_core.runtime.worker import Worker
from kvbm_core.testing.executor_bench import two_group_memory

HERE, NOWHERE = "http://127.0.0.1:1", "http://no-such-host.invalid:1"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name is not known; nobody is asked for it."""
    known = socket.getaddrinfo

    def look_up(host: str, *arguments: object, **more: object) -> object:
        if host in NOWHERE:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def settings_of(folder: Path, **more: object) -> KvbmSettings:
    _, secret = new_keys(folder / "keys", "node")
    keys = {"curve_key_file": str(secret), "curve_allowed": str(folder / "keys")}
    return KvbmSettings.from_env({**keys, "cpu_cache_override_num_blocks": 8, **more})


def endpoint_of(folder: Path, **more: object) -> Endpoint:
    endpoint = endpoint_apart(settings_of(folder, **more), "engine", 0)
    assert endpoint is not None
    return endpoint


def address_of(endpoint: Endpoint) -> str:
    """That of its leader's channel."""
    with closing(LeaderChannel(endpoint, lambda identity, message: [])) as channel:
        return channel.address


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "tcp://127.0.0.1:*"),  # by which it reaches etcd
        ({"etcd_endpoints": f"{NOWHERE},{HERE}"}, "tcp://127.0.0.1:*"),
        ({"etcd_endpoints": NOWHERE, "leader_zmq_host": "127.0.0.1"}, "tcp://127.0.0.1:*"),
        ({"leader_zmq_host": "[::1]"}, "tcp://[::1]:*"),
        ({"leader_zmq_host": "lo", "leader_zmq_ack_port": 7}, "tcp://lo:7"),
    ],
)
def test_what_a_leader_binds(tmp_path: Path, given: dict[str, object], address: str) -> None:
    endpoint = endpoint_of(tmp_path, **{"etcd_endpoints": HERE, "fleet_insecure": True, **given})
    assert endpoint.apart is not None and endpoint.apart.address_to_bind() == address


def test_a_rank_needs_no_address_of_its_own_and_a_leader_says_what_to_set(tmp_path: Path) -> None:
    """etcd's name is not known yet."""
    endpoint = endpoint_of(tmp_path, etcd_endpoints=NOWHERE, fleet_insecure=True)
    with pytest.raises(ConfigError, match=r"no way from here to no-such-host\.invalid") as caught:
        address_of(endpoint)
    assert caught.value.setting == "DYN_KVBM_LEADER_ZMQ_HOST" and "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "lo", ""])
def test_a_leader_that_other_machines_cannot_reach_does_not_start(tmp_path: Path, host: str) -> None:
    given = {"leader_zmq_host": host} if host else {}
    settings = settings_of(tmp_path, etcd_endpoints=HERE, **given)
    endpoint = endpoint_apart(settings, "engine", 0, is_spread=True)
    assert endpoint is not None
    with pytest.raises(ConfigError, match="no other machine can connect to that") as caught:
        LeaderProcess(settings, Metrics(), endpoint, world_size=2, model="model", engine_name="engine")
    assert caught.value.setting == "DYN_KVBM_LEADER_ZMQ_HOST" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "setting"),
    [
        ("198.51.100.7", "DYN_KVBM_LEADER_ZMQ_HOST"),  # for documentation: nobody's
        ("127.0.0.1", "DYN_KVBM_LEADER_ZMQ_ACK_PORT"),
    ],
)
def test_an_address_that_cannot_be_bound_is_one_line_about_the_right_setting(
    tmp_path: Path, host: str, setting: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        endpoint = endpoint_of(tmp_path, etcd_endpoints=HERE, leader_zmq_host=host, leader_zmq_ack_port=port)
        with pytest.raises(ConfigError, match="cannot be bound") as caught:
            address_of(endpoint)
    assert caught.value.setting == setting and "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1:5", "tcp://127.0.0.1", "[::1", "[::1]:5", "[]", "a b"])
def test_what_is_no_host_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match="write a host name or address") as caught:
        KvbmSettings.from_env({"leader_zmq_host": host})
    assert caught.value.setting == "DYN_KVBM_LEADER_ZMQ_HOST"


def test_what_somebody_has_written_to_etcd_is_no_second_line_of_the_log() -> None:
    host = "node-1\nkvbm: all is well " + "x" * 10_000
    for record in (
        RankRecord("engine", 0, host, 7),
        LeaderRecord("engine", "tcp://127.0.0.1:1", "key", host, 7, "instance"),
    ):
        assert record.who.startswith(r"node-1\nkvbm") and "\n" not in record.who and len(record.who) < 300


def test_a_rank_that_cannot_take_part_tells_each_leader_that_it_finds(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, etcd_endpoints=HERE)
    endpoint = endpoint_apart(settings, "engine", 0)
    assert endpoint is not None and endpoint.apart is not None
    heard: Queue[Message] = Queue()

    def take(identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        heard.put(message)
        return []

    with closing(Worker(0, 1, endpoint, rank_options(settings))) as worker:
        worker.refuse("unknown layout")
        for _ in range(2):
            with closing(LeaderChannel(endpoint, take)) as leader:
                worker._channel.reach(leader.address, endpoint.apart.keys.own.public)
                assert heard.get(timeout=20) == Refused(0, "unknown layout", endpoint.engine)


def test_a_rank_is_heard_by_another_leader_after_one_that_refused_it_and_stays_with_who_has_taken_it(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, etcd_endpoints=HERE)
    endpoint = endpoint_apart(settings, "engine", 0)
    assert endpoint is not None and endpoint.apart is not None
    public = endpoint.apart.keys.own.public
    heard: Queue[Message] = Queue()

    def leader(answer: Message) -> LeaderChannel:
        def take(identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
            heard.put(message)
            return [(identity, answer)] if isinstance(message, Hello) else []

        return LeaderChannel(endpoint, take)

    with closing(Worker(0, 1, endpoint, rank_options(settings))) as worker:
        worker.register(two_group_memory(), "layout")
        with closing(leader(Refused(0, "is there already as rank 0"))) as old:
            worker._channel.reach(old.address, public)
            assert isinstance(heard.get(timeout=20), Hello)
            ends_at_s = time.monotonic() + 20
            while not worker._is_refused:
                assert time.monotonic() < ends_at_s
                time.sleep(0.01)
        with closing(leader(Configure(4))) as new:
            worker._channel.reach(new.address, public)
            assert isinstance(heard.get(timeout=20), Hello)
            while not isinstance(heard.get(timeout=20), Ready):
                pass
            record = LeaderRecord(endpoint.engine, "tcp://127.0.0.1:1", public.decode(), "elsewhere", 1, "")
            assert worker._finder is not None
            assert worker._finder._on_found({"leader": msgspec.json.encode(record)})
            assert worker._channel._leader is None and worker._channel._reached == new.address
