"""Server sockets that let in those alone whose public keys are on the list.

ZMQ asks one socket per context, the ZAP handler, about everybody who connects. A ``Gate`` is that handler, on
a thread of its own: whatever else the context's threads do, whoever connects is answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.observe.log import RateLimitedLogger

log = logging.getLogger("kvbm")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"kvbm"
HANDSHAKE_TIMEOUT_MS = 5000
"""A connection that has not shown its key by then is closed."""
CLOSE_TIMEOUT_S = 5.0
MAX_AT_ONCE = 1000

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT_BYTES = 2


class Gate:
    """Who may connect to the server sockets of one context. One per context; any thread.

    ``on_refused`` is called, on the gate's thread, for each connection that ends before it has shown an
    allowed key, if it speaks ZMQ's protocol (libzmq tells nothing of others). Once the gate is closed nobody
    new is let in. It ends by itself when its context is terminated.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: CurveKeys,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self.refused_total = 0
        self._context = context
        self._keys = keys
        self._on_refused = on_refused
        self._log = RateLimitedLogger(log)
        self._lock = threading.Lock()  # guards all below
        self._new_monitors: list[zmq.Socket[bytes]] = []
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)  # before the first server socket: else it would find nobody to ask
        self._thread = threading.Thread(target=self._run, name="kvbm-gate", daemon=True)
        self._thread.start()

    def server_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that takes connections of those on the list alone; not yet bound. What it receives carries
        the sender's public key (Z85): ``frame.get("User-Id")``.
        """
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        self.guard(socket)
        return socket

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Makes one of a socket of this context that is not bound yet."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret)
        # Without a domain, libzmq lets everybody in when the handler is gone.
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        monitor = socket.get_monitor_socket(_REFUSALS | zmq.EVENT_MONITOR_STOPPED)
        with self._lock:
            if self._is_closing:
                socket.disable_monitor()
                monitor.close(linger=0)
                return
            self._new_monitors.append(monitor)
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends the thread; nobody new is let in. May be called twice."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- on the gate's thread

    def _run(self) -> None:
        monitors: list[zmq.Socket[bytes]] = []
        try:
            while not self._is_closing:
                poller = zmq.Poller()
                for readable in (self._wake_fd, self._zap, *monitors):
                    poller.register(readable, zmq.POLLIN)
                ready = dict(poller.poll())
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    with self._lock:
                        monitors += self._new_monitors
                        self._new_monitors.clear()
                if self._zap in ready:
                    self._answer()
                monitors = [one for one in monitors if one not in ready or self._has_more(one)]
        except zmq.ZMQError as error:  # the context ends, and we with it
            if error.errno != zmq.ETERM:
                log.exception("kvbm: nobody new can connect any more")
        finally:
            with self._lock:
                self._is_closing = True
                os.close(self._wake_fd)
                for socket in (self._zap, *monitors, *self._new_monitors):
                    socket.close(linger=0)

    def _answer(self) -> None:
        version, request_id, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        public = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        try:
            is_allowed = bool(public) and self._keys.is_allowed(public)
        except Exception as error:  # a bug must not leave the connection, and all later ones, unanswered
            self._log.warning("broken", "kvbm: keys could not be compared", exc_info=error)
            is_allowed = False
        if not is_allowed:
            line = "kvbm: refused a connection from %s: its key %s is not in KVBM_CURVE_ALLOWED"
            self._log.warning("refused", line, address.decode(errors="replace"), public.decode())
        # 300: it may be on the list later. After 400 its socket would never try again.
        status = (b"200", b"OK", public) if is_allowed else (b"300", b"not allowed", b"")
        self._zap.send_multipart([version, request_id, *status, b""])

    def _has_more(self, monitor: zmq.Socket[bytes]) -> bool:
        """Counts what it tells; False once its socket is closed."""
        for _ in range(MAX_AT_ONCE):
            with contextlib.suppress(zmq.Again):
                event = monitor.recv_multipart(zmq.NOBLOCK)[0]
                if int.from_bytes(event[:_EVENT_BYTES], "little") == zmq.EVENT_MONITOR_STOPPED:
                    monitor.close(linger=0)
                    return False
                self.refused_total += 1
                self._on_refused()
                continue
            break
        return True
