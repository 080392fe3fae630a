"""The ranks that share what rank 0 loads: who is there, what comes next, and the bytes.

What comes next goes over a loopback connection of each rank to rank 0, so that waiting costs no GPU time and
ends at once when a rank is gone. The bytes go through torch's own process groups (NCCL or gloo), apart from
the engine's.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome

LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.0002
JOIN_TIMEOUT_S = 2.0
# Never: its watchdog would end the whole process, where we only give up our own group.
_NCCL_TIMEOUT = timedelta(days=365)
_OUTCOMES = tuple(Outcome)
_HEADER = struct.Struct("<qqB")
_JOIN = struct.Struct("<32sH")
_WELCOME = struct.Struct("<H")
_VOTE = struct.Struct("<B")
_NO_ONE = "a connection ended: a rank is gone or has given up"


class GroupError(RuntimeError):
    """The group is of no use any more."""


class Header(NamedTuple):
    """What rank 0 has loaded: for which job, with what outcome, how many bytes."""

    job_id: int
    num_bytes: int
    outcome: Outcome


class MeetingPoint:
    """Rank 0's listening socket. ``address`` is for the other ranks only: who knows it may join."""

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


class Group:
    """One rank's end. All but ``close`` belong to one thread; each call raises GroupError, or another error
    of the connection or of torch, when the group is broken, ``timeout_s`` has passed or ``close`` was called.

    ``point``: rank 0's, which is closed with the group. ``max_ctas``: for NCCL; None leaves it the choice.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        point: MeetingPoint | None = None,
        *,
        timeout_s: float = 30.0,
        max_ctas: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if (rank == 0) != (point is not None):
            raise ValueError("rank 0, and nobody else, has the meeting point")
        self.rank = rank
        self._size = size
        self._address = address
        self._point = point
        self._timeout_s = timeout_s
        self._max_ctas = max_ctas
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._peers: list[socket.socket] = []
        self._pg: Any = None

    def connect(self, device: Any) -> None:
        """Waits for all ranks; the bytes will be on ``device`` (torch.device)."""
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
        joined: set[int] = set()
        ends_at_s = self._clock.now_s() + self._timeout_s
        while len(joined) < self._size - 1:
            point.socket.settimeout(max(0.001, ends_at_s - self._clock.now_s()))
            try:
                peer, _ = point.socket.accept()
            except TimeoutError:
                came = f"{len(joined) + 1} of {self._size} ranks came"
                raise GroupError(f"{came} within {self._timeout_s:g} s") from None
            rank = self._rank_of(peer, point.token)
            if 0 < rank < self._size and rank not in joined:
                joined.add(rank)
                self._keep(peer)
            else:
                peer.close()
        point.close()

    def _rank_of(self, peer: socket.socket, token: str) -> int:
        """What a rank says that it is; -1 for somebody who does not know the token."""
        try:
            said, rank = _JOIN.unpack(self._read(peer, _JOIN.size, JOIN_TIMEOUT_S))
        except (GroupError, OSError):
            return -1
        return int(rank) if hmac.compare_digest(said, token.encode()) else -1

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
            self._pg = distributed.ProcessGroupNCCL(store, self.rank, self._size, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            self._pg = distributed.ProcessGroupGloo(store, self.rank, self._size, options)
        self.share(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects with the first broadcast

    # ---------------------------------------------------------------- one load

    def announce(self, header: Header) -> None:
        """Rank 0: tells all ranks what comes, and waits until each has said that it expects just that."""
        frame = _HEADER.pack(header.job_id, header.num_bytes, _OUTCOMES.index(header.outcome))
        for peer in self._peers:
            self._write(peer, frame)
        votes = [_VOTE.unpack(self._read(peer, _VOTE.size, self._timeout_s))[0] for peer in self._peers]
        if not all(votes):
            raise GroupError(f"job {header.job_id} of rank 0 is not what the other ranks expect")

    def hear(self, timeout_s: float) -> Header:
        """Another rank: what rank 0 has loaded."""
        job_id, num_bytes, outcome = _HEADER.unpack(self._read(self._peers[0], _HEADER.size, timeout_s))
        return Header(job_id, num_bytes, _OUTCOMES[outcome])

    def vote(self, is_expected: bool) -> None:
        """Another rank's answer to what it has heard."""
        self._write(self._peers[0], _VOTE.pack(is_expected))

    def share(self, tensor: Any) -> None:
        """Rank 0's content of ``tensor`` (contiguous, uint8) is in everybody's, on return."""
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
