"""The control channel over real sockets: late leaders, garbage, taken addresses, and nothing left behind."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median

import msgspec
import pytest
import zmq

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.fleet.etcd import EtcdOptions
from kvbm_core.fleet.keys import CurveKeys, new_keys
from kvbm_core.fleet.meeting import Apart
from kvbm_core.runtime import channel as channels
from kvbm_core.runtime.channel import FIRST_RECONNECT_MS, LeaderChannel, WorkerChannel, key_pair
from kvbm_core.runtime.endpoint import Endpoint, tcp_endpoint
from kvbm_core.runtime.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Configure,
    Hello,
    Message,
    Ready,
    Refused,
    Results,
    decode,
    encode,
)
from kvbm_core.transfer.plan import JobResult

LONG_S = 120.0
RETRY_S = 0.05
HELLO = Hello(protocol=1, rank=0, world_size=1, block_bytes=1, num_device_blocks=1, fingerprint="f")


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    path = tmp_path / "s.sock"
    return Endpoint(f"ipc://{path}", path, secret=b"s")


class Leader:
    """A channel that keeps what it gets and answers each hello."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.inbox: queue.Queue[tuple[bytes, Message]] = queue.Queue()
        self.bad: queue.Queue[None] = queue.Queue()
        self.channel = LeaderChannel(endpoint, self._take, lambda: self.bad.put(None))

    def _take(self, identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        self.inbox.put((identity, message))
        return [(identity, Configure(7))] if isinstance(message, Hello) else []

    def next(self) -> Message:
        return self.inbox.get(timeout=LONG_S)[1]


class Worker:
    """A channel that says hello until it is answered."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.answered = threading.Event()
        self.channel = WorkerChannel(endpoint, self._take, retry_s=RETRY_S)

    def _take(self, message: Message) -> None:
        self.answered.set()
        self.inbox.put(message)

    def say_hello(self) -> None:
        self.channel.repeat(lambda: None if self.answered.is_set() else HELLO)


@contextmanager
def closing(*ends: Leader | Worker) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.channel.close()


@contextmanager
def raw_socket(endpoint: Endpoint) -> Iterator[zmq.Socket[bytes]]:
    """Somebody who has the secret, and says whatever the test says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.curve_publickey, raw.curve_secretkey = key_pair(endpoint.secret, b"worker")
        raw.curve_serverkey = key_pair(endpoint.secret, b"leader")[0]
        raw.connect(endpoint.address)
        yield raw


def wait_for(holds: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)


def apart_endpoint(folder: Path) -> Endpoint:
    """Of an engine whose leader is looked for."""
    _, secret = new_keys(folder, "node")
    settings = KvbmSettings.from_env({"curve_key_file": str(secret), "curve_allowed": str(folder)})
    keys = CurveKeys.from_settings(settings)
    assert keys is not None
    apart = Apart("engine", "tcp://127.0.0.1:*", keys, EtcdOptions((("127.0.0.1", 1),)), "/")
    return Endpoint(apart.address, apart=apart)


def test_a_leader_that_has_moved_is_followed_and_a_bad_address_is_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = apart_endpoint(tmp_path)
    assert endpoint.apart is not None
    key = endpoint.apart.keys.own.public
    worker = Worker(endpoint)
    with closing(worker):
        worker.say_hello()
        for bad in ("tcp://[::1", "tcp://nonsense", "udp://127.0.0.1:1", "tcp://127.0.0.1:999999"):
            worker.channel.reach(bad, key)
        for _ in range(20):  # by somebody who writes to etcd all the time
            worker.channel.reach("tcp://" + "x" * 100_000, key)
            worker.say_hello()
            time.sleep(0.02)
        for _ in range(2):
            leader = Leader(endpoint)
            with closing(leader):
                worker.answered.clear()
                worker.channel.reach(leader.channel.address, key)
                worker.say_hello()
                assert leader.next() == HELLO
                assert worker.answered.wait(LONG_S)
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert len(caplog.records) == 1 and len(caplog.text) < 1000


def test_a_rank_that_does_not_reach_its_leader_says_why_once_and_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channels, "TELL_AFTER_S", 0.2)
    endpoint, other = apart_endpoint(tmp_path / "ours"), apart_endpoint(tmp_path / "other")
    assert endpoint.apart is not None and other.apart is not None
    key = endpoint.apart.keys.own.public
    worker, stranger = Worker(endpoint), Leader(other)
    with closing(stranger, worker):
        worker.say_hello()
        wait_for(lambda: "etcd does not say where it is" in caplog.text)
        worker.channel.reach(stranger.channel.address, key)
        wait_for(lambda: f"nobody with its key answers at {stranger.channel.address}" in caplog.text)
        leader = Leader(endpoint)
        with closing(leader):
            worker.channel.reach(leader.channel.address, key)
            assert leader.next() == HELLO
            wait_for(lambda: "the leader is reached now" in caplog.text)
    assert len([line for line in caplog.messages if "reached" in line]) == 3
    assert stranger.inbox.empty()


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        Configure(3),
        Ready(1, 2),
        Refused(0, "why"),
        Results(1, [JobResult(5, Outcome.CORRUPT, 1, 0.5, 0.25)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_is_none_of_ours_decodes_to_nothing() -> None:
    other = msgspec.msgpack.encode
    for frame in (
        b"",
        b"\xc1",
        os.urandom(64),
        other({"type": "hello"}),
        other({"type": "hello", "protocol": PROTOCOL_VERSION, "rank": 0, "more": 3}),
        other({"type": "hello", "protocol": "later", "rank": 0}),
        other({"type": "unknown", "rank": 1}),
        other({"type": "ready", "rank": "1", "ready_slots": 2}),
        other({"type": "ready", "rank": 1, "ready_slots": 2, "more": 3}),
        other({"type": "refused", "rank": 1, "reason": b"\xff\xfe"}),
        encode(Configure(3))[:-1],
        encode(Configure(3)) + b"\0",
        b"\x91" * 100_000,
        encode(Refused(0, "x" * MAX_MESSAGE_BYTES)),
    ):
        assert decode(frame) is None


# ---------------------------------------------------------------- talking


def test_both_ways(endpoint: Endpoint) -> None:
    leader, worker = Leader(endpoint), Worker(endpoint)
    with closing(worker, leader):
        worker.say_hello()
        assert leader.next() == HELLO
        assert worker.inbox.get(timeout=LONG_S) == Configure(7)
        for slots in range(50):
            worker.channel.send(Ready(0, slots))
        received = [message for message in iter(leader.next, Ready(0, 49)) if isinstance(message, Ready)]
        assert received == [Ready(0, slots) for slots in range(49)]


def test_what_was_said_before_the_leader_came_arrives_once_it_is_there(endpoint: Endpoint) -> None:
    worker = Worker(endpoint)
    with closing(worker):
        worker.channel.send(Refused(0, "first"))
        worker.say_hello()
        for slots in range(2000):  # more than a socket's own queue holds
            worker.channel.send(Ready(0, slots))
        leader = Leader(endpoint)
        with closing(leader):
            said = [leader.next() for _ in range(2002)]
            readies = [message for message in said if isinstance(message, Ready)]
            assert readies == [Ready(0, slots) for slots in range(len(readies))] and len(readies) >= 1999
            assert Refused(0, "first") in said and said.count(HELLO) <= 3
            assert worker.inbox.get(timeout=LONG_S) == Configure(7)


def test_a_leader_that_comes_late_hears_one_hello_and_not_all_of_them(endpoint: Endpoint) -> None:
    asked, many = [0], threading.Event()

    def source() -> Message:
        asked[0] += 1
        if asked[0] >= 50:
            many.set()
        return HELLO

    worker = WorkerChannel(endpoint, lambda message: worker.repeat(lambda: None), retry_s=0.001)
    try:
        worker.repeat(source)
        assert many.wait(LONG_S)
        leader = Leader(endpoint)
        with closing(leader):
            assert leader.next() == HELLO
            worker.repeat(lambda: None)
            worker.send(Refused(0, "last"))
            rest = list(iter(leader.next, Refused(0, "last")))
            assert len(rest) < 25
    finally:
        worker.close()


def test_a_worker_that_starts_before_its_leader_finds_it_in_milliseconds(tmp_path: Path) -> None:
    took_s: list[float] = []
    for number in range(9):
        path = tmp_path / f"{number}.sock"
        endpoint, asked, waits = Endpoint(f"ipc://{path}", path, secret=b"s"), count(1), threading.Event()

        def hello(asked: Iterator[int] = asked, waits: threading.Event = waits) -> Message:
            if next(asked) == 5:
                waits.set()
            return HELLO

        worker = WorkerChannel(endpoint, lambda message: None, retry_s=0.001)
        try:
            worker.repeat(hello)
            assert waits.wait(LONG_S), "by now nobody has answered once"
            leader = Leader(endpoint)
            there_s = time.monotonic()
            with closing(leader):
                assert leader.next() == HELLO
                took_s.append(time.monotonic() - there_s)
        finally:
            worker.close()
    print(f"{1e3 * median(took_s):.0f} ms")
    assert FIRST_RECONNECT_MS < 50, "libzmq's own first wait is 100 ms and longer"


def test_a_worker_has_one_name_over_reconnections(endpoint: Endpoint) -> None:
    worker = Worker(endpoint)
    with closing(worker):
        names = set()
        for _ in range(2):
            leader = Leader(endpoint)
            with closing(leader):
                worker.answered.clear()
                worker.say_hello()
                names.add(leader.inbox.get(timeout=LONG_S)[0])
        assert len(names) == 1


def test_garbage_is_dropped_and_counted_and_the_others_are_still_served(endpoint: Endpoint) -> None:
    leader, worker = Leader(endpoint), Worker(endpoint)
    with closing(worker, leader), raw_socket(endpoint) as raw:
        raw.send(b"\xc1 garbage")
        raw.send_multipart([encode(Ready(0, 1)), b"a frame too many"])
        raw.send(encode(Configure(1))[:-1])
        for _ in range(3):
            leader.bad.get(timeout=LONG_S)
        assert leader.channel.undecodable_total == 3
        worker.say_hello()
        assert leader.next() == HELLO


def test_a_message_that_is_too_long_does_not_arrive(endpoint: Endpoint) -> None:
    leader, worker = Leader(endpoint), Worker(endpoint)
    with closing(worker, leader), raw_socket(endpoint) as raw:
        raw.send(bytes(MAX_MESSAGE_BYTES + 1))
        worker.say_hello()
        assert leader.next() == HELLO
        assert leader.inbox.empty()


def test_a_worker_drops_and_counts_what_no_leader_says(endpoint: Endpoint) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.curve_server, raw.curve_secretkey = True, key_pair(endpoint.secret, b"leader")[1]
        raw.bind(endpoint.address)
        worker = Worker(endpoint)
        with closing(worker):
            worker.say_hello()
            identity, _ = raw.recv_multipart()
            raw.send_multipart([identity, b"garbage"])
            raw.send_multipart([identity, encode(Configure(1)), b"more"])
            raw.send_multipart([identity, encode(Configure(2))])
            assert worker.inbox.get(timeout=LONG_S) == Configure(2)
            assert worker.channel.undecodable_total == 2


def test_a_handler_that_fails_does_not_end_the_thread(endpoint: Endpoint) -> None:
    good: queue.Queue[Message] = queue.Queue()

    def handle(identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        if isinstance(message, Ready):
            raise RuntimeError("a bug")
        good.put(message)
        return []

    worker = Worker(endpoint)
    channel = LeaderChannel(endpoint, handle)
    try:
        worker.channel.send(Ready(0, 1))
        worker.channel.send(Refused(0, "after"))
        assert good.get(timeout=LONG_S) == Refused(0, "after")
    finally:
        worker.channel.close()
        channel.close()


# ---------------------------------------------------------------- addresses


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.startswith("kvbm: ")
    return text


def test_a_second_leader_on_the_same_socket_is_refused_and_the_first_goes_on(endpoint: Endpoint) -> None:
    first = Leader(endpoint)
    with closing(first):
        with pytest.raises(ConfigError) as error:
            Leader(endpoint)
        assert "another running engine" in one_line(error)
        worker = Worker(endpoint)
        with closing(worker):
            worker.say_hello()
            assert first.next() == HELLO


def test_a_taken_port_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError) as error:
            Leader(tcp_endpoint("127.0.0.1", taken.getsockname()[1], b"s"))
    assert "DYN_KVBM_LEADER_ZMQ_ACK_PORT" in one_line(error)


def test_a_directory_without_sockets_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 200)
    with pytest.raises(ConfigError) as error:
        Leader(Endpoint(f"ipc://{path}", path, secret=b"s"))
    assert "TMPDIR" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_loopback_in_the_newer_protocol_works_where_the_machine_has_it() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no ::1")
    endpoint = tcp_endpoint("::1", port, b"s")
    leader, worker = Leader(endpoint), Worker(endpoint)
    with closing(worker, leader):
        worker.say_hello()
        assert leader.next() == HELLO


# ---------------------------------------------------------------- what is left


def wait_until(condition: Callable[[], bool]) -> bool:
    """For what the operating system does a moment after we asked."""
    deadline_s = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline_s:
        os.sched_yield()
    return condition()


def test_close_leaves_no_thread_no_descriptor_and_no_file(endpoint: Endpoint, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    threads, before = set(threading.enumerate()), descriptors()
    leader, worker, lonely = (
        Leader(endpoint),
        Worker(endpoint),
        Worker(Endpoint(f"ipc://{tmp_path}/none.sock", secret=b"s")),
    )
    worker.say_hello()
    lonely.say_hello()
    assert leader.next() == HELLO
    for _ in range(2):  # closing twice is allowed
        for end in (worker, leader, lonely):
            end.channel.close()
    worker.channel.send(HELLO)  # a copy that ends late
    assert set(threading.enumerate()) <= threads
    assert wait_until(lambda: descriptors() <= before)
    assert list(tmp_path.iterdir()) == []
