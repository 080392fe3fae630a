"""Object stores as an ObjectEngine: S3 and what speaks it, by obstore; Google's and Azure's the same way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.config.remote_url import Bucket
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import TroubleLog
from kvbm_core.storage.base import Memory
from kvbm_core.storage.call_pool import CallPool, IsGivenUp
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import EngineTraits, GetItem, Got, PutItem
from kvbm_core.storage.remote.s3_answers import Trouble, answer_in, is_beyond_the_end, judge
from kvbm_core.storage.remote.s3_client import StoreMaker

if TYPE_CHECKING:
    from obstore.store import ObjectStore

NUM_THREADS = 16
"""For reads, and as many for writes; each has one connection at a time."""
CHUNK_BYTES = 1 << 20
"""What comes is copied in pieces of this size: smaller ones cost 5 to 15 % more CPU, and so much a thread is
in flight beside the caller's memory.
"""
OFF_S = 300.0
"""A store that refuses is left alone for so long."""
RETRY_AFTER_S = 0.1
"""A second try comes after one to two of this: servers that are busy ask for a pause."""
CLOSE_TIMEOUT_S = 2.0
RENEW_AFTER_S = 86_400.0
"""Renewing costs as much as two writes; whichever engine comes first does it for all."""
LISTED_AT_ONCE = 1000
UNSAID = (400, 401, 403)
"""Answers to HEAD, which have no body, whose cause the same question by GET tells: clock, key, right."""
_SETTING = "KVBM_REMOTE_URL"

Act = Callable[["ObjectStore", IsGivenUp], Outcome]


class S3Engine:
    """ObjectEngine of a bucket. Safe to call from any thread.

    Names are content's, so writing one again is harmless: puts are unconditional. If-None-Match would save
    nothing, since the bytes have been sent by the time a server says 412, and would keep an object that got
    damaged from being replaced.

    What is got is copied to the caller's memory while its call lasts, never later. What is put is read from
    the caller's memory by obstore as it is sent, also when the call has been given up: ``holds`` says so
    (``timeout_s`` and one retry later at most). Making one sends nothing.
    """

    def __init__(
        self, make: StoreMaker, bucket: Bucket, timeout_s: float, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._make = make
        self._url = bucket.url
        self._timeout_s = timeout_s
        self._store: ObjectStore | None = make(timeout_s)
        self._readers = CallPool("s3-read", NUM_THREADS, clock)
        self._writers = CallPool("s3-write", NUM_THREADS, clock)
        self._reads = _Way("reads", self._readers, self._url, clock)
        self._writes = _Way("writes", self._writers, self._url, clock)
        self._removals = _Way("removals", self._writers, self._url, clock)
        self._is_closed = threading.Event()
        self._draw = Random()  # noqa: S311 (a pause before a second try)

    def __repr__(self) -> str:
        return f"S3Engine({self._url!r})"

    @property
    def traits(self) -> EngineTraits:
        """See ObjectEngine."""
        return EngineTraits(concurrency=NUM_THREADS, batch_items=NUM_THREADS)

    # ---------------------------------------------------------------- ObjectEngine

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""

        def act(index: int, store: ObjectStore, is_given_up: IsGivenUp) -> Outcome:
            import obstore

            pieces = [piece.cast("B") for piece in items[index].pieces if piece.nbytes]
            content = pieces[0] if len(pieces) == 1 else pieces or b""
            with suppress(obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                obstore.put(store, items[index].name, content, use_multipart=False)
            return Outcome.OK

        memory = [item.pieces for item in items]
        return self._run(self._writes, act, len(items), deadline_s, memory)

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """See ObjectEngine."""
        landing = _Landing(items)

        def act(index: int, store: ObjectStore, is_given_up: IsGivenUp) -> Outcome:
            return landing.bring(index, store)

        outcomes = self._run(self._reads, act, len(items), deadline_s)
        return landing.close(outcomes)

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""

        def act(index: int, store: ObjectStore, is_given_up: IsGivenUp) -> Outcome:
            import obstore

            try:
                obstore.head(store, names[index])
            except Exception as error:
                if answer_in(error)[0] not in UNSAID:
                    raise
                obstore.get_range(store, names[index], start=0, length=1)
            return Outcome.OK

        return self._run(self._reads, act, len(names), deadline_s)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. S3 says OK of what was not there."""

        def act(index: int, store: ObjectStore, is_given_up: IsGivenUp) -> Outcome:
            import obstore

            obstore.delete(store, names[index])
            return Outcome.OK

        return self._run(self._removals, act, len(names), deadline_s)

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. Lifecycle rules go by the time of the last write; what is young enough is left.

        Two copies within the server: S3 copies nothing onto itself without a header that obstore does not
        sign.
        """

        def act(index: int, store: ObjectStore, is_given_up: IsGivenUp) -> Outcome:
            import obstore

            name = names[index]
            age_s = time.time() - obstore.head(store, name)["last_modified"].timestamp()
            if age_s < RENEW_AFTER_S:
                return Outcome.OK
            beside = f"{name}.renewed"
            obstore.copy(store, name, beside)
            with suppress(FileNotFoundError):  # somebody else has renewed it at the same time
                obstore.copy(store, beside, name)
            with suppress(OSError, obstore.exceptions.BaseError):  # the next renewal writes over it
                obstore.delete(store, beside)
            return Outcome.OK

        return self._run(self._writes, act, len(names), deadline_s)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """See ObjectEngine."""
        import obstore

        if self._is_closed.is_set():
            raise OSError(f"{self._url} is closed")
        folder = prefix.rpartition("/")[0]  # obstore lists folders
        started_s = time.monotonic()
        try:
            for page in obstore.list(self._make(deadline_s), folder or None, chunk_size=LISTED_AT_ONCE):
                for found in page:
                    if found["path"].startswith(prefix):
                        changed_s = found["last_modified"].timestamp()
                        yield ObjectInfo(found["path"], found["size"], changed_s)
                started_s = time.monotonic()
        except (OSError, obstore.exceptions.BaseError) as error:
            trouble = judge(error, was_late=time.monotonic() - started_s >= deadline_s)
            why = trouble.why or (
                "no answer in time" if trouble.outcome is Outcome.TIMED_OUT else "not found"
            )
            raise OSError(f"{self._url} cannot be listed: {why}") from None

    def close(self) -> None:
        """See ObjectEngine."""
        self._is_closed.set()
        for pool in (self._readers, self._writers):
            pool.close(CLOSE_TIMEOUT_S)
        self._store = None

    # ---------------------------------------------------------------- inside

    def _run(
        self,
        way: _Way,
        act: Callable[[int, ObjectStore, IsGivenUp], Outcome],
        count: int,
        deadline_s: float,
        memory: Sequence[Memory] | None = None,
    ) -> list[Outcome]:
        store = self._store
        if store is None or self._is_closed.is_set():
            return [Outcome.REJECTED] * count
        if way.is_off:
            return [Outcome.IO_ERROR] * count

        def task(index: int, is_given_up: IsGivenUp) -> Outcome:
            return self._try_twice(way, lambda: act(index, store, is_given_up), is_given_up)

        return way.pool.run(task, count, deadline_s=deadline_s, targets=memory)

    def _try_twice(self, way: _Way, act: Callable[[], Outcome], is_given_up: IsGivenUp) -> Outcome:
        for is_last in (False, True):
            started_s = time.monotonic()
            try:
                outcome = act()
            except (
                BaseException
            ) as error:  # Rust's panics are no Exceptions; a thread of a pool gets no other
                trouble = judge(error, was_late=time.monotonic() - started_s >= self._timeout_s)
            else:
                way.worked()
                return outcome
            if is_last or not trouble.may_pass or is_given_up():
                break
            self._is_closed.wait(self._draw.uniform(RETRY_AFTER_S, 2 * RETRY_AFTER_S))
            if is_given_up() or self._is_closed.is_set():
                break
        return way.failed(trouble)


class _Way:
    """Whether one kind of request is refused, which is said once and then left alone for ``OFF_S``. Keys may
    read that may not write. Any thread.
    """

    def __init__(self, what: str, pool: CallPool, url: str, clock: Clock) -> None:
        self.pool = pool
        self._what = what
        self._url = url
        self._clock = clock
        self._trouble = TroubleLog(clock=clock)
        self._off_until_s = float("-inf")

    @property
    def is_off(self) -> bool:
        """Whether it is left alone now."""
        return self._clock.now_s() < self._off_until_s

    def failed(self, trouble: Trouble) -> Outcome:
        """Its outcome; says why, if that has not been said."""
        if trouble.why:
            pause = f"; it is left alone for {OFF_S / 60:g} minutes at a time" if trouble.is_off else ""
            line = "kvbm: %s=%s: %s fail: %s%s"
            self._trouble.failed(
                "it", trouble.kind, line, _SETTING, self._url, self._what, trouble.why, pause
            )
        elif trouble.outcome is Outcome.MISS:
            self.worked()
        if trouble.is_off:
            self._off_until_s = self._clock.now_s() + OFF_S
        return trouble.outcome

    def worked(self) -> None:
        """Says so, if it was said that it fails."""
        self._trouble.worked("it", "kvbm: %s=%s: %s work again", _SETTING, self._url, self._what)


class _Landing:
    """The memory of one call: nothing is written to it once the call has ended. Any thread."""

    def __init__(self, items: Sequence[GetItem]) -> None:
        self._items = items
        self._locks = [threading.Lock() for _ in items]  # one for all would make threads wait for each other
        self._is_over = False
        self._num_bytes = [0] * len(items)

    def bring(self, index: int, store: ObjectStore) -> Outcome:
        """Reads one object; obstore's exceptions. An object that is too large is not read."""
        import obstore

        item = self._items[index]
        pieces = [piece.cast("B") for piece in item.pieces if piece.nbytes]
        start, room_bytes = item.offset_bytes, sum(piece.nbytes for piece in pieces)
        if start and not room_bytes:
            obstore.head(store, item.name)
            return Outcome.OK
        try:
            options = {"range": (start, start + room_bytes)} if start else None
            found = obstore.get(store, item.name, options=options)
        except obstore.exceptions.BaseError as error:
            if start and is_beyond_the_end(error):
                return Outcome.OK
            raise
        if not start and found.meta["size"] > room_bytes:
            return Outcome.CORRUPT
        return self._fill(index, pieces, found.stream(CHUNK_BYTES))

    def _fill(self, index: int, pieces: Sequence[memoryview], chunks: Iterable[bytes]) -> Outcome:
        filled_bytes, room_bytes = 0, sum(piece.nbytes for piece in pieces)
        lock = self._locks[index]
        for chunk in chunks:
            with lock:
                if self._is_over:
                    return Outcome.TIMED_OUT
                if filled_bytes + len(chunk) > room_bytes:
                    return Outcome.CORRUPT
                _copy(pieces, filled_bytes, chunk)
            filled_bytes += len(chunk)
        self._num_bytes[index] = filled_bytes
        return Outcome.OK

    def close(self, outcomes: Sequence[Outcome]) -> list[Got]:
        """The call's answers; whoever still reads is too late."""
        self._is_over = True
        for lock in self._locks:  # whoever has it has looked before, and ends soon
            with lock:
                pass
        pairs = zip(outcomes, self._num_bytes, strict=True)
        return [Got(outcome, filled if outcome is Outcome.OK else 0) for outcome, filled in pairs]


def _copy(pieces: Sequence[memoryview], at: int, chunk: bytes) -> None:
    """Puts ``chunk`` into them, ``at`` bytes behind their beginning."""
    left = memoryview(chunk)
    for piece in pieces:
        if not left:
            return
        if at < piece.nbytes:
            part = left[: piece.nbytes - at]
            piece[at : at + part.nbytes] = part
            left = left[part.nbytes :]
        at = max(0, at - piece.nbytes)
