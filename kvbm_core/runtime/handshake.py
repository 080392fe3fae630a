"""How a leader learns its workers: sizes in, number of slots out, readiness in.

Runs on the channel's thread; what the leader needs is handed over in ``inbox`` and ``found`` (deques, safe
between two threads). Until every worker is ready the tier has no slots: the engine serves, without hits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbm_core.errors import ConfigError
from kvbm_core.runtime.messages import (
    PROTOCOL_VERSION,
    Acks,
    Configure,
    DiskFound,
    DiskRefused,
    DiskShare,
    ForgetDisk,
    Hello,
    JobAck,
    Message,
    Note,
    Ready,
    Refused,
    Store,
)
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.types import BlockKey

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """Slots 0 .. ``slots``-1 are usable on every rank; ``block_bytes`` and the device tier's size for the
    log.
    """

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


@dataclass(frozen=True, slots=True)
class DiskSlotsFound:
    """Disk slots below ``end`` are usable on one rank; ``found``: what it has in the newest of them."""

    rank: int
    end: int
    found: list[Found]


@dataclass(frozen=True, slots=True)
class DiskOff:
    """The disk cannot be used; ``reason`` is one line."""

    reason: str


LeaderEvent = SlotsReady | RankAck | Disabled | DiskOff
PlanDisk = Callable[[int, str], DiskShare | None]


class Handshake:
    """``size_tier(bytes of a block over all ranks)`` answers the number of slots, or raises ConfigError.

    ``plan_disk(the same, fingerprint of the layout)`` answers where the disk tier is, None for no such tier.

    A rank is the peer that said hello for it: what others say in its name (a worker left over from an engine
    that died, on the same port) is dropped and counted.

    Where every rank replicates the same KV, rank 0 alone stores: sizes, fingerprint and disk are its.
    """

    def __init__(
        self,
        world_size: int,
        size_tier: Callable[[int], int],
        plan_disk: PlanDisk = lambda block_bytes, fingerprint: None,
    ) -> None:
        self.inbox: deque[LeaderEvent] = deque()
        self.found: deque[DiskSlotsFound] = deque()
        self._world_size = world_size
        self._size_tier = size_tier
        self._plan_disk = plan_disk
        self._disk: DiskShare | None = None
        self.num_storing_ranks = world_size
        self._hellos: dict[int, tuple[bytes, Hello]] = {}
        self._ready: dict[int, int] = {}
        self._num_slots: int | None = None
        self._answered = threading.Event()
        self._disk_ranks: set[int] = set()
        self._disk_answered = threading.Event()
        self.foreign_total = 0

    def wait(self, timeout_s: float) -> bool:
        """Waits, at start only, until the first slots are usable and what is on disk is known; False if time
        ran out.

        Or until the tier is off. Both go on in the background.
        """
        ends_at_s = time.monotonic() + timeout_s
        return self._answered.wait(timeout_s) and self._disk_answered.wait(ends_at_s - time.monotonic())

    def on_message(self, identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        """Takes one message of one worker; returns the answers."""
        if isinstance(message, Hello):
            return self._hello(identity, message)
        if isinstance(message, Refused):
            self._disable(f"worker {message.rank}: {message.reason}")
        elif (
            isinstance(message, Configure | Store | ForgetDisk | Note)
            or self._peer_of(message.rank) != identity
        ):
            self.foreign_total += 1
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Acks):
            self.inbox.extend(RankAck(message.rank, ack) for ack in message.acks)
        elif isinstance(message, DiskRefused):
            self.inbox.append(DiskOff(f"worker {message.rank}: {message.reason}"))
            self._disk_answered.set()
        else:
            self._on_disk_found(message)
        return []

    def _on_disk_found(self, message: DiskFound) -> None:
        records = zip(message.slots, message.keys, message.sequences, strict=True)
        found = [Found(slot, BlockKey(key), sequence) for slot, key, sequence in records]
        self.found.append(DiskSlotsFound(message.rank, message.end, found))
        if self._disk is not None and message.end >= self._disk.num_slots:
            self._disk_ranks.add(message.rank)
            if len(self._disk_ranks) == self.num_storing_ranks:
                self._disk_answered.set()

    def peers(self) -> list[bytes]:
        """The workers that said hello."""
        return [identity for identity, _ in self._hellos.values()]

    def storing_peers(self) -> list[bytes]:
        """Those of them that store."""
        return [identity for identity, hello in self._hellos.values() if _stores(hello)]

    def _peer_of(self, rank: int) -> bytes | None:
        hello = self._hellos.get(rank)
        return hello[0] if hello is not None else None

    def _disable(self, reason: str) -> None:
        self.inbox.append(Disabled(reason))
        self._answered.set()
        self._disk_answered.set()

    def _hello(self, identity: bytes, hello: Hello) -> list[tuple[bytes, Message]]:
        problem = self._problem_of(identity, hello)
        if problem is not None:
            self._disable(f"worker {hello.rank} {problem}")
            return [(identity, Refused(hello.rank, problem))]
        self._hellos[hello.rank] = (identity, hello)
        if self._num_slots is not None:
            return [(identity, self._configuration(self._num_slots))]
        if len(self._hellos) < self._world_size:
            return []
        try:
            self._check_replicas()
            self._num_slots = self._size_tier(self._block_bytes())
        except ConfigError as error:
            self._disable(str(error))
            return [(who, Refused(rank, str(error))) for rank, (who, _) in self._hellos.items()]
        try:
            self._disk = self._plan_disk(self._block_bytes(), self._fingerprint())
        except (ConfigError, DiskError) as error:
            self.inbox.append(DiskOff(str(error.args[-1])))
        if self._disk is None:
            self._disk_answered.set()
        return [(who, self._configuration(self._num_slots)) for who, _ in self._hellos.values()]

    def _configuration(self, num_slots: int) -> Configure:
        return Configure(num_slots, self._disk, self._hellos[0][1].broadcast_address)

    def _check_replicas(self) -> None:
        """Whether ranks that replicate have indeed the same blocks; then only rank 0 stores from now on."""
        hellos = [hello for _, (_, hello) in sorted(self._hellos.items())]
        replicating = [hello.rank for hello in hellos if hello.replicates]
        if replicating and len(replicating) < len(hellos):
            remedy = f"only ranks {replicating} of {len(hellos)} say so; set it alike on all, or on none"
            raise ConfigError("DYN_KVBM_NCCL_MLA_MODE", True, remedy)
        first = hellos[0]
        same = (first.fingerprint, first.block_bytes, first.num_device_blocks)
        for hello in hellos if replicating else ():
            if (hello.fingerprint, hello.block_bytes, hello.num_device_blocks) != same:
                remedy = f"the KV blocks of rank {hello.rank} are not those of rank 0; unset it"
                raise ConfigError("DYN_KVBM_NCCL_MLA_MODE", True, remedy)
        self.num_storing_ranks = sum(_stores(hello) for hello in hellos)

    def _fingerprint(self) -> str:
        hellos = (hello for _, (_, hello) in sorted(self._hellos.items()))
        return "-".join(hello.fingerprint for hello in hellos if _stores(hello))

    def _problem_of(self, identity: bytes, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"speaks protocol {hello.protocol}, the leader {PROTOCOL_VERSION}; install one "
                "kvbm everywhere"
            )
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
        self.inbox.append(
            SlotsReady(
                slots=min(*self._ready.values(), self._num_slots),
                planned_slots=self._num_slots,
                block_bytes=self._block_bytes(),
                num_device_blocks=min(hello.num_device_blocks for _, hello in self._hellos.values()),
                fingerprint=self._fingerprint(),
            )
        )
        self._answered.set()

    def _block_bytes(self) -> int:
        return sum(hello.block_bytes for _, hello in self._hellos.values() if _stores(hello))


def _stores(hello: Hello) -> bool:
    return not hello.replicates or hello.rank == 0
