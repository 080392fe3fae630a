"""A KV cache on the GPU as vLLM lays it out, the pinned slab beside it, and proof that what was copied
arrived.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from benchmarks.gpu.device import WAIT_S, Device
from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import view_of_tensors
from kvbm_core.layout.view import Segment, pair_segments
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.cuda_runtime import Copies
from kvbm_core.transfer.pieces import PieceTable
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_core.types import Direction

PER_LAYER_NHD, PER_LAYER_HND, CROSS_LAYER = "per layer, NHD", "per layer, HND", "cross layer"
LAYOUTS = (PER_LAYER_NHD, PER_LAYER_HND, CROSS_LAYER)
HEADS, CONTENT, ITEM_BYTES = 4, 64, 2
TOKEN_BYTES = HEADS * CONTENT * ITEM_BYTES


class WrongBytes(Exception):
    """A copy ended well and its target does not hold its source."""


@dataclass(frozen=True)
class Choice:
    """Blocks and slots that move, all scattered: ``blocks[i]`` and ``slots[i]``."""

    blocks: list[int]
    slots: list[int]

    def plan(self, job_id: int, direction: Direction) -> TransferPlan:
        """What a leader would send."""
        return TransferPlan(job_id, direction, (GroupMove(0, tuple(self.blocks), tuple(self.slots)),))


def kv_tensors(raw: torch.Tensor, layout: str, layers: int, num_blocks: int) -> list[torch.Tensor]:
    """``raw``, bf16 and flat, as vLLM would hand it over: a tensor [blocks, heads, tokens, content] for each
    layer.
    """
    tokens = raw.numel() // (layers * num_blocks * HEADS * CONTENT)
    if layout == PER_LAYER_HND:
        return list(raw.view(layers, num_blocks, HEADS, tokens, CONTENT))
    if layout == PER_LAYER_NHD:
        return list(raw.view(layers, num_blocks, tokens, HEADS, CONTENT).transpose(2, 3))
    return list(raw.view(num_blocks, layers, tokens, HEADS, CONTENT).transpose(2, 3).unbind(1))


class Pool:
    """Device memory and a ready slab for ``num_blocks`` blocks of ``layers`` pages; half of them move at a
    time.
    """

    def __init__(self, device: Device, page_bytes: int, layers: int, num_blocks: int, seed: int) -> None:
        self.device, self.page_bytes, self.layers, self.num_blocks = device, page_bytes, layers, num_blocks
        self._draw = random.Random(seed)
        self.job_ids = count(1)
        self.bytes = torch.randint(
            0, 256, (num_blocks * layers * page_bytes,), dtype=torch.uint8, device=device.torch_device
        )
        self.slab = HostSlab(num_blocks, layers * page_bytes, prepare=device.pin, cpus=device.near_cpus)
        if not self.slab.wait_ready(WAIT_S):
            raise MemoryError(
                f"no host memory for {self.bytes.numel() >> 20} MiB of slots: {self.slab.failure}"
            )

    @property
    def moved_bytes(self) -> int:
        """Bytes of one copy."""
        return self.num_blocks // 2 * self.layers * self.page_bytes

    def choose(self) -> tuple[Choice, Choice]:
        """Two copies that do not touch each other."""
        half = self.num_blocks // 2
        blocks, slots = (self._draw.sample(range(self.num_blocks), 2 * half) for _ in range(2))
        return Choice(blocks[:half], slots[:half]), Choice(blocks[half:], slots[half:])

    def change(self) -> None:
        """Gives every byte on the device another value: no copy can pass by doing nothing."""
        self.bytes.add_(1)
        self.device.synchronize()

    def close(self) -> None:
        """Gives the slab back."""
        self.slab.close()


class Cache:
    """A pool seen through one layout, with the real executor. ``pages[block, layer]`` are the bytes on the
    device.
    """

    def __init__(self, pool: Pool, layout: str) -> None:
        self.pool, self.layout = pool, layout
        layers, blocks = pool.layers, pool.num_blocks
        tensors = kv_tensors(pool.bytes.view(torch.bfloat16), layout, layers, blocks)
        names = [f"layer.{number}" for number in range(layers)]
        infos, storages = describe_tensors(dict(zip(names, tensors, strict=True)), names)
        self.view = view_of_tensors(infos, blocks)
        self.memory = DeviceMemory((self.view,), storages)
        shape = (blocks, layers) if layout == CROSS_LAYER else (layers, blocks)
        pages = pool.bytes.view(*shape, pool.page_bytes)
        self.pages = pages if layout == CROSS_LAYER else pages.transpose(0, 1)
        self.pairs: Sequence[tuple[Segment, Segment]] = pair_segments(
            self.view, pool.slab.view(self.view.block_bytes)
        )
        self.bases = [pool.device.api.address_of(storage) for storage in storages]
        self.table = PieceTable(self.pairs, self.bases, pool.slab.address, pool.slab.chunk_bytes)
        self._results: list[JobResult] = []
        self.executor = pool.device.executor(self.memory, pool.slab, self._results.append)

    def submit(self, choices: Sequence[tuple[Choice, Direction]]) -> list[int]:
        """Gives the executor a job each and returns their ids."""
        plans = [choice.plan(next(self.pool.job_ids), direction) for choice, direction in choices]
        for plan in plans:
            self.executor.submit(plan)
        return [plan.job_id for plan in plans]

    def finish(self, job_ids: Sequence[int]) -> None:
        """Waits for jobs, which must end well."""
        if not self.executor.wait(job_ids, WAIT_S):
            raise TimeoutError(f"jobs {list(job_ids)} did not end within {WAIT_S:.0f} s")
        bad = [result for result in self._results if result.outcome is not Outcome.OK]
        self._results.clear()
        if bad:
            raise RuntimeError(f"a copy ended as {bad[0].outcome.value}: {bad[0].detail}")

    def copies(self, choice: Choice, direction: Direction) -> Copies:
        """Addresses of a whole choice, for those who copy without the executor."""
        arrays = self.table.arrays(choice.blocks, choice.slots, to_host=direction is Direction.OFFLOAD)
        targets, sources, sizes = (numbers.tolist() for numbers in arrays)
        return targets, sources, sizes

    def check(self, what: str, *choices: Choice) -> None:
        """Every slot holds its block, compared on the device; WrongBytes if not."""
        pool = self.pool
        host = torch.from_numpy(pool.slab.array)
        content = torch.empty_like(pool.bytes)
        for start in range(0, host.numel(), pool.slab.chunk_bytes):  # each chunk was pinned by itself
            part = slice(start, start + pool.slab.chunk_bytes)
            content[part].copy_(host[part])
        slots = content.view(pool.num_blocks, pool.layers, pool.page_bytes)
        for choice in choices:
            blocks, places = (torch.tensor(n, device=content.device) for n in (choice.blocks, choice.slots))
            if not torch.equal(self.pages[blocks], slots[places]):
                raise WrongBytes(f"{what}: {self.layout}, pages of {pool.page_bytes} bytes")

    def close(self) -> None:
        """Ends the executor."""
        self.executor.close()


def size_text(nbytes: int) -> str:
    """4 KiB, 2 MiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
