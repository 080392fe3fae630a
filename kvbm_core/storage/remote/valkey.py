"""Objects in a Valkey or Redis server: pooled memory for small blocks."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TypeVar

from kvbm_core.clock import SystemClock
from kvbm_core.config.readers import shown
from kvbm_core.config.server_url import ServerUrl
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.log import RateLimitedLogger, TroubleLog
from kvbm_core.storage.call_pool import CallPool
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import EngineTraits, GetItem, Got, PutItem
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.resp import Commands, Deadline, Refusal, Reply, RespConnection, WireError

CONNECTIONS = 8
BATCH_ITEMS = 32
BATCH_BYTES = 4 << 20
"""Of values under way on a connection, unless one of them is larger: what is asked for at once, the server
holds in memory of its own.
"""
BATCH_NAMES = 1024
"""In a look-up."""
MAX_OBJECT_BYTES = 64 << 20
PAGE_NAMES = 1000
CONNECT_S = 2.0
"""A server that does not take a connection in this time is not waited for longer."""
RESOLVING_THREADS = 2
MAX_DIGITS = 20
"""Of a number of bytes."""
CLOSE_S = 1.0

T = TypeVar("T")
limited_log = RateLimitedLogger()
"""Of one server once, also if each of an engine's pools opens it."""

_OUTCOMES = {
    "OOM": Outcome.NO_SPACE,
    "BUSY": Outcome.BUSY,
    "LOADING": Outcome.BUSY,
    "WRONGTYPE": Outcome.CORRUPT,
}
"""Of error replies; all others are IO_ERROR."""
_LOGIN = "set KVBM_REMOTE_PASSWORD_FILE, and KVBM_REMOTE_USERNAME if the server has users"
_CLUSTER = "it is one node of a cluster, which is not supported: name a server or proxy that has all keys"
_REMEDIES = {
    "NOAUTH": _LOGIN,
    "WRONGPASS": _LOGIN,
    "NOPERM": "docs/remote.md lists the rights that the user needs",
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CLUSTERDOWN": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    "READONLY": "it is a replica: name the primary",
    "MISCONF": "it cannot write its snapshot, and takes nothing until it can",
    "OOM": "set maxmemory-policy to allkeys-lru, or give it more memory",
}


class _ClosedError(OSError):
    """The engine was closed."""


class _RefusedError(OSError):
    """The server refuses the connection."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class ValkeyEngine:
    """An ObjectEngine. ConfigError for certificates that cannot be read; nothing is asked before the first
    call. The caller's thread does all the work, so that nothing touches its memory when it is back.
    """

    traits = EngineTraits(
        concurrency=CONNECTIONS,
        batch_items=BATCH_ITEMS,
        has_capacity=True,
        max_object_bytes=MAX_OBJECT_BYTES,
    )

    def __init__(self, server: ServerUrl, login: ServerLogin) -> None:
        self._address = f"{server.scheme}://{server.address}"
        self._trouble = TroubleLog()
        self._is_greeted = False
        self._connections = _Connections(server, login)

    # ---------------------------------------------------------------- objects

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        sizes = [sum(piece.nbytes for piece in item.pieces) for item in items]
        fitting = [i for i, size in enumerate(sizes) if size <= MAX_OBJECT_BYTES]

        def exchange(connection: RespConnection, answers: list[Outcome | None]) -> None:
            for window in _windows([sizes[i] for i in fitting]):
                commands = Commands()
                for at in window:
                    item = items[fitting[at]]
                    commands.add_set(item.name.encode(), item.pieces)
                connection.send(commands)
                for at in window:
                    answers[fitting[at]] = self._outcome_of(connection.reply(), "writes")

        outcomes = self._answers(len(items), deadline_s, exchange, _same)
        for i in {*range(len(items))}.difference(fitting):
            if outcomes[i] is not Outcome.REJECTED:
                outcomes[i] = Outcome.NO_SPACE
        return outcomes

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """See ObjectEngine."""
        sizes = [sum(piece.nbytes for piece in item.pieces) for item in items]

        def exchange(connection: RespConnection, answers: list[Got | None]) -> None:
            ended: list[int] = []
            for window in _windows(sizes):
                commands = Commands()
                for i in window:
                    name, first = items[i].name.encode(), items[i].offset_bytes
                    if first:
                        commands.add(b"GETRANGE", name, b"%d" % first, b"%d" % (first + sizes[i] - 1))
                    else:  # servers send a whole value without a copy
                        commands.add(b"GET", name)
                connection.send(commands)
                for i in window:
                    reply = connection.reply_into(items[i].pieces)
                    if isinstance(reply, Refusal) or reply is None:
                        answers[i] = Got(self._outcome_of(reply or 0, "reads"))
                    elif reply > sizes[i]:
                        answers[i] = Got(Outcome.CORRUPT)
                    elif reply or not items[i].offset_bytes:
                        answers[i] = Got(Outcome.OK, reply)
                    else:
                        ended.append(i)
            self._ask_length(connection, items, ended, answers)

        return self._answers(len(items), deadline_s, exchange, Got)

    def _ask_length(
        self,
        connection: RespConnection,
        items: Sequence[GetItem],
        ended: Sequence[int],
        answers: list[Got | None],
    ) -> None:
        """GETRANGE answers the same for what is not there and for what ends before the range."""
        commands = Commands()
        for i in ended:
            commands.add(b"STRLEN", items[i].name.encode())
        connection.send(commands)
        for i in ended:
            reply = connection.reply()
            is_shorter = isinstance(reply, int) and 0 < reply <= items[i].offset_bytes
            answers[i] = Got(Outcome.OK if is_shorter else Outcome.MISS)

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._counted(b"EXISTS", names, deadline_s)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._counted(b"UNLINK", names, deadline_s)

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._counted(b"TOUCH", names, deadline_s)

    def _counted(self, command: bytes, names: Sequence[str], deadline_s: float) -> list[Outcome]:
        def exchange(connection: RespConnection, answers: list[Outcome | None]) -> None:
            self._count(connection, command, names, answers)

        return self._answers(len(names), deadline_s, exchange, _same)

    def _count(
        self,
        connection: RespConnection,
        command: bytes,
        names: Sequence[str],
        answers: list[Outcome | None],
    ) -> None:
        """Each name alone: a count of several says nothing of each."""
        kind = "writes" if command == b"UNLINK" else "reads"
        for start in range(0, len(names), BATCH_NAMES):
            commands = Commands()
            part = names[start : start + BATCH_NAMES]
            for name in part:
                commands.add(command, name.encode())
            connection.send(commands)
            for i in range(start, start + len(part)):
                answers[i] = self._outcome_of(connection.reply(), kind)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """See ObjectEngine. An object's time is that of its last use, as the server counts it."""
        cursor, seen = b"0", set[str]()
        while True:
            found: list[ObjectInfo] = []
            with self._connections.lent(Deadline(deadline_s)) as connection:
                cursor = self._page(connection, cursor, prefix, found)
            for info in found:
                if info.name not in seen:  # the server may say a name twice
                    seen.add(info.name)
                    yield info
            if cursor == b"0":
                return

    def close(self) -> None:
        """See ObjectEngine."""
        self._connections.close()

    # ---------------------------------------------------------------- inside

    def _answers(
        self,
        count: int,
        deadline_s: float,
        exchange: Callable[[RespConnection, list[T | None]], None],
        made: Callable[[Outcome], T],
    ) -> list[T]:
        """What ``exchange`` has put there; where it did not come, what it failed of."""
        answers: list[T | None] = [None] * count
        failure = Outcome.IO_ERROR
        if count:
            try:
                with self._connections.lent(Deadline(deadline_s)) as connection:
                    self._greet(connection)
                    exchange(connection, answers)
                self._trouble.worked("connection", "kvbm: %s works again", self._address)
            except _ClosedError:
                failure = Outcome.REJECTED
            except TimeoutError:
                failure = Outcome.TIMED_OUT
            except _RefusedError as error:
                failure = self._outcome_of(error.refusal, "connection")
            except (OSError, UnicodeError, ConfigError) as error:
                line, why = "kvbm: KVBM_REMOTE_URL: %s: %s", type(error).__name__
                self._trouble.failed("connection", why, line, self._address, error)
        return [made(failure) if answer is None else answer for answer in answers]

    def _outcome_of(self, reply: Reply, what: str) -> Outcome:
        """Of a reply that is a count, OK or an error."""
        if not isinstance(reply, Refusal):
            if reply != "OK" and not isinstance(reply, int):
                raise WireError("OK or a count was expected")
            self._trouble.worked(what, "kvbm: %s does not refuse %s any more", self._address, what)
            return Outcome.MISS if reply == 0 else Outcome.OK
        outcome = _OUTCOMES.get(reply.code, Outcome.IO_ERROR)
        remedy = _REMEDIES.get(reply.code)
        text = f"{reply.text}; {remedy}" if remedy else reply.text
        line = "kvbm: KVBM_REMOTE_URL: %s refuses: %s"
        self._trouble.failed(what, reply.code, line, self._address, text[:300])
        return outcome

    def _greet(self, connection: RespConnection) -> None:
        """Says once what becomes of blocks when the server's memory is full."""
        if self._is_greeted:
            return
        reply = connection.ask(b"INFO", b"memory")
        self._is_greeted = True
        if isinstance(reply, bytes):
            level, text = memory_line(reply.decode("utf-8", "replace"))
            limited_log.log(level, self._address, "kvbm: %s: %s", self._address, text)

    def _page(self, connection: RespConnection, cursor: bytes, prefix: str, found: list[ObjectInfo]) -> bytes:
        """Puts a page's objects into ``found``; the next page's cursor."""
        reply = connection.ask(
            b"SCAN", cursor, b"MATCH", prefix.encode() + b"*", b"COUNT", b"%d" % PAGE_NAMES
        )
        if isinstance(reply, Refusal):
            raise _RefusedError(reply)
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            raise WireError("a page of names was expected")
        names = [name for name in reply[1] if isinstance(name, bytes)]
        if len(names) < len(reply[1]):
            raise WireError("names were expected")
        commands = Commands()
        commands.add(b"CLIENT", b"NO-TOUCH", b"ON")  # or looking would be use; older servers do not know it
        for name in names:
            commands.add(b"OBJECT", b"IDLETIME", name)
            commands.add(b"STRLEN", name)
        commands.add(b"CLIENT", b"NO-TOUCH", b"OFF")
        connection.send(commands)
        connection.reply()
        now_s = time.time()
        for name in names:
            idle_s, size = connection.reply(), connection.reply()
            if isinstance(size, int) and idle_s is not None:  # else it is not ours, or gone
                changed_s = now_s - (idle_s if isinstance(idle_s, int) else 0)
                found.append(ObjectInfo(name.decode("utf-8", "replace"), size, changed_s))
        connection.reply()
        next_cursor = reply[0]
        if not isinstance(next_cursor, bytes):
            raise WireError("a cursor was expected")
        return next_cursor


def _same(outcome: Outcome) -> Outcome:
    return outcome


def _windows(sizes: Sequence[int]) -> Iterator[range]:
    """Runs of items that may be under way at once."""
    start = num_bytes = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start == BATCH_ITEMS or num_bytes + size > BATCH_BYTES):
            yield range(start, i)
            start, num_bytes = i, 0
        num_bytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


def memory_line(info: str) -> tuple[int, str]:
    """What ``INFO memory`` says of room: how bad it is, and for people."""
    values = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    limit, policy = values.get("maxmemory", "0").strip(), shown(values.get("maxmemory_policy", "").strip())
    limit_bytes = int(limit) if limit.isdecimal() and len(limit) <= MAX_DIGITS else 0
    if not limit_bytes:
        text = "it has no limit of memory; set its maxmemory, and maxmemory-policy allkeys-lru"
        return logging.WARNING, text
    room = f"{limit_bytes / 1e9:g} GB"
    if policy.startswith("allkeys-"):
        return logging.INFO, f"it has {room}, and makes room by {policy}"
    text = f"it has {room}, and refuses new blocks when that is full ({policy})"
    return logging.WARNING, f"{text}; set maxmemory-policy allkeys-lru"


# -------------------------------------------------------------------- connections


class _Connections:
    """At most CONNECTIONS of them, opened when they are needed."""

    def __init__(self, server: ServerUrl, login: ServerLogin) -> None:
        self._server = server
        self._login = login
        login.password()  # one that cannot be read is told at once
        self._tls = _tls_context(login) if server.is_tls else None
        self._resolving = CallPool("valkey-name", RESOLVING_THREADS, SystemClock())
        self._changed = threading.Condition()
        self._idle: list[RespConnection] = []
        self._lent: set[RespConnection] = set()
        self._num_open = 0
        self._is_closed = False

    @contextmanager
    def lent(self, deadline: Deadline) -> Iterator[RespConnection]:
        """One, which is closed if what is done with it fails. _ClosedError at and after the end."""
        connection = self._take(deadline)
        is_good = False
        try:
            connection.deadline = deadline
            deadline.left_s()
            yield connection
            is_good = True
        except OSError:
            if self._is_closed:
                raise _ClosedError from None
            raise
        finally:
            self._give_back(connection, is_good=is_good)

    def _take(self, deadline: Deadline) -> RespConnection:
        while (connection := self._idle_one(deadline)) is not None:
            if not connection.is_stale:
                return connection
            self._give_back(connection, is_good=False)
        try:
            connection = self._connect(deadline)
        except BaseException:
            with self._changed:
                self._num_open -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._lent.add(connection)
            if not self._is_closed:
                return connection
        self._give_back(connection, is_good=False)
        raise _ClosedError

    def _idle_one(self, deadline: Deadline) -> RespConnection | None:
        """One that waits for work; None: one more may be opened, and is counted."""
        with self._changed:
            while not self._is_closed:
                left_s = deadline.left_s()
                if self._idle:
                    connection = self._idle.pop()
                    self._lent.add(connection)
                    return connection
                if self._num_open < CONNECTIONS:
                    self._num_open += 1
                    return None
                self._changed.wait(left_s)
            raise _ClosedError

    def _give_back(self, connection: RespConnection, *, is_good: bool) -> None:
        with self._changed:
            self._lent.discard(connection)
            is_kept = is_good and not self._is_closed
            if is_kept:
                self._idle.append(connection)
            else:
                self._num_open -= 1
            self._changed.notify()
        if not is_kept:
            connection.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._num_open -= len(idle)
            for connection in self._lent:
                connection.shut_down()
            self._changed.notify_all()
        for connection in idle:
            connection.close()
        self._resolving.close(CLOSE_S)

    # ---------------------------------------------------------------- opening

    def _connect(self, deadline: Deadline) -> RespConnection:
        sock = self._socket(deadline)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock.settimeout(deadline.left_s())
                sock = self._tls.wrap_socket(sock, server_hostname=self._server.host)
            connection = RespConnection(sock)
            connection.deadline = deadline
            self._sign_in(connection)
        except BaseException:
            sock.close()
            raise
        return connection

    def _socket(self, deadline: Deadline) -> socket.socket:
        problem: OSError = OSError("the name has no address")
        for family, address in self._addresses(deadline):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(min(deadline.left_s(), CONNECT_S))
                sock.connect(address)
                return sock
            except OSError as error:
                sock.close()
                problem = error
        raise problem

    def _addresses(self, deadline: Deadline) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        host, port = self._server.host, self._server.port
        try:
            version = ip_address(host).version
            return [(socket.AF_INET if version == 4 else socket.AF_INET6, (host, port))]
        except ValueError:
            pass
        found: list[tuple[socket.AddressFamily, tuple[str, int]]] = []
        problems: list[OSError] = []

        def resolve(_: int, __: object) -> Outcome:  # in a thread, as nothing bounds how long it takes
            try:
                for family, _kind, _protocol, _name, address in socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                ):
                    found.append((family, (str(address[0]), int(address[1]))))
            except OSError as error:
                problems.append(error)
            return Outcome.OK

        (outcome,) = self._resolving.run(resolve, 1, deadline_s=deadline.left_s())
        if problems:
            raise problems[0]
        if outcome is Outcome.REJECTED:
            raise _ClosedError
        if outcome is not Outcome.OK:
            raise TimeoutError("the name is not resolved in time")
        return found

    def _sign_in(self, connection: RespConnection) -> None:
        user = (self._login.username.encode(),) if self._login.username else ()
        password = self._login.password()
        if user or password:
            reply = connection.ask(b"AUTH", *user, password)
            if isinstance(reply, Refusal):  # not its text, which might repeat what it was told
                raise _RefusedError(Refusal(reply.code, f"{reply.code} (AUTH)"))
        if self._server.database:
            reply = connection.ask(b"SELECT", b"%d" % self._server.database)
            if isinstance(reply, Refusal):
                raise _RefusedError(reply)


def _tls_context(login: ServerLogin) -> ssl.SSLContext:
    setting, path = "KVBM_REMOTE_CA_FILE", login.ca_file
    try:
        context = ssl.create_default_context(cafile=path or None)
        if login.cert_file:
            setting, path = "KVBM_REMOTE_CERT_FILE", login.cert_file
            context.load_cert_chain(path)
    except OSError as error:
        raise ConfigError(setting, path, f"it cannot be used as PEM ({error.strerror or error})") from None
    return context
