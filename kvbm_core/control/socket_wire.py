"""Orders over a socket of this machine: for who runs the engine, and for root. No keys, as the kernel says
who connects.

The socket is in a folder that only this user can enter. One line with an order, one line with its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from pathlib import Path

import msgspec

from kvbm_core.control.messages import MAX_ANSWER_BYTES, MAX_ORDER_BYTES, Answer, Order, decode
from kvbm_core.control.place import is_private, private_place
from kvbm_core.control.responder import Responder
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger

log = logging.getLogger("kvbm")

SUFFIX, DRAFT = ".ctl", ".new"
READ_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 8
BACKLOG = 64
MAX_SHOWN_NAME = 32
MAX_SOCKET_PATH_BYTES = 107
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SETTING = "KVBM_CONTROL"


def sockets() -> list[Path]:
    """Those that are there; those of processes that are gone are removed."""
    place = private_place()
    if not is_private(place):
        return []
    sweep(place)
    return sorted(place.glob(f"*{SUFFIX}"))


def name_of(path: Path) -> str:
    """Instance and rank, as far as the name of a socket tells them."""
    return path.name.removesuffix(SUFFIX).rpartition("-")[0]


class SocketWire:
    """The engine's side. ConfigError, one line, if there can be no socket."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._connected = 0
        self._log = RateLimitedLogger(log)
        folder = private_place()
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if not is_private(folder):
            raise ConfigError("TMPDIR", folder, "is not private to this user; set a directory of your own")
        name = f"{responder.instance[:MAX_SHOWN_NAME]}.{responder.about.rank}"
        self.path = folder / f"{name}-{secrets.token_hex(4)}{SUFFIX}"
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH_BYTES:
            remedy = "is too long for the path of a socket; set a shorter one"
            raise ConfigError("TMPDIR", folder.parent, remedy)
        sweep(folder)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        draft = self.path.with_suffix(DRAFT)
        try:
            self._socket.bind(str(draft))
            draft.chmod(0o600)
            self._socket.listen(BACKLOG)
            draft.rename(self.path)  # by this name it is there when it can be connected to, and not before
        except OSError as error:
            self._socket.close()
            draft.unlink(missing_ok=True)
            raise ConfigError(_SETTING, "socket", f"{self.path} cannot be made: {error.strerror}") from None

    async def serve(self, closing: asyncio.Event) -> None:
        """Until ``closing``."""
        server = await asyncio.start_unix_server(self._connect, sock=self._socket, limit=MAX_ORDER_BYTES)
        log.info("kvbm: orders are taken at %s", self.path)
        await closing.wait()
        # Before the server closes, who was accepted needs a turn of the loop: else asyncio drops the socket.
        asyncio.get_running_loop().remove_reader(self._socket)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        server.close()

    def close(self) -> None:
        """May be called twice."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected += 1
        try:
            if self._connected <= MAX_CONNECTIONS and self._is_ours(writer):
                await self._converse(reader, writer)
        except asyncio.CancelledError:  # the end; streams of Python 3.11 would call it an error
            return
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            self._log.warning("socket", "kvbm: an order at %s was not understood: %s", self.path, error)
        finally:
            self._connected -= 1
            writer.close()

    def _is_ours(self, writer: asyncio.StreamWriter) -> bool:
        found = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, user, _ = _CREDENTIALS.unpack(found)
        is_ours = user in (os.getuid(), 0)
        if not is_ours:
            self._log.warning("user", "kvbm: refused an order of user %d at %s", user, self.path)
        return is_ours

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await asyncio.wait_for(reader.readline(), READ_TIMEOUT_S)
        if not line:  # it only looked whether somebody is here
            return
        order = decode(line, Order) if line.endswith(b"\n") else None
        if order is None:
            raise ValueError(f"{len(line)} bytes that are no order")
        writer.write(msgspec.json.encode(await self._responder.answer(order)) + b"\n")
        await asyncio.wait_for(writer.drain(), READ_TIMEOUT_S)


def sweep(folder: Path) -> None:
    """Removes sockets of processes that are gone."""
    for path in folder.glob(f"*{SUFFIX}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:
                continue


async def ask_socket(path: Path, order: Order, timeout_s: float) -> Answer | None:
    """The operator's side; None if nobody answers there."""

    async def converse() -> Answer | None:
        reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_ANSWER_BYTES)
        try:
            writer.write(msgspec.json.encode(order) + b"\n")
            await writer.drain()
            return decode(await reader.readline(), Answer, MAX_ANSWER_BYTES)
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(converse(), timeout_s)
    except (OSError, ValueError, asyncio.TimeoutError):
        return None
