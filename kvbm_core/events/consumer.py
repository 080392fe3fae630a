"""What a router does with KV events: a picture of one stream, made of its batches and of dumps.

For tests, and for who writes a router: give batches to ``Picture.take``, and when it ``wants_dump`` ask the
publisher with ``request`` until ``take_page`` has the last page. A batch that arrives meanwhile is kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import zmq

from kvbm_core.events.wire import (
    NUMBER,
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    DumpRequest,
    Event,
    Resident,
    decode_batch,
    decode_page,
    generation_of,
)
from kvbm_core.fleet.keys import CurveKeys

MAX_KEPT_BYTES = 16 << 20
"""Of batches that arrive during a dump."""

ASK_AGAIN_S = 2.0
"""A request that nobody has answered by then is lost."""
REFUSED_WAIT_S = 0.2
"""Before another request, after one that was not granted."""

Place = tuple[str, int]
"""Medium and group."""


class Picture:
    """Which blocks are where, as far as events have told. One thread.

    It begins unknown: the first batch makes it want a dump. What it shows while it is not ``is_current`` may
    be gone.
    """

    def __init__(self) -> None:
        self._places: dict[Place, set[BlockHash]] = {}
        self._last: int | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._dump = 0
        self._page = 0
        self._pages: list[Resident] = []
        self.is_current = False
        """Whether it has everything that was published, up to the last batch that arrived."""
        self.gaps_total = 0
        self.bad_batches_total = 0

    @property
    def places(self) -> Mapping[Place, frozenset[BlockHash]]:
        """What is where; without places that have nothing."""
        return {place: frozenset(hashes) for place, hashes in self._places.items() if hashes}

    def media_of(self, block_hash: BlockHash, group: int = 0) -> set[str]:
        """Where the block is."""
        return {medium for (medium, g), hashes in self._places.items() if g == group and block_hash in hashes}

    # ---------------------------------------------------------------- batches

    def take(self, number: int, payload: bytes) -> None:
        """A batch has arrived. Those that were taken before are left out."""
        last = self._last
        if last is not None and self.is_current and generation_of(number) == generation_of(last):
            if number <= last:
                return
            if number == last + 1:
                self._apply(number, payload)
                return
        elif last is not None and generation_of(number) != generation_of(last):
            self._places.clear()  # what was there is there no more
            self._restart()
        if self.is_current:
            self.gaps_total += 1
        self.is_current = False
        if self._kept and number != self._kept[-1][0] + 1:
            if number <= self._kept[-1][0]:
                return
            self._restart()
        self._last = number
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._restart()
            self._last = number

    def _restart(self) -> None:
        """Of the dump; a new one is to be asked for."""
        self._kept.clear()
        self._kept_bytes = 0
        self._dump = self._page = 0
        self._pages = []

    def _apply(self, number: int, payload: bytes) -> None:
        batch = decode_batch(payload)
        if batch is None:
            self.bad_batches_total += 1
            self.is_current = False
            self._restart()
            return
        self._last = number
        for event in batch.events:
            self._apply_event(event)

    def _apply_event(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            for (medium, _), hashes in self._places.items():
                if event.medium in (None, medium):
                    hashes.clear()
            return
        hashes = self._places.setdefault((event.medium or "", event.group_idx or 0), set())
        if isinstance(event, BlockStored):
            hashes.update(event.block_hashes)
        else:
            hashes.difference_update(event.block_hashes)

    # ---------------------------------------------------------------- dumps

    @property
    def wants_dump(self) -> bool:
        """Whether ``request`` is to be sent."""
        return not self.is_current and bool(self._kept)

    def request(self) -> bytes:
        """For the publisher: the next page of the dump, or a new dump."""
        since = self._kept[0][0] if self._kept else 0
        return DumpRequest(since, self._dump, self._page).pack()

    def take_page(self, payload: bytes) -> bool:
        """The publisher's answer. False: there is no such dump, or too soon for a new one; ask again in a
        moment.
        """
        page = decode_page(payload)
        is_next = page is not None and page.number and page.page == self._page
        if page is None or not is_next or (self._dump and page.dump != self._dump):
            self._dump = self._page = 0
            self._pages = []
            return False
        self._dump, self._page = page.dump, page.page + 1
        self._pages += page.residents
        if page.is_last:
            self._finish(page.number)
        return True

    def _finish(self, number: int) -> None:
        pages, self._pages = self._pages, []
        self._dump = self._page = 0
        if not self._kept or generation_of(self._kept[0][0]) != generation_of(number):
            return
        if self._kept[0][0] > number + 1:
            return  # what came between is lost
        self._places = {}
        for resident in pages:
            self._places.setdefault((resident.medium, resident.group), set()).update(resident.hashes)
        kept = list(self._kept)
        self._restart()
        self.is_current, self._last = True, number
        for later, payload in kept:
            if later > number and self.is_current:
                self._apply(later, payload)


class ZmqReader:
    """A picture that follows a publisher over ZMQ. One thread, which calls ``poll``.

    ``keys``: our own, for a publisher that has keys; ``server_key``: its public one (CurveKeys.server_key).
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        topic: str = "",
        keys: CurveKeys | None = None,
        server_key: bytes = b"",
    ) -> None:
        self.picture = Picture()
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 16_384)
        self._sub.subscribe(topic)
        self._asking: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        if keys is not None:
            keys.trust(self._sub, server_key)
            keys.trust(self._asking, server_key)
        self._sub.connect(endpoint)
        self._asking.connect(replay_endpoint)
        self._ask_at_s = 0.0
        self._poller = zmq.Poller()
        for socket in (self._sub, self._asking):
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Takes what has arrived, waiting ``timeout_s`` for it at most, and asks for what is missing."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._sub in ready:
            _, number, payload = self._sub.recv_multipart()
            self.picture.take(NUMBER.unpack(number)[0], payload)
        now_s = time.monotonic()
        if self._asking in ready:
            *_, page = self._asking.recv_multipart()
            self._ask_at_s = now_s + (0.0 if self.picture.take_page(page) else REFUSED_WAIT_S)
        if self.picture.wants_dump and now_s >= self._ask_at_s:
            self._asking.send_multipart((b"", self.picture.request()), zmq.NOBLOCK)
            self._ask_at_s = now_s + ASK_AGAIN_S

    def close(self) -> None:
        """May be called twice."""
        self._sub.close(linger=0)
        self._asking.close(linger=0)
        self._context.term()
