"""The control channel: one thread and one socket on each side, plain queues towards the engine's threads.

Neither side ever makes the engine wait: sending is an append and a wake-up, receiving is taking from a deque.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

import zmq

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.endpoint import Endpoint, EndpointLock
from kvbm_core.runtime.messages import MAX_MESSAGE_BYTES, Message, decode, encode

log = logging.getLogger("kvbm")

MAX_QUEUED_MESSAGES = 100_000
Identity = bytes


class _Loop:
    """A socket served by its own daemon thread; ``post`` may be called from any thread."""

    def __init__(self, kind: int, name: str, on_frames: Callable[[list[bytes]], None], tick_s: float) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._on_frames = on_frames
        self._outbox: deque[list[bytes]] = deque(maxlen=MAX_QUEUED_MESSAGES)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tick_ms = int(tick_s * 1000)
        self.on_tick: Callable[[], None] = lambda: None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, frames: list[bytes]) -> None:
        self._outbox.append(frames)
        self.wake()

    def wake(self) -> None:
        if not self._closing:
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._tick_ms))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            try:
                self._receive()
                self._send()
                self.on_tick()
            except Exception:
                log.exception("kvbm: control channel: a message could not be handled")
        self._send()

    def _receive(self) -> None:
        while True:
            try:
                frames: list[bytes] = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)

    def _send(self) -> None:
        while self._outbox:
            frames = self._outbox.popleft()
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.warning("kvbm: control channel: a message could not be sent (%s)", error)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True  # before the wake-up: the thread must not go back to sleep
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self.socket.close(linger=200)
        self._context.term()
        os.close(self._wake_fd)


class LeaderChannel:
    """The leader's side: binds, hands incoming messages to ``inbox``; ``on_message`` answers on the channel's thread.

    ``on_message(identity, message)`` returns messages to send, by identity of the worker. Raises ConfigError if the
    address is taken.
    """

    def __init__(self, endpoint: Endpoint, on_message: Callable[[Identity, Message], list[tuple[Identity, Message]]]) -> None:
        self.undecodable_total = 0
        self._on_message = on_message
        self._lock = EndpointLock(endpoint)
        self._loop = _Loop(zmq.ROUTER, "kvbm-leader-channel", self._take, tick_s=1.0)
        try:
            self._loop.socket.bind(endpoint.address)
        except zmq.ZMQError as error:
            self._loop.close()
            self._lock.close()
            raise ConfigError(
                "DYN_KVBM_LEADER_ZMQ_ACK_PORT", endpoint.address, f"cannot be bound ({error}); set a free port"
            ) from None
        self._loop.start()

    def _take(self, frames: list[bytes]) -> None:
        message = decode(frames[1]) if len(frames) == 2 else None
        if message is None:
            self.undecodable_total += 1
            return
        for identity, answer in self._on_message(frames[0], message):
            self._loop.socket.send_multipart([identity, encode(answer)])

    def close(self) -> None:
        """Ends the thread, closes and removes the socket. May be called twice."""
        self._loop.close()
        self._lock.close()


class WorkerChannel:
    """A worker's side: connects (the leader may come later); ``on_message`` is called on the channel's thread."""

    def __init__(self, endpoint: Endpoint, on_message: Callable[[Message], None], *, retry_s: float = 2.0) -> None:
        self._clock: Clock = SystemClock()
        self._handler = on_message
        self._repeat: Callable[[], Message | None] = lambda: None
        self._retry_s = retry_s
        self._loop = _Loop(zmq.DEALER, "kvbm-worker-channel", self._take, tick_s=retry_s)
        self._loop.socket.connect(endpoint.address)
        self._loop.on_tick = self._tick
        self._last_repeat_s = float("-inf")
        self._loop.start()

    def send(self, message: Message) -> None:
        """Queues ``message``; any thread."""
        self._loop.post([encode(message)])

    def repeat(self, source: Callable[[], Message | None]) -> None:
        """Asks ``source`` for a message to send now and every ``retry_s`` until it answers None."""
        self._repeat = source
        self._loop.wake()

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._last_repeat_s >= self._retry_s:
            message = self._repeat()
            if message is not None:
                self._last_repeat_s = now_s
                self._loop.socket.send_multipart([encode(message)], zmq.NOBLOCK)

    def _take(self, frames: list[bytes]) -> None:
        message = decode(frames[0]) if len(frames) == 1 else None
        if message is not None:
            self._handler(message)

    def close(self) -> None:
        """Ends the thread and closes the socket. May be called twice."""
        self._loop.close()

