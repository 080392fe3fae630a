"""The ranks that share what the first of them loads: who is there, what comes next, and the bytes.

What comes next goes over a loopback connection of each rank to the first, so that waiting costs no GPU time
and ends at once when a rank is gone. The bytes go through torch's own process groups (NCCL or gloo), apart
from the engine's.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome

LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.0002
MAX_STRANGERS = 64
"""Connections that have not said yet who they are; the oldest one makes room."""
# Never: its watchdog would end the whole process, where we only give up our own group.
_NCCL_TIMEOUT = timedelta(days=365)
_OUTCOMES = tuple(Outcome)
_HEADER = struct.Struct("<qqB?")
_JOIN = struct.Struct("<32sH")
_WELCOME = struct.Struct("<H")
_VOTE = struct.Struct("<B")
DIGEST_BYTES = 16
_NO_ONE = "a connection ended: a rank is gone or has given up"


class GroupError(RuntimeError):
    """The group is of no use any more."""


def loopback_name() -> str:
    """Of this process's loopback addresses: two processes that name them alike reach each other there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # then nobody is known to be near
        return secrets.token_hex(16)


class Header(NamedTuple):
    """What the first rank has loaded: for which job, with what outcome, how many bytes. ``has_digests``: a
    digest follows all that is shared.
    """

    job_id: int
    num_bytes: int
    outcome: Outcome
    has_digests: bool = False


class MeetingPoint:
    """The first rank's listening socket. ``address`` is for the other ranks only: who knows it may join."""

    def __init__(self) -> None:
        self.socket = socket.create_server((LOOPBACK, 0))
        self.token = secrets.token_hex(16)
        self.address = f"{self.socket.getsockname()[1]}/{self.token}"

    def close(self) -> None:
        """Nobody joins any more; whoever waits for that is woken. May be called twice, from any thread."""
        _shut(self.socket)

    def discard(self) -> None:
        """Gives the socket back, when nobody uses it."""
        self.socket.close()


class _Door:
    """Lets in those who say the token. Who says nothing, or something else, holds up nobody."""

    def __init__(self, point: MeetingPoint) -> None:
        self._token = point.token.encode()
        self._selector = selectors.DefaultSelector()
        point.socket.setblocking(False)
        self._selector.register(point.socket, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> list[tuple[socket.socket, int]]:
        """Connections of those who have said the token, and which ranks they are."""
        known: list[tuple[socket.socket, int]] = []
        ready = [key for key, _ in self._selector.select(timeout_s)]
        for key in sorted(ready, key=lambda key: key.data is None):  # it may close one of the others
            end = cast("socket.socket", key.fileobj)
            if key.data is None:
                self._accept(end)
            elif (rank := self._read(end, key.data)) is not None:
                known.append((end, rank))
        return known

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):  # who came has gone again
            peer, _ = listener.accept()
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ, bytearray())
        strangers = self._strangers()
        if len(strangers) > MAX_STRANGERS:
            self._send_away(strangers[0])

    def _read(self, peer: socket.socket, said: bytearray) -> int | None:
        """None: it has not said all, or is sent away."""
        with suppress(OSError):
            said += (part := peer.recv(_JOIN.size - len(said)))
            if part and len(said) < _JOIN.size:
                return None
        if len(said) == _JOIN.size:
            token, rank = _JOIN.unpack(said)
            if hmac.compare_digest(token, self._token):
                self._selector.unregister(peer)
                return int(rank)
        self._send_away(peer)
        return None

    def _strangers(self) -> list[socket.socket]:
        """The oldest first."""
        keys = self._selector.get_map().values()
        return [cast("socket.socket", key.fileobj) for key in keys if key.data is not None]

    def _send_away(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        stranger.close()

    def close(self) -> None:
        for stranger in self._strangers():
            self._send_away(stranger)
        self._selector.close()


class Group:
    """One rank's end. All but ``close`` belong to one thread; each call raises GroupError, or another error
    of the connection or of torch, when the group is broken, ``timeout_s`` has passed or ``close`` was called.

    ``ranks``: all that share, by their numbers; the first of them has the ``point``, which is closed with the
    group. ``load_timeout_s``: what the first rank may take to load. ``max_ctas``: for NCCL; None leaves it
    the choice.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        address: str,
        point: MeetingPoint | None = None,
        *,
        timeout_s: float = 30.0,
        load_timeout_s: float = 120.0,
        max_ctas: int | None = None,
    ) -> None:
        if (rank == ranks[0]) != (point is not None):
            raise ValueError("the first rank, and nobody else, has the meeting point")
        self.rank = rank
        self._ranks = tuple(ranks)
        self._address = address
        self._point = point
        self._timeout_s = timeout_s
        self._max_ctas = max_ctas
        self._load_timeout_s = load_timeout_s
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._peers: list[socket.socket] = []
        self._pg: Any = None

    def connect(self, device: Any) -> None:
        """Waits for all ranks, and sends a first byte; once. The bytes will be on ``device``
        (torch.device).
        """
        _check_backend(device)
        if self._point is None:
            port, _, token = self._address.partition("/")
            peer = self._keep(socket.create_connection((LOOPBACK, int(port)), self._timeout_s))
            self._write(peer, _JOIN.pack(token.encode(), self.rank))
            (port_of_store,) = _WELCOME.unpack(self._read(peer, _WELCOME.size, self._timeout_s))
            self._make(port_of_store, None, device)
            return
        self._gather_peers(self._point)
        with socket.create_server((LOOPBACK, 0)) as listener:
            port_of_store = listener.getsockname()[1]
            for peer in self._peers:
                self._write(peer, _WELCOME.pack(port_of_store))
            self._make(port_of_store, listener, device)

    def _gather_peers(self, point: MeetingPoint) -> None:
        missing = set(self._ranks[1:])
        ends_at_s = self._clock.now_s() + self._timeout_s
        with closing(_Door(point)) as door:
            while missing:
                left_s = ends_at_s - self._clock.now_s()
                if left_s <= 0:
                    line = f"of ranks {list(self._ranks)} {sorted(missing)} did not come"
                    raise GroupError(f"{line} within {self._timeout_s:g} s")
                for peer, rank in door.wait(left_s):
                    if rank in missing:
                        missing.remove(rank)
                        self._keep(peer)
                    else:
                        peer.close()
        point.close()

    def _keep(self, peer: socket.socket) -> socket.socket:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._peers.append(peer)
            is_closed = self._is_closed
        if is_closed:
            _shut(peer)
        return peer

    def _make(self, port: int, listener: socket.socket | None, device: Any) -> None:
        """The process group; every rank is here now."""
        import torch
        from torch import distributed

        timeout = timedelta(seconds=self._timeout_s)
        position, size = self._ranks.index(self.rank), len(self._ranks)
        listen_fd = None if listener is None else listener.detach()
        store = distributed.TCPStore(
            LOOPBACK,
            port,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _NCCL_TIMEOUT
            if self._max_ctas is not None and hasattr(options, "config"):
                options.config.max_ctas = self._max_ctas
            self._pg = distributed.ProcessGroupNCCL(store, position, size, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            self._pg = distributed.ProcessGroupGloo(store, position, size, options)
        self.share(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects with the first broadcast

    # ---------------------------------------------------------------- one load

    def announce(self, header: Header) -> None:
        """The first rank: tells all what comes, and waits until each has said that it expects just that."""
        number = _OUTCOMES.index(header.outcome)
        frame = _HEADER.pack(header.job_id, header.num_bytes, number, header.has_digests)
        for peer in self._peers:
            self._write(peer, frame)
        votes = [_VOTE.unpack(self._read(peer, _VOTE.size, self._timeout_s))[0] for peer in self._peers]
        if not all(votes):
            raise GroupError(f"job {header.job_id} is not what the other ranks expect")

    def hear(self) -> Header:
        """Another rank: what the first has loaded."""
        frame = self._read(self._peers[0], _HEADER.size, self._load_timeout_s)
        job_id, num_bytes, outcome, has_digests = _HEADER.unpack(frame)
        return Header(job_id, num_bytes, _OUTCOMES[outcome], has_digests)

    def vote(self, is_expected: bool) -> None:
        """Another rank's answer to what it has heard."""
        self._write(self._peers[0], _VOTE.pack(is_expected))

    def share(self, tensor: Any) -> None:
        """The first rank's content of ``tensor`` (contiguous, uint8) is in everybody's, on return."""
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _NCCL_TIMEOUT if tensor.is_cuda else timedelta(seconds=self._timeout_s)
        ends_at_s = self._clock.now_s() + self._timeout_s
        work = self._pg.broadcast([tensor], options)
        while not work.is_completed():
            time.sleep(POLL_INTERVAL_S)
            # A rank that is through already may be gone too: that is no reason to give up what it has left to
            # us.
            if any(_is_gone(peer) for peer in self._peers) and not work.is_completed():
                raise GroupError(_NO_ONE)
            if self._clock.now_s() > ends_at_s:
                raise GroupError(
                    f"a broadcast of {tensor.numel()} bytes took longer than {self._timeout_s:g} s"
                )
        # NCCL that gives up because a rank is gone ends its work as if all bytes had come.
        if tensor.is_cuda and any(_is_gone(peer) for peer in self._peers):
            raise GroupError(_NO_ONE)
        work.wait()

    def tell_digest(self, digest: bytes) -> None:
        """The first rank: of what was shared last."""
        for peer in self._peers:
            self._write(peer, digest)

    def hear_digest(self) -> bytes:
        """Another rank: what the first has told."""
        return self._read(self._peers[0], DIGEST_BYTES, self._timeout_s)

    def _write(self, peer: socket.socket, frame: bytes) -> None:
        peer.settimeout(self._timeout_s)
        peer.sendall(frame)

    def _read(self, peer: socket.socket, num_bytes: int, timeout_s: float) -> bytes:
        peer.settimeout(timeout_s)
        content = b""
        while len(content) < num_bytes:
            try:
                part = peer.recv(num_bytes - len(content))
            except TimeoutError:
                raise GroupError(f"a rank said nothing for {timeout_s:g} s") from None
            if not part:
                raise GroupError(_NO_ONE)
            content += part
        return content

    # ---------------------------------------------------------------- ends

    def close(self) -> None:
        """Any thread: whatever is waited for, here and on the other ranks, ends with an error. May be called
        twice.
        """
        with self._lock:
            self._is_closed = True
            peers = list(self._peers)
        if self._point is not None:
            self._point.close()
        for peer in peers:
            _shut(peer)

    def discard(self) -> None:
        """Gives up what is left, after ``close``, when no call is under way."""
        for peer in self._peers:
            peer.close()
        if self._point is not None:
            self._point.discard()
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()


def _check_backend(device: Any) -> None:
    """GroupError if torch has not what is needed, before anybody waits for a rank that cannot come."""
    from torch import distributed

    is_cuda = device.type == "cuda"
    is_there = distributed.is_available() and (
        distributed.is_nccl_available() if is_cuda else distributed.is_gloo_available()
    )
    if not is_there:
        raise GroupError(f"this torch has no {'NCCL' if is_cuda else 'gloo'}")


def _is_gone(peer: socket.socket) -> bool:
    peer.settimeout(0.0)
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def _shut(end: socket.socket) -> None:
    """Wakes whoever waits on the socket, on both sides; closing it is for the thread that uses it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
