"""The consolidator: hears the engine's device events over ZMQ and ours from the log, publishes one stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import zmq

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.log import Change, EventLog, Snapshot
from kvbm_core.events.merge import EngineBatch, Merge
from kvbm_core.events.publisher import BATCH_S, CLOSE_TIMEOUT_S, Stream
from kvbm_core.events.wire import NUMBER, AllBlocksCleared, Event
from kvbm_core.events.zmq_sink import Place, ZmqSink
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.numa import leave_bound_core

log = logging.getLogger("kvbm")

MAX_RECEIVED_AT_ONCE = 1000
MAX_MESSAGE_BYTES = 64 << 20
MAX_WAITING_BATCHES = 100_000

_ENGINE_BATCH = msgspec.msgpack.Decoder(EngineBatch)


@dataclass(frozen=True)
class Ends:
    """Where the engine publishes, and where we do, for data-parallel rank ``rank``."""

    engine_endpoint: str
    place: Place
    rank: int = 0


class Consolidator:
    """Runs until ``close``, on a thread of its own. ConfigError if it cannot publish where it should."""

    def __init__(
        self, event_log: EventLog, merge: Merge, ends: Ends, metrics: Metrics, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._log_of_events = event_log
        self._merge = merge
        self._changes: list[Change] = []
        self._out: list[Event] = []
        self._last_number: int | None = None
        self._log = RateLimitedLogger(log)
        self.sink = ZmqSink(ends.place)
        self.dumps = Dumps(self._snapshot, clock)
        self.sink.open(self.dumps)
        self._stream = Stream([self.sink], ends.rank, metrics, clock)
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RCVHWM, MAX_WAITING_BATCHES)
        self._sub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._sub.subscribe("")
        self._sub.connect(ends.engine_endpoint)
        event_log.connect(self._changes.append)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-consolidator", daemon=True)
        self._thread.start()

    def _snapshot(self) -> tuple[int, Snapshot]:
        return self._stream.last_number, Snapshot(self._merge.residents)

    def _run(self) -> None:
        leave_bound_core()
        while not self._closing.is_set():
            try:
                if self._sub.poll(int(BATCH_S * 1000)):
                    self._receive()
                self._publish()
            except Exception as error:
                line = "kvbm: KV events could not be consolidated"
                self._log.warning("broken", line, exc_info=error)
                self._stream.begin_anew()
                self._closing.wait(BATCH_S)

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER.size:
            self._log.warning("frames", "kvbm: the engine published what is no KV event")
            return
        (number,) = NUMBER.unpack(frames[1])
        last, self._last_number = self._last_number, number
        if last is not None and number != last + 1:
            line = "kvbm: KV events of the engine are missing: what is on its device is told anew as it comes"
            self._log.warning("gap", line)
            self._add(self._merge.engine_lost())
        try:
            batch = _ENGINE_BATCH.decode(frames[2])
        except msgspec.DecodeError as error:
            self._log.warning("decode", "kvbm: KV events of the engine are not understood: %s", error)
            self._add(self._merge.engine_lost())
            return
        for event in batch.events:
            self._add(self._merge.of_engine(event))

    def _add(self, events: Iterable[Event]) -> None:
        self._out.extend(events)

    def _publish(self) -> None:
        with self._log_of_events.lock:
            self._log_of_events.fold()
            changes = self._changes[:]
            self._changes.clear()
        for change in changes:
            self._add(self._merge.of_us(change))
        out, self._out = self._out, []
        self._stream.send(out)
        self._stream.beat()

    def close(self) -> None:
        """Says that nothing is here any more. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._stream.send([AllBlocksCleared()])
            self._sub.close(linger=0)
            self._context.term()
            self.sink.close()
