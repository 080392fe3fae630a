"""Real leaders and workers, and others on the machine who would be heard: without the secret none is.

A second engine that was given the same address fails with one line; the first goes on untouched.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from kvbm_core.clock import ManualClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.runtime import worker as worker_module
from kvbm_core.runtime.channel import LeaderChannel, WorkerChannel, key_pair
from kvbm_core.runtime.endpoint import Endpoint, tcp_endpoint
from kvbm_core.runtime.handshake import ANSWER_WITHIN_S
from kvbm_core.runtime.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Ready,
    Refused,
    Results,
    TierRefused,
    encode,
)
from kvbm_core.runtime.worker import Worker
from kvbm_core.testing.executor_bench import two_group_memory
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer.plan import JobResult
from kvbm_core.transfer.rank import RankOptions
from tests.engines.ports import free_port
from tests.unit.test_worker import LONG_S, NUM_SLOTS, PROMPT, Engine, content

DOWN, UP = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], [[7, 8, 9, 10, 11], [6, 7, 8, 9, 10]]
SECRET, ANOTHER = b"of the first", b"of the second"


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, short_path: Path) -> Callable[[bytes], Endpoint]:
    """One address for whoever has whatever secret, as of a second engine with these ports or this name."""
    if request.param == "tcp":
        port = free_port()
        return lambda secret: tcp_endpoint("127.0.0.1", port, secret)
    path = short_path / "s.sock"
    return lambda secret: Endpoint(f"ipc://{path}", path, secret=secret)


@contextmanager
def serving(
    folder: Path, endpoint: Endpoint, ranks: int = 1, clock: ManualClock | None = None
) -> Iterator[Engine]:
    engine = Engine(folder, ranks, endpoint=endpoint, clock=clock)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        yield engine
    finally:
        engine.close()


def serve(engine: Engine, name: str) -> bool:
    """A prompt goes down and comes up elsewhere, with the right bytes on every rank; whether it was found."""
    leader = engine.leader
    state = leader.open(name, ROOT, None)
    expected = [[content(memory, g, b) for g in (0, 1) for b in DOWN[g]] for memory in engine.memories]
    leader.offload(state, PROMPT, 0, 20, DOWN)
    job = leader.take_offloads()
    if job is not None:
        engine.submit(job.plan())
        engine.settle()
    found = leader.match(state, PROMPT, 0, 20) == 20
    if found:
        engine.submit(leader.onboard(state, 20, UP))
        engine.settle()
        for memory, wanted in zip(engine.memories, expected, strict=True):
            assert [content(memory, g, b) for g in (0, 1) for b in UP[g]] == wanted
    leader.finish(state)
    leader.check_integrity()
    return found


def state_of(engine: Engine) -> tuple[object, ...]:
    """What a stranger's word might change."""
    engine.leader.poll()
    shake = engine.handshake
    return (
        engine.leader.disabled_reason,
        engine.leader.readiness(),
        engine.tier.capacity_blocks,
        shake.peers(),
        shake.foreign_total,
        len(shake.inbox),
        len(shake.found),
        engine.channel.undecodable_total,
        engine.leader.stale_results_total,
    )


def test_a_second_engine_at_the_same_address_fails_in_one_line_and_the_first_goes_on(
    tmp_path: Path, address: Callable[[bytes], Endpoint]
) -> None:
    with serving(tmp_path, address(SECRET)) as first:
        before = state_of(first)
        # As in vLLM: its worker is there, and says hello, before its own leader.
        worker = Worker(0, 1, address(ANOTHER), RankOptions())
        with closing(worker):
            worker.register(two_group_memory(), "layout0")
            worker.refuse("no memory")
            first.wait_for_tick(lambda: first.channel.refused_connections_total >= 3)
            with pytest.raises(ConfigError) as error:
                LeaderChannel(address(ANOTHER), lambda identity, message: [])
            line = str(error.value)
            assert "\n" not in line and ("ACK_PORT" in line or "engine_id" in line), line
            assert state_of(first) == before and not worker.is_ready
            assert serve(first, "a")


def test_a_second_process_of_the_same_engine_and_rank_is_refused_and_the_first_goes_on(
    tmp_path: Path,
    address: Callable[[bytes], Endpoint],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(tmp_path, address(SECRET)) as engine:
        quick_hellos(monkeypatch)
        worker = Worker(0, 1, address(SECRET), RankOptions())
        with closing(worker):
            worker.register(two_group_memory(), "layout0")
            engine.wait_for_tick(lambda: worker._is_refused)
            assert "refused by the leader: is there already as rank 0" in caplog.text
            worker.refuse("no memory")
            engine.wait_for_tick(lambda: engine.handshake.foreign_total >= 2)
            assert engine.leader.is_ready and engine.leader.disabled_reason is None and not worker.is_ready
            assert serve(engine, "a")


def quick_hellos(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*args: object) -> WorkerChannel:
        return WorkerChannel(*args, retry_s=0.02)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "WorkerChannel", make)


def test_a_worker_that_is_started_anew_gets_its_rank_back(
    tmp_path: Path, address: Callable[[bytes], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with serving(tmp_path, address(SECRET), 2, clock) as engine:
        assert serve(engine, "a")
        quick_hellos(monkeypatch)
        engine.workers[1].close()
        engine.workers[1] = worker = Worker(1, 2, address(SECRET), RankOptions(verify=True))
        worker.register(engine.memories[1], "layout1")
        engine.wait_for_tick(lambda: 1 in engine.handshake._challenged_at_s)
        assert serve_half(engine)  # nobody knows yet that it is dead
        clock.advance(ANSWER_WITHIN_S)
        engine.wait_for_tick(lambda: worker.is_ready and engine.leader.is_ready)
        assert engine.tier.resident_blocks == 0  # its half of each block is gone
        assert serve(engine, "b") and serve(engine, "c")
        assert engine.leader.disabled_reason is None


def serve_half(engine: Engine) -> bool:
    state = engine.leader.open("half", ROOT, None)
    found = engine.leader.match(state, PROMPT, 0, 20) == 20
    engine.leader.finish(state)
    return found


# ---------------------------------------------------------------- a hostile user of the machine


def every_word(rank: int = 0) -> list[bytes]:
    """All that a worker may say, in perfect grammar, to the ruin of the tier."""
    return [
        encode(message)
        for message in (
            Hello(PROTOCOL_VERSION, rank, 1, 1, 1, "other"),
            Hello(1, rank, 1, 1, 1, "other"),
            Refused(rank, "the tier shall be off"),
            TierRefused(rank, "disk", "shall be off too"),
            Ready(rank, 10**6),
            Results(rank, [JobResult(job_id, Outcome.OK, 1, 0.0, 0.0) for job_id in range(100)]),
        )
    ] + [b"\xc1", b""]


@contextmanager
def client(
    endpoint: Endpoint, identity: bytes = b"", secret: bytes | None = None
) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if identity:
            stranger.setsockopt(zmq.ROUTING_ID, identity)
        if secret is not None:
            stranger.curve_publickey, stranger.curve_secretkey = key_pair(secret, b"worker")
            stranger.curve_serverkey = key_pair(secret, b"leader")[0]
        stranger.connect(endpoint.address)
        yield stranger


@pytest.mark.parametrize(
    "secret", [None, b"", b"guessed", SECRET + b"\0"], ids=["none", "empty", "guess", "near"]
)
def test_whoever_has_not_the_secret_is_not_heard(
    tmp_path: Path, address: Callable[[bytes], Endpoint], secret: bytes | None
) -> None:
    with serving(tmp_path, address(SECRET)) as engine:
        before = state_of(engine)
        for identity in (b"", engine.handshake.peers()[0]):  # in the worker's own name too
            with client(address(SECRET), identity, secret) as stranger:
                refused = engine.channel.refused_connections_total
                for word in every_word() * 20:
                    with suppress(zmq.Again):  # it has been refused: a send would wait for ever
                        stranger.send(word, zmq.NOBLOCK)
                engine.wait_for_tick(lambda seen=refused: engine.channel.refused_connections_total > seen)
                assert not stranger.poll(0)  # nor is it told anything
        assert state_of(engine) == before
        assert serve(engine, "a")


class Tap:
    """A relay before a leader that keeps what a worker sends."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._leader_port = port
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        worker, _ = self._listener.accept()
        leader = socket.create_connection(("127.0.0.1", self._leader_port))
        self._ends = [worker, leader]
        self._threads.append(threading.Thread(target=self._relay, args=(leader, worker, bytearray())))
        self._threads[-1].start()
        self._relay(worker, leader, self.heard)

    def _relay(self, source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        while data := source.recv(65536):
            heard += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in list(self._threads):
            thread.join(LONG_S)
        for end in (*self._ends, self._listener):
            end.close()


def test_what_was_recorded_of_a_worker_is_of_no_use_to_who_says_it_again(tmp_path: Path) -> None:
    port = free_port()
    heard: list[object] = []
    came = threading.Event()

    def take(identity: bytes, message: object) -> list[object]:
        heard.append(message)
        came.set()
        return []

    leader = LeaderChannel(tcp_endpoint("127.0.0.1", port, SECRET), take)  # type: ignore[arg-type]
    with closing(leader):
        tap = Tap(port)
        worker = WorkerChannel(tcp_endpoint("127.0.0.1", tap.port, SECRET), lambda message: None)
        worker.send(Refused(0, "the tier shall be off"))
        assert came.wait(LONG_S)
        worker.close()
        tap.close()
        recorded = bytes(tap.heard)
        assert len(recorded) > 200 and b"the tier shall be off" not in recorded and SECRET not in recorded
        for length in (len(recorded), len(recorded) // 2):
            with socket.create_connection(("127.0.0.1", port)) as replay:
                replay.settimeout(LONG_S)
                replay.sendall(recorded[:length])
                if length == len(recorded):
                    while replay.recv(65536):  # until the leader has had enough
                        pass
        assert heard == [Refused(0, "the tier shall be off")]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stranger_fills_no_memory(tmp_path: Path) -> None:
    endpoint = tcp_endpoint("127.0.0.1", free_port(), SECRET)
    port = int(endpoint.address.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
    huge = b"\x06" + (2**40).to_bytes(8, "big")  # a command of a terabyte
    with serving(tmp_path, endpoint) as engine:
        before, used_bytes = state_of(engine), resident_bytes()
        chunk = bytes(1 << 20)
        for opening in (b"", greeting, greeting + huge, huge, os.urandom(64)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.settimeout(0.2)
                try:
                    stranger.sendall(opening)
                    for _ in range(64):
                        stranger.sendall(chunk)
                except (TimeoutError, ConnectionError):
                    pass  # it is not read any more
        assert resident_bytes() - used_bytes < 4 * MAX_MESSAGE_BYTES
        assert state_of(engine) == before
        assert serve(engine, "a")
