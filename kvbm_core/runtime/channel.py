"""The control channel: one thread and one socket on each side, plain queues towards the engine's threads.

Neither side ever makes the engine wait: sending is an append and a wake-up, receiving is taking from a deque.

Both sides derive CurveZMQ's keys from the endpoint's secret. The leader's public key is one of them and is
never sent: who has not the secret cannot so much as open a connection, and what was recorded of one opens no
second. Where ranks are on several machines, the keys are those of files (``fleet/keys``).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

import zmq
from zmq.utils import z85

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger, TroubleLog
from kvbm_core.runtime.endpoint import Endpoint, EndpointLock
from kvbm_core.runtime.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from kvbm_core.storage.numa import leave_bound_core

if TYPE_CHECKING:
    from kvbm_core.fleet.gate import Gate
    from kvbm_core.fleet.keys import CurveKeys
    from kvbm_core.fleet.meeting import LeaderFinder

log = logging.getLogger("kvbm")

MAX_QUEUED_MESSAGES = 100_000
MAX_RECEIVED_AT_ONCE = 1000
CLOSE_TIMEOUT_S = 5.0
MAX_ADDRESS_CHARS = 200
FIRST_RECONNECT_MS, LAST_RECONNECT_MS = 5, 320
"""A worker whose leader does not listen tries again after so long, then twice as long, and so on."""
LAST_RECONNECT_APART_MS = 2000
HANDSHAKE_TIMEOUT_S = 5.0
"""A connection that has not shown by then that it has the secret is closed."""
TELL_AFTER_S = 30.0
"""A rank that has not reached its leader on another machine for so long says so."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15_000
"""Between machines: a connection whose other end has vanished without a word is closed, and made again."""
Identity = bytes

# All that ends before it has shown the secret; some of it is ended by the other side.
_REFUSED_CONNECTIONS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def key_pair(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """(public, private) CurveZMQ keys of one side, "leader" or "worker"; ConfigError if libzmq has none."""
    if not zmq.has("curve"):
        remedy = "is built without CURVE, by which leader and workers know each other; install its wheel"
        raise ConfigError("pyzmq", zmq.__version__, remedy)
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvbm " + side).digest())
    return zmq.curve_public(private), private


class _Loop:
    """A socket served by its own daemon thread; ``post`` may be called from any thread."""

    def __init__(self, kind: int, name: str, on_frames: Callable[[list[bytes]], None], tick_s: float) -> None:
        self.on_tick: Callable[[], float | None] = lambda: None
        """Called after each wake-up; answers in how many seconds it wants to be called again."""
        self.on_refused: Callable[[], None] = lambda: None
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000))
        self._refusals: zmq.Socket[bytes] | None = None
        self._gate: Gate | None = None
        self._on_frames = on_frames
        self._outbox: deque[list[bytes]] = deque(maxlen=MAX_QUEUED_MESSAGES)
        self._is_blocked = False
        self._tick_ms = int(tick_s * 1000)
        self._log = RateLimitedLogger(log)
        # Guards the wake-up's file descriptor, whose number is somebody else's after close.
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def bind(self, endpoint: Endpoint) -> str:
        """Takes connections of those alone who have the secret, or an allowed key; ``on_refused`` is told of
        others. Returns the address, with its port. ConfigError if it cannot be known.
        """
        address = endpoint.address
        if endpoint.apart is not None:
            from kvbm_core.fleet.gate import Gate

            address = endpoint.apart.address_to_bind()
            self._gate = Gate(self._context, endpoint.apart.keys, self._tell_refused)
            self._gate.guard(self.socket)
            self._expect_silence()
        else:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, key_pair(endpoint.secret, b"leader")[1])
            self._refusals = self.socket.get_monitor_socket(_REFUSED_CONNECTIONS)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        self.socket.bind(address)
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoint: Endpoint) -> None:
        """Speaks to nobody who has not the secret, or the leader's key."""
        if endpoint.apart is not None:
            self.reach(endpoint.apart.keys, endpoint.address, endpoint.apart.server_key)
            return
        public, private = key_pair(endpoint.secret, b"worker")
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, key_pair(endpoint.secret, b"leader")[0])
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint.address))
        self.socket.connect(endpoint.address)

    def reach(self, keys: CurveKeys, address: str, server_key: bytes) -> None:
        """Connects to the holder of ``server_key``, on the loop's own thread or before it runs."""
        keys.trust(self.socket, server_key)
        self._expect_silence()
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        self.socket.connect(address)

    def _tell_refused(self) -> None:
        self.on_refused()

    def _expect_silence(self) -> None:
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)

    def post(self, frames: list[bytes]) -> None:
        self._outbox.append(frames)
        self.wake()

    def wake(self) -> None:
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wake_fd, 1)

    def try_send(self, frames: list[bytes]) -> bool:
        """For the loop's own thread. False: nobody takes it now; ``on_tick`` is called again when somebody
        does.
        """
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._is_blocked = True
            return False
        return True

    def _run(self) -> None:
        leave_bound_core()
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._refusals is not None:
            poller.register(self._refusals, zmq.POLLIN)
        wait_ms = self._tick_ms
        while not self._closing:
            poller.register(self.socket, zmq.POLLIN | (zmq.POLLOUT if self._is_blocked else 0))
            self._is_blocked = False
            ready = dict(poller.poll(wait_ms))
            wait_ms = self._tick_ms
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for step in (self._note_refused, self._receive, self._send, self.on_tick):
                try:
                    again_s = step()
                    if again_s is not None:
                        wait_ms = min(wait_ms, max(1, int(again_s * 1000)))
                except Exception as error:  # a bug in one message must not end the thread that carries all
                    self._log.warning(
                        type(error).__name__,
                        "kvbm: control channel: a message could not be handled",
                        exc_info=error,
                    )
        self._send()

    def _receive(self) -> None:
        # Not until there is none left: a flood must not keep us from sending, or from ending.
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                frames: list[bytes] = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)

    def _note_refused(self) -> None:
        if self._refusals is None:
            return
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                self._refusals.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.on_refused()

    def _send(self) -> None:
        while self._outbox:
            frames = self._outbox.popleft()
            if not self.try_send(frames):
                self._outbox.appendleft(frames)
                return

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True  # before the wake-up: the thread must not go back to sleep
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("kvbm: %s did not end; its socket stays open", self._thread.name)
            return
        if self._refusals is not None:
            self.socket.disable_monitor()
            self._refusals.close(linger=0)
        if self._gate is not None:
            self._gate.close()
        self.socket.close(linger=200)
        self._context.term()
        os.close(self._wake_fd)


class LeaderChannel:
    """The leader's side: binds; ``on_message`` is called, and its answers are sent, on the channel's thread.

    ``on_message(identity, message)`` returns messages to send, by identity of the worker; ``on_tick`` is
    called at least once a second, and answers the same. Raises ConfigError if the address is taken.
    ``on_bad_frames`` is told of each message that is none of ours, and of each connection of somebody who has
    not the endpoint's secret. All on the channel's thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_message: Callable[[Identity, Message], list[tuple[Identity, Message]]],
        on_bad_frames: Callable[[], None] = lambda: None,
        on_tick: Callable[[], list[tuple[Identity, Message]]] = list,
    ) -> None:
        self.undecodable_total = 0
        self.refused_connections_total = 0
        self._on_message = on_message
        self._on_bad_frames = on_bad_frames
        self._on_tick = on_tick
        self._poll: Callable[[], float | None] = lambda: None
        self._endpoint = endpoint
        try:
            self._lock = EndpointLock(endpoint)
        except ConfigError:
            endpoint.release()
            raise
        self._loop = _Loop(zmq.ROUTER, "kvbm-leader-channel", self._take, tick_s=1.0)
        self._loop.on_refused = self._refuse
        self._loop.on_tick = self._tick
        # A worker that has lost its connection is known again when it comes back.
        self._loop.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.address = self._loop.bind(endpoint)
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            setting, remedy = ("DYN_KVBM_LEADER_ZMQ_HOST", "set it to an address of the scheduler's machine")
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                setting, remedy = ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "give each engine a port of its own")
            if endpoint.path is not None:
                setting, remedy = ("TMPDIR", "set a directory in which sockets can be made")
            raise ConfigError(setting, endpoint.address, f"cannot be bound ({error}); {remedy}") from None
        self._loop.start()

    def _take(self, frames: list[bytes]) -> None:
        message = decode(frames[1]) if len(frames) == 2 else None
        if message is None:
            self.undecodable_total += 1
            self._on_bad_frames()
            return
        self._answer(self._on_message(frames[0], message))

    def _answer(self, answers: list[tuple[Identity, Message]]) -> None:
        for identity, answer in answers:
            self._loop.socket.send_multipart([identity, encode(answer)])

    def _refuse(self) -> None:
        self.refused_connections_total += 1
        self._on_bad_frames()

    def _tick(self) -> float | None:
        self._answer(self._on_tick())
        return self._poll()

    def poll_with(self, poll: Callable[[], float | None]) -> None:
        """Calls ``poll`` on the channel's thread after each message and each second; sooner if it answers in
        how many seconds.
        """
        self._poll = poll
        self.wake()

    def wake(self) -> None:
        """Has ``poll`` called now; any thread."""
        self._loop.wake()

    def send(self, identity: Identity, message: Message) -> None:
        """Queues ``message`` for one worker; any thread."""
        self._loop.post([identity, encode(message)])

    def close(self) -> None:
        """Ends the thread, closes and removes the socket. May be called twice."""
        self._loop.close()
        self._lock.close()
        self._endpoint.release()


def find_leader(endpoint: Endpoint, rank: int, channel: WorkerChannel) -> LeaderFinder | None:
    """Lets ``channel`` reach the leader when it is found; None where it need not be looked for. The caller
    closes it.
    """
    if endpoint.apart is None or endpoint.apart.etcd is None:
        return None
    from kvbm_core.fleet.meeting import LeaderFinder

    try:
        return LeaderFinder(endpoint.apart, endpoint.apart.etcd, rank, channel.reach)
    except ConfigError:
        channel.close()
        raise


class WorkerChannel:
    """A worker's side: connects (the leader may come later); ``on_message`` is called on the channel's
    thread.

    What is sent waits here until there is a leader to take it. Where the leader has to be found first,
    nothing is connected before ``reach``.
    """

    def __init__(
        self, endpoint: Endpoint, on_message: Callable[[Message], None], *, retry_s: float = 2.0
    ) -> None:
        self.undecodable_total = 0
        self.on_other_leader: Callable[[], None] = lambda: None
        """Called on the channel's thread before another leader than the one before is connected to."""
        self._clock: Clock = SystemClock()
        self._handler = on_message
        self._repeat: Callable[[], Message | None] = lambda: None
        self._retry_s = retry_s
        self._endpoint = endpoint
        self._loop = _Loop(zmq.DEALER, "kvbm-worker-channel", self._take, tick_s=retry_s)
        # The leader knows this worker by this name, over reconnections too.
        self._loop.socket.setsockopt(zmq.ROUTING_ID, uuid4().hex.encode())
        # Else messages to nobody would fill the socket's own queue, and the oldest hello would come first.
        self._loop.socket.setsockopt(zmq.IMMEDIATE, 1)
        self._loop.socket.setsockopt(zmq.RECONNECT_IVL, FIRST_RECONNECT_MS)
        self._loop.socket.setsockopt(zmq.RECONNECT_IVL_MAX, LAST_RECONNECT_MS)
        self._log = RateLimitedLogger(log)
        self._trouble = TroubleLog(log)
        self._waits_since_s = math.inf
        self._leader: tuple[str, bytes] | None = None
        self._looks_for_leader = endpoint.apart is not None and endpoint.apart.etcd is not None
        self._reached = ""
        if endpoint.apart is not None:  # who is refused asks again, over a network
            self._loop.socket.setsockopt(zmq.RECONNECT_IVL_MAX, LAST_RECONNECT_APART_MS)
        if not self._looks_for_leader:
            try:
                self._loop.connect(endpoint)
            except ConfigError:  # nobody knows the leader's key
                self.close()
                raise
        self._loop.on_tick = self._tick
        self._last_repeat_s = float("-inf")
        self._loop.start()

    def send(self, message: Message) -> None:
        """Queues ``message``; any thread."""
        self._loop.post([encode(message)])

    def reach(self, address: str, server_key: bytes) -> None:
        """The leader is there now; ``server_key``: its public key. Any thread."""
        self._leader = (address, server_key)
        self._loop.wake()

    def repeat(self, source: Callable[[], Message | None]) -> None:
        """Asks ``source`` for a message to send now and every ``retry_s`` until it answers None."""
        self._repeat = source
        self._loop.wake()

    def _tick(self) -> None:
        leader, self._leader = self._leader, None
        if leader is not None and self._endpoint.apart is not None:
            self._connect_anew(self._endpoint.apart.keys, *leader)
        now_s = self._clock.now_s()
        if now_s - self._last_repeat_s < self._retry_s:
            return
        message = self._repeat()
        if message is None:
            self._waits_since_s = math.inf
        elif self._loop.try_send([encode(message)]):
            self._last_repeat_s, self._waits_since_s = now_s, math.inf
            self._trouble.worked("leader", "kvbm: the leader is reached now")
        else:
            self._waits_since_s = min(now_s, self._waits_since_s)
            if self._endpoint.apart is not None and now_s - self._waits_since_s >= TELL_AFTER_S:
                self._tell_that_it_waits()

    def _tell_that_it_waits(self) -> None:
        """Its leader sees nothing of this rank."""
        line = "kvbm: this rank has not reached its leader for %g s: %s; it serves without hits until it has"
        reason = "etcd does not say where it is"
        if address := self._reached or ("" if self._looks_for_leader else self._endpoint.address):
            reason = (
                f"nobody with its key answers at {address[:MAX_ADDRESS_CHARS]}, or ours is not on its list"
            )
        self._trouble.failed("leader", reason, line, TELL_AFTER_S, reason)

    def _connect_anew(self, keys: CurveKeys, address: str, server_key: bytes) -> None:
        if self._reached:
            self._loop.socket.disconnect(self._reached)
            self.on_other_leader()
        self._reached, self._waits_since_s = "", math.inf
        try:
            self._loop.reach(keys, address, server_key)
            self._reached = address
        except zmq.ZMQError as error:
            line = "kvbm: the leader says that it is at %r: %s"
            self._log.warning("address", line, address[:MAX_ADDRESS_CHARS], zmq.strerror(error.errno or 0))

    def _take(self, frames: list[bytes]) -> None:
        message = decode(frames[0]) if len(frames) == 1 else None
        if message is None:
            self.undecodable_total += 1
            return
        self._handler(message)

    def close(self) -> None:
        """Ends the thread and closes the socket. May be called twice."""
        self._loop.close()
        self._endpoint.release()
