"""How leader and workers of one engine find each other when they are on several machines.

With etcd the leader tells its address and public key under the engine's name, and each rank that it is there.
Without, all of them are told the leader's address by a setting. Either way the channel between them takes
only those whose keys are on the list; etcd is not trusted with that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import msgspec

from kvbm_core.config import KvbmSettings, addresses
from kvbm_core.config.addresses import bracketed
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.etcd import ENDPOINTS, EtcdOptions
from kvbm_core.fleet.keys import ALLOWED, CurveKeys, is_local, require_keys
from kvbm_core.fleet.session import EtcdSession
from kvbm_core.observe.log import RateLimitedLogger

log = logging.getLogger("kvbm")

HOST_SETTING = "DYN_KVBM_LEADER_ZMQ_HOST"
_WILDCARDS = ("0.0.0.0", "::", "*")
_MAX_SHOWN_CHARS = 200


class LeaderRecord(msgspec.Struct, frozen=True):
    """What a leader tells of itself."""

    engine: str
    address: str
    public_key: str
    host: str
    pid: int
    instance: str

    @property
    def who(self) -> str:
        """For a line in the log."""
        return f"{_shown(self.host)}, process {self.pid}"


class RankRecord(msgspec.Struct, frozen=True):
    """What a rank tells of itself."""

    engine: str
    rank: int
    host: str
    pid: int

    @property
    def who(self) -> str:
        """For a line in the log."""
        return f"{_shown(self.host)}, process {self.pid}"


@dataclass(frozen=True)
class Apart:
    """That leader and workers of ``engine`` may be on several machines, and by what they know each other.

    ``address``: what the leader binds, ``tcp://HOST:PORT`` or ``tcp://HOST:*``; without HOST that by which
    its machine reaches etcd. ``etcd``: where they meet; None: at ``address``. ``root``: of the fleet's
    records there. ``is_spread``: the engine says that they are on several machines.
    """

    engine: str
    address: str
    keys: CurveKeys
    etcd: EtcdOptions | None
    root: str
    is_spread: bool = False

    @classmethod
    def from_settings(
        cls, settings: KvbmSettings, engine: str, data_parallel_rank: int, *, is_spread: bool
    ) -> Apart | None:
        """None if leader and workers meet on their machine alone: so it is without keys, and with keys that
        neither etcd nor an address of the leader's goes with. ConfigError, one line: settings that do not go
        together, or too few of them for ranks that ``is_spread`` says are on several machines.
        """
        host = settings.leader_zmq_host if settings.is_set("leader_zmq_host") else ""
        address = f"tcp://{_bracketed(host)}:*"
        keys = CurveKeys.from_settings(settings)
        if host or is_spread:
            require_keys(HOST_SETTING, address if host else "tcp://*", keys)
        if keys is None:
            return None
        etcd = EtcdOptions.from_settings(settings)
        if etcd is None and (not host or is_local(address)):
            if is_spread:
                remedy = (
                    f"ranks on several machines need {ENDPOINTS}, or the leader's address in {HOST_SETTING}"
                )
                raise ConfigError(HOST_SETTING, host or "(unset)", remedy)
            return None  # keys for something else
        if etcd is None and host in _WILDCARDS:
            remedy = f"workers cannot connect to that; write the leader's own address, or set {ENDPOINTS}"
            raise ConfigError(HOST_SETTING, host, remedy)
        port = "*"
        if etcd is None or settings.is_set("leader_zmq_ack_port"):
            port = str(settings.leader_zmq_ack_port + data_parallel_rank)
        name = f"{engine} dp{data_parallel_rank}"
        address, root = f"tcp://{_bracketed(host)}:{port}", f"/kvbm/v1/{settings.fleet}/"
        return cls(name, address, keys, etcd, root, is_spread)

    def address_to_bind(self) -> str:
        """With HOST in any case; on the leader's machine. ConfigError if there is no way from it to etcd."""
        if self.etcd is None or not self.address.startswith("tcp://:"):
            return self.address
        return f"tcp://{_bracketed(own_address(self.etcd))}:{self.address.rpartition(':')[2]}"

    def address_to_tell(self, bound: str) -> str:
        """Where ranks connect if the leader has bound ``bound``. ConfigError if they cannot."""
        if self.etcd is not None and any(wildcard in bound for wildcard in ("//0.0.0.0:", "//[::]:")):
            bound = f"tcp://{_bracketed(own_address(self.etcd))}:{bound.rpartition(':')[2]}"
        if self.is_spread and is_local(bound):
            remedy = "no other machine can connect to that; set it to the leader's address"
            raise ConfigError(HOST_SETTING, bound, remedy)
        return bound

    @property
    def server_key(self) -> bytes:
        """Of the leader, where no record names it. ConfigError."""
        return self.keys.server_key(self.address.partition("://")[2].rpartition(":")[0].strip("[]"))

    @property
    def stem(self) -> str:
        """The engine's name as part of a record's."""
        return hashlib.sha256(self.engine.encode()).hexdigest()[:24]


def _bracketed(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else bracketed(host)


def own_address(etcd: EtcdOptions) -> str:
    """Of this machine, on the way to etcd; nothing is sent. Loopback if etcd is on this machine."""
    reason = ""
    for host, port in etcd.servers:
        try:
            return addresses.own_address(host, port)
        except OSError as error:
            reason = f"no way from here to {host} of {ENDPOINTS} ({error.strerror})"
    raise ConfigError(HOST_SETTING, "(unset)", f"{reason}; set it to the leader's address")


class LeaderPost:
    """A leader's record, and what is known of its ranks. ``address``: as it was bound."""

    def __init__(self, apart: Apart, address: str) -> None:
        self._ranks: dict[int, RankRecord] = {}
        self._log = RateLimitedLogger(log)
        self._engine = apart.engine
        self._session: EtcdSession | None = None
        address = apart.address_to_tell(address)
        if apart.etcd is None:
            return
        record = LeaderRecord(
            apart.engine,
            address,
            apart.keys.own.public.decode(),
            socket.gethostname(),
            os.getpid(),
            uuid4().hex,
        )
        self._session = EtcdSession(apart.etcd, apart.root)
        self._session.tell(f"leader/{apart.stem}", msgspec.json.encode(record), self._on_rival)
        self._session.look_for(f"rank/{apart.stem}/", self._on_ranks, keep_looking=True)
        self._looks_at = f"rank/{apart.stem}/"

    def _on_rival(self, value: bytes) -> None:
        record = _decode(value, LeaderRecord)
        who = record.who if record is not None else "somebody"
        line = (
            "kvbm: the name %s has a leader already (%s): end it, or give each engine an engine_id of its "
            "own; if it has died, this one is found when its lease is over"
        )
        self._log.warning("rival", line, self._engine, who)

    def _on_ranks(self, found: dict[str, bytes]) -> bool:
        records = (_decode(value, RankRecord) for value in found.values())
        self._ranks = {record.rank: record for record in records if record is not None}
        return True

    def are_met(self) -> None:
        """Every rank is there; nobody needs to be told what is missing."""
        if self._session is not None:
            self._session.look_no_more(self._looks_at)

    def describe(self, ranks: Iterable[int]) -> str:
        """What etcd knows of these ranks, for a line that says that they are missing; "" without etcd."""
        if self._session is None:
            return ""
        if not self._session.is_there:
            return f"{ENDPOINTS} does not answer"
        known = self._ranks
        return ", ".join(
            f"rank {rank} runs on {known[rank].who}, but does not reach us"
            if rank in known
            else f"rank {rank} has not registered"
            for rank in ranks
        )

    def close(self) -> None:
        """Takes the record back. May be called twice."""
        if self._session is not None:
            self._session.close()


class LeaderFinder:
    """A rank's side: calls ``on_leader(address, public key)`` when the leader is found, and when it has moved
    before they have met.

    A leader whose key is not on our list is not believed.
    """

    def __init__(
        self, apart: Apart, etcd: EtcdOptions, rank: int, on_leader: Callable[[str, bytes], None]
    ) -> None:
        self._keys = apart.keys
        self._engine = apart.engine
        self._on_leader = on_leader
        self._is_met = False
        self._log = RateLimitedLogger(log)
        record = RankRecord(apart.engine, rank, socket.gethostname(), os.getpid())
        self._session = EtcdSession(etcd, apart.root)
        self._session.tell(f"rank/{apart.stem}/{rank}", msgspec.json.encode(record))
        self._looks_for = f"leader/{apart.stem}"
        self._session.look_for(self._looks_for, self._on_found)

    def are_met(self) -> None:
        """The leader has taken this rank, which goes to no other one, whatever is in etcd. Any thread."""
        self._is_met = True
        self._session.look_no_more(self._looks_for)

    def _on_found(self, found: dict[str, bytes]) -> bool:
        if self._is_met:
            return True
        (value,) = found.values()
        record = _decode(value, LeaderRecord)
        key = record.public_key.encode(errors="replace") if record is not None else b""
        if record is None or record.engine != self._engine or not record.address.startswith("tcp://"):
            self._log.warning("record", "kvbm: the leader's record in etcd cannot be read; it is ignored")
        elif not self._keys.is_allowed(key):
            line = "kvbm: the leader of %s on %s has a key that is not in %s; it is not believed"
            self._log.warning("key", line, record.engine, record.who, ALLOWED)
        else:
            self._on_leader(record.address, key)
            return True
        return False

    def close(self) -> None:
        """Takes the rank's record back. May be called twice."""
        self._session.close()


R = TypeVar("R", LeaderRecord, RankRecord)


def _shown(text: str) -> str:
    """Of somebody who may have written anything to etcd: short, and no second line of a log."""
    return repr(text[:_MAX_SHOWN_CHARS])[1:-1]


def _decode(value: bytes, kind: type[R]) -> R | None:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
