"""Connections to a NATS server, one after the other: one that has broken is given up, never mended.

The client's own way to connect again is not used: it ends for good when a server refuses us once, and cannot
be interrupted while no server is there.

Nor is its TLS trusted: it goes on in clear, with the password, where a server does not ask for TLS. So with
``tls`` among its options, ours says nothing before TLS is up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from nats.aio.client import Client

PING_S, MAX_PINGS = 2, 2
"""A server that does not answer for that long is left, and connected to anew."""
CONNECT_TIMEOUT_S = 2
SESSION_TIMEOUT_S = 6.0
"""For a connection with all that belongs to it: TLS, CONNECT, subscriptions."""
RECONNECT_S = 1.0
MAX_RECONNECT_S = 5.0
"""An attempt to connect comes within RECONNECT_S, at a moment drawn at random; after each that failed within
twice as long, up to this: a whole fleet does not come at once.
"""
_FIRST_WORDS = "_connect_command"
"""The client's method that makes what it says first on each connection, a mended one and one to a server that
it was told of too. Nothing is written before it.
"""


def require_nats(setting: str) -> None:
    """ConfigError, one line, without the package: at the start, not at the first message."""
    try:
        import nats.aio.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            setting, "nats", "needs the package nats-py: pip install 'nats-py[nkeys]'"
        ) from error


def new_client() -> Client:
    """Not connected. With TLS wanted, ConnectionError, one line, from ``connect`` to a server without it."""
    made: Client = _client_class()()
    return made


@cache
def _client_class() -> type[Client]:
    from nats.aio.client import Client

    class TlsOrNothing(Client):
        _wants_tls = True

        async def connect(self, *servers: Any, **options: Any) -> None:
            self._wants_tls = options.get("tls") is not None
            if self._wants_tls and not hasattr(Client, _FIRST_WORDS):
                raise ConnectionError("this nats-py is not known to keep quiet before TLS: install 2.16")
            await super().connect(*servers, **options)

        def _connect_command(self) -> bytes:
            writer = getattr(self._transport, "_io_writer", None)
            if self._wants_tls and (writer is None or writer.get_extra_info("ssl_object") is None):
                if self._transport is not None:
                    self._transport.close()  # so that nothing that waits goes there at the end either
                raise ConnectionError("TLS is wanted and the server does not ask for it; it was told nothing")
            words: bytes = super()._connect_command()
            return words

    return TlsOrNothing


class NatsSessions:
    """``options``: for the client, and what else it is to be told. ``failed`` hears of every trouble.
    ``max_reconnect_s``: between two attempts. On one event loop; ``end`` too.
    """

    def __init__(
        self,
        options: Callable[[], dict[str, Any]],
        failed: Callable[[Exception], None],
        max_reconnect_s: float = MAX_RECONNECT_S,
    ) -> None:
        self._options = options
        self._failed = failed
        self._max_reconnect_s = max_reconnect_s
        self._jitter = random.SystemRandom()
        self._ending = asyncio.Event()

    @property
    def is_ending(self) -> bool:
        """Whether ``end`` has been called."""
        return self._ending.is_set()

    def end(self) -> None:
        """No session is begun any more, and none is waited for."""
        self._ending.set()

    async def run(
        self, begin: Callable[[Client], Awaitable[None]], use: Callable[[Client], Awaitable[None]]
    ) -> None:
        """Until ``end``: connects, lets ``begin`` subscribe, and ``use`` the session until it has ended."""
        num_failed = 0
        while not self.is_ending:
            client = new_client()
            num_failed += 1
            try:
                await self._unless_ending(self._begin(client, begin), SESSION_TIMEOUT_S)
                num_failed = 0
                await use(client)
                if client.last_error is not None:
                    self._failed(client.last_error)
            except Exception as error:  # whatever it is, it is tried again
                if not self.is_ending:
                    self._failed(error)
            with suppress(Exception):
                await asyncio.wait_for(client.close(), CONNECT_TIMEOUT_S)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._pause_s(num_failed))

    def _pause_s(self, num_failed: int) -> float:
        """Before the next attempt, after as many."""
        return self._jitter.uniform(0, min(self._max_reconnect_s, RECONNECT_S * 2 ** min(num_failed, 10)))

    async def _begin(self, client: Client, begin: Callable[[Client], Awaitable[None]]) -> None:
        async def failed(error: Exception) -> None:
            self._failed(error)

        await client.connect(
            **self._options(),
            error_cb=failed,
            connect_timeout=CONNECT_TIMEOUT_S,
            allow_reconnect=False,
            ping_interval=PING_S,
            max_outstanding_pings=MAX_PINGS,
        )
        if not client.is_connected:
            # Something came before the answer to the client's first ping, such as the ping of a server that
            # stood still. The client then neither sends nor closes, and says nothing.
            raise ConnectionError("the server did not answer in order")
        await begin(client)

    async def _unless_ending(self, step: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Until it is done. TimeoutError if that takes longer, or if ``end`` is called meanwhile."""
        task, ending = asyncio.create_task(step), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((task, ending), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimeoutError(f"nothing came of it in {timeout_s:g} s")
            task.result()
        finally:
            for each in (task, ending):
                each.cancel()
            await asyncio.wait((task, ending))


async def let_others_end() -> None:
    """For a loop that has nothing but sessions to run, at its end: the client closes connections in tasks of
    its own.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=CONNECT_TIMEOUT_S)
        for task in late:
            task.cancel()
    await asyncio.sleep(0)
