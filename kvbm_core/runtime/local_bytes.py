"""The bytes of LocalTiers: the host tier's memory, the block file, and the executors between them and the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbm_core.errors import ConfigError
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.runtime.disk import DiskOptions
from kvbm_core.runtime.messages import DiskShare, Message, Store
from kvbm_core.runtime.worker_disk import WorkerDisk, WorkerDiskOptions, piped
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.storage.host_slab import HostSlab, available_memory_bytes
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, DeviceMemory, Executor
from kvbm_core.transfer.factory import make_executor, slab_cpus, slab_preparation
from kvbm_core.transfer.plan import JobResult, TransferPlan


@dataclass(frozen=True, slots=True)
class LocalDisk:
    """``share``: folder and slots. ``fingerprint``: what the bytes of a block mean; other files are begun
    anew.
    """

    share: DiskShare
    fingerprint: str
    admission: AdmissionPolicy
    tier: DiskOptions = field(default_factory=DiskOptions)
    worker: WorkerDiskOptions = field(default_factory=WorkerDiskOptions)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """``num_slots``: of the host tier. ``transfer_deadline_s``: what has not started by then is given up.

    ``lease_ttl_s``: how long a match is held for an owner who does not come back. ``verify``: a checksum of
    each block is compared when it is loaded.
    """

    num_slots: int
    disk: LocalDisk | None = None
    lease_ttl_s: float = 30.0
    transfer_deadline_s: float = 60.0
    max_concurrent_transfers: int = 4
    max_batch_blocks: int = 16
    near_memory: bool = True
    verify: bool = False


def slot_bytes_of(memory: DeviceMemory, *, with_disk: bool) -> int:
    """Of a block of ``memory`` in the host tier."""
    block_bytes = memory.views[0].block_bytes
    return whole_sectors(block_bytes) if with_disk else block_bytes


class LocalBytes:
    """Slab, disk and executors of one process. ``on_result``, ``on_news`` and ``on_released`` are called from
    any thread; ``on_ready(slots)`` from the slab's.

    ConfigError if there is not enough memory, UnsupportedError if nothing copies from such device memory. A
    disk that cannot be used is said to ``on_news``; there is none then.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        options: LocalOptions,
        *,
        on_ready: Callable[[int], None],
        on_result: Callable[[JobResult], None],
        on_news: Callable[[Message], None],
        on_released: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._options = options
        self._on_result, self._on_released = on_result, on_released
        self._disk: WorkerDisk | None = None
        self._digests = SlotDigests() if options.verify else None
        slot_bytes = slot_bytes_of(memory, with_disk=options.disk is not None)
        needed, available = options.num_slots * slot_bytes, available_memory_bytes()
        if needed > available:
            why = f"needs {needed / 1e9:.2f} GB, {available / 1e9:.2f} GB are free; set a smaller size"
            raise ConfigError("DYN_KVBM_CPU_CACHE_GB", f"{needed / 1e9:.2f}", why)
        self._slab = HostSlab(
            options.num_slots,
            slot_bytes,
            prepare=slab_preparation(memory),
            on_ready=on_ready,
            cpus=slab_cpus(memory) if options.near_memory else (),
        )
        try:
            self._executor = self._make_executor(on_news)
        except BaseException:
            self._slab.close()
            raise

    def _make_executor(self, on_news: Callable[[Message], None]) -> Executor:
        disk_options = self._options.disk
        if disk_options is not None:
            disk = WorkerDisk(0, 1, disk_options.worker, on_news)
            share, fingerprint = disk_options.share, disk_options.fingerprint
            if disk.open(share, self._slab.slot_bytes, fingerprint) or disk.is_busy:
                self._disk = disk
                finished, released = self._finished, self._released
                return piped(self._make_copier, disk, self._slab, finished, released, self._digests)
        return self._make_copier(self._finished)

    def _make_copier(self, on_done: Callable[[JobResult], None]) -> Copier:
        return make_executor(
            self._memory,
            self._slab,
            max_concurrent=self._options.max_concurrent_transfers,
            max_batch_blocks=self._options.max_batch_blocks,
            on_done=on_done,
            digests=self._digests,
        )

    def submit(self, plan: TransferPlan) -> None:
        """See Executor.submit."""
        self._executor.submit(plan, deadline_s=self._options.transfer_deadline_s)

    def cancel(self, job_id: int) -> bool:
        """See Executor.cancel."""
        return self._executor.cancel(job_id)

    def store(self, order: Store) -> None:
        """Writes host slots to the disk; the end of it comes with ``on_news``."""
        if self._disk is not None:
            self._disk.store(order, deadline_s=self._options.transfer_deadline_s)

    def close(self) -> None:
        """Rejects what waits, lets what runs end, gives memory and files back; idempotent."""
        if self._disk is not None:
            self._disk.close()
        self._executor.close()
        self._slab.close()

    def _finished(self, result: JobResult) -> None:
        if self._disk is not None and self._disk.is_store(result.job_id):
            self._disk.stored(result)
        else:
            self._on_result(result)

    def _released(self, job_id: int) -> None:
        if self._disk is not None and self._disk.is_store(job_id):
            self._disk.released(job_id)
        else:
            self._on_released(job_id)
