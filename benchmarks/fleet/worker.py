"""A process with some of the simulated instances."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

from benchmarks.fleet.children import serve
from benchmarks.fleet.instance import RUN_BLOCKS, Instance, Place
from kvbm_core.events import publisher

TICK_S = 0.05
LOOK_S = 0.5
"""How often it looks how much waits."""
AT_ONCE = 8
"""Instances of a process that begin at a time: it is one processor that all of them have to share."""
SWITCH_S = 0.1
"""Hundreds of threads would ask for the interpreter 200 times a second each, and keep it busy with that."""
publisher.BATCH_S = 0.5
"""Publishers look ten times less often for something to tell than in an engine: a thousand of them would use
two cores for that. What they tell, and in how many batches, stays the same: a run is a batch.
"""


class Worker:
    """``serve`` calls it. One thread more stands for the engines: it stores their blocks."""

    def __init__(self) -> None:
        self._instances: list[Instance] = []
        self._due_s: list[float] = []
        self._every_s = float("inf")
        self._stored_blocks = 0
        self._peak_waiting_bytes = 0
        self._lock = threading.Lock()  # guards all above
        self._draw = random.Random()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, first: int, count: int, **place: Any) -> dict[str, Any]:
        """Instances ``first`` and following."""
        where = Place(**place)
        keys = where.keys()
        made: list[Instance] = []
        for number in range(first, first + count):
            made.append(Instance(number, where, keys))
            while sum(not each.sessions for each in made[-AT_ONCE:]) == AT_ONCE:
                time.sleep(0.01)
        with self._lock:
            self._instances = made
        return {}

    def churn(self, blocks_per_s: float) -> dict[str, Any]:
        """How many blocks each stores from now on; 0: none."""
        with self._lock:
            self._every_s = RUN_BLOCKS / blocks_per_s if blocks_per_s else float("inf")
            now_s = time.monotonic()
            self._due_s = [now_s + self._draw.random() * self._every_s for _ in self._instances]
        return {}

    def fill(self) -> dict[str, Any]:
        """Their tiers, with blocks."""
        with self._lock:
            for each in self._instances:
                each.fill()
        return {}

    def status(self) -> dict[str, Any]:
        """Sums over the instances; the peak of one since the last time."""
        with self._lock:
            peak, self._peak_waiting_bytes = self._peak_waiting_bytes, 0
            return {
                "met": sum(each.is_met for each in self._instances),
                "sessions": sum(each.sessions for each in self._instances),
                "attempts": sum(each.attempts for each in self._instances),
                "dumps": sum(each.dumps for each in self._instances),
                "stored_blocks": self._stored_blocks,
                "peak_waiting_bytes": peak,
            }

    def truth(self) -> dict[str, Any]:
        """What each has: its name to a digest."""
        with self._lock:
            return {each.name: each.truth() for each in self._instances}

    def _run(self) -> None:
        look_at_s = 0.0
        while True:
            time.sleep(TICK_S)
            with self._lock:
                now_s = time.monotonic()
                for i, due_s in enumerate(self._due_s):
                    if due_s <= now_s:
                        self._instances[i].store_run()
                        self._stored_blocks += RUN_BLOCKS
                        self._due_s[i] = max(due_s + self._every_s, now_s - 1.0)
                if now_s >= look_at_s:
                    waiting = max((each.waiting_bytes for each in self._instances), default=0)
                    self._peak_waiting_bytes = max(self._peak_waiting_bytes, waiting)
                    look_at_s = now_s + LOOK_S


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    worker = Worker()
    serve({do.__name__: do for do in (worker.begin, worker.fill, worker.churn, worker.status, worker.truth)})
