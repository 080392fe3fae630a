"""A leader and workers with a disk, as in one process of an engine, without the engine: over real channel and
files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import SystemClock
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake, PlanTier
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import Move
from kvbm_core.runtime.worker import Worker
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.testing.executor_bench import two_group_memory
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.tiers.keyed import keyed_tier
from kvbm_core.tiers.slotted import SlottedTier, slotted_tier
from kvbm_core.transfer.plan import BLOCK_FILE, OrderKind, TierOrder, TierPlace, TransferPlan
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import BlockKey, Tier
from tests.faults.doubles import BUFFERED
from tests.unit.test_worker import GROUPS, NUM_SLOTS, PROMPT, Engine, content

DISK_SLOTS = 40
NUM_TOKENS = 20
STRAY = TierOrder(10**6, "disk", OrderKind.STORE, (BlockKey(b"x" * 32),), (0,), (DISK_SLOTS - 1,))
"""An order that the leader does not know of."""
FORGET = TierOrder(0, "disk", OrderKind.FORGET, ())
TABLES = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
ELSEWHERE = [[7, 8, 9, 10, 11], [3, 6, 1, 9, 2]]


class DiskEngine(Engine):
    """Engine with a disk tier in ``folder``/blocks. Blocks of PROMPT are those of the device blocks of
    TABLES.

    ``replicates``: every rank has the same blocks, which rank 0 stores for all. ``parts``: which part of the
    KV each rank has, and says that it has; "" for a rank that says nothing. ``store_url``: of a tier "store"
    by key below the disk. ``fetch_wait_s``: so long requests wait for that.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        *,
        io_deadline_s: float = 20.0,
        options: FileOptions = BUFFERED,
        replicates: bool = False,
        parts: Sequence[str] = (),
        store_url: str = "",
        fetch_wait_s: float = 0.0,
    ) -> None:
        path = folder / "s.sock"
        self.endpoint = Endpoint(f"ipc://{path}", path, secret=b"s")
        self.folder = folder / "blocks"
        self.news = threading.Condition()
        plans: dict[str, PlanTier] = {"disk": self._plan_disk}
        makers = [slotted_tier("disk", Tier.DISK, AdmitAll())]
        if store_url:
            plans["store"] = lambda block_bytes, fingerprint: TierPlace("store", store_url, model="m")
            makers.append(keyed_tier("store", Tier.REMOTE, AdmitAll()))
        self.handshake = Handshake(ranks, lambda block_bytes: NUM_SLOTS, plans)
        clock = SystemClock()
        self.tier = BlockTier(Tier.HOST, LruPolicy(), clock)
        self.leader = Leader(
            GROUPS,
            self.tier,
            self.handshake,
            clock=clock,
            metrics=Metrics(),
            options=LeaderOptions(fetch_wait_s=fetch_wait_s),
            parts=LeaderParts(tuple(makers), self.tell_all),
        )
        self.channel = LeaderChannel(self.endpoint, self._on_message)  # type: ignore[arg-type]
        parts = parts or (["all"] * ranks if replicates else [""] * ranks)
        named = [part for part in dict.fromkeys(parts) if part]
        self._shard_of = [named.index(part) if part else 0 for part in parts] if named else [*range(ranks)]
        self.memories = [two_group_memory(seed=shard + 1) for shard in self._shard_of]
        disk_options = replace(options, io_deadline_s=io_deadline_s)
        memory_options = RankOptions(verify=True, disk=disk_options)
        self.workers = [Worker(rank, ranks, self.endpoint, memory_options) for rank in range(ranks)]
        for worker, memory, part in zip(self.workers, self.memories, parts, strict=True):
            worker.register(memory, f"layout{self._shard_of[worker.rank]}", part=part)

    def _plan_disk(self, block_bytes: int, fingerprint: str) -> TierPlace:
        return TierPlace("disk", str(self.folder), DISK_SLOTS, kind=BLOCK_FILE)

    def tell_all(self, order: TierOrder) -> None:
        for peer in self.handshake.storing_peers():
            self.channel.send(peer, Move(order))

    def rank_file(self, rank: int = 0) -> Path:
        """Where a rank keeps its blocks."""
        return self.folder / f"rank-{rank}-of-{len(self.workers)}.blocks"

    @property
    def slot_bytes(self) -> int:
        """Of a record's payload."""
        return whole_sectors(max(view.block_bytes for view in self.memories[0].views))

    @property
    def disk(self) -> SlottedTier:
        tier = self.leader.chain.named("disk")
        assert isinstance(tier, SlottedTier)
        return tier

    def wait_ready(self) -> None:
        """Slots of the host, and all of the disk's files looked at."""
        self.wait_for(lambda: self.tier.capacity_blocks == NUM_SLOTS)
        self.wait_for(lambda: self.disk.slots.capacity_blocks == DISK_SLOTS)

    def expected(self) -> list[list[bytes]]:
        """The blocks of PROMPT on each rank."""
        return [
            [content(memory, group, block) for group in (0, 1) for block in TABLES[group]]
            for memory in (two_group_memory(seed=shard + 1) for shard in self._shard_of)
        ]

    def on_devices(self) -> list[list[bytes]]:
        """What is on each rank where PROMPT was onboarded to."""
        return [
            [content(memory, group, block) for group in (0, 1) for block in ELSEWHERE[group]]
            for memory in self.memories
        ]

    def offload_prompt(self, name: str = "writer") -> None:
        """Offloads it; what follows goes by itself."""
        state = self.leader.open(name, ROOT, None)
        self.leader.offload(state, PROMPT, 0, NUM_TOKENS, TABLES)
        self.submit_offloads()
        self.settle()
        self.leader.finish(state)

    def store_prompt(self) -> None:
        """Offloads it, and waits until the disks have it."""
        self.offload_prompt()
        self.wait_for(lambda: self.disk.slots.resident_blocks == 10 and not self.disk.storing_blocks)

    def onboard_prompt(self, name: str = "reader") -> TransferPlan | None:
        """Onboards what there is of it, elsewhere; the plan, once every rank has answered."""
        state = self.leader.open(name, ROOT, None)
        try:
            found = self.leader.match(state, PROMPT, 0, NUM_TOKENS)
            if not found:
                return None
            plan = self.submit(self.leader.onboard(state, found, ELSEWHERE))
            self.settle()
            return plan
        finally:
            self.leader.finish(state)
