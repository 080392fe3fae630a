"""LocalTiers over device memory of one process: what a key's block holds is known from the key."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.runtime.local import LocalOptions, LocalTiers
from kvbm_core.storage.disk.allocate import OFF
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.store_contract import key_of
from kvbm_core.tiers.keyed import keyed_tier
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.plan import BLOCK_FILE, TierPlace
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import BlockKey, Tier, group_of
from tests.faults.doubles import BUFFERED

NUM_BLOCKS = 16
PIECE_BYTES = 3000  # no whole sectors
KEYS = [key_of(number) for number in range(12)]


PART_BYTES = 700


def device_memory(num_blocks: int = NUM_BLOCKS, num_groups: int = 1) -> DeviceMemory:
    """K and V apart, in one storage; blocks of further groups are smaller, and in one of their own."""
    shape, strides = (2, num_blocks, PIECE_BYTES), (num_blocks * PIECE_BYTES, PIECE_BYTES, 1)
    size = 2 * num_blocks * PIECE_BYTES
    info = TensorInfo("kv", shape, strides, 1, "uint8", 0, 0, size)
    infos, sizes = [info], [size, *[num_blocks * PART_BYTES] * (num_groups - 1)]
    for group in range(1, num_groups):
        name, shape = f"group {group}", (num_blocks, PART_BYTES)
        infos.append(TensorInfo(name, shape, (PART_BYTES, 1), 1, "uint8", group, 0, sizes[group]))
    views = tuple(view_of_tensors([info], num_blocks) for info in infos)
    return DeviceMemory(views, [np.zeros(size, dtype=np.uint8) for size in sizes])


class End:
    """Waits for the end of one transfer."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._over = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._over.set()

    def wait(self) -> Outcome:
        """The outcome; fails if there is none, or if it was told twice."""
        assert self._over.wait(LONG_S)
        (outcome,) = self.outcomes
        return outcome


class LocalBench:
    """``disk_slots`` 0: no disk. ``has_disk`` False: it cannot be opened. ``store``: URL of a store by key
    below it. ``memory``: a rank's options, as an engine has them. ``num_groups``: see device_memory.

    A second bench on the same ``folder`` is what comes after a restart.
    """

    def __init__(
        self,
        folder: Path,
        num_slots: int = 12,
        disk_slots: int = 0,
        *,
        clock: Clock | None = None,
        io_deadline_s: float = LONG_S,
        has_disk: bool = True,
        store: str = "",
        to_device: str = OFF,
        memory: RankOptions | None = None,
        num_groups: int = 1,
    ) -> None:
        self.folder, self.device = folder, device_memory(num_groups=num_groups)
        self.metrics = Metrics()
        buffered = replace(BUFFERED, io_deadline_s=io_deadline_s, to_device=to_device)
        memory = memory or RankOptions(disk=buffered)
        options = LocalOptions(num_slots, fingerprint="layout", memory=memory)
        if disk_slots:
            lower = (slotted_tier("disk", Tier.DISK, AdmitAll()),)
            options = replace(
                options, lower=lower, places=(TierPlace("disk", str(folder), disk_slots, kind=BLOCK_FILE),)
            )
        if store:
            lower = (*options.lower, keyed_tier("remote", Tier.REMOTE, AdmitAll()))
            options = replace(options, lower=lower, places=(*options.places, TierPlace("remote", store)))
        self.tiers = LocalTiers(self.device, options, self.metrics, clock)
        ready = (num_slots, disk_slots) if disk_slots and has_disk else (num_slots,)
        assert self.tiers.wait_ready(*ready, timeout_s=LONG_S)

    def fill(self, block: int, key: BlockKey) -> None:
        """Gives a device block what ``key`` stands for."""
        for number, (storage, offset, nbytes) in enumerate(self.device.views[group_of(key)].regions(block)):
            content = np.frombuffer(Random(bytes([number]) + key).randbytes(nbytes), np.uint8)
            self.device.storages[storage][offset : offset + nbytes] = content

    def holds(self, block: int, key: BlockKey) -> bool:
        """Whether a device block has what ``key`` stands for."""
        return all(
            self.device.storages[storage][at : at + nbytes].tobytes()
            == Random(bytes([number]) + key).randbytes(nbytes)
            for number, (storage, at, nbytes) in enumerate(self.device.views[group_of(key)].regions(block))
        )

    def begin_store(self, keys: Sequence[BlockKey]) -> End:
        """From the first device blocks."""
        for block, key in enumerate(keys):
            self.fill(block, key)
        end = End()
        self.tiers.store(keys, list(range(len(keys))), end)
        return end

    def store(self, keys: Sequence[BlockKey]) -> Outcome:
        """And to the disk, if there is one."""
        outcome = self.begin_store(keys).wait()
        assert self.tiers.wait_stored(LONG_S)
        return outcome

    def load(self, owner: str, keys: Sequence[BlockKey]) -> Outcome:
        """Into the last device blocks, the first key last."""
        claim = self.tiers.claim(owner, keys)
        if claim is None:
            return Outcome.MISS
        end = End()
        blocks = self.blocks_for(keys)
        self.tiers.load(claim, blocks, end)
        return end.wait()

    def blocks_for(self, keys: Sequence[BlockKey]) -> list[int]:
        """Where ``load`` puts them."""
        return [NUM_BLOCKS - 1 - number for number in range(len(keys))]

    def came(self, keys: Sequence[BlockKey]) -> bool:
        """Whether all are there where ``load`` puts them."""
        return all(self.holds(block, key) for block, key in zip(self.blocks_for(keys), keys, strict=True))

    def metric(self, name: str) -> float:
        """A number of the metrics."""
        return self.metrics.snapshot()[name]

    def close(self) -> None:
        """Checks the books first."""
        self.tiers.check_integrity()
        self.tiers.close()
