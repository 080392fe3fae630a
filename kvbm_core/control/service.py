"""Takes orders for one instance, as the settings say: over which wires, from whom; and tells etcd of it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from kvbm_core.config import KvbmSettings
from kvbm_core.config.addresses import bracketed, is_loopback
from kvbm_core.control.listed import RECORDS, InstanceRecord, proof_of
from kvbm_core.control.pages import EVERY_ADDRESS, Page
from kvbm_core.control.responder import Responder
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.numa import leave_bound_core

if TYPE_CHECKING:
    from kvbm_core.control.http_wire import HttpWire
    from kvbm_core.control.nats_wire import NatsWire
    from kvbm_core.control.socket_wire import SocketWire
    from kvbm_core.fleet.etcd import EtcdOptions
    from kvbm_core.fleet.session import EtcdSession

log = logging.getLogger("kvbm")

CLOSE_TIMEOUT_S = 5.0
MAX_RECORD_NAME = 200
_TURNS = 12  # of the loop; asyncio needs about five from a connection to its handler


class ControlService:
    """Until ``close``. What cannot be had is told in one line, and the engine serves on. One thread for all
    wires, and that of the session with etcd, if there is one. ``page``: of metrics, if there is one.
    """

    def __init__(
        self, settings: KvbmSettings, responder: Responder, metrics: Metrics, page: Page | None = None
    ) -> None:
        self._settings = settings
        self._page = page
        self._responder = responder
        self._metrics = metrics
        self._socket: SocketWire | None = None
        self._http: HttpWire | None = None
        self._nats: NatsWire | None = None
        self._session: EtcdSession | None = None
        self._rivals = RateLimitedLogger(log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        for way in settings.control_ways:
            try:
                self._open(way)
            except ConfigError as error:
                log.error("%s; orders are not taken over %s", error, way)
        self._thread = threading.Thread(target=self._run, name="kvbm-control", daemon=True)
        if self._wires():
            self._loop = asyncio.new_event_loop()
            self._closing = asyncio.Event()
            self._thread.start()
            self._register()

    @property
    def name(self) -> str:
        """Of this instance's rank, in its fleet."""
        return f"{self._responder.instance}.{self._responder.about.rank}"

    def _wires(self) -> list[SocketWire | HttpWire | NatsWire]:
        return [wire for wire in (self._socket, self._http, self._nats) if wire is not None]

    def _open(self, way: str) -> None:
        settings, responder = self._settings, self._responder
        if way == "socket":
            from kvbm_core.control.socket_wire import SocketWire

            self._socket = SocketWire(responder)
        elif way == "http":
            from kvbm_core.control.http_wire import HttpWire

            self._http = HttpWire(settings, responder, self._metrics)
        else:
            from kvbm_core.control.nats_wire import NatsWire
            from kvbm_core.control.operators import Operators
            from kvbm_core.events.nats_sink import login_of

            operators = Operators(settings.control_operators, settings.fleet, responder.instance)
            self._nats = NatsWire(login_of(settings), settings.fleet, operators, responder, self._metrics)

    def _register(self) -> None:
        if not self._settings.etcd_endpoints or (self._nats is None and self._http is None):
            return
        from kvbm_core.fleet.etcd import EtcdOptions
        from kvbm_core.fleet.session import EtcdSession

        try:
            options = EtcdOptions.from_settings(self._settings)
            if options is not None:
                record = msgspec.json.encode(self._record(options))
                self._session = EtcdSession(options, self._settings.fleet_root)
                self._session.tell(f"{RECORDS}{self.name}", record, self._on_rival)
        except ConfigError as error:
            log.error("%s; etcd does not list this instance", error)

    def _record(self, options: EtcdOptions) -> InstanceRecord:
        about, http, page = self._responder.about, self._http, self._page
        address = "" if http is None else _told_address(http.host, http.port, options)
        proof = ""
        if http is not None and address:
            proof = proof_of(http.token, self._settings.fleet, self.name, address)
        return InstanceRecord(
            self._responder.instance,
            about.rank,
            about.engine,
            about.model[:MAX_RECORD_NAME],
            socket.gethostname(),
            os.getpid(),
            self._settings.control,
            address,
            proof,
            "" if page is None else _told_address(page.host, page.port, options),
        )

    def _on_rival(self, value: bytes) -> None:
        line = (
            "kvbm: etcd lists another instance as %s: give each a KVBM_INSTANCE of its own; if that one has "
            "died, this one is listed when its lease is over"
        )
        self._rivals.warning("rival", line, self.name)

    def close(self) -> None:
        """May be called twice."""
        if self._loop is not None and self._closing is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._session is not None:
            self._session.close()
        if self._http is not None:
            self._http.close()
        if self._socket is not None:
            self._socket.close()

    # ---------------------------------------------------------------- the wires' thread

    def _run(self) -> None:
        leave_bound_core()
        if self._loop is None:
            return
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("kvbm: no orders are taken any more")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        if self._closing is None:
            return
        wires = [wire.serve(self._closing) for wire in self._wires()]
        for error in await asyncio.gather(*wires, return_exceptions=True):
            if isinstance(error, Exception):
                log.error("kvbm: no orders are taken any more over one wire", exc_info=error)
        while True:
            await _turns()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def _told_address(host: str, port: int, options: EtcdOptions) -> str:
    """Where other machines reach what is bound to ``host``: HOST:PORT; "" if they do not."""
    from kvbm_core.fleet.meeting import own_address

    if host in EVERY_ADDRESS:
        try:
            host = own_address(options)
        except ConfigError:  # no way to etcd now
            return ""
    if is_loopback(host):
        return ""
    return f"{bracketed(host)}:{port}"


async def _turns() -> None:
    """Until who has just connected has a handler, and what a handler has closed is given back."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
