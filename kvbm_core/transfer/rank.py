"""One rank's bytes: the host slab, the executor between it and the device, a mover per lower tier.

Used by a worker, which the leader gives orders to, and by an engine's rank that looks after itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbm_core.errors import ConfigError
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.storage.stores import StoreOptions
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, DeviceMemory, Executor
from kvbm_core.transfer.factory import make_executor, slab_cpus, slab_preparation
from kvbm_core.transfer.movers.base import Mover, OnResult, TierListener
from kvbm_core.transfer.movers.disk_direct import DirectReader
from kvbm_core.transfer.movers.disk_file import RankFile
from kvbm_core.transfer.movers.opening import OPENERS, Shard, Site
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TierPlace, TransferPlan, rejected
from kvbm_core.transfer.staged import StagedExecutor

OnDone = Callable[[JobResult], None]


@dataclass(frozen=True, slots=True)
class RankOptions:
    """``transfer_deadline_s``: what has not started by then is given up. ``verify``: compare bytes after an
    onboard. ``near_memory``: host memory from the GPU's NUMA node. ``disk`` and ``store``: of lower tiers
    with slots, and by key.
    """

    transfer_deadline_s: float = 60.0
    max_concurrent_transfers: int = 4
    max_batch_blocks: int = 16
    verify: bool = False
    near_memory: bool = True
    disk: FileOptions = field(default_factory=FileOptions)
    store: StoreOptions = field(default_factory=StoreOptions)


def slot_bytes_of(memory: DeviceMemory, *, has_lower: bool) -> int:
    """Of a block of ``memory`` in the host tier."""
    block_bytes = max(view.block_bytes for view in memory.views)
    return whole_sectors(block_bytes) if has_lower else block_bytes


class RankMemory:
    """Safe to call from any thread. ``on_done`` gets the results of plans, ``listener`` the news of lower
    tiers, ``on_ready(slots)`` the host slots that can be used, from any thread.

    ConfigError if there is not enough memory, UnsupportedError if nothing copies from such device memory. A
    lower tier that cannot be had is told to ``listener``; orders to it are REJECTED.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        num_slots: int,
        options: RankOptions,
        *,
        places: Sequence[TierPlace],
        shard: Shard,
        listener: TierListener,
        on_ready: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._options = options
        self._movers: dict[str, Mover] = {}
        self._readers: dict[str, DirectReader] = {}
        self._forgotten: set[str] = set()
        self._digests = SlotDigests() if options.verify else None
        self._executor: Executor | None = None
        slot_bytes = slot_bytes_of(memory, has_lower=bool(places))
        needed_bytes = num_slots * slot_bytes
        available_memory().check("DYN_KVBM_CPU_CACHE_GB", f"{needed_bytes / 1e9:.2f}", needed_bytes)
        self.slab = HostSlab(
            num_slots,
            slot_bytes,
            prepare=slab_preparation(memory),
            on_ready=on_ready,
            cpus=slab_cpus(memory) if options.near_memory else (),
        )
        self._site = Site(memory, self.slab, shard, listener, options.disk, options.store, self.join)
        self._places = places

    def make_executor(self, on_done: OnDone) -> Executor:
        """The executor of plans; once. Opens the lower tiers, so that their news come from now on."""
        make_copier = self._make_copier
        if self._places:
            block_bytes = self.slab.slot_bytes
            staged = StagedExecutor(
                make_copier, self._movers, block_bytes, on_done, self._digests, readers=self._readers
            )
            self._executor = staged
            for place in self._places:
                self._open(place)
        else:
            self._executor = make_copier(on_done)
        return self._executor

    def _make_copier(self, on_done: OnDone) -> Copier:
        return make_executor(
            self._memory,
            self.slab,
            max_concurrent=self._options.max_concurrent_transfers,
            max_batch_blocks=self._options.max_batch_blocks,
            on_done=on_done,
            digests=self._digests,
        )

    def _open(self, place: TierPlace) -> None:
        opener, refused = OPENERS.get(place.kind), self._site.listener.refused
        if opener is None:
            refused(place.name, f"nothing in this process opens a tier of the kind {place.kind!r}")
            return
        try:
            opener(self._site, place)
        except (ConfigError, OSError) as error:
            refused(place.name, str(error.args[-1] if error.args else type(error).__name__))
        except Exception as error:  # whatever somebody else's kind raises: it costs no other tier
            refused(place.name, " ".join(f"{type(error).__name__}: {error}".split()))

    # ---------------------------------------------------------------- work

    def submit(self, order: TierOrder, on_result: OnResult) -> None:
        """Starts an order to a lower tier that is not part of a plan."""
        if order.kind is OrderKind.FORGET:
            self._forgotten.add(order.tier)
        mover = self._movers.get(order.tier)
        if mover is None:
            if order.kind.is_answered:
                on_result(rejected(order.job_id, f"there is no {order.tier} here"))
            return
        if self._digests is not None and order.kind is OrderKind.FETCH:
            self._digests.forget(order.slots)
        mover.submit(order, on_result, deadline_s=self._options.transfer_deadline_s)

    def start(self, executor: Executor, plan: TransferPlan) -> None:
        """Submits a plan with this rank's deadline."""
        executor.submit(plan, deadline_s=self._options.transfer_deadline_s)

    def join(self, name: str, mover: Mover, reader: DirectReader | None = None) -> None:
        """See Site. The mover is closed with the others."""
        self._movers[name] = mover
        if reader is not None:
            self._readers[name] = reader
        if name in self._forgotten:
            mover.submit(TierOrder(0, name, OrderKind.FORGET, ()), lambda result: None)

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a host slot. ValueError if there is none."""
        if not 0 <= slot < self.slab.ready_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.slab.ready_slots - 1}")
        return self.slab.array[slot * self.slab.slot_bytes : (slot + 1) * self.slab.slot_bytes]

    def file_of(self, name: str) -> RankFile | None:
        """The open block file of this tier."""
        file = self._site.files.get(name)
        return file if file is not None and file.is_open else None

    def close_lower(self) -> None:
        """Ends what lower tiers do, before whoever shares their loads ends; idempotent."""
        for file in self._site.files.values():
            file.close()
        for mover in self._movers.values():
            mover.close()
        for close in self._site.closes:
            close()

    def close(self) -> None:
        """Rejects what waits, lets what runs end, gives memory and files back; idempotent."""
        self.close_lower()
        if self._executor is not None:
            self._executor.close()
        self.slab.close()
