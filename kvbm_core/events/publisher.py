"""Publishes the event log: batches with numbers, to every sink, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.log import Change, Cleared, EventLog, Snapshot
from kvbm_core.events.wire import (
    COUNT_BITS,
    MAX_BATCH_HASHES,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    encode,
    new_generation,
)
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.numa import leave_bound_core

log = logging.getLogger("kvbm")

BATCH_S = 0.05
"""So long events wait for company, at most."""
HEARTBEAT_S = 1.0
"""After so long without events an empty batch goes out, so that who missed the last one finds out."""
CLOSE_TIMEOUT_S = 5.0


class Sink(Protocol):
    """Where batches go. ``serves``: it has something to do on the publisher's thread besides."""

    serves: bool

    def open(self, dumps: Dumps) -> None:
        """Before the first batch, on the publisher's thread or the caller's. ConfigError, one line, if it
        cannot be; ``dumps`` answers who asks for one.
        """

    def send(self, number: int, payload: bytes) -> None:
        """On the publisher's thread. Does not wait, does not raise: what finds no room is lost as a whole."""

    def serve(self, timeout_s: float) -> None:
        """On the publisher's thread, until ``timeout_s`` has gone by: whatever else there is to do."""

    def close(self) -> None:
        """From any thread, when the publisher's has ended. May be called twice."""


class Stream:
    """Gives batches their numbers and hands them to ``sinks``. One thread, or a lock around it."""

    def __init__(self, sinks: Sequence[Sink], rank: int, metrics: Metrics, clock: Clock) -> None:
        self._sinks = sinks
        self._rank = rank
        self._metrics = metrics
        self._clock = clock
        self._last_s = clock.now_s()
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new generation: whoever listens asks for all, as something may not have been told."""
        self.last_number = new_generation() << COUNT_BITS  # that of the empty start, which no batch has
        self._end = self.last_number | ((1 << COUNT_BITS) - 1)

    def send(self, events: Sequence[Event]) -> None:
        """In batches of MAX_BATCH_HASHES blocks, at most."""
        batch, num_hashes = list[Event](), 0
        for event in events:
            num_more = 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
            if num_hashes + num_more > MAX_BATCH_HASHES and batch:
                self._send(batch)
                batch, num_hashes = [], 0
            batch.append(event)
            num_hashes += num_more
        if batch:
            self._send(batch)

    def beat(self) -> None:
        """Lets who listens know that nothing was missed, if nothing was said for a while."""
        if self._clock.now_s() - self._last_s >= HEARTBEAT_S:
            self._send([])

    def _send(self, events: list[Event]) -> None:
        if self.last_number == self._end:  # years from now
            self.begin_anew()
        self.last_number += 1
        self._last_s = self._clock.now_s()
        payload = encode(EventBatch(time.time(), events, self._rank))
        for sink in self._sinks:
            sink.send(self.last_number, payload)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._metrics.event("cleared", 1)
            else:
                kind = "stored" if isinstance(event, BlockStored) else "removed"
                self._metrics.event(kind, len(event.block_hashes))


class EventPublisher:
    """``sinks``: opened here; one that cannot be is left out, with a line. Runs until ``close``."""

    def __init__(
        self,
        event_log: EventLog,
        sinks: Sequence[Sink],
        rank: int,
        metrics: Metrics,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._log = event_log
        self._trouble = RateLimitedLogger(log)
        self._events: list[Event] = []
        self.dumps = Dumps(self._snapshot, self._clock)
        self._sinks = [sink for sink in sinks if self._opens(sink)]
        self._stream = Stream(self._sinks, rank, metrics, self._clock)
        event_log.connect(self._take)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-events", daemon=True)
        self._thread.start()

    def _opens(self, sink: Sink) -> bool:
        try:
            sink.open(self.dumps)
        except ConfigError as error:
            log.error("%s; KV events are not published there", error)
            return False
        return True

    def _take(self, change: Change) -> None:
        self._events.append(AllBlocksCleared(change.medium) if isinstance(change, Cleared) else change)

    def _snapshot(self) -> tuple[int, Snapshot]:
        # It may have more than that batch: what comes after it is told once more, which changes nothing.
        with self._log.lock:
            return self._stream.last_number, self._log.snapshot()

    def publish(self) -> None:
        """Everything that was noted until now. On its thread."""
        with self._log.lock:
            try:
                self._log.fold()
                events = self._events[:]
                self._events.clear()
                self._stream.send(events)
                self._stream.beat()
            except BaseException:
                self._stream.begin_anew()
                raise

    def _run(self) -> None:
        leave_bound_core()
        while not self._closing.is_set():
            try:
                self.publish()
                self._wait()
            except Exception as error:
                self._trouble.warning("publish", "kvbm: KV events could not be published", exc_info=error)
                self._closing.wait(BATCH_S)

    def _wait(self) -> None:
        serving = [sink for sink in self._sinks if sink.serves]
        for sink in serving:
            sink.serve(BATCH_S / len(serving))
        if not serving:
            self._closing.wait(BATCH_S)

    def close(self) -> None:
        """What was noted goes out, and that nothing is here any more. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            with self._log.lock:
                self.publish()
                self._stream.send([AllBlocksCleared()])
        for sink in self._sinks:
            sink.close()
