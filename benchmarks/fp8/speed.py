"""How fast numbers are rounded and come back, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from kvbm_core.layout.heads import FP8, HeadGroup, divide_heads, head_tensors
from kvbm_core.layout.tensors import TensorInfo
from kvbm_core.storage.remote.head_copies import copies_of

LAYERS, HEADS, TOKENS, CONTENT = 32, 8, 16, 256
"""Of Llama 3.1 8B on one rank: 2 MiB in bfloat16."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NUM_BLOCKS, ROUNDS = 8, 9


class Speed(NamedTuple):
    """GB of the engine's numbers in a second. ``stored``: of each byte, what the store gets."""

    dtype: str
    to_store: float
    from_store: float
    stored: float


def measure(dtype: str, seed: int) -> Speed:
    """Blocks with random numbers, in memory as vLLM has it (NHD)."""
    itemsize = ITEM_BYTES[dtype]
    shape = (NUM_BLOCKS, HEADS, TOKENS, CONTENT)
    strides = (HEADS * TOKENS * CONTENT, CONTENT, HEADS * CONTENT, 1)
    size = NUM_BLOCKS * strides[0] * itemsize
    infos = [TensorInfo(f"{n}", shape, strides, itemsize, dtype, n, 0, size) for n in range(LAYERS)]
    group = HeadGroup(TOKENS, head_tensors(infos, NUM_BLOCKS, 1))
    heads = divide_heads([group], HEADS, 0, 1, 1, codec=FP8)
    copies = copies_of(group, heads)
    block_bytes = LAYERS * strides[0] * itemsize
    blocks = [memoryview(_numbers(dtype, block_bytes // itemsize, seed + n)) for n in range(NUM_BLOCKS)]
    rooms = [memoryview(bytearray(heads.shard_bytes)) for _ in blocks]

    def divide() -> None:
        for block, room in zip(blocks, rooms, strict=True):
            copies.divide(block, room)

    def join() -> None:
        for block, room in zip(blocks, rooms, strict=True):
            copies.join(room, block)

    gigabytes = NUM_BLOCKS * block_bytes / 1e9
    to_store, from_store = (
        gigabytes / median(_timed(work) for _ in range(ROUNDS)) for work in (divide, join)
    )
    return Speed(dtype, to_store, from_store, heads.shard_bytes / block_bytes)


def _numbers(dtype: str, count: int, seed: int) -> bytearray:
    numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    if dtype == "bfloat16":
        return bytearray((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return bytearray(numbers.astype(dtype).tobytes())


def _timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
