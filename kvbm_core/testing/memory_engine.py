"""An ObjectEngine in memory that can be slow, fail, hang, lose, lie and write late, all from one seed.

``register()`` makes records on it usable as a lower tier by the URL ``memory://NAME?seed=1&flips=0.1``: what
``EngineFaults`` knows. Engines of one name in one process have their objects in common.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import EngineTraits, GetItem, Got, PutItem
from kvbm_core.storage.stores import StoreOptions, register_engine

PUT, GET, EXISTS, REMOVE, RENEW, SCAN = "put", "get", "exists", "remove", "renew", "scan"
LATE_WRITE_CALLS = 5
"""A late write lands so many calls later, if nobody lets it land before."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """How often, from 0.0 to 1.0. ``latency_ms``: of a call, on average.

    Of a call: ``hangs`` (it ends at its deadline, TIMED_OUT). Of an item: ``fails`` (IO_ERROR), ``loses``
    (the object is gone for good), ``claims`` (what is not there is said to exist). Of an object that is got,
    and told as OK: ``flips`` a bit, ``truncates``, ``extends``, ``swaps`` it for another one that is there.
    ``is_late``: the get is TIMED_OUT, and the memory is written all the same, later.
    """

    seed: int = 0
    latency_ms: float = 0.0
    hangs: float = 0.0
    fails: float = 0.0
    loses: float = 0.0
    claims: float = 0.0
    flips: float = 0.0
    truncates: float = 0.0
    extends: float = 0.0
    swaps: float = 0.0
    is_late: float = 0.0


class _Object(NamedTuple):
    content: bytes
    changed_s: float


@dataclass
class MemoryObjects:
    """What engines of one store have in common; the least recently used is forgotten first."""

    max_bytes: int | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    objects: OrderedDict[str, _Object] = field(default_factory=OrderedDict)
    used_bytes: int = 0

    def put(self, name: str, content: bytes, kept: Collection[str] = ()) -> bool:
        """False if it does not fit, whatever else is forgotten but those ``kept``. This and all below under
        the lock.
        """
        self.pop(name)
        left_bytes = float("inf") if self.max_bytes is None else self.max_bytes - len(content)
        for old in [old for old in self.objects if old not in kept]:
            if self.used_bytes <= left_bytes:
                break
            self.pop(old)
        if self.used_bytes > left_bytes:
            return False
        self.used_bytes += len(content)
        self.objects[name] = _Object(content, time.time())
        return True

    def pop(self, name: str) -> bool:
        """False if it is not there."""
        found = self.objects.pop(name, None)
        self.used_bytes -= 0 if found is None else len(found.content)
        return found is not None

    def use(self, name: str) -> bytes | None:
        """Its content; others are forgotten before it."""
        found = self.objects.get(name)
        if found is None:
            return None
        self.objects.move_to_end(name)
        return found.content

    def damage(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """It has other content from now on."""
        self.put(name, change(self.objects[name].content))


class MemoryEngine:
    """Safe to call from any thread. ``faults`` may be replaced at any time."""

    def __init__(
        self,
        faults: EngineFaults | None = None,
        objects: MemoryObjects | None = None,
        traits: EngineTraits | None = None,
    ) -> None:
        self.faults = faults or EngineFaults()
        self.objects = objects or MemoryObjects()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        """Name and objects of all that was asked."""
        self._traits = traits or EngineTraits(8, 16, self.objects.max_bytes is not None)
        self._random = Random(self.faults.seed)  # noqa: S311 (a test's randomness)
        self._lock = threading.Lock()
        self._late: list[tuple[int, list[memoryview], bytes, int]] = []
        self._is_closed = threading.Event()

    @property
    def traits(self) -> EngineTraits:
        """See ObjectEngine."""
        return self._traits

    # ---------------------------------------------------------------- late writes

    def land(self) -> None:
        """All late writes land now."""
        self._land(None)

    def _land(self, number: int | None) -> None:
        with self._lock:
            due = [late for late in self._late if number is None or late[0] <= number]
            self._late = [late for late in self._late if late not in due]
        for _, pieces, content, token in due:
            _fill(pieces, content)
            LATE.end(token)

    # ---------------------------------------------------------------- ObjectEngine

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        names = [item.name for item in items]
        own: set[str] = set()
        return self._call(PUT, names, deadline_s, lambda index: self._put(items[index], own), lambda bad: bad)

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """See ObjectEngine."""
        names = [item.name for item in items]
        return self._call(GET, names, deadline_s, lambda index: self._get(items[index]), Got)

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._call(EXISTS, names, deadline_s, lambda i: self._exists(names[i]), lambda bad: bad)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._call(
            REMOVE, names, deadline_s, lambda i: _found(self.objects.pop(names[i])), lambda bad: bad
        )

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        return self._call(RENEW, names, deadline_s, lambda i: self._renew(names[i]), lambda bad: bad)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """See ObjectEngine."""
        (outcome,) = self._call(SCAN, [prefix], deadline_s, lambda _: Outcome.OK, lambda bad: bad)
        if outcome is not Outcome.OK:
            raise OSError(f"the memory engine cannot list its objects: {outcome}")
        with self.objects.lock:
            found = [
                ObjectInfo(name, len(content), changed_s)
                for name, (content, changed_s) in self.objects.objects.items()
                if name.startswith(prefix)
            ]
        return iter(found)

    def close(self) -> None:
        """See ObjectEngine."""
        self._is_closed.set()

    # ---------------------------------------------------------------- a call

    def _call(
        self,
        name: str,
        names: Sequence[str],
        deadline_s: float,
        act: Callable[[int], _Answer],
        bad: Callable[[Outcome], _Answer],
    ) -> list[_Answer]:
        """``act`` for each item, or ``bad`` with what went wrong."""
        with self._lock:
            self.calls.append((name, tuple(names)))
            number = len(self.calls)
            latency_s = self._random.uniform(0.0, 2e-3 * self.faults.latency_ms)
            hangs = self._is_drawn(self.faults.hangs)
        self._land(number)
        is_late = hangs or latency_s > deadline_s or deadline_s <= 0
        if is_late or latency_s:
            self._is_closed.wait(max(0.0, deadline_s if is_late else latency_s))
        if self._is_closed.is_set():
            return [bad(Outcome.REJECTED) for _ in names]
        if is_late:
            return [bad(Outcome.TIMED_OUT) for _ in names]
        with self.objects.lock, self._lock:
            return [
                bad(Outcome.IO_ERROR) if self._is_drawn(self.faults.fails) else act(index)
                for index in range(len(names))
            ]

    def _is_drawn(self, rate: float) -> bool:
        return rate > 0.0 and self._random.random() < rate

    # ---------------------------------------------------------------- an object, under both locks

    def _put(self, item: PutItem, own: set[str]) -> Outcome:
        """``own``: put by the same call, and not to be forgotten for what comes behind."""
        content = b"".join(item.pieces)
        most = self._traits.max_object_bytes
        if (most is not None and len(content) > most) or not self.objects.put(item.name, content, own):
            return Outcome.NO_SPACE
        own.add(item.name)
        return Outcome.OK

    def _get(self, item: GetItem) -> Got:
        content = self._content(item.name)
        if content is None:
            return Got(Outcome.MISS)
        room_bytes = sum(piece.nbytes for piece in item.pieces)
        wanted = content[item.offset_bytes : item.offset_bytes + room_bytes]
        if not item.offset_bytes and len(content) > room_bytes:
            return Got(Outcome.CORRUPT)
        if self._is_drawn(self.faults.is_late):
            token = LATE.add(ranges_of(item.pieces), item.pieces)
            self._late.append((len(self.calls) + LATE_WRITE_CALLS, list(item.pieces), wanted, token))
            return Got(Outcome.TIMED_OUT)
        _fill(item.pieces, wanted)
        return Got(Outcome.OK, len(wanted))

    def _content(self, name: str) -> bytes | None:
        """As it is told."""
        faults, rng = self.faults, self._random
        if self._is_drawn(faults.loses):
            self.objects.pop(name)
        content = self.objects.use(name)
        if content is None:
            return None
        if self._is_drawn(faults.swaps):
            content = self.objects.objects[rng.choice(list(self.objects.objects))].content
        if self._is_drawn(faults.flips):
            changed = bytearray(content)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            content = bytes(changed)
        if self._is_drawn(faults.truncates):
            content = content[: rng.randrange(len(content))]
        if self._is_drawn(faults.extends):
            content += rng.randbytes(rng.randrange(1, 5000))
        return content

    def _exists(self, name: str) -> Outcome:
        return _found(name in self.objects.objects or self._is_drawn(self.faults.claims))

    def _renew(self, name: str) -> Outcome:
        content = self.objects.use(name)
        if content is not None:
            self.objects.put(name, content)
        return _found(content is not None)


def _found(is_there: bool) -> Outcome:
    return Outcome.OK if is_there else Outcome.MISS


def _fill(pieces: Sequence[memoryview], content: bytes) -> None:
    at = 0
    for piece in pieces:
        part = content[at : at + piece.nbytes]
        piece.cast("B")[: len(part)] = part
        at += piece.nbytes


# ---------------------------------------------------------------- by URL

_SHARED: dict[str, MemoryObjects] = {}
OPENED: list[MemoryEngine] = []
"""Those that were opened by URL, for tests that look at them."""


def register() -> None:
    """Makes ``memory://`` URLs usable in this process."""
    register_engine("memory", _open)


def forget_all() -> None:
    """Nothing of what was opened by URL remains."""
    _SHARED.clear()
    OPENED.clear()


def land_all() -> None:
    """Late writes of all engines that were opened by URL land now."""
    for engine in OPENED:
        engine.land()


def _open(url: str, options: StoreOptions) -> MemoryEngine:
    parts, given = urlsplit(url), dict[str, Any]()
    types = {known.name: int if known.name == "seed" else float for known in fields(EngineFaults)}
    for name, value in parse_qsl(parts.query):
        try:
            given[name] = types[name](value)
        except (KeyError, ValueError):
            raise ConfigError("KVBM_REMOTE_URL", url, f"{name}={value} is no fault of it") from None
    objects = _SHARED.setdefault(parts.netloc, MemoryObjects(options.max_bytes))
    engine = MemoryEngine(EngineFaults(**given), objects)
    OPENED.append(engine)
    return engine
