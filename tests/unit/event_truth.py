"""Tiers that churn beside an event log, and the truth about them: for a router double to be compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.events.log import EventLog, Names
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key

MEDIA = {Tier.HOST: "CPU_TIER1", Tier.DISK: "CPU_TIER2"}
BLOCK_TOKENS = 4
CHAINS, CHAIN_BLOCKS = 400, 40


def hash_of(engine_hash: bytes) -> int:
    """What is published."""
    return int.from_bytes(engine_hash[-8:], "big")


def make_log() -> EventLog:
    """Of tiers with these media."""
    return EventLog(MEDIA, hash_of)


class Truth:
    """A host and a disk tier: chains are stored, evicted, forgotten, cleared, by chance. One thread."""

    def __init__(self, log: EventLog, draw: random.Random, host_blocks: int = 600) -> None:
        self.log = log
        self._draw = draw
        self.tiers = {tier: BlockTier(tier, LruPolicy(), ManualClock(), log) for tier in MEDIA}
        self.tiers[Tier.HOST].grow(host_blocks)
        self.tiers[Tier.DISK].grow(2 * host_blocks)
        self.was_ever: set[tuple[str, int]] = set()

    @staticmethod
    def chain(number: int) -> list[BlockKey]:
        """The keys of one."""
        first = number * 1000 + 1
        return [block_key(SequenceHash((first + i).to_bytes(32, "big")), 0) for i in range(CHAIN_BLOCKS)]

    def step(self) -> None:
        """One thing happens."""
        chain = self.chain(self._draw.randrange(CHAINS))[: self._draw.randint(1, CHAIN_BLOCKS)]
        host, disk = self.tiers[Tier.HOST], self.tiers[Tier.DISK]
        what = self._draw.random()
        if what < 0.70:
            host.commit(host.reserve(chain, frozenset))
            self._name(chain)
        elif what < 0.90:
            here = host.resident_of(chain)
            disk.commit(disk.reserve(here, frozenset))
        elif what < 0.998:
            self._draw.choice([host, disk]).forget(self._draw.sample(chain, len(chain) // 2))
        else:
            self._draw.choice([host, disk]).reset()
        for tier, held in self.tiers.items():
            self.was_ever.update((MEDIA[tier], hash_of(key)) for key in held.resident_of(chain))

    def _name(self, chain: list[BlockKey]) -> None:
        tokens = [i % 1000 for i in range(BLOCK_TOKENS * len(chain))]
        self.log.name(Names(chain, chain, None, BLOCK_TOKENS, tokens))

    def now(self) -> Mapping[tuple[str, int], frozenset[int]]:
        """What is where, as hashes."""
        found = {(MEDIA[tier], 0): frozenset(map(hash_of, held.keys())) for tier, held in self.tiers.items()}
        return {place: hashes for place, hashes in found.items() if hashes}
