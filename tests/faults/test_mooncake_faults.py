"""What becomes of an engine's calls when machines of its pool fail: the table of docs/remote.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbm_core.config.server_url import server_url
from kvbm_core.errors import Outcome
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.remote import mooncake
from kvbm_core.storage.remote.engine import GetItem, Got, PutItem
from kvbm_core.storage.remote.mooncake import THREADS, MooncakeEngine
from kvbm_core.testing.engine_contract import content_of, room
from tests.engines.mooncake_pool import MooncakePool
from tests.engines.ports import HOST, free_port
from tests.faults.deadlines import GRACE_S

pytestmark = pytest.mark.mooncake
LONG_S = 120.0
SIZE = 300_000
PATTERN = b"\xa5"


@contextmanager
def client(pool: MooncakePool) -> Iterator[MooncakeEngine]:
    engine = pool.engine()
    try:
        yield engine
    finally:
        engine.close()


def put(engine: MooncakeEngine, names: list[str], deadline_s: float = LONG_S) -> list[Outcome]:
    items = [PutItem(name, [memoryview(bytearray(content_of(name, SIZE)))]) for name in names]
    return engine.put(items, deadline_s=deadline_s)


def get(engine: MooncakeEngine, names: list[str], deadline_s: float = LONG_S) -> list[Outcome]:
    """What is OK has the right bytes."""
    pieces = [room(SIZE) for _ in names]
    items = [GetItem(name, piece) for name, piece in zip(names, pieces, strict=True)]
    got = engine.get(items, deadline_s=deadline_s)
    for name, (piece,), one in zip(names, pieces, got, strict=True):
        assert one.outcome is not Outcome.OK or (one.num_bytes == SIZE and piece == content_of(name, SIZE))
    return [one.outcome for one in got]


def until(is_so: Callable[[], bool], pause_s: float = 0.02) -> None:
    ends_at_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < ends_at_s
        time.sleep(pause_s)


def within(limit_s: float, call: Callable[[], list[Outcome]]) -> set[Outcome]:
    started_s = time.monotonic()
    outcomes = set(call())
    assert time.monotonic() - started_s < limit_s + GRACE_S
    return outcomes


def test_a_master_that_does_not_answer_at_the_start_stops_no_thread_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal_s = 5.0
    monkeypatch.setattr(mooncake, "REHEARSAL_S", rehearsal_s)
    with MooncakePool(tmp_path) as pool:
        pool.freeze_master()
        is_over, gaps = threading.Event(), [0.0]

        def beat() -> None:
            last_s = time.monotonic()
            while not is_over.wait(0.01):
                now_s = time.monotonic()
                gaps.append(now_s - last_s)
                last_s = now_s

        heart = threading.Thread(target=beat)
        heart.start()
        engine = MooncakeEngine(server_url(f"mooncake://{pool.address}"))
        try:
            assert put(engine, ["a"], deadline_s=rehearsal_s + 5.0) == [Outcome.IO_ERROR]
            assert max(gaps) < 5.0, "Mooncake joins with the interpreter's lock in its hands, for 40 s"
            pool.thaw_master()
            until(lambda: put(engine, ["a"]) == [Outcome.OK])
        finally:
            is_over.set()
            heart.join()
            engine.close()


def test_a_machine_that_dies_takes_its_objects_along_and_no_others(tmp_path: Path) -> None:
    names = [f"a/{number}" for number in range(24)]
    with MooncakePool(tmp_path, num_nodes=2) as pool, client(pool) as engine:
        assert set(put(engine, names)) == {Outcome.OK}
        pool.nodes[0].kill()
        found = get(engine, names)
        # What was on its way when it died is an error, what the master knows to be gone is a miss.
        assert {Outcome.OK} < set(found) <= {Outcome.OK, Outcome.IO_ERROR, Outcome.MISS}
        held = [name for name, outcome in zip(names, found, strict=True) if outcome is Outcome.OK]
        assert set(get(engine, held)) == {Outcome.OK}
        # Half of what is put goes to the dead machine until the master has noticed, after 10 s or so.
        until(lambda: set(put(engine, [f"b/{time.monotonic_ns()}" for _ in range(8)])) == {Outcome.OK}, 0.5)
        lost = [name for name in names if name not in held]
        until(lambda: set(engine.exists(lost, deadline_s=LONG_S)) == {Outcome.MISS})
        assert set(put(engine, lost)) == set(get(engine, lost)) == {Outcome.OK}


def test_a_frozen_machine_costs_the_deadline_and_its_calls_keep_their_memory(
    tmp_path: Path, waits_s: list[float]
) -> None:
    with MooncakePool(tmp_path) as pool, client(pool) as engine:
        assert put(engine, ["a", "b"]) == [Outcome.OK] * 2
        assert get(engine, ["a"]) == [Outcome.OK]
        pool.nodes[0].freeze()
        waits_s.clear()
        targets = [room(SIZE) for _ in range(THREADS)]
        for number, (target,) in enumerate(targets):
            started_s = time.monotonic()
            got = engine.get([GetItem("ab"[number % 2], [target])], deadline_s=0.3)
            assert got == [Got(Outcome.TIMED_OUT)]
            assert time.monotonic() - started_s < 0.3 + GRACE_S and max(waits_s) <= 0.3
            assert LATE.holds(ranges_of(target)) and not LATE.holds(ranges_of(room(SIZE)[0]))
        source = memoryview(bytearray(content_of("c", SIZE)))
        put_late = engine.put([PutItem("c", [source])], deadline_s=0.3)
        assert put_late == [Outcome.BUSY], "each of its threads has a call that does not end"
        assert within(0.3, lambda: engine.exists(["a"], deadline_s=0.3)) == {Outcome.BUSY}
        until(lambda: not any(LATE.holds(ranges_of(target)) for (target,) in targets))
        for (target,) in targets:
            target[:] = PATTERN * SIZE
        pool.nodes[0].thaw()
        until(lambda: get(engine, ["b"]) in ([Outcome.OK], [Outcome.MISS]))
        until(lambda: put(engine, ["d"]) == get(engine, ["d"]) == [Outcome.OK])
        assert all(target == PATTERN * SIZE for (target,) in targets), "written to after it was given back"


def test_memory_of_a_put_that_was_given_up_is_held_too(tmp_path: Path) -> None:
    with MooncakePool(tmp_path) as pool, client(pool) as engine:
        assert put(engine, ["a"]) == [Outcome.OK]
        pool.nodes[0].freeze()
        source = memoryview(bytearray(content_of("c", 8 << 20)))
        assert engine.put([PutItem("c", [source])], deadline_s=0.3) == [Outcome.TIMED_OUT]
        assert LATE.holds(ranges_of(source))
        until(lambda: not LATE.holds(ranges_of(source)))
        source[:] = PATTERN * source.nbytes
        pool.nodes[0].thaw()
        until(lambda: put(engine, ["d"]) == get(engine, ["d"]) == [Outcome.OK])
        pieces = room(8 << 20)
        (got,) = engine.get([GetItem("c", pieces)], deadline_s=LONG_S)
        assert got.outcome is not Outcome.OK or pieces[0] == content_of("c", 8 << 20)


def test_after_a_restart_of_the_master_all_is_gone_and_can_be_put_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"a/{number}" for number in range(8)]
    with MooncakePool(tmp_path) as pool, client(pool) as engine:
        assert set(put(engine, names)) == {Outcome.OK}
        pool.kill_master()
        failures = {Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.BUSY}
        for _ in range(2):
            assert within(1.0, lambda: get(engine, names, 1.0)) <= failures
            assert within(1.0, lambda: put(engine, ["b"], 1.0)) <= failures
            assert within(1.0, lambda: engine.exists(names, deadline_s=1.0)) <= failures
        pool.start_master()
        until(lambda: put(engine, names) == [Outcome.OK] * 8 and get(engine, names) == [Outcome.OK] * 8)
        # A put whose deadline is over may be carried out by the client once the master is back.
        assert get(engine, ["b"]) in ([Outcome.MISS], [Outcome.OK])
    told = [record.getMessage() for record in caplog.records if record.name == "kvbm"]
    assert len([line for line in told if "-900" in line]) <= 2, told


def test_a_frozen_master_costs_the_deadline(tmp_path: Path) -> None:
    with MooncakePool(tmp_path) as pool, client(pool) as engine:
        assert put(engine, ["a"]) == get(engine, ["a"]) == [Outcome.OK]
        pool.freeze_master()
        for _ in range(2):
            assert within(0.5, lambda: engine.exists(["a"], deadline_s=0.5)) == {Outcome.TIMED_OUT}
        # Half a minute later its own limit ends the call, were it not for MC_RPC_TIMEOUT_MS.
        assert within(5.0, lambda: get(engine, ["a"])) == {Outcome.TIMED_OUT}
        pool.thaw_master()
        until(lambda: get(engine, ["a"]) == [Outcome.OK])


def test_a_master_that_comes_later_is_joined_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = MooncakePool(tmp_path)
    pool.port, pool.metrics_port = free_port(), free_port()
    try:
        with client(pool) as engine:
            until(lambda: put(engine, ["a"], 1.0) == [Outcome.IO_ERROR])
            assert within(0.5, lambda: engine.exists(["a"], deadline_s=5.0)) == {Outcome.IO_ERROR}
            pool.start_master()
            pool.add_nodes(1)
            until(lambda: put(engine, ["a"]) == get(engine, ["a"]) == [Outcome.OK])
    finally:
        pool.stop()
    told = [record.getMessage() for record in caplog.records if record.name == "kvbm"]
    assert len([line for line in told if "refused" in line]) == 1, told


def test_close_while_there_is_no_master_is_quick() -> None:
    engine = MooncakeEngine(server_url(f"mooncake://{HOST}:{free_port()}"))
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < GRACE_S
    assert engine.exists(["a"], deadline_s=LONG_S) == [Outcome.REJECTED]


def test_a_full_pool_is_no_space_and_gives_what_it_has(tmp_path: Path) -> None:
    names = [f"a/{number}" for number in range(100)]
    with MooncakePool(tmp_path, segment_bytes=16 << 20) as pool, client(pool) as engine:
        outcomes = [outcome for name in names for outcome in put(engine, [name])]
        assert outcomes[0] is Outcome.OK and Outcome.NO_SPACE in outcomes
        assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
        held = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK]
        found = get(engine, held)
        assert Outcome.OK in found and set(found) <= {Outcome.OK, Outcome.MISS}


def test_a_part_of_an_object_in_memory_that_was_registered(tmp_path: Path) -> None:
    with MooncakePool(tmp_path) as pool, client(pool) as engine:
        assert put(engine, ["a"]) == [Outcome.OK]
        memory = memoryview(bytearray(SIZE))
        target = memory[5000:150_000]
        engine.register(np.frombuffer(memory, dtype=np.uint8).ctypes.data, SIZE)
        got = engine.get([GetItem("a", [target[:1000], target[1000:]], 70_000)], deadline_s=LONG_S)
        assert got == [Got(Outcome.OK, 145_000)]
        assert target == content_of("a", SIZE)[70_000:215_000]
        assert not any(memory[:5000]) and not any(memory[150_000:])
