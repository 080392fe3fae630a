"""Between a block of one group and its head shards: copies of bytes, or of numbers that are made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_core.layout.heads import FP8, SCALE_BYTES, HeadGroup, HeadShards, HeadTensor
from kvbm_core.storage.base import Memory, plain_parts
from kvbm_core.storage.remote.fp8 import NUMPY_OF, Encoded, decode, encode

TOGETHER_NUMBERS = 1 << 18
"""So many are made smaller at once: what that takes of memory stays in a CPU's cache."""


def copies_of(group: HeadGroup, heads: HeadShards) -> Copies:
    """Those of this group's blocks."""
    return Fp8Copies(group, heads) if heads.codec == FP8 else ExactCopies(group, heads)


class Copies:
    """A block's shards lie one after the other in a ``room``. Any thread."""

    def __init__(self, group: HeadGroup, heads: HeadShards) -> None:
        self._num_shards, self._shard_bytes = len(heads.own), heads.shard_bytes
        per_head = sum(tensor.stored_head_bytes(heads.codec) for tensor in group.tensors)
        self._used_bytes = per_head * (group.tensors[0].shape[0] // self._num_shards)

    def divide(self, payload: Memory, room: memoryview) -> bool:
        """Fills the room for its shards; False, and garbage in it, if such a block cannot be kept."""
        parts = plain_parts(payload)
        block = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        if not self._divide(block, room):
            return False
        if self._used_bytes < self._shard_bytes:  # or what was in this memory before would be stored
            rest: npt.NDArray[np.uint8] = np.frombuffer(room, np.uint8).reshape(self._num_shards, -1)
            rest[:, self._used_bytes :] = 0
        return True

    def join(self, room: memoryview, target: Memory) -> None:
        """The opposite. What of a block is in no shard, such as its padding, is left as it is."""
        parts = plain_parts(target)
        block = parts[0] if len(parts) == 1 else memoryview(bytearray(sum(part.nbytes for part in parts)))
        self._join(room, block)
        if len(parts) > 1:
            at = 0
            for part in parts:
                part[:] = block[at : at + part.nbytes]
                at += part.nbytes

    def _divide(self, block: memoryview, room: memoryview) -> bool:
        raise NotImplementedError

    def _join(self, room: memoryview, block: memoryview) -> None:
        raise NotImplementedError

    def _in_shards(self, dtype: str, at_bytes: int, shape: tuple[int, ...]) -> _Places:
        """``shape``: tensors, shards, heads of a shard, and what each head has, one after the other."""
        strides = _packed(np.dtype(dtype).itemsize, shape[2:])
        return _Places(dtype, shape, at_bytes, (shape[2] * strides[0], self._shard_bytes, *strides))


class ExactCopies(Copies):
    """Bytes as they are."""

    def __init__(self, group: HeadGroup, heads: HeadShards) -> None:
        super().__init__(group, heads)
        self._places: list[tuple[_Places, _Places]] = []
        at_bytes = 0
        for run in _runs(group.tensors):
            in_block = _in_block(run, self._num_shards, f"u{run[0].itemsize}")
            self._places.append((in_block, self._in_shards(in_block.dtype, at_bytes, in_block.shape)))
            at_bytes += len(run) * in_block.shape[2] * run[0].head_bytes

    def _divide(self, block: memoryview, room: memoryview) -> bool:
        for in_block, in_shards in self._places:
            in_shards.array(room)[...] = in_block.array(block)
        return True

    def _join(self, room: memoryview, block: memoryview) -> None:
        for in_block, in_shards in self._places:
            in_block.array(block)[...] = in_shards.array(room)


class _Fp8Run(NamedTuple):
    cuts: tuple[int, ...]
    numbers: _Places
    codes: _Places
    scales: _Places


class Fp8Copies(Copies):
    """Numbers as fp8.py keeps them. A shard is its scales (float32: tensor, head, parts), and then a byte for
    each number, in the order that the numbers have as they are.
    """

    def __init__(self, group: HeadGroup, heads: HeadShards) -> None:
        super().__init__(group, heads)
        self._runs: list[_Fp8Run] = []
        heads_each = group.tensors[0].shape[0] // self._num_shards
        scales_at = 0
        codes_at = heads_each * sum(prod(tensor.cuts) for tensor in group.tensors) * SCALE_BYTES
        for run in _runs(group.tensors):
            numbers = _in_block(run, self._num_shards, NUMPY_OF[run[0].dtype])
            cuts = run[0].cuts
            scales_shape = (*numbers.shape[:3], *cuts)
            codes = self._in_shards("u1", codes_at, numbers.shape)
            scales = self._in_shards("f4", scales_at, scales_shape)
            self._runs.append(_Fp8Run(cuts, numbers, codes, scales))
            codes_at += prod(numbers.shape) // self._num_shards
            scales_at += prod(scales_shape) // self._num_shards * SCALE_BYTES

    def _divide(self, block: memoryview, room: memoryview) -> bool:
        for run in self._runs:
            numbers, codes, scales = (places.array(m) for places, m in _of(run, block, room))
            for step in _steps(run.numbers.shape):
                encoded = encode(np.ascontiguousarray(numbers[step]), run.cuts)
                if encoded is None:
                    return False
                codes[step], scales[step] = encoded
        return True

    def _join(self, room: memoryview, block: memoryview) -> None:
        for run in self._runs:
            numbers, codes, scales = (places.array(m) for places, m in _of(run, block, room))
            for step in _steps(run.numbers.shape):
                encoded = Encoded(np.ascontiguousarray(codes[step]), scales[step])
                numbers[step] = decode(encoded, run.numbers.dtype, run.cuts)


def _of(run: _Fp8Run, block: memoryview, room: memoryview) -> tuple[tuple[_Places, memoryview], ...]:
    return (run.numbers, block), (run.codes, room), (run.scales, room)


def _steps(shape: tuple[int, ...]) -> list[slice]:
    """Of the first axis."""
    each = max(1, TOGETHER_NUMBERS // prod(shape[1:]))
    return [slice(start, start + each) for start in range(0, shape[0], each)]


# ---------------------------------------------------------------- where what is


class _Places(NamedTuple):
    """Where the elements of an array of ``shape`` and numpy's ``dtype`` are in a block, or in its shards."""

    dtype: str
    shape: tuple[int, ...]
    at_bytes: int
    strides_bytes: tuple[int, ...]

    def array(self, memory: memoryview) -> npt.NDArray[Any]:
        """It, over the given memory."""
        made: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, memory, self.at_bytes, self.strides_bytes)
        return made


def _in_block(run: Sequence[HeadTensor], num_shards: int, dtype: str) -> _Places:
    """Axes: tensors, shards, heads of a shard, and the others."""
    first = run[0]
    step_bytes = run[1].offset_bytes - first.offset_bytes if len(run) > 1 else 0
    head_stride, *others = first.strides_bytes
    heads_each = first.shape[0] // num_shards
    shape = (len(run), num_shards, heads_each, *first.shape[1:])
    strides = (step_bytes, heads_each * head_stride, head_stride, *others)
    return _Places(dtype, shape, first.offset_bytes, strides)


def _packed(itemsize: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    sizes = [*accumulate(reversed(shape[1:]), lambda size, n: size * n, initial=itemsize)]
    return tuple(reversed(sizes))


def _runs(tensors: Sequence[HeadTensor]) -> list[Sequence[HeadTensor]]:
    """Tensors one after the other that are alike but for their places, which are evenly spaced."""
    runs, start = list[Sequence[HeadTensor]](), 0
    while start < len(tensors):
        runs.append(_alike(tensors[start:]))
        start += len(runs[-1])
    return runs


def _alike(tensors: Sequence[HeadTensor]) -> list[HeadTensor]:
    """As many of the first ones as are alike but for their places, which are evenly spaced."""
    first, run = tensors[0], [tensors[0]]
    for tensor in tensors[1:]:
        same = tensor._replace(name=first.name, offset_bytes=first.offset_bytes) == first
        step_bytes = tensor.offset_bytes - run[-1].offset_bytes
        if not same or (len(run) > 1 and step_bytes != run[1].offset_bytes - run[0].offset_bytes):
            break
        run.append(tensor)
    return run
