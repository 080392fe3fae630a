"""What an instance tells etcd of itself, and what it wants to know from there.

A session with etcd (connection, lease, keys) is rebuilt as a whole and never repaired: after any error, or
when the lease is gone, everything is put again under a new lease, at another server if there are several.
While etcd is away, what was found before stays as it was.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.fleet.etcd import EtcdOptions, first_server, load_etcd3, open_client
from kvbm_core.observe.log import TroubleLog

log = logging.getLogger("kvbm")

LOOK_EVERY_S = 1.0
"""How often a record that is not there yet is asked for."""
RETRY_S = 3.0
"""Between two attempts to build a session, at least; up to half of it is added, so that a fleet does not come
at once.
"""
MAX_SHORT_FACTOR = 3
"""As many times as long, at most, after sessions that did not last: a fleet may ask for too much."""
MAX_VALUE_BYTES = 64 * 1024
MAX_RECORDS = 10_000
CLOSE_TIMEOUT_S = 10.0
_MAX_SHOWN_CHARS = 200

T = TypeVar("T")


class _LeaseGoneError(Exception):
    """etcd has forgotten us: it was restarted empty, or this process stood still for too long."""


@dataclass
class _Told:
    """``is_lone``: nobody else may tell a record of this name."""

    value: bytes
    is_lone: bool
    on_rival: Callable[[bytes], None]
    is_there: bool = False


@dataclass
class _Wanted:
    """Everything below ``name`` if it ends with a slash, else the record of this name."""

    name: str
    on_found: Callable[[dict[str, bytes]], bool]
    found: dict[str, bytes]
    is_watched: bool


class EtcdSession:
    """Any thread may call; callbacks come on the session's own thread, and must not wait.

    Names are below ``root``. Nothing here raises because of etcd: one line says that it is away, and one that
    it is back.
    """

    def __init__(self, options: EtcdOptions, root: str, clock: Clock | None = None) -> None:
        load_etcd3()  # whether it is there, the user is told at start
        self.attempts_total = 0
        self._options = options
        self._root = root
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()  # guards both tables
        self._told: dict[str, _Told] = {}
        self._wanted: list[_Wanted] = []
        self._wake = threading.Event()
        self._is_closing = False
        self._is_there = threading.Event()
        self._trouble = TroubleLog(log, interval_s=0.0)
        self._jitter = random.SystemRandom()
        self._thread = threading.Thread(target=self._run, name="kvbm-etcd", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- any thread

    def tell(self, name: str, value: bytes, on_rival: Callable[[bytes], None] | None = None) -> None:
        """Keeps this record there as long as this instance lives. With ``on_rival`` nobody else may have one
        of the same name: it is called with what another instance has put there, and ours joins when that is
        gone.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a record of {len(value)} bytes")
        with self._lock:
            self._told[name] = _Told(value, on_rival is not None, on_rival or (lambda value: None))
        self._wake.set()

    def look_for(
        self, name: str, on_found: Callable[[dict[str, bytes]], bool], *, keep_looking: bool = False
    ) -> None:
        """Calls ``on_found`` with the records when they are there, and whenever they have changed: of this
        name, or of all names below it if it ends with a slash. What is gone is reported only of the latter.
        If it answers False, it is called again with the same.

        Looks each second until something is there (``keep_looking``: always), then with each keepalive.
        """
        with self._lock:
            self._wanted.append(_Wanted(name, on_found, {}, keep_looking))
        self._wake.set()

    def look_no_more(self, name: str) -> None:
        """Ends ``look_for``."""
        with self._lock:
            self._wanted = [wanted for wanted in self._wanted if wanted.name != name]

    @property
    def is_there(self) -> bool:
        """Whether there is a session now."""
        return self._is_there.is_set()

    def close(self) -> None:
        """What this instance told is taken back, if etcd answers. May be called twice."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- the session's thread

    def _run(self) -> None:
        number, num_short = first_server(self._options), 0
        while not self._is_closing:
            began_s = self._clock.now_s()
            try:
                self.attempts_total += 1
                with closing(open_client(self._options, number)) as client:
                    self._serve(client)
            except Exception as error:  # whatever package and servers can do; the engine serves on
                self._is_there.clear()
                lived_s = self._clock.now_s() - began_s
                if lived_s >= self._options.lease_s:
                    num_short = 0
                elif lived_s >= self._options.call_s / 3:  # else it was refused, which costs nobody anything
                    num_short += 1
                line = (
                    "kvbm: etcd at %s:%d is away (%s); what is known goes on, nothing new is met until it is "
                    "back"
                )
                server = self._options.servers[number % len(self._options.servers)]
                self._trouble.failed("etcd", "away", line, *server, _reason_of(error))
            number += 1
            pause_s = RETRY_S * min(max(1, num_short), MAX_SHORT_FACTOR)
            next_at_s = began_s + pause_s * (1 + self._jitter.random() / 2)
            while not self._is_closing and (pause_s := next_at_s - self._clock.now_s()) > 0:
                self._wake.wait(pause_s)  # what was told meanwhile is put by the next session
                self._wake.clear()
        self._is_there.clear()

    def _serve(self, client: Any) -> None:
        lease = client.lease(max(1, round(self._options.lease_s)))
        with self._lock:
            for told in self._told.values():
                told.is_there = False
        kept_at_s = self._clock.now_s()
        while not self._is_closing:
            now_s = self._clock.now_s()
            if now_s - kept_at_s >= self._options.keepalive_s:
                if not any(answer.TTL > 0 for answer in lease.refresh()):
                    raise _LeaseGoneError("it has forgotten this instance")
                kept_at_s = now_s
                self._check(client)
            self._put(client, lease)
            is_complete = self._look(client)
            self._is_there.set()
            self._trouble.worked("etcd", "kvbm: etcd is back")
            pause_s = kept_at_s + self._options.keepalive_s - self._clock.now_s()
            self._wake.wait(max(0.0, pause_s if is_complete else min(pause_s, LOOK_EVERY_S)))
            self._wake.clear()
        with suppress(Exception):
            lease.revoke()

    def _check(self, client: Any) -> None:
        """A record that somebody has removed, or that etcd has lost, is put again; our lease says nothing of
        it.
        """
        with self._lock:
            told = [(name, one) for name, one in self._told.items() if one.is_there]
        for name, one in told:
            one.is_there = client.get(self._root + name)[0] == one.value

    def _put(self, client: Any, lease: Any) -> None:
        with self._lock:
            missing = [(name, told) for name, told in self._told.items() if not told.is_there]
        for name, told in missing:
            key = self._root + name
            if told.is_lone:
                told.is_there = self._take(client, lease, key, told)
            else:
                client.put(key, told.value, lease)
                told.is_there = True

    def _take(self, client: Any, lease: Any, key: str, told: _Told) -> bool:
        """Whether this name, which nobody else may have, is ours.

        Looks first: a fleet that was restarted waits for the leases of its earlier life, each instance asks
        every second, and a read costs etcd less than a transaction that fails.
        """
        found = client.get(key)[0]
        if found is None:
            return bool(client.put_if_not_exists(key, told.value, lease))
        if found != told.value:
            _call(told.on_rival, bytes(found))
            return False
        client.put(key, told.value, lease)  # ours, of an earlier session
        return True

    def _look(self, client: Any) -> bool:
        """Whether all that is wanted is there."""
        with self._lock:
            wanted, told = list(self._wanted), list(self._told.values())
        is_complete = all(one.is_there for one in told)
        for one in wanted:
            found = self._read(client, one.name)
            if found != one.found and (found or one.name.endswith("/")) and _call(one.on_found, dict(found)):
                one.found = found
            is_complete = is_complete and bool(found) and found == one.found and not one.is_watched
        return is_complete

    def _read(self, client: Any, name: str) -> dict[str, bytes]:
        if not name.endswith("/"):
            value = client.get(self._root + name)[0]
            return {} if value is None else {name: bytes(value)}
        records = {}
        for value, about in client.get_prefix(self._root + name):
            records[about.key.decode(errors="replace").removeprefix(self._root)] = bytes(value)
            if len(records) == MAX_RECORDS:
                break
        return records


def _reason_of(error: BaseException) -> str:
    """In a few words; gRPC's, which etcd3 leaves behind an exception of its own, tell more."""
    text = str(error) or type(error).__name__
    for known in (error, error.__context__):
        details = getattr(known, "details", None)
        text = str(details() or text) if callable(details) else text
    return " ".join(text.split())[:_MAX_SHOWN_CHARS]


def _call(callback: Callable[[T], bool | None], found: T) -> bool:
    """Whether it was taken up. A bug there is not etcd's."""
    try:
        return callback(found) is not False
    except Exception:
        log.exception("kvbm: what etcd told could not be taken up")
        return True
