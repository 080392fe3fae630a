"""The wire of Valkey and Redis (RESP2), as far as a store of objects needs it.

Values go from the caller's memory to the socket and back with no copy between, and a deadline is that of the
whole exchange: clients with a time-out for each receive can be held for ever by a server that trickles.

redis-py (8, with hiredis) was tried in its place. Its time-outs are of each receive, hiredis makes a list as
long as a server says, and values are copied twice. With all of that mended there was more code around it than
there is here, and reads took a tenth longer.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, Union

BUFFER_BYTES = 8 << 10
"""What is read ahead: lines, and the beginning of a value."""
SMALL_BYTES = 8 << 10
"""Pieces below it are sent together."""
MAX_LINE_BYTES = 4 << 10
MAX_DEPTH = 4


class Deadline:
    """The end of a call."""

    def __init__(self, seconds: float) -> None:
        self._ends_at_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Above 0. TimeoutError if it is over."""
        left_s = self._ends_at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline is over")
        return left_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply. ``code``: its first word, such as OOM or NOAUTH."""

    code: str
    text: str


Reply: TypeAlias = Union[int, bytes, str, list["Reply"], Refusal, None]  # noqa: UP007 - it names itself
"""Of integers, values, status lines, lists, errors and what is not there."""


class WireError(OSError):
    """The other side does not speak as it should."""


class Commands:
    """Commands in the form in which they are sent, in order; values are not copied."""

    def __init__(self) -> None:
        self._small = bytearray()
        self.chunks: list[bytearray | memoryview] = []

    def add(self, *words: bytes) -> None:
        """A command of short words."""
        self._small += b"*%d\r\n" % len(words)
        for word in words:
            self._small += b"$%d\r\n%b\r\n" % (len(word), word)

    def add_set(self, name: bytes, pieces: Sequence[memoryview]) -> None:
        """SET of ``name`` to the pieces' bytes."""
        num_bytes = sum(piece.nbytes for piece in pieces)
        self._small += b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, num_bytes)
        for piece in pieces:
            if piece.nbytes < SMALL_BYTES:
                self._small += piece
            else:
                self._flush()
                self.chunks.append(as_bytes(piece))
        self._small += b"\r\n"

    def _flush(self) -> None:
        if self._small:
            self.chunks.append(self._small)
            self._small = bytearray()

    def done(self) -> Sequence[bytearray | memoryview]:
        """What is to be sent."""
        self._flush()
        return self.chunks


def as_bytes(piece: memoryview) -> memoryview:
    """The same memory, counted in bytes."""
    return piece if piece.format == "B" and piece.ndim == 1 else piece.cast("B")


class RespConnection:
    """One connection. By one thread at a time, but for ``shut_down``.

    OSError if it breaks, TimeoutError (which is one) at the end of ``deadline``: it can only be closed then.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(sock)
        self._bytes = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0
        self.deadline = Deadline(0.0)

    @property
    def is_stale(self) -> bool:
        """Whether one that is idle was closed by the other side, or has something to say unasked."""
        self._poll.modify(self._sock, select.POLLIN)
        return bool(self._poll.poll(0)) or self._start != self._end

    def shut_down(self) -> None:
        """Ends what another thread waits for. The connection is of no use afterwards."""
        with suppress(OSError):  # not TLS's own, which would have that thread go on in plain text
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    # ---------------------------------------------------------------- out

    def send(self, commands: Commands) -> None:
        """All of them."""
        for chunk in commands.done():
            left = memoryview(chunk)
            while left:
                left = left[self._now(self._sock.send, left) :]

    def ask(self, *words: bytes) -> Reply:
        """The answer to one command."""
        commands = Commands()
        commands.add(*words)
        self.send(commands)
        return self.reply()

    # ---------------------------------------------------------------- in

    def reply(self) -> Reply:
        """The next one."""
        return self._parsed(self._line(), 0)

    def reply_into(self, pieces: Iterable[memoryview]) -> int | Refusal | None:
        """The next one, a value, into ``pieces`` in order. The number of its bytes, which may be more than
        fit.
        """
        line = self._line()
        if line[:1] != b"$":
            reply = self._parsed(line, 0)
            if isinstance(reply, Refusal):
                return reply
            raise WireError("a value was expected")
        num_bytes = _number(line)
        if num_bytes < 0:
            return None
        left = num_bytes
        for piece in pieces:
            if not left:
                break
            room = as_bytes(piece)[:left]
            left -= len(room)
            self._take_into(room)
        self._skip(left)
        self._expect_end()
        return num_bytes

    def _parsed(self, line: bytes, depth: int) -> Reply:
        kind = line[:1]
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return line[1:].decode("ascii", "replace")
        if kind == b"-":
            # What follows repeats what was sent: perhaps a password, perhaps somebody's KV.
            text = ascii(line[1:].decode("utf-8", "replace").partition(", with args")[0])[1:-1]
            return Refusal(text.partition(" ")[0], text)
        if kind == b"$":
            num_bytes = _number(line)
            if num_bytes < 0:
                return None
            if num_bytes > (1 << 20):
                raise WireError("an answer is too long")
            value = bytearray(num_bytes)
            self._take_into(memoryview(value))
            self._expect_end()
            return bytes(value)
        if kind == b"*" and depth < MAX_DEPTH:
            count = _number(line)
            return None if count < 0 else [self._parsed(self._line(), depth + 1) for _ in range(count)]
        raise WireError("that is no server of this kind")

    def _line(self) -> bytes:
        while (at := self._bytes.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > MAX_LINE_BYTES:
                raise WireError("a line is too long")
            if self._start == self._end:
                self._start = self._end = 0
            elif self._end == BUFFER_BYTES:
                rest = bytes(self._view[self._start : self._end])
                self._view[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            self._end += self._receive(self._view[self._end :])
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _take_into(self, room: memoryview) -> None:
        count = min(len(room), self._end - self._start)
        room[:count] = self._view[self._start : self._start + count]
        self._start += count
        while count < len(room):
            count += self._receive(room[count:])

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            if self._start == self._end:
                self._start, self._end = 0, self._receive(self._view)
            count = min(num_bytes, self._end - self._start)
            self._start += count
            num_bytes -= count

    def _expect_end(self) -> None:
        end = bytearray(2)
        self._take_into(memoryview(end))
        if end != b"\r\n":
            raise WireError("a value is not as long as it says")

    def _receive(self, room: memoryview) -> int:
        count = self._now(self._sock.recv_into, room)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _now(self, call: Callable[[memoryview], int], memory: memoryview) -> int:
        """``call(memory)``, as soon as it can be done without waiting: most of the time that is at once."""
        while True:
            left_s = self.deadline.left_s()
            try:
                return call(memory)
            except BlockingIOError:
                events = select.POLLOUT if call == self._sock.send else select.POLLIN
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            self._poll.modify(self._sock, events)
            self._poll.poll(math.ceil(1000 * left_s))


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError as error:
        raise WireError("a number was expected") from error
