"""How a leader learns its workers: sizes in, number of slots out, readiness in.

Runs on the channel's thread; what the leader needs is handed over in ``inbox`` (a deque, safe between two threads).
Until every worker is ready the tier has no slots: the engine serves, without hits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbm_core.errors import ConfigError
from kvbm_core.runtime.messages import PROTOCOL_VERSION, Configure, Hello, JobAck, Message, Ready, Refused

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """Slots 0 .. ``slots``-1 are usable on every rank; ``block_bytes`` and the device tier's size for the log."""

    slots: int
    planned_slots: int
    block_bytes: int
    num_device_blocks: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RankAck:
    """One rank's word on one job."""

    rank: int
    ack: JobAck


@dataclass(frozen=True, slots=True)
class Disabled:
    """The tier cannot be used; ``reason`` is one line."""

    reason: str


LeaderEvent = SlotsReady | RankAck | Disabled


class Handshake:
    """``size_tier(bytes of a block over all ranks)`` answers the number of slots, or raises ConfigError.

    A rank is the peer that said hello for it: what others say in its name (a worker left over from an engine that
    died, on the same port) is dropped and counted.
    """

    def __init__(self, world_size: int, size_tier: Callable[[int], int]) -> None:
        self.inbox: deque[LeaderEvent] = deque()
        self._world_size = world_size
        self._size_tier = size_tier
        self._hellos: dict[int, tuple[bytes, Hello]] = {}
        self._ready: dict[int, int] = {}
        self._num_slots: int | None = None
        self._answered = threading.Event()
        self.foreign_total = 0

    def wait(self, timeout_s: float) -> bool:
        """Waits, at start-up only, until the first slots are usable or the tier is off; False if time ran out."""
        return self._answered.wait(timeout_s)

    def on_message(self, identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        """Takes one message of one worker; returns the answers."""
        if isinstance(message, Hello):
            return self._hello(identity, message)
        if isinstance(message, Refused):
            self._disable(f"worker {message.rank}: {message.reason}")
        elif isinstance(message, Configure) or self._peer_of(message.rank) != identity:
            self.foreign_total += 1
        elif isinstance(message, Ready):
            self._on_ready(message)
        else:
            self.inbox.extend(RankAck(message.rank, ack) for ack in message.acks)
        return []

    def _peer_of(self, rank: int) -> bytes | None:
        hello = self._hellos.get(rank)
        return hello[0] if hello is not None else None

    def _disable(self, reason: str) -> None:
        self.inbox.append(Disabled(reason))
        self._answered.set()

    def _hello(self, identity: bytes, hello: Hello) -> list[tuple[bytes, Message]]:
        problem = self._problem_of(identity, hello)
        if problem is not None:
            self._disable(f"worker {hello.rank} {problem}")
            return [(identity, Refused(hello.rank, problem))]
        self._hellos[hello.rank] = (identity, hello)
        if self._num_slots is not None:
            return [(identity, Configure(self._num_slots))]
        if len(self._hellos) < self._world_size:
            return []
        try:
            self._num_slots = self._size_tier(self._block_bytes())
        except ConfigError as error:
            self._disable(str(error))
            return [(who, Refused(rank, str(error))) for rank, (who, _) in self._hellos.items()]
        return [(who, Configure(self._num_slots)) for who, _ in self._hellos.values()]

    def _problem_of(self, identity: bytes, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"speaks protocol {hello.protocol}, the leader {PROTOCOL_VERSION}; install one kvbm everywhere"
        if hello.world_size != self._world_size or not 0 <= hello.rank < self._world_size:
            return f"is rank {hello.rank} of {hello.world_size}, the leader expects {self._world_size} ranks"
        if hello.block_bytes <= 0 or hello.num_device_blocks <= 0:
            return f"has blocks of {hello.block_bytes} bytes, {hello.num_device_blocks} of them"
        if self._num_slots is not None and self._peer_of(hello.rank) != identity:
            return f"is there twice: two processes say that they are rank {hello.rank}; end the one left over"
        return None

    def _on_ready(self, ready: Ready) -> None:
        self._ready[ready.rank] = max(ready.ready_slots, self._ready.get(ready.rank, 0))
        if self._num_slots is None or len(self._ready) < self._world_size:
            return
        fingerprints = [self._hellos[rank][1].fingerprint for rank in sorted(self._hellos)]
        self.inbox.append(
            SlotsReady(
                slots=min(*self._ready.values(), self._num_slots),
                planned_slots=self._num_slots,
                block_bytes=self._block_bytes(),
                num_device_blocks=min(hello.num_device_blocks for _, hello in self._hellos.values()),
                fingerprint="-".join(fingerprints),
            )
        )
        self._answered.set()

    def _block_bytes(self) -> int:
        return sum(hello.block_bytes for _, hello in self._hellos.values())
