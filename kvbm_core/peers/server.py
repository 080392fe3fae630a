"""The owner's rank: answers the same rank of other instances, over ZMQ, in threads of its own.

A question takes this way: the leader says where its blocks lie and holds them (Borrow, Lent); they are
copied; the leader lets go of them and says whether they were held all the time (GiveBack, Returned); the
copies are sent, or written to the asker's landing zone. Nothing here waits for an asker, and no block is held
while one is slow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

import zmq

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.fleet.gate import Gate
from kvbm_core.fleet.keys import CurveKeys, require_keys
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.peers.address import parse_address
from kvbm_core.peers.copies import Bytes, Copies
from kvbm_core.peers.lending import LONGEST_S, Loan
from kvbm_core.peers.wire import (
    IO_THREADS,
    MAX_MESSAGE_BYTES,
    Answer,
    Blocks,
    Done,
    Fetch,
    Find,
    Found,
    Hello,
    Refused,
    Terms,
    Welcome,
    Written,
    block_keys,
    copied_seal,
    decode_question,
    encode,
    has_places,
    refusal_of,
    seal_of,
    shown,
)
from kvbm_core.peers.writer import Write, ZoneWriter
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.transfer.plan import NO_SLOT
from kvbm_core.types import BlockKey

SETTING = "KVBM_PEER_BIND"
MAX_ASKERS = 1024
"""Connections that said hello; of more, those that were silent the longest have to say it again."""
MAX_QUESTIONS = 512
MAX_QUESTIONS_EACH = 32
"""Under way at once, of all askers and of one."""
MAX_AT_ONCE = 256
SEND_MESSAGES = 4096
TICK_S = 0.2
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 6000
CLOSE_TIMEOUT_S = 3.0
MESSAGE_BYTES = 1 << 20
"""Blocks in one message, about."""

log = logging.getLogger("kvbm")


class OwnBlocks(Protocol):
    """Where this rank has its blocks. Called on the server's threads."""

    def slot(self, slot: int) -> Bytes:
        """The bytes of a host slot, the block's first. ValueError if there is none."""

    def read(
        self, tier: str, blocks: Sequence[tuple[BlockKey, int]], copies: Sequence[Bytes], *, deadline_s: float
    ) -> list[Outcome]:
        """Blocks of a lower tier with slots, by (key, place). May wait for the disk."""


class LeaderLine(Protocol):
    """To this instance's leader; the answers come to ``lent`` and ``returned``. Any thread, never waits."""

    def borrow(self, number: int, keys: Sequence[BlockKey], ttl_s: float, *, is_find: bool) -> None:
        """Where are they? ``is_find`` False: hold them."""

    def give_back(self, number: int) -> None:
        """They have been copied."""

    def counted(self, busy: int, refused: int, bad: int) -> None:
        """So many questions were put off, askers refused, and messages none of ours since the last call."""


class _Stage(Enum):
    LOOKING = "looking"  # for where its blocks lie
    READING = "reading"  # from the disk
    RETURNING = "returning"  # copied; were they held?
    WRITING = "writing"  # to the landing zone


@dataclass(eq=False)
class _Question:
    asker: bytes
    call_id: int
    keys: tuple[BlockKey, ...]
    is_find: bool
    ends_at_s: float
    stage: _Stage = _Stage.LOOKING
    num_set_aside: int = 0  # copies that have no memory yet
    num_put_off: int = 0  # keys beyond these, for which there is no memory now
    copies: dict[int, Bytes] = field(default_factory=dict)
    seals: dict[int, bytes] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    zone: bytes = b""
    addresses: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Reading:
    number: int
    tier: str
    indices: list[int]
    blocks: list[tuple[BlockKey, int]]
    copies: list[Bytes]
    ends_at_s: float
    outcomes: list[Outcome] = field(default_factory=list)


class PeerServer:
    """Serves from its construction to ``close``. ConfigError, one line, if the address cannot be bound.

    ``bind``: tcp://HOST:PORT of this rank; with * for the port any (see ``port``). ``copies``: for those on
    their way to others; if they are in one piece, they are written to landing zones of those who have one.
    """

    def __init__(
        self,
        bind: str,
        terms: Terms,
        blocks: OwnBlocks,
        leader: LeaderLine,
        *,
        copies: Copies,
        keys: CurveKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._terms = terms
        self._blocks = blocks
        self._leader = leader
        self._clock = clock or SystemClock()
        self._copies = copies
        self._askers: OrderedDict[bytes, int] = OrderedDict()  # and how many questions each has under way
        self._questions: dict[int, _Question] = {}
        self._last_number = 0
        self._news: deque[Callable[[], None]] = deque()
        self._readings: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._counts = [0, 0, 0]  # busy, refused, bad
        self._last_tick_s = self._clock.now_s()
        self._log = RateLimitedLogger(log)
        self._is_closing = False
        self.port = 0
        self._lock = threading.Lock()  # guards the descriptor, whose number is somebody else's after close
        require_keys(SETTING, bind, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._gate = Gate(self._context, keys, self._refused_one) if keys is not None else None
        self._socket = (
            self._gate.server_socket(zmq.ROUTER) if self._gate else self._context.socket(zmq.ROUTER)
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._listen(bind)
        except (zmq.ZMQError, ConfigError) as error:
            self._end()
            raise ConfigError(
                SETTING, bind, f"cannot be bound ({error}); give each rank a free port"
            ) from None
        self._writer = ZoneWriter(copies.whole, self._clock) if len(copies.whole) else None
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-server", daemon=True)
        self._thread.start()

    def _listen(self, bind: str) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RCVHWM, MAX_QUESTIONS_EACH),
            (zmq.SNDHWM, SEND_MESSAGES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int("[" in bind)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.bind(bind)
        address = parse_address(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.port = address.port if address is not None else 0

    @property
    def writes(self) -> bool:
        """Whether it writes to landing zones now."""
        return self._writer is not None and self._writer.is_ready

    def wait_for_writer(self, timeout_s: float) -> bool:
        """Until it writes to landing zones, or is known not to; whether it does."""
        return self._writer is not None and self._writer.wait(timeout_s)

    @property
    def copied_blocks(self) -> int:
        """Copies that exist: being made, or being sent."""
        return self._copies.taken_blocks

    # ---------------------------------------------------------------- what the leader says; any thread

    def lent(self, number: int, loan: Loan) -> None:
        """Where the blocks of a question lie."""
        self._hear(lambda: self._take_loan(number, loan))

    def returned(self, number: int, *, was_held: bool) -> None:
        """They were let go of. ``was_held``: until then."""
        self._hear(lambda: self._send_copies(number, was_held=was_held))

    def _hear(self, news: Callable[[], None]) -> None:
        self._news.append(news)
        with self._lock:
            if not self._is_closing:
                os.eventfd_write(self._wake_fd, 1)

    def _refused_one(self) -> None:
        self._counts[1] += 1

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            os.eventfd_write(self._wake_fd, 1)
        self._readings.put(None)
        if self._writer is not None:
            self._writer.close()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._reader is not None:
            self._reader.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("kvbm: %s did not end; its socket stays open", self._thread.name)
            return
        self._end()

    def _end(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._wake_fd)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        leave_bound_core()
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for step in (self._take_news, self._receive, self._tick):
                try:
                    step()
                except Exception as error:  # a bug in one question must not end the thread of all
                    self._log.warning(type(error).__name__, "kvbm: a peer's question failed", exc_info=error)

    def _take_news(self) -> None:
        while self._news:
            self._news.popleft()()

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._last_tick_s < TICK_S:
            return
        self._last_tick_s = now_s
        self._copies.sweep()
        for number, question in list(self._questions.items()):
            # What the disk reads and what is written come back; whatever else is late will not.
            comes_back = question.stage in (_Stage.READING, _Stage.WRITING)
            if question.ends_at_s < now_s and not comes_back:
                self._answer_all(number, Outcome.TIMED_OUT)
        if any(self._counts):
            counts, self._counts = self._counts, [0, 0, 0]
            self._leader.counted(*counts)

    def _receive(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        asker = frames[0]
        question = decode_question(frames[1]) if len(frames) == 2 else None
        if isinstance(question, Hello):
            self._welcome(asker, question)
            return
        keys = block_keys(question.keys) if question is not None else None
        if question is None or keys is None:
            self._counts[2] += 1
            self._refuse(asker, "says what is none of ours")
        elif asker not in self._askers or question.instance != self._terms.instance:
            self._refuse(asker, "another instance is here now")
        else:
            self._askers.move_to_end(asker)
            self._begin(asker, question, keys)

    def _welcome(self, asker: bytes, hello: Hello) -> None:
        reason = refusal_of(hello, self._terms)
        if reason is not None:
            self._counts[1] += 1
            self._log.warning(reason, "kvbm: a peer is refused: %s", reason)
            self._refuse(asker, reason)
            return
        self._askers.setdefault(asker, 0)
        self._askers.move_to_end(asker)
        while len(self._askers) > MAX_ASKERS:
            self._askers.popitem(last=False)
        self._send(asker, Welcome(self._terms.instance))

    def _refuse(self, asker: bytes, reason: str) -> None:
        self._askers.pop(asker, None)
        self._send(asker, Refused(shown(reason)))

    def _begin(self, asker: bytes, asked: Find | Fetch, keys: tuple[BlockKey, ...]) -> None:
        is_find = isinstance(asked, Find)
        is_busy = len(self._questions) >= MAX_QUESTIONS or self._askers[asker] >= MAX_QUESTIONS_EACH
        granted = 0 if is_busy else len(keys) if is_find else self._copies.take(asker, len(keys))
        self._counts[0] += granted < len(keys)
        if not granted:
            self._send(asker, Done(asked.call_id, [Outcome.BUSY] * len(keys)))
            return
        num_put_off, keys = len(keys) - granted, keys[:granted]
        ttl_s = min(LONGEST_S, max(0, asked.deadline_ms) / 1000)
        self._last_number += 1
        number = self._last_number
        question = _Question(asker, asked.call_id, keys, is_find, self._clock.now_s() + ttl_s)
        question.outcomes = [Outcome.MISS] * len(keys)
        if isinstance(asked, Fetch) and has_places(asked):
            question.zone, question.addresses = asked.zone, asked.addresses
        question.num_set_aside, question.num_put_off = 0 if is_find else granted, num_put_off
        self._questions[number] = question
        self._askers[asker] += 1
        self._leader.borrow(number, keys, ttl_s, is_find=is_find)

    # ---------------------------------------------------------------- one question

    def _take_loan(self, number: int, loan: Loan) -> None:
        question = self._questions.get(number)
        if question is None or question.stage is not _Stage.LOOKING:
            if question is None:  # it came too late
                self._leader.give_back(number)
            return
        places = list(zip(loan.slots, loan.places, strict=True))
        if loan.is_refused or len(places) != len(question.keys):
            self._counts[0] += 1
            self._answer_all(number, Outcome.BUSY)
            return
        there = [i for i, (slot, place) in enumerate(places) if slot != NO_SLOT or place != NO_SLOT]
        if question.is_find:
            found = set(there)
            self._end_question(number)
            is_there = [i in found for i in range(len(question.keys))]
            self._send(question.asker, Found(question.call_id, is_there))
            return
        self._copies.unused(question.asker, question.num_set_aside - len(there))
        question.num_set_aside, question.copies = 0, {i: self._copies.memory() for i in there}
        if not there:
            self._answer_all(number, Outcome.MISS)
            return
        for i in there:
            if places[i][0] != NO_SLOT:
                self._copy(question, i, places[i][0])
        below = [i for i in there if places[i][0] == NO_SLOT]
        if not below:
            self._give_back(number, question)
            return
        question.stage = _Stage.READING
        blocks = [(question.keys[i], places[i][1]) for i in below]
        copies = [question.copies[i] for i in below]
        self._read(_Reading(number, loan.tier, below, blocks, copies, question.ends_at_s))

    def _copy(self, question: _Question, i: int, slot: int) -> None:
        copy = question.copies[i]
        try:
            question.seals[i] = copied_seal(question.keys[i], copy, self._blocks.slot(slot)[: len(copy)])
        except ValueError:
            question.outcomes[i] = Outcome.REJECTED
        else:
            question.outcomes[i] = Outcome.OK

    def _read(self, reading: _Reading) -> None:
        if self._reader is None:
            self._reader = threading.Thread(target=self._keep_reading, name="kvbm-peer-disk", daemon=True)
            self._reader.start()
        self._readings.put(reading)

    def _keep_reading(self) -> None:
        leave_bound_core()
        while (reading := self._readings.get()) is not None and not self._is_closing:
            left_s = reading.ends_at_s - self._clock.now_s()
            outcomes = [Outcome.TIMED_OUT] * len(reading.blocks)
            if left_s > 0:
                try:
                    outcomes = self._blocks.read(
                        reading.tier, reading.blocks, reading.copies, deadline_s=left_s
                    )
                except Exception as error:  # whatever happens is its outcome
                    self._log.warning("disk", "kvbm: a peer's blocks could not be read", exc_info=error)
                    outcomes = [Outcome.IO_ERROR] * len(reading.blocks)
            reading.outcomes = outcomes
            self._hear(partial(self._was_read, reading))

    def _was_read(self, reading: _Reading) -> None:
        question = self._questions.get(reading.number)
        if question is None:
            return
        for i, outcome in zip(reading.indices, reading.outcomes, strict=True):
            question.outcomes[i] = outcome
            if outcome is Outcome.OK:
                question.seals[i] = seal_of(question.keys[i], question.copies[i].data)
        self._give_back(reading.number, question)

    def _give_back(self, number: int, question: _Question) -> None:
        question.stage = _Stage.RETURNING
        self._leader.give_back(number)

    def _send_copies(self, number: int, *, was_held: bool) -> None:
        question = self._questions.get(number)
        if question is None or question.stage is not _Stage.RETURNING:
            return
        if not was_held or question.ends_at_s < self._clock.now_s():
            self._answer_all(number, Outcome.TIMED_OUT)
            return
        there = [i for i, outcome in enumerate(question.outcomes) if outcome is Outcome.OK]
        if self._writer is not None and self._writer.is_ready and question.zone and there:
            question.stage = _Stage.WRITING
            self._writer.write(
                Write(
                    question.zone,
                    [question.copies[i] for i in there],
                    [question.addresses[i] for i in there],
                    question.ends_at_s,
                    lambda outcome: self._hear(partial(self._were_written, number, there, outcome)),
                )
            )
            return
        self._send_messages(number, question, there)

    def _were_written(self, number: int, there: list[int], outcome: Outcome) -> None:
        question = self._end_question(number)
        if outcome is Outcome.OK:
            seals = [question.seals[i] for i in there]
            self._send(question.asker, Written(question.call_id, there, seals))
        else:
            self._counts[0] += outcome is Outcome.BUSY
            for i in there:
                question.outcomes[i] = outcome
        self._done(question, question.outcomes)

    def _send_messages(self, number: int, question: _Question, there: list[int]) -> None:
        asker, call_id = question.asker, question.call_id
        size = max(1, MESSAGE_BYTES // self._terms.block_bytes)
        for start in range(0, len(there), size):
            numbers = there[start : start + size]
            seals = [question.seals[i] for i in numbers]
            if not self._send_head(asker, encode(Blocks(call_id, numbers, seals))):
                break
            for i in numbers:
                copy, flags = question.copies.pop(i), 0 if i == numbers[-1] else zmq.SNDMORE
                tracker = self._socket.send(copy.data, flags, copy=False, track=True)
                self._copies.sent(asker, copy, tracker)
        self._end_question(number)
        self._done(question, question.outcomes)

    def _answer_all(self, number: int, outcome: Outcome) -> None:
        question = self._end_question(number)
        self._done(question, [outcome] * len(question.keys))

    def _done(self, question: _Question, outcomes: list[Outcome]) -> None:
        put_off = [Outcome.BUSY] * question.num_put_off
        self._send(question.asker, Done(question.call_id, [*outcomes, *put_off]))

    def _end_question(self, number: int) -> _Question:
        question = self._questions.pop(number)
        if question.asker in self._askers:
            self._askers[question.asker] -= 1
        self._copies.unused(question.asker, question.num_set_aside)
        for copy in question.copies.values():
            self._copies.back(question.asker, copy)
        return question

    # ---------------------------------------------------------------- sending

    def _send(self, asker: bytes, answer: Answer) -> None:
        with contextlib.suppress(zmq.ZMQError):  # gone, or it takes nothing: nobody waits for it
            self._socket.send_multipart([asker, encode(answer)], zmq.NOBLOCK)

    def _send_head(self, asker: bytes, head: bytes) -> bool:
        """Frames follow. False if the asker is gone, or takes nothing; then none may."""
        try:
            self._socket.send(asker, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self._socket.send(head, zmq.SNDMORE)
        return True
