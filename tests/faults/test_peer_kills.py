"""An owner or an asker is killed, frozen, cut off or slow at any moment: no wrong byte, no question longer
than its limit, nothing held or kept afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import IO

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.peers import landing, writer
from kvbm_core.peers.landing import LandingZone
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.testing.peer_owner import PATIENCE_S, Owner, content_of, wait_for
from tests.effort import tries
from tests.engines.freeze import freeze, thaw
from tests.engines.hosts import Host, lone_host, why_not
from tests.engines.ports import free_port
from tests.faults.apart import in_process
from tests.faults.deadlines import asked
from tests.faults.nurseries import Countdown, Moment, nursery, pipes
from tests.faults.peer_nursery import BLOCK_BYTES, KEYS, NIXL, OURS, THEIRS, ask_some, zone_of
from tests.unit.peer_bench import asking, owning, targets_for
from tests.unit.test_fleet_keys import keys_of

DEADLINE_S = 0.5
"""How long a question waits, and how long blocks are held for it."""
NO_MOMENT = Moment(0, 0.0, is_own=False)
NO_NIXL = why_no_nixl()
both_ways = pytest.mark.parametrize(
    ("by", "moments"),
    [
        pytest.param("zmq", tries(10, nightly=200), id="zmq"),
        pytest.param(
            NIXL,
            tries(2, nightly=200),
            id=NIXL,
            marks=pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: peers by NIXL: {NO_NIXL}"),
        ),
    ],
)
MODULE = "tests.faults.peer_nursery"
Pipes = tuple[IO[str], IO[str]]


def begin(talk: Pipes, order: str, word: str, moment: Moment = NO_MOMENT) -> int:
    """The process that this order makes, once it has said ``word``."""
    given, said = talk
    given.write(moment.line(order))
    pid = 0
    for text in said:
        if text.startswith("pid "):
            pid = int(text.split()[1])
        if text.startswith(word):
            return pid
    raise AssertionError("it never began")


def end(talk: Pipes, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while not talk[1].readline().startswith("dead "):
        pass


def ask_meanwhile(
    address: str, rng: Random, strike: Callable[[], None], zone: LandingZone | None = None
) -> list[Outcome]:
    """Questions before, while and after ``strike`` happens beside one, when a random part of what the first
    one took is done; outcomes of the last one.
    """
    is_time = threading.Event()

    def strike_in_time() -> None:
        is_time.wait()
        strike()

    striker = threading.Thread(target=strike_in_time)
    countdown = Countdown(is_time.set)
    try:
        with asking(OURS, zone=zone) as store, asked() as seconds:
            assert set(ask_some(store, address, rng, PATIENCE_S)) == {Outcome.OK}
            striker.start()
            countdown.strike_after(int(rng.random() * rng.choice((0.1, 1, 3)) * countdown.count))
            num_after = 0
            while num_after < 2:
                num_after += not striker.is_alive()
                seconds.clear()
                outcomes = ask_some(store, address, rng, DEADLINE_S)
                assert max(seconds, default=0.0) <= DEADLINE_S
            return outcomes
    finally:
        countdown.stop()
        is_time.set()
        if striker.is_alive():
            striker.join()


def owner_struck(process: subprocess.Popen[str], rng: Random, number: int, by: str) -> None:
    talk, port = pipes(process), free_port()
    address = f"tcp://127.0.0.1:{port}"
    pid = begin(talk, f"own {port} instance-{number} {by}", "owns")
    is_frozen = rng.random() < 0.3
    strike = partial(freeze, pid) if is_frozen else partial(os.kill, pid, signal.SIGKILL)
    zone = zone_of() if by == NIXL else None
    last = ask_meanwhile(address, rng, strike, zone)
    assert Outcome.OK not in last and (zone is None or zone.free_calls == 1)
    if is_frozen and rng.random() < 0.5:  # it goes on, and is asked anew
        thaw(pid)
    else:
        if is_frozen:
            os.kill(pid, signal.SIGKILL)
        while not talk[1].readline().startswith("dead "):
            pass
        pid = begin(talk, f"own {port} again-{number} {by}", "owns")
    with asking(OURS, zone=zone_of() if by == NIXL else None) as store:
        assert set(ask_some(store, address, rng, PATIENCE_S)) == {Outcome.OK}
    end(talk, pid)


def asker_struck(process: subprocess.Popen[str], rng: Random, by: str) -> None:
    talk = pipes(process)
    with owning(terms=THEIRS, max_bytes=1 << 24, writes=by == NIXL) as owner:
        owner.put(*KEYS)
        wait_for(lambda: owner.server.writes or by != NIXL)
        moment = Moment(rng.randint(1, 5), rng.random(), is_own=False)
        pid = begin(talk, f"ask {owner.address} {rng.random()} {by}", "now", moment)
        if rng.random() < 0.3:
            freeze(pid)
            owner.assert_whole_soon()
        end(talk, pid)
        owner.assert_whole()
        with asking(OURS, zone=zone_of() if by == NIXL else None) as store:
            assert set(ask_some(store, owner.address, rng, PATIENCE_S)) == {Outcome.OK}


@both_ways
@pytest.mark.timeout(1800)
def test_an_owner_that_is_killed_or_frozen_and_comes_back(by: str, moments: int, seed: int) -> None:
    rng = Random(seed)
    with nursery(MODULE) as process:
        for number in range(moments):
            owner_struck(process, rng, number, by)


@both_ways
@pytest.mark.timeout(1800)
def test_an_asker_that_is_killed_or_frozen_leaves_nothing_behind(by: str, moments: int, seed: int) -> None:
    rng = Random(seed)
    with nursery(MODULE) as process:
        for _ in range(moments):
            asker_struck(process, rng, by)


class Wire:
    """A relay on loopback that can hold bytes, close, be slow or change them; all of them are noted."""

    def __init__(self, port: int, rng: Random) -> None:
        self._target = port
        self._rng = rng
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.how = "whole"
        self._is_mended = threading.Event()
        self.asked, self.answered = bytearray(), bytearray()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            for way in ((near, far, self.asked), (far, near, self.answered)):
                self._threads.append(threading.Thread(target=self._carry, args=way))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, noted: bytearray) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                noted += data
                if self.how == "flip":
                    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                elif self.how == "slow":
                    time.sleep(0.01)
                elif self.how == "cut" or (self.how == "one way" and source is self._sockets[-1]):
                    self._is_mended.wait()  # TCP sends again what was lost: it comes late
                elif self.how == "close":
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            _shut(source, sink)

    def mend(self) -> None:
        """What was held comes now."""
        self.how = "whole"
        self._is_mended.set()

    def close(self) -> None:
        self.mend()
        _shut(self._server)
        self._threads[0].join()
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join()
        for one in (self._server, *self._sockets):
            one.close()


def _shut(*sockets: socket.socket) -> None:
    """Whoever waits for them hears of it; a descriptor that was closed would tell nobody."""
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def network_struck(
    owner: Owner, address: str, rng: Random, by: str, *, strike: Callable[[], None], mend: Callable[[], None]
) -> list[Outcome]:
    """At a random moment; then it is mended, and asked again. Outcomes of a question in between."""
    zone = zone_of() if by == NIXL else None
    last = ask_meanwhile(address, rng, strike, zone)
    assert zone is None or zone.free_calls == 1, "a part of the landing zone is missing"
    owner.assert_whole_soon()
    mend()
    with asking(OURS, zone=zone_of() if by == NIXL else None) as store:
        assert set(ask_some(store, address, rng, PATIENCE_S)) == {Outcome.OK}
    return last


@both_ways
@pytest.mark.parametrize("how", ["slow", "one way", "cut"])
@pytest.mark.timeout(1800)
def test_a_wire_that_is_slow_or_cut_off_and_comes_back(how: str, by: str, moments: int, seed: int) -> None:
    """By NIXL too the questions go over it, but not the blocks."""
    rng = Random(seed)
    with owning(terms=THEIRS, max_bytes=1 << 24, writes=by == NIXL) as owner:
        owner.put(*KEYS)
        wait_for(lambda: owner.server.writes or by != NIXL)
        for _ in range(moments):
            wire = Wire(owner.server.port, rng)
            try:
                strike = partial(setattr, wire, "how", how)
                last = network_struck(owner, wire.address, rng, by, strike=strike, mend=wire.mend)
                assert how == "slow" or Outcome.OK not in last
            finally:
                wire.close()
            owner.assert_whole()


@pytest.mark.parametrize("how", ["flip", "close"])
def test_a_wire_that_changes_bytes_or_closes(how: str, seed: int) -> None:
    rng = Random(seed)
    with owning(terms=THEIRS, max_bytes=1 << 24) as owner:
        owner.put(*KEYS)
        for _ in range(3):
            wire = Wire(owner.server.port, rng)
            try:
                ask_meanwhile(wire.address, rng, partial(setattr, wire, "how", how))
            finally:
                wire.close()
            owner.assert_whole()


def on_a_network_of_its_own(host: Host, how: str, moments: int, seed: int) -> None:
    """Questions and blocks go over this host's loopback, which is cut, or has a random rate."""
    host.enter()
    os.environ["UCX_TLS"] = "tcp,self"  # and none of them by memory that both share
    landing.PAUSE_S = writer.PAUSE_S = 0.2  # no agent can be made while the network is cut
    rng = Random(seed)
    with owning(terms=THEIRS, max_bytes=1 << 24, writes=True) as owner:
        owner.put(*KEYS)
        for _ in range(moments):
            wait_for(lambda: owner.server.writes)
            rate = int(2 ** rng.uniform(19, 25))
            strike = host.cut if how == "cut" else partial(host.slow, rate)
            last = network_struck(owner, owner.address, rng, NIXL, strike=strike, mend=host.mend)
            assert how == "slow" or Outcome.OK not in last
            owner.assert_whole()


@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: peers by NIXL: {NO_NIXL}")
@pytest.mark.parametrize("how", ["slow", "cut"])
@pytest.mark.timeout(1800)
def test_by_nixl_the_network_of_the_blocks_is_slow_or_cut_off_too(how: str, seed: int) -> None:
    if reason := why_not():
        pytest.skip(f"NOT RUN: {reason}")
    with lone_host() as host:
        moments = tries(2, nightly=200)
        in_process(on_a_network_of_its_own, host, how, moments, seed, patience_s=1700.0)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_who_listens_on_the_wire_reads_no_byte_and_who_says_it_all_again_hears_none(
    is_encrypted: bool, tmp_path: Path
) -> None:
    """Without keys the wire is on this machine alone; there the test finds what it looks for."""
    key, content = KEYS[0], content_of(KEYS[0], BLOCK_BYTES)
    keys = keys_of(tmp_path, "both") if is_encrypted else None
    with owning(terms=THEIRS, keys=keys) as owner, asking(OURS, keys) as store:
        owner.put(key)
        wire = Wire(owner.server.port, Random(0))
        try:
            (target,) = targets_for(1, BLOCK_BYTES)
            assert store.at(wire.address).get_many([key], [target], deadline_s=PATIENCE_S) == [Outcome.OK]
            assert bytes(target) == content
            heard = bytes(wire.answered), bytes(wire.asked)
        finally:
            wire.close()
        assert (content[:64] in heard[0]) is (key in heard[1]) is not is_encrypted
        owner.assert_whole()
        with socket.create_connection(("127.0.0.1", owner.server.port)) as again:
            again.sendall(heard[1])
            again.shutdown(socket.SHUT_WR)
            said = bytearray()
            with suppress(ConnectionError):
                while data := again.recv(1 << 16):
                    said += data
        assert content[:64] not in said
        if is_encrypted:
            assert owner.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 1
