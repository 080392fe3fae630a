"""Orders over NATS: for operators, who sign them.

A request to ``kvbm.v1.{fleet}.{instance}.ctl`` is for one instance, one to ``kvbm.v1.{fleet}.ctl`` for all; a
SignedOrder. Each of its data-parallel ranks answers with an Answer.

Whoever may publish there can send anything: what is too large is not read, what is too much is not listened
to for a while, and answers go to inboxes alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from kvbm_core.config.readers import shown
from kvbm_core.control.budget import ORDERS_PER_S, Budget
from kvbm_core.control.messages import MAX_ANSWER_BYTES, MAX_ORDER_BYTES, Answer, Order, decode
from kvbm_core.control.operators import OperatorKey, Operators, RefusedError
from kvbm_core.control.responder import Responder
from kvbm_core.errors import ConfigError
from kvbm_core.events.nats_session import CONNECT_TIMEOUT_S, NatsSessions, new_client, require_nats
from kvbm_core.events.nats_sink import NatsLogin
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.log import RateLimitedLogger, TroubleLog
from kvbm_core.observe.metrics import Metrics

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger("kvbm")

MAX_AT_ONCE = 8
PAUSE_S = 2.0
"""So long an instance does not listen to more than its budget."""
ASK_CONNECT_S = 5.0
MAX_PENDING = 64
LOOK_S = 1.0
"""How often it is looked whether the session has ended."""
INBOX = "_INBOX."
SERVER = "NATS_SERVER"
_NO_RESPONDERS = "503"


def subject_of(fleet: str, instance: str = "") -> str:
    """Of the orders to one instance, or to all."""
    names = [name.replace(".", "-") for name in (fleet, instance) if name]
    return f"kvbm.v1.{'.'.join(names)}.ctl"


class NatsWire:
    """The engine's side. ConfigError, one line, without the package, or for a login that cannot be used."""

    def __init__(
        self, login: NatsLogin, fleet: str, operators: Operators, responder: Responder, metrics: Metrics
    ) -> None:
        require_nats("KVBM_CONTROL")
        login.check()
        self.heard_total = 0
        self._subjects = (subject_of(fleet, responder.instance), subject_of(fleet))
        self._operators = operators
        self._responder = responder
        self._metrics = metrics
        self._trouble = TroubleLog(log)
        self._log = RateLimitedLogger(log)
        self._sessions = NatsSessions(lambda: login.options() | {"name": "kvbm control"}, self._fails)
        self._client: Client | None = None
        self._listening: list[Any] = []
        self._asked: set[asyncio.Task[None]] = set()
        self._resting: set[asyncio.Task[None]] = set()
        self._is_paused = False
        self._budget = Budget()

    async def serve(self, closing: asyncio.Event) -> None:
        """Until ``closing``; while the server is away it is tried again and again."""

        async def use(client: Client) -> None:
            while client.is_connected and not closing.is_set():
                await _wait(closing, LOOK_S)

        async def end() -> None:
            await closing.wait()
            self._sessions.end()

        ending = asyncio.create_task(end())
        await self._sessions.run(self._begin, use)
        for task in (ending, *self._asked, *self._resting):
            task.cancel()

    async def _begin(self, client: Client) -> None:
        self._is_paused = False
        await self._listen(client)
        if self._client is None:
            log.info("kvbm: orders are taken over NATS at %s", " and ".join(self._subjects))
        self._client = client
        self._trouble.worked("nats", "kvbm: orders can be given over NATS again")

    async def _listen(self, client: Client) -> None:
        self._listening = [
            await client.subscribe(
                subject,
                cb=self._heard,
                pending_msgs_limit=MAX_PENDING,
                pending_bytes_limit=2 * MAX_ORDER_BYTES,
            )
            for subject in self._subjects
        ]

    def _fails(self, error: Exception) -> None:
        from nats.errors import SlowConsumerError

        if isinstance(error, SlowConsumerError):  # more at once than the client may hold for us
            self._refused("too much at once, or too large")
            return
        why = f"{type(error).__name__}: {error}".strip(": ")
        line = "kvbm: no orders come over NATS (%s); the engine serves on"
        self._trouble.failed("nats", type(error).__name__, line, why)

    # ---------------------------------------------------------------- one order

    async def _heard(self, message: Any) -> None:
        self.heard_total += 1
        if self._is_paused:
            return
        if not self._budget.take():
            self._pause()
            return
        if not message.reply.startswith(INBOX):  # else anybody could have us write anywhere
            self._refused("it names no inbox for the answer")
            return
        if len(self._asked) >= MAX_AT_ONCE:
            return
        try:
            order = self._operators.check(message.data)
        except RefusedError as error:
            self._refused(str(error))
            await self._tell(message.reply, self._responder.refuse(str(error)))
            return
        task = asyncio.create_task(self._answer(order, message.reply))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    def _refused(self, why: str) -> None:
        self._metrics.failure(FailureKind.BAD_MESSAGE)
        self._log.warning("refused", "kvbm: refused an order that came over NATS: %s", why)

    async def _answer(self, order: Order, inbox: str) -> None:
        await self._tell(inbox, await self._responder.answer(order))

    async def _tell(self, inbox: str, answer: Answer) -> None:
        if self._client is not None:
            with suppress(Exception):  # who asked has gone, or the server has
                await self._client.publish(inbox, msgspec.json.encode(answer))

    # ---------------------------------------------------------------- too much

    def _pause(self) -> None:
        self._is_paused = True
        line = "kvbm: more than %d orders a second come over NATS; none is taken for %g s"
        self._log.warning("flood", line, ORDERS_PER_S, PAUSE_S)
        self._metrics.failure(FailureKind.BAD_MESSAGE)
        task = asyncio.create_task(self._rest(self._client, self._listening))
        self._resting.add(task)
        task.add_done_callback(self._resting.discard)

    async def _rest(self, client: Client | None, listening: list[Any]) -> None:
        """The server is told to send no more, so that the flood does not even reach this process."""
        if client is None:
            return
        with suppress(Exception):
            for subscription in listening:
                await subscription.unsubscribe()
            await asyncio.sleep(PAUSE_S)
            self._is_paused, self._budget = False, Budget()
            if client is self._client:
                await self._listen(client)


async def _wait(closing: asyncio.Event, seconds: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(closing.wait(), seconds)


# ---------------------------------------------------------------- the operator's side


async def ask_nats(
    login: NatsLogin,
    key: OperatorKey,
    order: Order,
    is_complete: Callable[[list[Answer]], bool],
    wait_s: float,
) -> list[Answer]:
    """What was answered until ``is_complete``, nobody listens, or the time is over. ConfigError, one line, if
    there is no such server.
    """
    require_nats("KVBM_CONTROL")
    login.check()
    client, answers = new_client(), list[Answer]()
    is_over = asyncio.Event()

    async def failed(error: Exception) -> None:
        """Told by ``connect``."""

    async def heard(message: Any) -> None:
        if (message.headers or {}).get("Status") == _NO_RESPONDERS:
            is_over.set()
        elif (answer := decode(message.data, Answer, MAX_ANSWER_BYTES)) is not None:
            answers.append(answer)
            if is_complete(answers):
                is_over.set()

    try:
        connecting = client.connect(
            **login.options(),
            name="kvbm fleet",
            error_cb=failed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            connect_timeout=CONNECT_TIMEOUT_S,
        )
        await asyncio.wait_for(connecting, ASK_CONNECT_S)
        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=heard)
        subject = subject_of(order.fleet, order.instance)
        payload = key.sign(order)
        if len(payload) > client.max_payload:
            why = f"takes {client.max_payload:,} bytes in a message, and this order has {len(payload):,}: "
            raise ConfigError(SERVER, shown(login.server), f"{why}set its max_payload, or shorten the prompt")
        await client.publish(subject, payload, reply=inbox)
        await _wait(is_over, wait_s)
    except ConfigError:
        raise
    except Exception as error:  # whatever package and server can do
        why = f"cannot be asked: {type(error).__name__}: {error}".strip(": ")
        raise ConfigError(SERVER, shown(login.server), why) from None
    finally:
        with suppress(Exception):
            await asyncio.wait_for(client.close(), CONNECT_TIMEOUT_S)
    return answers
