"""Dumps: what a stream has told so far and is still so, in pages, for who missed something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbm_core.clock import Clock
from kvbm_core.events.log import Snapshot
from kvbm_core.events.wire import (
    MAX_PAGE_BYTES,
    PAGE_HASHES,
    BlockHash,
    DumpPage,
    DumpRequest,
    Resident,
    encode,
    generation_of,
)

KEPT_S = 30.0
"""A dump of which no page was asked for so long is thrown away."""
MAX_DUMPS = 4
"""At once. The one that nobody has asked for longest makes room."""
BETWEEN_S = 0.5
"""From one to the next, at least, and SPARED times what the last one took: whoever asks, dumps take a fifth
of a core. Many that ask meanwhile share the next one.
"""
SPARED = 4

TakeSnapshot = Callable[[], tuple[int, Snapshot]]
"""The picture, and the number of the last batch that is part of it."""


class _Dump(NamedTuple):
    number: int
    pages: list[list[Resident]]


class Dumps:
    """Answers requests for dumps. Any thread."""

    def __init__(self, take: TakeSnapshot, clock: Clock) -> None:
        self._take = take
        self._clock = clock
        self._lock = threading.Lock()
        self._dumps: dict[int, _Dump] = {}
        self._used_s: dict[int, float] = {}
        self._next_id = 1
        self._next_at_s = float("-inf")
        self.served_total = 0
        """Dumps that were begun."""

    def answer(self, request: bytes) -> bytes | None:
        """A page, as bytes; None for what is no request."""
        asked = DumpRequest.unpack(request)
        if asked is None:
            return None
        with self._lock:
            self._forget_old()
            number = asked.dump or self._dump_for(asked.since)
            dump = self._dumps.get(number)
            if dump is None or asked.page >= len(dump.pages):
                return encode(DumpPage(0, 0, 0, True, []))
            self._used_s[number] = self._clock.now_s()
            is_last = asked.page == len(dump.pages) - 1
            return encode(DumpPage(dump.number, number, asked.page, is_last, dump.pages[asked.page]))

    def _dump_for(self, since: int) -> int:
        """One that is new enough; 0 if it is too soon for another."""
        for number, dump in self._dumps.items():
            is_same = generation_of(dump.number) == generation_of(since)
            if since and is_same and dump.number >= since - 1:
                return number
        now_s = self._clock.now_s()
        if now_s < self._next_at_s:
            return 0
        if len(self._dumps) >= MAX_DUMPS:
            self._forget(min(self._used_s, key=self._used_s.__getitem__))
        last, snapshot = self._take()
        number, self._next_id = self._next_id, self._next_id + 1
        self._dumps[number] = _Dump(last, list(_pages(snapshot)))
        self._used_s[number] = now_s
        took_s = self._clock.now_s() - now_s
        self._next_at_s = now_s + took_s + max(BETWEEN_S, SPARED * took_s)
        self.served_total += 1
        return number

    def _forget_old(self) -> None:
        since_s = self._clock.now_s() - KEPT_S
        for number in [number for number, used_s in self._used_s.items() if used_s < since_s]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._dumps[number], self._used_s[number]


def _pages(snapshot: Snapshot) -> Iterator[list[Resident]]:
    """At least one."""
    page, num_free = list[Resident](), PAGE_HASHES
    for (medium, group), hashes in snapshot.hashes.items():
        first = 0
        while first < len(hashes):
            num_free = min(num_free, _hashes_of_a_page(hashes[first]))
            if num_free <= 0:
                yield page
                page, num_free = [], PAGE_HASHES
                continue
            part = hashes[first : first + num_free]
            page.append(Resident(medium, group, part))
            first += len(part)
            num_free -= len(part)
    yield page


def _hashes_of_a_page(example: BlockHash) -> int:
    return PAGE_HASHES if isinstance(example, int) else MAX_PAGE_BYTES // (len(example) + 2)
