"""Batches over core NATS, from a thread of its own; dumps are answered as requests.

A message on ``kvbm.v1.{fleet}.{instance}.{rank}.kv`` is a batch's number, 8 bytes, and the batch. A request
to ``...{rank}.dump`` is a DumpRequest, its answer a DumpPage.

While the server is away or takes nothing, batches wait in a bounded outbox. When it is full all of it is
dropped: who listens sees by the next number that something was missed, and asks for a dump.

A server that is back finds a whole fleet at its door. Each instance comes at a moment of its own, later after
each failure, and what waits in its outbox goes out when those who listen have had time to be back too: what
they do not hear, they would ask every instance for.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvbm_core.errors import ConfigError
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.nats_session import CONNECT_TIMEOUT_S, NatsSessions, let_others_end, require_nats
from kvbm_core.events.wire import NUMBER
from kvbm_core.fleet.keys import is_local
from kvbm_core.observe.log import RateLimitedLogger, TroubleLog
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.numa import leave_bound_core

if TYPE_CHECKING:
    from nats.aio.client import Client
    from pydantic import SecretStr

    from kvbm_core.config import KvbmSettings

log = logging.getLogger("kvbm")

MAX_OUTBOX_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 1 << 20
"""As servers take them, if nobody has told them otherwise."""
CLIENT_BYTES = 1 << 20
"""What the client may hold that the server has not taken: more stays in the outbox."""
HOLD_S = 2.0
"""After a reconnection batches wait so long for those who listen: one that lost its connection too is back.
"""
BUSY_S = 0.05
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NatsLogin:
    """Where the server is, and who we are. Files are paths, empty for none. ``nkey``: a seed.
    ``certificate_file``: certificate and key in one file. ``insecure``: without TLS beyond this machine.
    """

    server: str
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    credentials_file: str = ""
    nkey: str = field(default="", repr=False)
    ca_file: str = ""
    certificate_file: str = ""
    insecure: bool = False

    def servers(self) -> list[str]:
        """Each with its scheme, in small letters: with others the client takes it for a host's name."""
        parts = (part.strip().rpartition("://") for part in self.server.split(","))
        return [f"{scheme.lower() or 'nats'}://{rest}" for scheme, _, rest in parts if scheme or rest]

    def check(self) -> None:
        """ConfigError, one line, for what cannot be used."""
        for url in self.servers():
            host = _host_of(url)
            if not host:
                raise ConfigError("NATS_SERVER", _shown(url), "write nats://HOST:PORT or tls://HOST:PORT")
            if not is_local(f"tcp://[{host}]:4222") and self.tls_for(url) is None and not self.insecure:
                remedy = "is on another machine and has no TLS; write tls://, or set KVBM_FLEET_INSECURE=1"
                raise ConfigError("NATS_SERVER", _shown(url), remedy)
        for name in ("credentials_file", "ca_file", "certificate_file"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(_SETTINGS[name], path, "is no file; write the path of one")

    def tls_for(self, url: str) -> ssl.SSLContext | None:
        """None: without."""
        if not (url.startswith("tls://") or self.ca_file or self.certificate_file):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file)
        except (ssl.SSLError, OSError) as error:
            setting = "certificate_file" if self.certificate_file else "ca_file"
            raise ConfigError(_SETTINGS[setting], getattr(self, setting), f"is of no use: {error}") from error
        return context

    def options(self) -> dict[str, Any]:
        """For the client. If TLS is wanted of one server, it is of all, and of those that they name."""
        found: dict[str, Any] = {"servers": self.servers()}
        named = {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "user_credentials": self.credentials_file,
            "nkeys_seed_str": self.nkey,
        }
        found.update({name: value for name, value in named.items() if value})
        tls = next((t for url in self.servers() if (t := self.tls_for(url)) is not None), None)
        if tls is not None:
            found["tls"] = tls
        return found


_SETTINGS = {
    "credentials_file": "NATS_AUTH_CREDENTIALS_FILE",
    "ca_file": "KVBM_NATS_CA_FILE",
    "certificate_file": "KVBM_NATS_CERT_FILE",
}


def _host_of(url: str) -> str:
    """Empty if it is no address of a NATS server."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("nats", "tls") and (parts.port is None or parts.port > 0)
    except ValueError:
        return ""
    return (parts.hostname or "") if is_one else ""


def _shown(url: str) -> str:
    """Without a password."""
    return url.rpartition("@")[2] if "@" in url else url


def subject(fleet: str, instance: str, rank: int) -> str:
    """What an instance's data-parallel rank publishes under, without the last word."""
    return f"kvbm.v1.{_word(fleet)}.{_word(instance)}.{rank}"


def _word(name: str) -> str:
    """One word of a subject."""
    return name.replace(".", "-")


def login_of(settings: KvbmSettings) -> NatsLogin:
    """As the settings say."""

    def secret(value: SecretStr | None) -> str:
        return "" if value is None else value.get_secret_value()

    return NatsLogin(
        settings.nats_server,
        settings.nats_username or "",
        secret(settings.nats_password),
        secret(settings.nats_token),
        settings.nats_credentials_file or "",
        secret(settings.nats_nkey),
        settings.nats_ca_file or "",
        settings.nats_cert_file or "",
        settings.fleet_insecure,
    )


class NatsSink:
    """See the module. ConfigError if the package is missing, or a file is."""

    serves = False

    def __init__(
        self,
        login: NatsLogin,
        prefix: str,
        metrics: Metrics,
        *,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        require_nats("KVBM_EVENTS")
        login.check()
        self._login = login
        self._prefix = prefix
        self._metrics = metrics
        self._max_outbox_bytes = max_outbox_bytes
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._dumps: Dumps | None = None
        self._trouble = TroubleLog(log)
        self._log = RateLimitedLogger(log)
        self._loop = asyncio.new_event_loop()
        self._is_news = asyncio.Event()
        own = {"name": "kvbm", "pending_size": 2 * CLIENT_BYTES, "no_echo": True}
        self._sessions = NatsSessions(lambda: login.options() | own, self._fails)
        self._client: Client | None = None
        self._held_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvbm-nats", daemon=True)

    def open(self, dumps: Dumps) -> None:
        """See Sink. Does not wait for the server."""
        self._dumps = dumps
        log.info("kvbm: KV events are published over NATS as %s.kv", self._prefix)
        self._thread.start()

    def send(self, number: int, payload: bytes) -> None:
        """See Sink."""
        message = NUMBER.pack(number) + payload
        with self._lock:
            if self._outbox_bytes + len(message) > self._max_outbox_bytes:
                self._metrics.event_batches_dropped(len(self._outbox))
                self._outbox.clear()
                self._outbox_bytes = 0
            self._outbox.append(message)
            self._outbox_bytes += len(message)
        self._wake()

    def serve(self, timeout_s: float) -> None:
        """See Sink: nothing."""

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._is_news.set)

    def close(self) -> None:
        """See Sink. What waits has a moment to get out, if the server takes it."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._sessions.end)
        self._wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        elif not self._loop.is_closed():
            self._loop.close()

    # ---------------------------------------------------------------- its own thread

    def _run(self) -> None:
        leave_bound_core()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("kvbm: KV events reach NATS no more")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._sessions.run(self._begin, self._pump)
        await let_others_end()

    async def _begin(self, client: Client) -> None:
        async def asked(message: Any) -> None:
            page = None if self._dumps is None else self._dumps.answer(message.data)
            if page is not None and message.reply:
                await client.publish(message.reply, page)

        async def heard_a_twin(message: Any) -> None:
            line = (
                "kvbm: another process publishes KV events as %s, so that readers believe neither: give each "
                "engine a KVBM_INSTANCE of its own, or none"
            )
            self._log.warning("twin", line, self._prefix)

        # Before the first connection nothing was lost.
        self._held_until_s = 0.0 if self._client is None else self._loop.time() + HOLD_S
        self._client = client
        if client.max_payload < MAX_MESSAGE_BYTES:
            line = "kvbm: NATS at %s takes %d bytes in a message: set its max_payload to %d, or readers that "
            line += "missed KV events cannot be sent all"
            at = _shown(self._login.server)
            self._log.warning("payload", line, at, client.max_payload, MAX_MESSAGE_BYTES)
        await client.subscribe(f"{self._prefix}.dump", cb=asked)
        await client.subscribe(f"{self._prefix}.kv", cb=heard_a_twin)
        self._trouble.worked("nats", "kvbm: NATS takes KV events again")

    def _fails(self, error: Exception) -> None:
        if f'subscription to "{self._prefix}.kv"'.lower() in str(error).lower():
            return  # then nobody tells of a twin
        why = f"{type(error).__name__}: {error}".strip(": ")
        line = "kvbm: KV events do not reach NATS at %s (%s); they wait, and are dropped if it takes long"
        self._trouble.failed("nats", type(error).__name__, line, _shown(self._login.server), why)

    async def _pump(self, client: Client) -> None:
        """Gives the client what waits, as much as it may hold, until its session or this sink has ended."""
        while client.is_connected:
            is_held = not self._sessions.is_ending and self._loop.time() < self._held_until_s
            has_to_wait = is_held or client.pending_data_size > CLIENT_BYTES
            message = None if has_to_wait else self._next()
            if message is not None:
                try:
                    await asyncio.wait_for(client.publish(f"{self._prefix}.kv", message), CONNECT_TIMEOUT_S)
                except Exception as error:  # it is lost, and its number says so
                    self._fails(error)
                    self._metrics.event_batches_dropped(1)
            elif self._sessions.is_ending:
                return
            elif has_to_wait:
                await asyncio.sleep(BUSY_S)
            else:  # a beat comes once a second, at least
                self._is_news.clear()
                await self._is_news.wait()

    def _next(self) -> bytes | None:
        with self._lock:
            if not self._outbox:
                return None
            message = self._outbox.popleft()
            self._outbox_bytes -= len(message)
            return message
