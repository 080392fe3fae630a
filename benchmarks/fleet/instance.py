"""One simulated instance: everything of kvbm that speaks with etcd and NATS, as it is, and no engine.

Its leader has a session with etcd, a publisher and a connection to NATS, with the threads that these have in
an engine; every tenth has a rank on another machine too, which finds it by a session of its own. Simulated
are the blocks: a host tier takes runs of new ones and evicts the oldest, without bytes. What each instance
has to itself elsewhere, and hundreds share here, is the Python interpreter: its CPU time is counted apart
from the servers'.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import SystemClock
from kvbm_core.events.log import EventLog, Names
from kvbm_core.events.nats_sink import NatsLogin, NatsSink, subject
from kvbm_core.events.publisher import EventPublisher
from kvbm_core.events.wire import MAX_BATCH_HASHES, BlockHash
from kvbm_core.fleet.etcd import EtcdOptions
from kvbm_core.fleet.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, CurveKeys, KeyPair
from kvbm_core.fleet.meeting import Apart, LeaderFinder, LeaderPost
from kvbm_core.fleet.session import EtcdSession
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key

FLEET = "simulated"
ROOT = f"/kvbm/v1/{FLEET}/"
MEDIUM = "CPU_TIER1"
RUN_BLOCKS = MAX_BATCH_HASHES
"""An instance stores as many at a time: a step of a prefill of 1,024 tokens."""
BLOCK_TOKENS = 16
VOCABULARY = 128_000
RANK_EVERY = 10
"""Each such instance has a rank on another machine: one session with etcd more."""


@dataclass(frozen=True)
class Place:
    """Where everything is; goes to another process as keywords. ``life`` tells the processes of one instance
    apart.
    """

    etcd_port: int
    lease_s: float
    nats_url: str
    nats_user: str
    nats_password: str
    keys_folder: str
    host_blocks: int
    life: int = 0

    def etcd(self) -> EtcdOptions:
        """As settings make it."""
        return EtcdOptions((("127.0.0.1", self.etcd_port),), lease_s=self.lease_s)

    def nats(self) -> NatsLogin:
        """As settings make it."""
        return NatsLogin(self.nats_url, self.nats_user, self.nats_password)

    def keys(self) -> CurveKeys:
        """Of the whole fleet."""
        folder = Path(self.keys_folder)
        return CurveKeys(_read_pair(folder / f"fleet{SECRET_SUFFIX}"), folder / f"fleet{PUBLIC_SUFFIX}")


def _read_pair(path: Path) -> KeyPair:
    from zmq.auth import load_certificate

    public, secret = load_certificate(path)
    if secret is None:
        raise ValueError(f"no secret key in {path}")
    return KeyPair(public, secret)


def sessions_of(count: int) -> int:
    """With etcd, of the first ``count`` instances."""
    return count + -(-count // RANK_EVERY)


def name_of(number: int) -> str:
    """Of an instance: what its subjects and records are called after."""
    return f"instance-{number}"


def digest(hashes: Iterable[BlockHash]) -> str:
    """Of what is somewhere; equal for equal sets alone."""
    ordered = array("Q", sorted(int(each) for each in hashes))
    return hashlib.sha256(ordered.tobytes()).hexdigest()


def published_hash(engine_hash: bytes) -> int:
    """64 bits of it."""
    return int.from_bytes(engine_hash[-8:], "big")


class Instance:
    """``store_run`` on one thread. It registers and publishes from the start until ``close``."""

    def __init__(self, number: int, place: Place, keys: CurveKeys) -> None:
        self.name = name_of(number)
        self._address = f"tcp://127.0.0.1:{20_000 + place.life}"
        apart = Apart(f"{self.name} dp0", self._address, keys, place.etcd(), ROOT)
        self._post = LeaderPost(apart, self._address)
        self._finder: LeaderFinder | None = None
        self.is_met = number % RANK_EVERY != 0
        """Whether its rank has found this leader, not an earlier one."""
        if self.is_met:
            self._post.are_met()
        else:
            self._finder = LeaderFinder(apart, place.etcd(), 0, self._found)
        self._next = number << 24 | place.life << 56
        self.log = EventLog({Tier.HOST: MEDIUM}, published_hash)
        self._host = BlockTier(Tier.HOST, LruPolicy(), SystemClock(), self.log)
        self._host.grow(place.host_blocks)
        self.metrics = Metrics()
        self._sink = NatsSink(place.nats(), subject(FLEET, self.name, 0), self.metrics)
        self._publisher = EventPublisher(self.log, [self._sink], 0, self.metrics)

    def _found(self, address: str, key: bytes) -> None:
        if address == self._address:
            self.is_met = True
            self._post.are_met()

    @property
    def sessions(self) -> int:
        """With etcd, at this moment."""
        return sum(session.is_there for session in self._sessions())

    @property
    def attempts(self) -> int:
        """To begin one, until now."""
        return sum(session.attempts_total for session in self._sessions())

    def _sessions(self) -> list[EtcdSession]:
        found = [] if self._post._session is None else [self._post._session]
        return found if self._finder is None else [*found, self._finder._session]

    @property
    def waiting_bytes(self) -> int:
        """Of events that NATS has not taken: in the outbox and in its client."""
        client = self._sink._client
        return self._sink._outbox_bytes + (0 if client is None else client.pending_data_size)

    @property
    def dumps(self) -> int:
        """That somebody asked for, until now."""
        return self._publisher.dumps.served_total

    def store_run(self) -> None:
        """RUN_BLOCKS new blocks; the oldest make room."""
        first, self._next = self._next, self._next + RUN_BLOCKS
        keys = [_key(first + i) for i in range(RUN_BLOCKS)]
        self._host.commit(self._host.reserve(keys, lambda new: frozenset()))
        tokens = [(first * 31 + i * 7919) % VOCABULARY for i in range(RUN_BLOCKS * BLOCK_TOKENS)]
        self.log.name(Names(keys, keys, None, BLOCK_TOKENS, tokens))

    def fill(self) -> None:
        """All of its tier."""
        for _ in range(self._host.capacity_blocks // RUN_BLOCKS):
            self.store_run()

    def truth(self) -> str:
        """A digest of what is here, under the names that are published."""
        return digest(map(published_hash, self._host.keys()))

    def close(self) -> None:
        """Takes back what it told."""
        self._publisher.close()
        if self._finder is not None:
            self._finder.close()
        self._post.close()


def _key(number: int) -> BlockKey:
    return block_key(SequenceHash(number.to_bytes(32, "big")), 0)
