"""The owner's side of landing zones: writes copies of blocks to them, by NIXL, in a thread of its own.

A transfer cannot be called back. One that is not over in time ends with the agent, and with it all that is
under way; then there is a new agent. Only who was late is TIMED_OUT. For the others this owner is BUSY: they
may ask again at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.peers.copies import Bytes
from kvbm_core.peers.ucx import Agent, rows_of
from kvbm_core.storage.numa import leave_bound_core

MAX_ZONES = 256
"""Whose agents are known; the one that was written to the longest time ago is forgotten."""
FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 1e-3
LOOK_S = 1.0
PAUSE_S = 60.0
"""After an agent could not be made."""
CLOSE_TIMEOUT_S = 3.0

log = logging.getLogger("kvbm")

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Write:
    """``copies[i]`` goes to ``addresses[i]`` of ``zone``. ``on_end``: called on the writer's thread, when
    nobody reads the copies any more.
    """

    zone: bytes
    copies: list[Bytes]
    addresses: list[int]
    ends_at_s: float
    on_end: Callable[[Outcome], None]


class ZoneWriter:
    """``memory``: from which all copies are; the agent has registered it, and nobody is told how to reach it.
    ``write`` may be called from any thread.
    """

    def __init__(self, memory: Bytes, clock: Clock | None = None) -> None:
        self._memory = memory
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._waiting: deque[Write] = deque()
        self._is_closed = False
        self._agent: Agent | None = None
        self._has_tried = False
        self._zones: OrderedDict[bytes, Any] = OrderedDict()
        self._next_try_s = float("-inf")
        self._flights: dict[int, tuple[Write, Any]] = {}
        self._numbers = itertools.count()
        self._log = RateLimitedLogger(log)
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-writer", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether it has an agent; at first it makes one, and after trouble another."""
        return self._agent is not None

    def wait(self, timeout_s: float) -> bool:
        """Until there is an agent, or it is known that there is none; whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_tried, timeout_s)
        return self.is_ready

    def write(self, write: Write) -> None:
        """Begins; never waits."""
        with self._changed:
            self._waiting.append(write)
            self._changed.notify()

    def close(self) -> None:
        """What is under way is REJECTED. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        leave_bound_core()
        pause_s = FIRST_PAUSE_S
        while not self._is_closed:
            if self._agent is None:
                self._make_agent()
            with self._changed:
                if not self._waiting and not self._is_closed:
                    # Not a SimpleQueue: one of Python 3.11 may wait for ever if the time is as short.
                    self._changed.wait(pause_s if self._flights else LOOK_S)
            while self._waiting:
                self._start(self._waiting.popleft())
                pause_s = FIRST_PAUSE_S
            pause_s = FIRST_PAUSE_S if self._poll() else min(2 * pause_s, LAST_PAUSE_S)
            now_s = self._clock.now_s()
            if any(write.ends_at_s <= now_s for write, _ in self._flights.values()):
                self._end_all(Outcome.BUSY)
        self._end_all(Outcome.REJECTED)
        for write in self._waiting:
            write.on_end(Outcome.REJECTED)

    def _make_agent(self) -> None:
        if self._next_try_s > self._clock.now_s():
            return
        name = f"kvbm-peer-writer-{os.getpid()}-{next(_NUMBERS)}"
        try:
            self._agent = Agent(name, int(self._memory.ctypes.data), self._memory.nbytes)
        except OSError as error:
            self._next_try_s = self._clock.now_s() + PAUSE_S
            self._log.warning("agent", "kvbm: peers: blocks are sent over ZMQ: %s", error)
        with self._changed:
            self._has_tried = True
            self._changed.notify_all()

    def _start(self, write: Write) -> None:
        if self._agent is None or write.ends_at_s <= self._clock.now_s():  # neither is its asker's fault
            write.on_end(Outcome.BUSY)
            return
        try:
            num_bytes = write.copies[0].nbytes
            sources = rows_of([int(copy.ctypes.data) for copy in write.copies], num_bytes)
            targets = rows_of(write.addresses, num_bytes)
            handle = self._agent.write(self._peer(self._agent, write.zone), sources, targets)
        except Exception as error:  # NIXL's have no class in common
            self._failed(write, error)
            return
        self._flights[next(self._numbers)] = write, handle

    def _peer(self, agent: Agent, zone: bytes) -> Any:
        peer = self._zones.get(zone)
        if peer is None:
            peer = agent.meet(zone)
            self._zones[zone] = peer
            while len(self._zones) > MAX_ZONES:
                agent.forget(self._zones.popitem(last=False)[1])
        self._zones.move_to_end(zone)
        return peer

    def _poll(self) -> bool:
        """Whether something has ended."""
        agent, num_before = self._agent, len(self._flights)
        for number, (write, handle) in list(self._flights.items()):
            try:
                is_over = agent is not None and agent.is_over(handle)
            except Exception as error:
                del self._flights[number]
                self._failed(write, error)
                continue
            if is_over:
                del self._flights[number]
                write.on_end(Outcome.OK)
        return len(self._flights) < num_before

    def _failed(self, write: Write, error: Exception) -> None:
        """The asker may be gone: what is known of it is forgotten."""
        text = " ".join(str(error).split())
        self._log.warning(text, "kvbm: blocks could not be written to a peer: %s", text)
        peer = self._zones.pop(write.zone, None)
        if peer is not None and self._agent is not None:
            self._agent.forget(peer)
        write.on_end(Outcome.IO_ERROR)

    def _end_all(self, outcome: Outcome) -> None:
        """The agent ends, so that nothing is read from memory that is used again. ``outcome``: of those that
        are not late.
        """
        flights, self._flights = list(self._flights.values()), {}
        self._zones.clear()
        agent, self._agent = self._agent, None
        ends = [write for write, _ in flights]
        flights.clear()  # NIXL's handles, before their agent
        if agent is not None:
            agent.close()
        now_s = self._clock.now_s()
        for write in ends:
            write.on_end(Outcome.TIMED_OUT if write.ends_at_s <= now_s else outcome)
