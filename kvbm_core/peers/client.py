"""The asker's rank: questions to the same rank of other instances, over ZMQ.

A connection (Link) carries one question at a time and belongs to whoever asks. After any trouble it is
closed, and the next question has a new one: what an owner sends late reaches nobody. Nobody but the thread
that asks writes to the memory that is to be filled, and only until its call ends. Bytes come in messages, or
to a landing zone, where an owner may write at any time: what has been copied from there is verified.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import zmq

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.fleet.keys import CurveKeys, is_local
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.peers.address import address_of_rank, host_of
from kvbm_core.peers.landing import Landing, LandingZone
from kvbm_core.peers.wire import (
    IO_THREADS,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    Answer,
    Blocks,
    Done,
    Fetch,
    Find,
    Found,
    Question,
    Refused,
    Terms,
    Welcome,
    Written,
    copied_seal,
    decode_answer,
    encode,
    hello_of,
    seal_of,
    shown,
)
from kvbm_core.storage.base import Memory, ReadsAlone, plain_parts
from kvbm_core.types import BlockKey

CONCURRENCY = 4
"""Questions at once, over all owners."""
CALL_BYTES = 16 << 20
MAX_CALL_BLOCKS = 128
MAX_OWNERS = 64
"""With open connections; those that were not asked for the longest time are closed."""
IDLE_S = 60.0
REFUSED_S = 60.0
"""An owner that has refused us is not asked again for so long."""
SILENT_S = 5.0
"""Nor one that has not answered in time: what is left of an order would wait as long for each of its parts,
and others with it.
"""
MAX_AVOIDED = 1024
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3000
CURVE_BYTES = 256
"""More than encryption adds to a message."""

_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_PAUSES_S = {Outcome.INCOMPATIBLE: REFUSED_S, Outcome.TIMED_OUT: SILENT_S}

log = logging.getLogger("kvbm")


class LinkError(Exception):
    """A question that was not answered. ``outcome``: of all that was asked."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class _Heard(NamedTuple):
    answer: Answer
    payloads: list[memoryview]


class Link:
    """One connection to an owner's rank. One thread at a time. LinkError if it is not made by ``ends_at_s``,
    or the owner refuses us.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        terms: Terms,
        clock: Clock,
        *,
        ends_at_s: float,
        keys: CurveKeys | None = None,
    ) -> None:
        self._clock = clock
        self._block_bytes = terms.block_bytes
        self._calls = itertools.count(secrets.randbits(48))
        self.used_at_s = clock.now_s()
        if keys is None:
            self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        else:
            self._socket = keys.client_socket(context, zmq.DEALER, keys.server_key(host_of(address)))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),  # another process may be there next time: it is asked who it is
            (zmq.MAXMSGSIZE, max(MAX_MESSAGE_BYTES, terms.block_bytes) + CURVE_BYTES),
            (zmq.RCVHWM, 4 * call_blocks(terms.block_bytes) + 16),
            (zmq.SNDHWM, 16),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        self._ends: zmq.Socket[bytes] = self._socket.get_monitor_socket(_ENDS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._ends, zmq.POLLIN)
        try:
            self._socket.connect(address)
            self._say(hello_of(terms))
            welcome = self._hear(ends_at_s).answer
            if not isinstance(welcome, Welcome):
                raise LinkError(Outcome.IO_ERROR, "answers what was not asked")
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(Outcome.IO_ERROR, str(error)) from error
        except BaseException:
            self.close()
            raise
        self._instance = welcome.instance

    @property
    def is_usable(self) -> bool:
        """Whether the owner is still there, as far as is known, and has said nothing that was not asked."""
        return not self._poller.poll(0)

    def find(self, keys: Sequence[BlockKey], ends_at_s: float) -> list[Outcome]:
        """OK or MISS of each key, or what the owner says instead. LinkError."""
        call_id = next(self._calls)
        self._say(Find(call_id, self._instance, list(keys), self._left_ms(ends_at_s)))
        answer = self._hear(ends_at_s).answer
        if isinstance(answer, Done) and answer.call_id == call_id and len(answer.outcomes) == len(keys):
            return [outcome if outcome is not Outcome.OK else Outcome.IO_ERROR for outcome in answer.outcomes]
        if not isinstance(answer, Found) or answer.call_id != call_id or len(answer.is_there) != len(keys):
            raise LinkError(Outcome.IO_ERROR, "answers what was not asked")
        return [Outcome.OK if is_there else Outcome.MISS for is_there in answer.is_there]

    def fetch(
        self,
        keys: Sequence[BlockKey],
        targets: Sequence[Memory],
        outcomes: list[Outcome],
        ends_at_s: float,
        landing: Landing | None = None,
    ) -> None:
        """Fills the first bytes of ``targets``, and ``outcomes`` as they come: what has its block is OK, also
        if a LinkError ends the rest. ``landing``: where the owner may write them to.
        """
        call_id, zone, addresses = next(self._calls), b"", list[int]()
        if landing is not None:
            zone, addresses = landing.zone, landing.addresses
        self._say(Fetch(call_id, self._instance, list(keys), self._left_ms(ends_at_s), zone, addresses))
        seen: set[int] = set()
        while True:
            answer, payloads = self._hear(ends_at_s)
            if isinstance(answer, Blocks | Written) and answer.call_id == call_id:
                for place, (number, seal) in enumerate(zip(answer.numbers, answer.seals, strict=True)):
                    if not 0 <= number < len(keys) or number in seen:
                        raise LinkError(Outcome.IO_ERROR, "sends blocks that were not asked for")
                    if isinstance(answer, Blocks):
                        payload = payloads[place]
                    elif landing is not None:
                        payload = landing.rows[number]
                    else:
                        raise LinkError(Outcome.IO_ERROR, "answers what was not asked")
                    seen.add(number)
                    outcomes[number] = self._take(payload, keys[number], seal, targets[number])
            elif isinstance(answer, Done) and answer.call_id == call_id:
                self._end(answer, seen, outcomes)
                if landing is not None:
                    landing.is_whole = True
                return
            else:
                raise LinkError(Outcome.IO_ERROR, "answers what was not asked")

    def _take(self, payload: memoryview, key: BlockKey, seal: bytes, target: Memory) -> Outcome:
        """What has been copied is what is verified."""
        if len(payload) != self._block_bytes:
            return Outcome.INCOMPATIBLE
        parts = plain_parts(target)
        if len(parts) == 1 and parts[0].nbytes >= len(payload):
            into = np.frombuffer(parts[0], np.uint8)[: len(payload)]
            copied = copied_seal(key, into, np.frombuffer(payload, np.uint8))
            return Outcome.OK if copied == seal else Outcome.CORRUPT
        payload = memoryview(bytes(payload))  # which nobody else writes to
        source, start = np.frombuffer(payload, np.uint8), 0
        for part in parts:
            end = min(start + part.nbytes, len(source))
            np.copyto(np.frombuffer(part, np.uint8)[: end - start], source[start:end])
            start = end
        is_whole = start == len(source) and seal_of(key, payload) == seal
        return Outcome.OK if is_whole else Outcome.CORRUPT

    @staticmethod
    def _end(done: Done, seen: set[int], outcomes: list[Outcome]) -> None:
        if len(done.outcomes) != len(outcomes):
            raise LinkError(Outcome.IO_ERROR, "answers what was not asked")
        for number, outcome in enumerate(done.outcomes):
            if number not in seen:
                outcomes[number] = Outcome.CORRUPT if outcome is Outcome.OK else outcome

    def _left_ms(self, ends_at_s: float) -> int:
        return max(1, int((ends_at_s - self._clock.now_s()) * 1000))

    def _say(self, question: Question) -> None:
        try:
            self._socket.send(encode(question), zmq.NOBLOCK)
        except zmq.Again:
            raise LinkError(Outcome.IO_ERROR, "takes no more questions") from None

    def _hear(self, ends_at_s: float) -> _Heard:
        """The next message. LinkError if none comes in time, or it is none of ours."""
        self.used_at_s = self._clock.now_s()
        while True:
            left_s = ends_at_s - self._clock.now_s()
            ready = dict(self._poller.poll(max(0, int(left_s * 1000)) + 1)) if left_s > 0 else {}
            if self._socket in ready:  # first: what was said before an end counts
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                return self._read([frame.buffer for frame in frames])
            if self._ends in ready:
                self._ends.recv_multipart(zmq.NOBLOCK)
                raise LinkError(Outcome.IO_ERROR, "the connection has ended, or was not made")
            if left_s <= 0:
                raise LinkError(Outcome.TIMED_OUT, "no answer")

    def _read(self, frames: list[memoryview]) -> _Heard:
        answer = decode_answer(frames[0])
        if isinstance(answer, Refused):
            raise LinkError(Outcome.INCOMPATIBLE, shown(answer.reason))
        payloads = frames[1:]
        is_even = not isinstance(answer, Blocks | Written) or len(answer.numbers) == len(answer.seals)
        num_payloads = len(answer.numbers) if isinstance(answer, Blocks) else 0
        if answer is None or not is_even or len(payloads) != num_payloads:
            raise LinkError(Outcome.IO_ERROR, "says what is none of ours")
        return _Heard(answer, payloads)

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):  # its context is ending
                self._socket.disable_monitor()
            self._ends.close(linger=0)
            self._socket.close(linger=0)


def call_blocks(block_bytes: int) -> int:
    """Blocks in one question for them."""
    return max(1, min(MAX_CALL_BLOCKS, CALL_BYTES // block_bytes))


class PeerStore(ReadsAlone):
    """Owners by their addresses, each as a BlockStore to read from. Any thread. ``keys`` None: owners on this
    machine alone are asked, in the clear. ``zone``: where owners may write to; closed with the store.
    """

    concurrency = CONCURRENCY

    def __init__(
        self,
        terms: Terms,
        keys: CurveKeys | None = None,
        clock: Clock | None = None,
        *,
        zone: LandingZone | None = None,
    ) -> None:
        self.batch_blocks = call_blocks(terms.block_bytes)
        self._zone = zone
        self._terms = terms
        self._keys = keys
        self._clock = clock or SystemClock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[Link]] = OrderedDict()
        self._avoided: OrderedDict[str, tuple[Outcome, float]] = OrderedDict()  # outcome of asking, until
        self._log = RateLimitedLogger(log)
        self._is_closed = False

    def at(self, source: str) -> PeerBlocks:
        """The blocks of the owner whose rank 0 has this address."""
        return PeerBlocks(self, source)

    def ask(
        self, source: str, keys: Sequence[BlockKey], targets: Sequence[Memory] | None, deadline_s: float
    ) -> list[Outcome]:
        """One question. ``targets`` None: whether they are there."""
        if len(keys) > MAX_KEYS:
            raise ValueError(f"{len(keys)} keys in one question")
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes = [Outcome.TIMED_OUT] * len(keys)
        if not keys or deadline_s <= 0:
            return outcomes
        avoided = self._why_avoided(source)
        if avoided is not None:
            return [avoided] * len(keys)
        link: Link | None = None
        try:
            link = self._link_to(source, ends_at_s)
            if targets is None:
                outcomes = link.find(keys, ends_at_s)
            else:
                with self._landing(len(keys)) as landing:
                    link.fetch(keys, targets, outcomes, ends_at_s, landing)
        except (LinkError, zmq.ZMQError) as error:  # the latter when the store is closed
            if link is not None:
                link.close()
            trouble = error if isinstance(error, LinkError) else LinkError(Outcome.REJECTED, str(error))
            self._note(source, trouble)
            return [o if o is not Outcome.TIMED_OUT else trouble.outcome for o in outcomes]
        self._give_back(source, link)
        return outcomes

    def _landing(self, count: int) -> AbstractContextManager[Landing | None]:
        return contextlib.nullcontext() if self._zone is None else self._zone.landing(count)

    def _link_to(self, source: str, ends_at_s: float) -> Link:
        while True:
            with self._lock:
                if self._is_closed:
                    raise LinkError(Outcome.REJECTED, "closed")
                idle = self._idle.get(source)
                link = idle.pop() if idle else None
            if link is None:
                break
            if link.is_usable and self._clock.now_s() - link.used_at_s < IDLE_S:
                return link
            link.close()
        address = address_of_rank(source, self._terms.rank)
        if address is None:
            raise LinkError(Outcome.REJECTED, "is no address such as tcp://HOST:PORT")
        if self._keys is None and not is_local(address):
            raise LinkError(Outcome.REJECTED, "is on another machine, which needs CURVE keys")
        try:
            return Link(
                self._context, address, self._terms, self._clock, ends_at_s=ends_at_s, keys=self._keys
            )
        except (ConfigError, zmq.ZMQError) as error:
            raise LinkError(Outcome.REJECTED, str(error)) from error

    def _give_back(self, source: str, link: Link) -> None:
        gone: list[Link] = []
        with self._lock:
            if self._is_closed:
                gone.append(link)
            else:
                self._idle.setdefault(source, []).append(link)
                self._idle.move_to_end(source)
                while len(self._idle) > MAX_OWNERS:
                    gone += self._idle.popitem(last=False)[1]
        for one in gone:
            one.close()

    def _why_avoided(self, source: str) -> Outcome | None:
        with self._lock:
            outcome, until_s = self._avoided.get(source, (Outcome.OK, 0.0))
        return outcome if until_s > self._clock.now_s() else None

    def _note(self, source: str, error: LinkError) -> None:
        pause_s = _PAUSES_S.get(error.outcome)
        if pause_s is not None:
            with self._lock:
                self._avoided[source] = (error.outcome, self._clock.now_s() + pause_s)
                self._avoided.move_to_end(source)
                while len(self._avoided) > MAX_AVOIDED:
                    self._avoided.popitem(last=False)
        if error.outcome is not Outcome.TIMED_OUT:  # who asks says that
            self._log.warning((source, str(error)), "kvbm: peer %s: %s", shown(source), error)

    def close(self) -> None:
        """Later questions are REJECTED; those under way end by their deadlines. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, OrderedDict()
        for link in itertools.chain.from_iterable(idle.values()):
            link.close()
        self._context.term()  # waits for those that are in use, whose threads hear of it at once
        if self._zone is not None:
            self._zone.close()

    # ---------------------------------------------------------------- BlockStore: of nobody

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore. Only a certain owner can be asked: see ``at``."""
        return [Outcome.REJECTED] * len(keys)

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        return [Outcome.REJECTED] * len(keys)


class PeerBlocks(ReadsAlone):
    """BlockStore of what one owner has. Nothing can be put there, nor removed."""

    def __init__(self, store: PeerStore, source: str) -> None:
        self._store = store
        self._source = source

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._store.ask(self._source, keys, None, deadline_s)

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. A target may be larger than a block: the rest of it is left as it is."""
        return self._store.ask(self._source, keys, targets, deadline_s)

    def close(self) -> None:
        """The store of all owners is closed instead."""
