"""A router's side of KV events over NATS: follows the data-parallel ranks of one instance, or of many.

For tests, and for who writes a router. Needs nats-py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvbm_core.events.consumer import ASK_AGAIN_S, REFUSED_WAIT_S, Picture
from kvbm_core.events.nats_session import RECONNECT_S, NatsSessions, let_others_end
from kvbm_core.events.nats_sink import CLOSE_TIMEOUT_S, NatsLogin
from kvbm_core.events.wire import NUMBER

MAX_WAITING_BYTES = 64 << 20
"""Of messages that this reader has not looked at; the client drops what comes beyond that, and a number is
missing.
"""
LOOK_S = 0.05
MAX_ASKED = 8
"""Streams whose dumps are on their way at a time. After a loss every instance's is wanted: of all at once a
server keeps 64 MiB for one reader, then closes its connection, and all is lost again.
"""


class NatsReader:
    """``prefix``: what follows is subscribed to: kvbm.v1.FLEET.INSTANCE.RANK, with * for any of the last two.

    Runs until ``close``, on a thread of its own. What it shows is as of the last batch that has arrived.
    """

    def __init__(self, login: NatsLogin, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._pictures: dict[str, Picture] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(MAX_ASKED)
        self._loop = asyncio.new_event_loop()
        # It connects again by itself, and what was missed is seen by the numbers. Without a long pause: those
        # who publish wait a moment for their readers.
        self._sessions = NatsSessions(login.options, lambda error: None, RECONNECT_S)
        self._thread = threading.Thread(target=self._run, name="kvbm-nats-reader", daemon=True)
        self._thread.start()

    def look(self, prefix: str, see: Callable[[Picture], Any]) -> Any:
        """What ``see`` says of the picture of this stream, which does not change meanwhile. Any thread."""
        with self._lock:
            return see(self._pictures.setdefault(prefix, Picture()))

    def close(self) -> None:
        """May be called twice."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._sessions.end)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._sessions.run(self._begin, self._use)
        await let_others_end()

    async def _begin(self, client: Any) -> None:
        async def heard(message: Any) -> None:
            self._heard(client, message.subject.removesuffix(".kv"), message.data)

        await client.subscribe(f"{self._prefix}.kv", cb=heard, pending_bytes_limit=MAX_WAITING_BYTES)

    async def _use(self, client: Any) -> None:
        while client.is_connected and not self._sessions.is_ending:
            await asyncio.sleep(LOOK_S)
        for task in self._asking.values():
            task.cancel()

    def _heard(self, client: Any, stream: str, message: bytes) -> None:
        if len(message) < NUMBER.size:
            return
        (number,) = NUMBER.unpack_from(message)
        with self._lock:
            picture = self._pictures.setdefault(stream, Picture())
            picture.take(number, message[NUMBER.size :])
            wants_dump = picture.wants_dump
        if wants_dump and stream not in self._asking:
            task = self._asking[stream] = self._loop.create_task(self._ask(client, stream, picture))
            task.add_done_callback(lambda done: self._asking.pop(stream))

    async def _ask(self, client: Any, stream: str, picture: Picture) -> None:
        """Until nothing is wanted. If nobody answers, or has no dump to give, the next batch asks again."""
        with suppress(Exception):
            async with self._turns:
                while (request := self._request(picture)) is not None:
                    answer = await client.request(f"{stream}.dump", request, timeout=ASK_AGAIN_S)
                    with self._lock:
                        is_granted = picture.take_page(answer.data)
                    if is_granted and self._request(picture) == request:
                        break
                    await asyncio.sleep(0.0 if is_granted else REFUSED_WAIT_S)

    def _request(self, picture: Picture) -> bytes | None:
        with self._lock:
            return picture.request() if picture.wants_dump else None
