"""Batches over ZMQ, as engines publish theirs: PUB, and ROUTER for replays; dumps over the latter too.

A reader that is too slow loses batches and sees it by their numbers. What is kept for replays is bounded.
Who asks for a replay sends the number of the first batch that it lacks, 8 bytes; the answer is those batches,
as published, and one without a payload and with number -1. Who asks for a dump sends a DumpRequest, and gets
one frame, a DumpPage.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from typing import NamedTuple

import zmq

from kvbm_core.errors import ConfigError
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.wire import NUMBER
from kvbm_core.fleet.gate import Gate
from kvbm_core.fleet.keys import CurveKeys, is_local, require_keys
from kvbm_core.observe.log import RateLimitedLogger

log = logging.getLogger("kvbm")

MAX_KEPT_BYTES = 16 << 20
"""Of batches, for replays."""
MAX_WAITING_BATCHES = 2048
"""For one reader that does not read; then it loses some."""
CLOSE_LINGER_S = 0.5
"""So long the last batches may take to get out."""
MAX_REQUEST_BYTES = 1024
"""Of what readers send; CURVE's handshake is some of it."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_REPLAYS = 8
"""In one turn of the publisher, each of all that is kept."""


class Place(NamedTuple):
    """Where to publish. ``replay_endpoint``: None: nobody can ask for anything."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    setting: str = "KVBM_EVENTS_ENDPOINT"
    """What the user calls the first."""


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The port, or the file's name, of a data-parallel rank."""
    if not rank or endpoint.endswith(":*"):
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{head}{colon}{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def _is_served(path: str) -> bool:
    """Whether somebody listens at this socket. ZMQ would take it away from him without a word."""
    name = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
        except OSError:
            return False
        return True


class ZmqSink:
    """See the module. ``keys``: of who may read where other machines can; None: it is no such place."""

    serves = True

    def __init__(
        self, place: Place, keys: CurveKeys | None = None, *, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._place = place
        self._keys = keys
        self._gate: Gate | None = None
        self._max_kept_bytes = max_kept_bytes
        self._topic = place.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._log = RateLimitedLogger(log)
        self._dumps: Dumps | None = None
        self._context = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self.endpoint = self.replay_endpoint = ""
        """Where it is bound, with the number of its port."""

    def open(self, dumps: Dumps) -> None:
        """See Sink. ConfigError if an address cannot be bound, or is open to other machines without keys."""
        self._dumps = dumps
        try:
            self._pub, self.endpoint = self._bind(zmq.PUB, self._place.setting, self._place.endpoint)
            if self._place.replay_endpoint is not None:
                self._replay, self.replay_endpoint = self._bind(
                    zmq.ROUTER, "KVBM_EVENTS_REPLAY_ENDPOINT", self._place.replay_endpoint
                )
        except BaseException:
            self.close()
            raise
        log.info("kvbm: KV events are published at %s", self.endpoint)
        if self.replay_endpoint:
            log.info("kvbm: KV events are sent again at %s", self.replay_endpoint)

    def _bind(self, kind: int, setting: str, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        require_keys(setting, endpoint, self._keys)
        if endpoint.startswith("ipc://") and _is_served(endpoint.removeprefix("ipc://")):
            raise ConfigError(setting, endpoint, "is another process's; choose another path")
        if self._keys is None or is_local(endpoint):
            bound: zmq.Socket[bytes] = self._context.socket(kind)
        else:
            self._gate = self._gate or Gate(self._context, self._keys)
            bound = self._gate.server_socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.SNDHWM, MAX_WAITING_BATCHES)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        bound.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            bound.close()
            remedy = f"cannot be bound ({error.strerror}); choose another address or port"
            raise ConfigError(setting, endpoint, remedy) from error
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, number: int, payload: bytes) -> None:
        """See Sink."""
        if self._pub is None:
            return
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > self._max_kept_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, NUMBER.pack(number), payload), zmq.NOBLOCK)

    def serve(self, timeout_s: float) -> None:
        """See Sink: replays and dumps."""
        if self._replay is None:
            time.sleep(timeout_s)
            return
        end_s = time.monotonic() + timeout_s
        for _ in range(MAX_REPLAYS):
            left_s = end_s - time.monotonic()
            if not self._replay.poll(max(0, int(left_s * 1000))):
                return
            frames = self._replay.recv_multipart()
            if len(frames) == 3:
                self._answer(frames[0], frames[2])
            else:
                self._log.warning("frames", "kvbm: a request for KV events has %d frames, not 3", len(frames))
        time.sleep(max(0.0, end_s - time.monotonic()))

    def _answer(self, reader: bytes, request: bytes) -> None:
        if self._replay is None or self._dumps is None:
            return
        if len(request) == NUMBER.size:
            (first,) = NUMBER.unpack(request)
            for number, payload in self._kept:
                if number >= first:
                    self._reply(reader, self._topic, NUMBER.pack(number), payload)
            self._reply(reader, b"", END_OF_REPLAY, b"")
            return
        page = self._dumps.answer(request)
        if page is None:
            self._log.warning("request", "kvbm: a request for KV events is none: %d bytes", len(request))
        else:
            self._reply(reader, page)

    def _reply(self, reader: bytes, *frames: bytes) -> None:
        if self._replay is None:
            return
        try:
            self._replay.send_multipart((reader, b"", *frames), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._log.warning("reply", "kvbm: KV events could not be sent again: %s", error.strerror)

    def close(self) -> None:
        """See Sink."""
        if self._pub is not None:
            self._pub.close(linger=int(CLOSE_LINGER_S * 1000))
        if self._replay is not None:
            self._replay.close(linger=0)
        self._pub = self._replay = None
        if self._gate is not None:
            self._gate.close()
        self._context.term()
