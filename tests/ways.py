"""How long the ways of a block are, in calls, files and threads. `python -m tests.ways` prints them.

A way is followed in this process, over a real channel, real files and real copies. Functions of kvbm count,
but for numbers, words and time (observe, types, errors, clock) and what is for tests.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

LEFT_OUT = ("/observe/", "/testing/", "kvbm_core/types.py", "kvbm_core/errors.py", "kvbm_core/clock.py")
WAIT_S = 20.0


class Row(NamedTuple):
    """One line of the table. ``own_calls``: those of the thread of the engine, which alone are the same each
    time: how often the others wake up is chance.
    """

    way: str
    calls: int
    own_calls: int
    files: int
    threads: int

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


class Trace:
    """Counts calls in all threads that begin after it was made, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()
        self.threads: Counter[int] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_on:
            return
        path = frame.f_code.co_filename
        at = path.find("kvbm_core/")
        if at < 0 or any(part in path for part in LEFT_OUT) or frame.f_code.co_name.startswith("<"):
            return
        self.calls[path[at:] + ":" + frame.f_code.co_name] += 1
        self.threads[threading.get_ident()] += 1

    @contextmanager
    def way(self) -> Iterator[None]:
        """On meanwhile."""
        self.calls.clear()
        self.threads.clear()
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def wait(self, engine: Any, is_done: Callable[[], bool]) -> None:
        """Lets the leader hear what there is to hear, until ``is_done``; looking costs nothing. It hears all
        answers that it waits for at once: how many come together is chance, and each time costs calls.
        """
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.002)):
            sys.setprofile(None)
            is_over, num_answers = is_done(), len(engine.handshake.inbox)
            is_answered = num_answers >= max(1, len(engine.leader._jobs))
            sys.setprofile(self._note)
            if is_over:
                return
            if is_answered:
                engine.leader.poll()
            else:
                sys.setprofile(None)
                pause.wait(0.002)
                sys.setprofile(self._note)
        raise TimeoutError("the way does not end")

    def row(self, name: str) -> Row:
        """The way that was gone last."""
        files = {call.rpartition(":")[0] for call in self.calls}
        own_calls = self.threads[threading.get_ident()]
        return Row(name, sum(self.calls.values()), own_calls, len(files), len(self.threads))


def leader_ways(trace: Trace, folder: Path) -> Iterator[Row]:
    """Ten blocks of two groups on one rank, with a check of bytes after loads."""
    from kvbm_core.testing.leader_bench import ROOT
    from tests.unit.test_worker import PROMPT
    from tests.unit.worker_disk_engine import ELSEWHERE, NUM_TOKENS, TABLES, DiskEngine

    engine = DiskEngine(folder)
    engine.wait_ready()
    state = engine.leader.open("writer", ROOT, None, is_lasting=False)
    engine.leader.offload(state, PROMPT, 0, NUM_TOKENS, TABLES)
    engine.submit_offloads()
    engine.settle()
    with trace.way():
        engine.leader.confirm(state)
        trace.wait(engine, lambda: not engine.disk.storing_blocks)
    yield trace.row("host to disk")
    engine.leader.finish(state)
    engine.close()
    engine = DiskEngine(folder)
    engine.wait_ready()
    state = engine.leader.open("reader", ROOT, None)
    with trace.way():
        found = engine.leader.match(state, PROMPT, 0, NUM_TOKENS)
        assert found == NUM_TOKENS
        plan = engine.leader.onboard(state, found, ELSEWHERE)
        assert plan is not None
        engine.workers[0].submit(plan)
        trace.wait(engine, lambda: not engine.leader.is_pending(plan.job_id))
    yield trace.row("disk to host to device")
    assert engine.on_devices() == engine.expected()
    engine.leader.finish(state)
    engine.close()


def store_way(trace: Trace, folder: Path) -> Iterator[Row]:
    """The same ten blocks from a store by key. The engine asks once more before it hears anything, and again
    when all that it was told of is over.
    """
    from kvbm_core.testing.leader_bench import ROOT
    from tests.unit.test_worker import PROMPT
    from tests.unit.worker_disk_engine import NUM_TOKENS, DiskEngine

    for name in ("store", "writer", "reader"):
        (folder / name).mkdir(parents=True)
    url = f"file://{folder}/store"
    engine = DiskEngine(folder / "writer", store_url=url)
    engine.wait_ready()
    engine.offload_prompt()
    engine.wait_for(lambda: not engine.leader.chain.storing_blocks)
    engine.close()
    engine = DiskEngine(folder / "reader", store_url=url, fetch_wait_s=WAIT_S)
    engine.wait_ready()
    leader, state = engine.leader, engine.leader.open("reader", ROOT, None)
    with trace.way():
        while leader.match(state, PROMPT, 0, NUM_TOKENS) is None:
            assert leader.match(state, PROMPT, 0, NUM_TOKENS) is None
            trace.wait(engine, lambda: not len(leader._jobs))
    yield trace.row("store to host")
    leader.finish(state)
    engine.close()


def local_way(trace: Trace, folder: Path) -> Iterator[Row]:
    """Five blocks of one group, by key, in a process without a leader."""
    from tests.unit.local_bench import KEYS, End, LocalBench

    bench = LocalBench(folder, 8, 8)
    bench.store(KEYS[:5])
    bench.close()
    bench = LocalBench(folder, 8, 8)
    with trace.way():
        assert bench.tiers.match("owner", KEYS[:5]) == 5
        claim = bench.tiers.claim("owner", KEYS[:5])
        assert claim is not None
        end = End()
        bench.tiers.load(claim, bench.blocks_for(KEYS[:5]), end)
        end.wait()
    yield trace.row("linker from disk")
    assert bench.came(KEYS[:5])
    bench.close()


def rows() -> list[Row]:
    """One of each way."""
    trace = Trace()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("a", "b", "c"):
                (Path(folder) / name).mkdir()
            a, b, c = (Path(folder) / name for name in ("a", "b", "c"))
            ways = leader_ways(trace, a), store_way(trace, b), local_way(trace, c)
            return [row for way in ways for row in way]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


if __name__ == "__main__":
    print("| way | calls | by the engine | files | threads |\n| --- | --- | --- | --- | --- |")
    print(*rows(), sep="\n")
