"""Blocks from disk: straight into the device's memory by NIXL, and by way of host memory; the same bytes?"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.device import WAIT_S, Device, open_device
from benchmarks.gpu.memory import PER_LAYER_NHD, kv_tensors
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, now_s, told_by
from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import view_of_tensors
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.device_digest import device_digest
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.movers.device_stage import DeviceStage
from kvbm_core.transfer.movers.opening import Shard
from kvbm_core.transfer.plan import (
    BLOCK_FILE,
    FIRST_DIRECT_SLOT,
    GroupMove,
    JobResult,
    OrderKind,
    TierOrder,
    TierPlace,
    TransferPlan,
)
from kvbm_core.transfer.rank import RankMemory, RankOptions
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_core.types import BlockKey, Direction

DIGESTS = Goal("checksums in the device's memory that are not the CPU's", "blocks", bound=0)
WRONG = Goal("loads from disk that brought other bytes", "loads", bound=0)
TABLE = "disk to device"
LAYERS = 36


class DiskStage:
    """See the module."""

    name = "disk"
    help = "disk straight to the device by GPUDirect Storage, its checksum, and the way through host memory"
    share = 0.08

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (DIGESTS, WRONG)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        device, folder = open_device(options.is_dry), options.output / "disk"
        num_wrong = 0
        try:
            yield Row(DIGESTS, ours=(float(_wrong_digests(device, options)),))
            for kind in ("nixl-posix",) if options.is_dry else ("nixl-gds-mt", "nixl-gds"):
                try:
                    values, wrong = _measure(device, kind, folder, options)
                    num_wrong += wrong
                    yield Cell(TABLE, {"by": kind} | values)
                except Exception as error:  # the other one is still worth knowing
                    yield Cell(TABLE, {"by": kind, "failed": told_by(error)})
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
            yield Row(WRONG, ours=(float(num_wrong),))
        finally:
            device.close()


def _wrong_digests(device: Device, options: Options) -> int:
    """Of random bytes that the CPU brings into the places."""
    size = options.choose(3, 288) * SECTOR_BYTES
    memory = _memory(device, options.choose(2, LAYERS), 4, SECTOR_BYTES)
    stage = DeviceStage(memory, size, 8 * (size + SECTOR_BYTES))
    with stage.bound():
        places = [stage.take() for _ in range(8)]
        random = torch.Generator().manual_seed(options.seed)
        expected = []
        for place in places:
            content = torch.randint(0, 256, (stage.place_bytes,), dtype=torch.uint8, generator=random)
            start = place - stage.address
            stage.staged_bytes[start : start + stage.place_bytes].copy_(content)
            raw = content.numpy()
            expected.append((raw[:SECTOR_BYTES].tobytes(), device_digest(raw[SECTOR_BYTES:])))
        return sum(found != want for found, want in zip(stage.look(places), expected, strict=True))


def _memory(device: Device, layers: int, num_blocks: int, page_bytes: int) -> DeviceMemory:
    """Random bytes on the device, as vLLM lays them out."""
    raw = torch.randint(
        0, 256, (num_blocks * layers * page_bytes,), dtype=torch.uint8, device=device.torch_device
    )
    tensors = kv_tensors(raw.view(torch.bfloat16), PER_LAYER_NHD, layers, num_blocks)
    named = {str(i): tensor for i, tensor in enumerate(tensors)}
    infos, storages = describe_tensors(named, list(named))
    return DeviceMemory((view_of_tensors(infos, num_blocks),), storages)


@dataclass
class _News:
    """TierListener, and who hears of ends."""

    is_told: threading.Event = field(default_factory=threading.Event)
    is_direct: bool = False
    results: queue.SimpleQueue[JobResult] = field(default_factory=queue.SimpleQueue)

    def found(self, tier: str, end: int, found: list[Found]) -> None:
        """See TierListener."""

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""
        raise OSError(reason)

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        self.is_direct = is_direct
        self.is_told.set()

    def end(self) -> JobResult:
        """The next one; TimeoutError if it was not OK, or does not come."""
        result = self.results.get(timeout=WAIT_S)
        if result.outcome is not Outcome.OK:
            raise TimeoutError(f"{result.outcome}: {result.detail}")
        return result


def _measure(device: Device, kind: str, folder: Path, options: Options) -> tuple[dict[str, str], int]:
    """Figures, and how many loads brought other bytes. OSError if the way cannot be had: the log says why."""
    num_blocks = options.choose(8, 512)
    memory = _memory(device, options.choose(4, LAYERS), num_blocks, options.choose(4096, 32 << 10))
    originals = [torch.as_tensor(storage).clone() for storage in memory.storages]
    news, disk = _News(), FileOptions(to_device=kind)
    rank = RankMemory(
        memory,
        num_blocks,
        RankOptions(disk=disk),
        places=(TierPlace("disk", str(folder), num_blocks, kind=BLOCK_FILE),),
        shard=Shard(0, 1, "gpu benchmark"),
        listener=news,
        on_ready=lambda slots: None,
    )
    try:
        executor = rank.make_executor(news.results.put)
        if not rank.slab.wait_ready(WAIT_S) or not (news.is_told.wait(WAIT_S) and news.is_direct):
            raise OSError(f"{kind} cannot be had; the log of this stage says why")
        load = _store(rank, executor, num_blocks, news)
        rates: dict[bool, list[float]] = {True: [], False: []}
        num_wrong = 0
        for _ in range(options.choose(1, 5)):
            for is_straight in (True, False):
                for storage in memory.storages:
                    torch.as_tensor(storage).zero_()
                device.synchronize()
                seconds, num_bytes = _load(rank, executor, load, news, is_straight=is_straight)
                rates[is_straight].append(num_bytes / seconds / 1e9)
                pairs = zip(memory.storages, originals, strict=True)
                num_wrong += not all(torch.equal(torch.as_tensor(own), original) for own, original in pairs)
    finally:
        rank.close()
    straight, staged = median(rates[True]), median(rates[False])
    return {
        "GB/s": f"{straight:.2f}",
        "by way of host memory, GB/s": f"{staged:.2f}",
        "ratio": f"{median(a / b for a, b in zip(rates[True], rates[False], strict=True)):.3f}",
    }, num_wrong


def _store(rank: RankMemory, executor: Executor, num_blocks: int, news: _News) -> TransferPlan:
    """All blocks to disk; the plan that brings them back by way of host slots."""
    numbers = tuple(range(num_blocks))
    keys = tuple(BlockKey(number.to_bytes(32, "little")) for number in numbers)
    move = GroupMove(0, numbers, numbers)
    executor.submit(TransferPlan(1, Direction.OFFLOAD, (move,)))
    news.end()
    rank.submit(TierOrder(2, "disk", OrderKind.STORE, keys, numbers, numbers), news.results.put)
    news.end()
    rank.slab.array[:] = 0
    return TransferPlan(
        3,
        Direction.ONBOARD,
        (move,),
        (TierOrder(3, "disk", OrderKind.FETCH, keys, numbers, numbers),),
    )


def _load(
    rank: RankMemory, executor: Executor, load: TransferPlan, news: _News, *, is_straight: bool
) -> tuple[float, int]:
    """Seconds, and bytes that came to the device."""
    if is_straight:
        (move,), (order,) = load.moves, load.reads
        slots = tuple(FIRST_DIRECT_SLOT + place for place in order.places)
        load = replace(load, moves=(move._replace(slots=slots),), reads=(replace(order, slots=slots),))
    started_s = now_s()
    rank.start(executor, load)
    result = news.end()
    return now_s() - started_s, result.num_bytes
