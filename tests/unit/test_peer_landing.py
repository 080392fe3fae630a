"""Blocks that owners write to an asker's landing zone, by NIXL's own UCX: whatever they do, what an asker
takes is what was asked for, and its zone is whole again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.peers import landing as landing_module
from kvbm_core.peers import rank as rank_module
from kvbm_core.peers import writer as writer_module
from kvbm_core.peers.landing import LandingZone
from kvbm_core.peers.rank import PeerOptions, join_peers
from kvbm_core.peers.tier import PeerTier
from kvbm_core.peers.ucx import Agent, rows_of
from kvbm_core.peers.wire import Done, Fetch, Welcome, Written, decode_answer, seal_of
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.testing.peer_owner import content_of, key_of, wait_for
from kvbm_core.tiers.keyed import KeyedOptions
from kvbm_core.tiers.lower import Seeker, Sought
from kvbm_core.tokens.runs import run_of
from kvbm_core.types import BlockKey
from tests.faults.deadlines import GRACE_S
from tests.unit.peer_bench import (
    BLOCK_BYTES,
    OWNER,
    SLOT_BYTES,
    FakeOwner,
    Stranger,
    asking,
    owning,
    targets_for,
)
from tests.unit.tier_bench import TierBench

NO_NIXL = why_no_nixl()
pytestmark = pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: peers by NIXL: {NO_NIXL}")
KEYS = [key_of(number) for number in range(1, 40)]
OK, LONG_S, NUM_CALLS = Outcome.OK, 20.0, 2


@pytest.fixture
def zone() -> Iterator[LandingZone]:
    made = LandingZone(BLOCK_BYTES, 64, NUM_CALLS)
    try:
        assert made.wait(LONG_S)
        yield made
        assert made.free_calls == NUM_CALLS
    finally:
        made.close()


CODE_OF_LIBC = """
import ctypes
import numpy as np
from kvbm_core.peers.tier import PeerTier
from kvbm_core.peers.ucx import Agent

def code():
    calls = [getattr(ctypes.CDLL(None), name) for name in ("mmap", "munmap", "madvise", "brk")]
    return [ctypes.string_at(ctypes.cast(call, ctypes.c_void_p).value, 16) for call in calls]

before, memory = code(), np.zeros(4096, np.uint8)
Agent("some", int(memory.ctypes.data), memory.nbytes)
print(code() == before)
"""


def is_block(target: memoryview, key: Any) -> bool:
    return bytes(target[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)


def test_blocks_are_written_to_the_zone_and_what_is_not_there_is_not(zone: LandingZone) -> None:
    with owning(writes=True) as owner, asking(zone=zone) as store:
        wait_for(lambda: owner.server.writes)
        owner.put(*KEYS[:5])
        peer, targets = store.at(owner.address), targets_for(7)
        for _ in range(3):
            assert peer.get_many(KEYS[:7], targets, deadline_s=LONG_S) == [OK] * 5 + [Outcome.MISS] * 2
            assert all(map(is_block, targets, KEYS[:5]))
            assert bytes(targets[6]) == b"\xee" * SLOT_BYTES == bytes(targets[5])
        part = zone._memory[NUM_CALLS - 1]
        assert [row.tobytes() for row in part[:5]] == [content_of(key, BLOCK_BYTES) for key in KEYS[:5]]
        (target,) = targets_for(1)
        pieces = [target[:10], target[10:700], target[700:]]
        assert peer.get_many(KEYS[:1], [pieces], deadline_s=LONG_S) == [OK] and is_block(target, KEYS[0])
        assert owner.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 16
        owner.assert_whole()


@pytest.mark.parametrize("writes", [True, False])
def test_who_has_a_zone_and_who_has_none_go_together(zone: LandingZone, writes: bool) -> None:
    with owning(writes=writes) as owner, asking(zone=None if writes else zone) as store:
        if writes:
            wait_for(lambda: owner.server.writes)
        owner.put(*KEYS[:3])
        targets = targets_for(3)
        assert store.at(owner.address).get_many(KEYS[:3], targets, deadline_s=LONG_S) == [OK] * 3
        assert all(map(is_block, targets, KEYS)) and not zone._memory.any()
        owner.assert_whole()


def test_while_there_is_no_agent_bytes_come_in_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("NIXL's UCX cannot be had (no)")

    monkeypatch.setattr(landing_module, "Agent", refuse)
    zone = LandingZone(BLOCK_BYTES, 64, 1)
    assert not zone.wait(LONG_S)
    with owning() as owner, asking(zone=zone) as store:
        owner.put(KEYS[0])
        assert store.at(owner.address).get_many(KEYS[:1], targets_for(1), deadline_s=LONG_S) == [OK]
    assert [r.getMessage() for r in caplog.records if "over ZMQ" in r.getMessage()]


def test_a_question_that_is_not_answered_ends_the_zones_agent(zone: LandingZone) -> None:
    """Whoever was to write finds nobody, and the next question has another agent."""
    with owning(writes=True) as owner, asking(zone=zone) as store:
        wait_for(lambda: owner.server.writes)
        owner.put(KEYS[0])
        owner.line.hold()
        with zone.landing(1) as before:
            assert before is not None
            before.is_whole = True
        got = store.at(owner.address).get_many(KEYS[:1], targets_for(1), deadline_s=0.3)
        assert got == [Outcome.TIMED_OUT] and zone.free_calls == NUM_CALLS
        assert zone.wait(LONG_S)
        with zone.landing(1) as after:
            assert after is not None and after.zone != before.zone
            after.is_whole = True
        owner.line.let_go()
        owner.assert_whole()
        with asking(zone=zone) as other:
            assert other.at(owner.address).get_many(KEYS[:1], targets_for(1), deadline_s=LONG_S) == [OK]


def test_what_is_written_late_arrives_nowhere_or_in_the_zone_alone(zone: LandingZone) -> None:
    """An owner that goes on after the question has ended: NIXL itself, with all that the question told it."""
    source = np.full(BLOCK_BYTES, 7, np.uint8)
    late = Agent("late-owner", int(source.ctypes.data), source.nbytes)
    try:
        with zone.landing(1) as landing:
            assert landing is not None
            peer = late.meet(landing.zone)
            address = landing.addresses[0]
            handle = late.write(
                peer, rows_of([int(source.ctypes.data)], BLOCK_BYTES), rows_of([address], BLOCK_BYTES)
            )
            wait_for(lambda: late.is_over(handle))
            assert bytes(landing.rows[0]) == source.tobytes()
        assert zone.wait(LONG_S)  # not whole: another agent
        before = zone._memory.copy()
        try:
            again = late.write(
                peer, rows_of([int(source.ctypes.data)], BLOCK_BYTES), rows_of([address], BLOCK_BYTES)
            )
            ends_at_s = time.monotonic() + 1.0
            while time.monotonic() < ends_at_s and not late.is_over(again):
                pass
        except Exception as error:  # NIXL's have no class in common
            assert "nixl" in type(error).__name__.lower() or isinstance(error, OSError)
        assert np.array_equal(before, zone._memory)
    finally:
        late.close()


# ---------------------------------------------------------------- owners that lie


def written(question: Fetch, numbers: list[int], seals: list[bytes] | None = None) -> list[Any]:
    own = [seal_of(KEYS[0], memoryview(content_of(KEYS[0], BLOCK_BYTES)))] * len(numbers)
    return [
        [Written(question.call_id, numbers, own if seals is None else seals)],
        [Done(question.call_id, [OK, OK])],
    ]


LIES: dict[str, Any] = {
    "nothing was written": lambda q: written(q, [0]),
    "a number beyond": lambda q: written(q, [2]),
    "a number below": lambda q: written(q, [-1]),
    "one twice": lambda q: written(q, [0, 0]),
    "fewer seals": lambda q: written(q, [0, 1], [b""]),
    "another call": lambda q: [[Written(q.call_id + 1, [0], [b""])]],
    "bytes behind it": lambda q: [[Written(q.call_id, [0], [b""]), b"x"]],
    "the end alone": lambda q: [[Done(q.call_id, [OK, OK])]],
}


@pytest.mark.parametrize("has_zone", [True, False])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_owner_that_says_it_has_written_is_not_believed(
    lie: Any, has_zone: bool, zone: LandingZone
) -> None:
    owner = FakeOwner(lie, Welcome("owner"))
    try:
        with asking(zone=zone if has_zone else None) as store:
            got = store.at(owner.address).get_many(KEYS[:2], targets_for(2), deadline_s=1.0)
            assert OK not in got
        assert zone.free_calls == NUM_CALLS
    finally:
        owner.close()


# ---------------------------------------------------------------- askers that lie


@pytest.mark.parametrize("how", ["no zone", "beyond its memory", "no address", "below", "too few"])
def test_an_asker_whose_zone_is_none_gets_no_block_and_hurts_nobody(how: str, zone: LandingZone) -> None:
    with owning(writes=True) as owner, zone.landing(2) as landing, asking(zone=zone) as store:
        assert landing is not None
        wait_for(lambda: owner.server.writes)
        owner.put(*KEYS[:2])
        places = {
            "no zone": (b"\xff" * 300, landing.addresses),
            "beyond its memory": (landing.zone, [landing.addresses[0] + (1 << 30)] * 2),
            "no address": (landing.zone, [0, 1]),
            "below": (landing.zone, [-1, -5]),
            "too few": (landing.zone, landing.addresses[:1]),
        }
        stranger = Stranger(owner.address)
        stranger.say(Fetch(1, OWNER.instance, list(KEYS[:2]), 5000, *places[how]))
        answer = decode_answer(stranger.hear()[0])
        if how == "too few":
            assert not isinstance(answer, Done | Written), "they come in a message"
        else:
            assert answer == Done(1, [Outcome.IO_ERROR] * 2)
        assert store.at(owner.address).get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S) == [OK] * 2
        stranger.close()
        owner.assert_whole()
        landing.is_whole = True


@contextmanager
def frozen_agent() -> Iterator[tuple[Agent, list[int], Any]]:
    """Of an asker that takes nothing until it is told to; addresses of two blocks, and their memory."""
    memory = np.zeros((2, BLOCK_BYTES), np.uint8)
    agent = Agent("frozen-asker", int(memory.ctypes.data), memory.nbytes)
    try:
        yield agent, [int(row.ctypes.data) for row in memory], memory
    finally:
        agent.close()


def test_an_asker_that_takes_nothing_costs_its_deadline_and_others_one_miss_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is frozen: over TCP nothing arrives that it does not take. Its write ends with the owner's agent,
    and with it one that was under way to another asker, which takes its time and has more of it.
    """
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    is_awake, progress = threading.Event(), Agent.progress
    monkeypatch.setattr(Agent, "progress", lambda agent: progress(agent) if is_awake.is_set() else None)
    zone, books = LandingZone(BLOCK_BYTES, 64, 1), Books()
    with frozen_agent() as (frozen, addresses, memory), closing(zone), ThreadPoolExecutor(1) as beside:
        assert zone.wait(LONG_S)
        with owning(writes=True) as owner, asking(zone=zone) as store:
            wait_for(lambda: owner.server.writes)
            owner.put(*KEYS[:2])
            peer = store.at(owner.address)
            other = beside.submit(peer.get_many, KEYS[:2], targets_for(2), deadline_s=LONG_S)
            wait_for(lambda: owner.server._writer is not None and owner.server._writer._flights)
            stranger, started_s = Stranger(owner.address), time.monotonic()
            stranger.say(Fetch(1, OWNER.instance, list(KEYS[:2]), 500, frozen.zone(), addresses))
            assert decode_answer(stranger.hear()[0]) == Done(1, [Outcome.TIMED_OUT] * 2)
            assert time.monotonic() - started_s < 0.5 + GRACE_S
            missed = other.result(LONG_S)
            wait_for(lambda: owner.line.counts[0] == 1)
            assert missed == [Outcome.BUSY] * 2 and books.goes_on_asking_after(missed)
            owner.assert_whole()
            is_awake.set()
            assert peer.get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S) == [OK] * 2
            wait_for(lambda: owner.server.writes)
            assert peer.get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S) == [OK] * 2
            assert zone._memory.any() and not memory.any()
            progress(frozen)  # it goes on
            assert not memory.any()
            stranger.close()
            owner.assert_whole()


class Books(TierBench[PeerTier]):
    """An asker's leader."""

    def __init__(self) -> None:
        super().__init__(lambda around: PeerTier(around, KeyedOptions(always_loads=True)))

    def goes_on_asking_after(self, outcomes: list[Outcome]) -> bool:
        """Whether this owner is asked for other blocks, once a fetch has ended in this way."""
        assert self._wanted(KEYS[:2]) is Sought.COMING
        self.answer(self.take_sent()[0])
        assert self._wanted(KEYS[:2]) is Sought.COMING
        self.answer(self.take_sent()[0], failed=dict(enumerate(outcomes)))
        return self._wanted(KEYS[2:4]) is Sought.COMING

    def _wanted(self, keys: list[BlockKey]) -> Sought:
        return self.tier.wanted([run_of(keys)], Seeker(source="tcp://10.0.0.1:5000"))


@pytest.mark.parametrize("why", ["no agent", "waited too long"])
def test_what_a_writer_cannot_begin_is_not_held_against_the_owner(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("NIXL's UCX cannot be had (no)")

    if why == "no agent":
        monkeypatch.setattr(writer_module, "Agent", refuse)
    memory, ends = np.zeros(BLOCK_BYTES, np.uint8), SimpleQueue[Outcome]()
    with closing(writer_module.ZoneWriter(memory)) as writer:
        assert writer.wait(LONG_S) == (why != "no agent")
        over_s = time.monotonic() + (LONG_S if why == "no agent" else -1.0)
        writer.write(writer_module.Write(b"zone", [memory], [0], over_s, ends.put))
        assert ends.get(timeout=LONG_S) is Outcome.BUSY


def test_an_agent_that_cannot_say_where_it_is_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is made every minute, and each has all of the zone's memory registered."""
    ended = threading.Event()

    def refuse() -> bytes:
        raise OSError("no addresses")

    mute = SimpleNamespace(zone=refuse, close=ended.set)
    monkeypatch.setattr(landing_module, "Agent", lambda *args: mute)
    with closing(LandingZone(BLOCK_BYTES, 1, 1)) as zone:
        assert not zone.wait(LONG_S)
        assert ended.wait(LONG_S)


def test_the_doctor_tries_ucx_as_engines_use_it() -> None:
    """Without its part for devices that are not here, and without touching the code of libc."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    code = "import os; from kvbm_core.cli.doctor.nixl import _try_ucx; print(repr(_try_ucx()), flush=True)"
    code += "; print(os.environ['UCX_MEM_MMAP_HOOK_MODE'], flush=True); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["''", "none"]


@pytest.mark.parametrize("mode", [None, "bistro"])
def test_ucx_leaves_the_code_of_libc_as_it_is_unless_the_user_asks_for_more(mode: str | None) -> None:
    """Other threads run that code meanwhile."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    if mode is not None:
        environ["UCX_MEM_MMAP_HOOK_MODE"] = mode
    command = [sys.executable, "-c", CODE_OF_LIBC]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(mode is None)


def test_without_nixl_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "is_installed", lambda: False)
    options = PeerOptions("127.0.0.1:56100", "namespace", 1.0, 1 << 20, by_nixl=True)
    with pytest.raises(ConfigError, match=r"KVBM_PEERS=.?nixl.*pip install"):
        join_peers(options, (0, 1, BLOCK_BYTES, "layout"), None, None)  # type: ignore[arg-type]


def test_ucx_is_off_by_default_and_a_line_says_that_it_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert KvbmSettings.from_env({"cpu_cache_gb": 1}).peers == "off"
    taken = FakeOwner(lambda question: [], Welcome("owner"))  # so that it goes no further
    options = PeerOptions(taken.address.removeprefix("tcp://"), "namespace", 1.0, 1 << 20, by_nixl=True)
    try:
        with pytest.raises(ConfigError, match="cannot be bound"):
            join_peers(options, (0, 1, BLOCK_BYTES, "layout"), None, None)  # type: ignore[arg-type]
    finally:
        taken.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "neither encrypts nor asks who is there" in line and "\n" not in line
