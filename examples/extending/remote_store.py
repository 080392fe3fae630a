"""A remote store: objects in one SQLite database, for processes that have a file system in common."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TypeVar
from urllib.parse import urlsplit

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.log import TroubleLog
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import EngineTraits, GetItem, Got, PutItem
from kvbm_core.storage.stores import StoreOptions

Answer = TypeVar("Answer")
TABLE = "CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, content BLOB, changed_s REAL)"
PUT = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?)"
GET = "SELECT length(content), substr(content, ?, ?) FROM objects WHERE name = ?"
RENEW = "UPDATE objects SET changed_s = strftime('%s', 'now') + 0.0 WHERE name = ?"  # seconds since 1970
SCAN = "SELECT name, length(content), changed_s FROM objects WHERE name >= ? AND name < ?"


class SqliteEngine:
    """ObjectEngine. Each call has a connection of its own, so any thread may call."""

    traits = EngineTraits(concurrency=4, batch_items=64)

    def __init__(self, path: str) -> None:
        self._path = path
        self._trouble = TroubleLog()
        self._is_closed = False
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(TABLE)

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        def put(database: sqlite3.Connection) -> list[Outcome]:
            rows = [(item.name, b"".join(item.pieces), time.time()) for item in items]
            database.executemany(PUT, rows)
            return [Outcome.OK] * len(rows)

        return self._call(put, lambda bad: [bad] * len(items), deadline_s)

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        return self._call(
            lambda database: [_get(database, item) for item in items],
            lambda bad: [Got(bad)] * len(items),
            deadline_s,
        )

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        return self._each("SELECT count(*) FROM objects WHERE name = ?", names, deadline_s)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        return self._each("DELETE FROM objects WHERE name = ?", names, deadline_s)

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        return self._each(RENEW, names, deadline_s)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        def scan(database: sqlite3.Connection) -> list[ObjectInfo]:
            # "{" comes next to "z", the last of the characters that a name may have.
            return [ObjectInfo(*row) for row in database.execute(SCAN, (prefix, prefix + "{"))]

        def fail(bad: Outcome) -> list[ObjectInfo]:
            raise OSError(f"{self._path} cannot be listed: {bad}")

        return iter(self._call(scan, fail, deadline_s))

    def close(self) -> None:
        self._is_closed = True

    def _each(self, sql: str, names: Sequence[str], deadline_s: float) -> list[Outcome]:
        def run(database: sqlite3.Connection) -> list[Outcome]:
            outcomes = []
            for name in names:
                cursor = database.execute(sql, (name,))
                count = cursor.fetchone()[0] if sql.startswith("SELECT") else cursor.rowcount
                outcomes.append(Outcome.OK if count else Outcome.MISS)
            return outcomes

        return self._call(run, lambda bad: [bad] * len(names), deadline_s)

    def _call(
        self,
        act: Callable[[sqlite3.Connection], list[Answer]],
        bad: Callable[[Outcome], list[Answer]],
        deadline_s: float,
    ) -> list[Answer]:
        """What ``act`` answers, in one transaction; or ``bad``. Nothing is raised for what SQLite does."""
        if self._is_closed:
            return bad(Outcome.REJECTED)
        if deadline_s <= 0:
            return bad(Outcome.TIMED_OUT)
        try:
            with closing(sqlite3.connect(self._path, timeout=deadline_s)) as database, database:
                database.execute("PRAGMA synchronous=NORMAL")  # what a crash loses is computed again
                answers = act(database)
        except sqlite3.Error as error:
            if "locked" in str(error):
                return bad(Outcome.TIMED_OUT)
            self._trouble.failed(self._path, str(error), "kvbm: %s: %s", self._path, error)
            return bad(Outcome.IO_ERROR)
        self._trouble.worked(self._path, "kvbm: %s works again", self._path)
        return answers


def _get(database: sqlite3.Connection, item: GetItem) -> Got:
    sizes = [piece.nbytes for piece in item.pieces]
    found = database.execute(GET, (item.offset_bytes + 1, sum(sizes), item.name)).fetchone()
    if found is None:
        return Got(Outcome.MISS)
    whole_bytes, content = found
    if not item.offset_bytes and whole_bytes > sum(sizes):
        return Got(Outcome.CORRUPT)
    for piece, end in zip(item.pieces, accumulate(sizes), strict=True):
        part = content[end - piece.nbytes : end]
        piece.cast("B")[: len(part)] = part
    return Got(Outcome.OK, len(content))


def open_sqlite(url: str, options: StoreOptions) -> SqliteEngine:
    """The engine of ``sqlite:///PATH``."""
    place = urlsplit(url)
    if place.netloc or len(place.path) < 2:
        remedy = "write three slashes and the whole path of a file, such as sqlite:///tmp/blocks.db"
        raise ConfigError("KVBM_REMOTE_URL", url, remedy)
    return SqliteEngine(place.path)
