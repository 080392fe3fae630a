"""The asker's landing zone: the only memory that owners write to, and the slab is no part of it.

Each question has a part of the zone, and what comes there is copied to host slots and verified there. An
owner that has not said that it is done may write later. Over a network it cannot once the zone's agent is
gone, which ends with the question; a process of this machine may still do so, so the zone's memory is never
given back. What comes late can only be what a later question finds to be damaged.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.peers.ucx import Agent
from kvbm_core.storage.late import LATE
from kvbm_core.storage.numa import leave_bound_core

PAUSE_S = 60.0
"""After an agent could not be made."""
CLOSE_TIMEOUT_S = 5.0
LOOK_S = 1.0
PROGRESS_PAUSE_S = 50e-6
"""Between two looks at what comes over TCP, while a question is open. NIXL's own thread for that never
pauses.
"""

log = logging.getLogger("kvbm")

_NUMBERS = itertools.count()


@dataclass(eq=False)
class _Generation:
    agent: Agent
    zone: bytes
    num_users: int = 0
    is_current: bool = True


@dataclass(eq=False)
class Landing:
    """One question's part of the zone. ``zone``, ``addresses``: what the owner needs to write there.
    ``is_whole``: to be set when the owner is known to write no more.
    """

    zone: bytes
    rows: list[memoryview]
    addresses: list[int]
    is_whole: bool = False


class LandingZone:
    """Memory for ``num_calls`` questions at once, of ``call_blocks`` each. Any thread.

    All of NIXL is called in a thread of its own, which works while there are questions. While there is no
    agent, bytes come in messages.
    """

    def __init__(
        self, block_bytes: int, call_blocks: int, num_calls: int, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._memory = np.zeros((num_calls, call_blocks, block_bytes), np.uint8)
        LATE.add((), self._memory)
        self._free = list(range(num_calls))
        self._current: _Generation | None = None
        self._all: list[_Generation] = []
        self._next_try_s = float("-inf")
        self._is_wanted = True
        self._changed = threading.Condition()
        self._is_closed = False
        self._log = RateLimitedLogger(log)
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-zone", daemon=True)
        self._thread.start()

    @property
    def free_calls(self) -> int:
        """Parts that no question has."""
        return len(self._free)

    def wait(self, timeout_s: float) -> bool:
        """Until there is an agent, or it is known that there is none; whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_wanted, timeout_s)
            return self._current is not None

    @contextmanager
    def landing(self, count: int) -> Iterator[Landing | None]:
        """A part for a question of so many blocks; None if there is none now."""
        part: int | None = None
        with self._changed:
            generation = self._current
            if generation is None:
                self._is_wanted = True
            elif self._free:
                part = self._free.pop()
                generation.num_users += 1
            self._changed.notify_all()
        if generation is None or part is None:
            yield None
            return
        rows = [self._memory[part, i] for i in range(count)]
        landing = Landing(generation.zone, [row.data for row in rows], [int(row.ctypes.data) for row in rows])
        try:
            yield landing
        finally:
            with self._changed:
                self._free.append(part)
                generation.num_users -= 1
                if not landing.is_whole:
                    self._retire(generation)
                self._changed.notify_all()

    def _retire(self, generation: _Generation) -> None:
        generation.is_current = False
        if self._current is generation:
            self._current, self._is_wanted = None, True

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        leave_bound_core()
        while not self._is_closed:
            with self._changed:
                is_due = self._is_wanted and self._next_try_s <= self._clock.now_s()
                ended = [one for one in self._all if not (one.is_current or one.num_users)]
                self._all = [one for one in self._all if one not in ended]
                busy = [one for one in self._all if one.num_users]
                if not (is_due or ended or busy):
                    self._changed.wait(LOOK_S)
                    continue
            for one in ended:
                one.agent.close()
            if is_due:
                self._make()
            for one in busy:
                one.agent.progress()
            if busy:
                time.sleep(PROGRESS_PAUSE_S)
        for one in self._all:
            one.agent.close()

    def _make(self) -> None:
        name = f"kvbm-peer-zone-{os.getpid()}-{next(_NUMBERS)}"
        made, agent = None, None
        try:
            agent = Agent(name, int(self._memory.ctypes.data), self._memory.nbytes)
            made = _Generation(agent, agent.zone())
        except Exception as error:  # NIXL's have no class in common
            self._log.warning("agent", "kvbm: peers: blocks come over ZMQ: %s", error)
            if agent is not None:
                agent.close()
        with self._changed:
            self._is_wanted = False
            if made is None:
                self._next_try_s = self._clock.now_s() + PAUSE_S
            else:
                self._current = made
                self._all.append(made)
            self._changed.notify_all()
