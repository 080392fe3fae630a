"""What one rank has for peers: the server of its blocks, and a mover that brings theirs to its host slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.peers.address import address_of_rank
from kvbm_core.peers.client import CONCURRENCY, PeerStore, call_blocks
from kvbm_core.peers.copies import Bytes, Copies
from kvbm_core.peers.disk import DiskCopies
from kvbm_core.peers.landing import LandingZone
from kvbm_core.peers.server import SETTING, LeaderLine, PeerServer
from kvbm_core.peers.ucx import EXTRA, is_installed
from kvbm_core.peers.wire import Terms
from kvbm_core.tiers.lower import PEERS
from kvbm_core.transfer.movers.store import StoreMover
from kvbm_core.transfer.rank import RankMemory
from kvbm_core.types import BlockKey

AGENT_TIMEOUT_S = 5.0
"""Each of two. Until there is one, bytes go in messages."""

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """``bind``: where rank 0 listens. ``namespace``: of all keys of the engine. ``deadline_s``: of one
    question. ``export_bytes``: for copies on their way to others, of each rank. ``by_nixl``: bytes are
    written to landing zones.
    """

    bind: str
    namespace: str
    deadline_s: float
    export_bytes: int
    keys: CurveKeys | None = None
    by_nixl: bool = False


class RankBlocks:
    """See OwnBlocks."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._disks: dict[str, DiskCopies] = {}

    def slot(self, slot: int) -> Bytes:
        """See OwnBlocks."""
        return self._memory.slot(slot)

    def read(
        self, tier: str, blocks: Sequence[tuple[BlockKey, int]], copies: Sequence[Bytes], *, deadline_s: float
    ) -> list[Outcome]:
        """See OwnBlocks."""
        disk = self._disks.get(tier)
        if disk is None:
            file = self._memory.file_of(tier)
            if file is None:
                return [Outcome.MISS] * len(blocks)
            disk = self._disks[tier] = DiskCopies(file)
        return disk.read(blocks, copies, deadline_s=deadline_s)


def join_peers(
    options: PeerOptions, shard: tuple[int, int, int, str], memory: RankMemory, leader: LeaderLine
) -> PeerServer:
    """Begins to serve, and adds the mover to ``memory``, which closes it. ``shard``: rank, number of ranks,
    bytes of a block, and what they mean. ConfigError, one line, if the address cannot be had.
    """
    rank, num_ranks, block_bytes, fingerprint = shard
    bind = address_of_rank(options.bind, rank)
    if bind is None:
        raise ConfigError(SETTING, options.bind, f"leaves no port for rank {rank}; write HOST:PORT")
    if options.by_nixl:
        if not is_installed():
            raise ConfigError("KVBM_PEERS", "nixl", f"NIXL is not installed; {EXTRA}, or set it to zmq")
        log.warning(
            "kvbm: KVBM_PEERS=nixl: blocks come and go by UCX, which neither encrypts nor asks who is there; "
            "nobody else must be on its network"
        )
    terms = Terms(uuid4().hex, rank, num_ranks, block_bytes, fingerprint, options.namespace)
    server = PeerServer(
        bind,
        terms,
        RankBlocks(memory),
        leader,
        copies=Copies(block_bytes, options.export_bytes, in_one=options.by_nixl),
        keys=options.keys,
    )
    zone = LandingZone(block_bytes, call_blocks(block_bytes), CONCURRENCY) if options.by_nixl else None
    if zone is not None:
        # UCX walks through the environment when it begins, and whoever calls us is whoever adds to it.
        zone.wait(AGENT_TIMEOUT_S)
        server.wait_for_writer(AGENT_TIMEOUT_S)
    store = PeerStore(terms, options.keys, zone=zone)
    memory.join(PEERS, StoreMover(PEERS, store, memory.slab, io_deadline_s=options.deadline_s))
    return server
