"""From what an engine's KV cache tensors look like to a BlockView, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from kvbm_core.errors import LayoutError
from kvbm_core.layout.view import BlockView, Segment

MAX_SEGMENTS_PER_TENSOR = 65_536
"""A tensor that falls into more pieces per block than this is refused."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its bytes. ``strides`` count elements; storages are numbered by the caller."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    storage: int
    storage_offset_bytes: int
    storage_bytes: int

    def refuse(self, why: str) -> LayoutError:
        """The one line that a user gets when this tensor cannot be cached."""
        return LayoutError(f"kvbm: KV cache of {self.name} {why}: shape {self.shape}, strides {self.strides}")


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    stride: int


def view_of_tensors(
    tensors: Sequence[TensorInfo], num_blocks: int, *, logical_order: bool = False
) -> BlockView:
    """The blocks of one KV cache group, whose layers are ``tensors`` in layer order.

    The block axis is axis 0 if its size is a multiple of ``num_blocks`` (several kernel blocks may make
    one block), else axis 1 behind an axis of 1 or 2 (K and V apart). The content of a block is its layers
    one after the other, each in the order its bytes have in memory, so that pages stay whole; with
    ``logical_order`` it is the order of the tensor's indices, the same for every permutation of memory.
    A layer that shares another layer's tensor adds nothing. Anything unclear raises LayoutError.
    """
    if num_blocks < 1:
        raise LayoutError(f"kvbm: {num_blocks} device blocks")
    if not tensors:
        raise LayoutError("kvbm: a KV cache group without tensors")
    segments: list[Segment] = []
    storage_bytes = {tensor.storage: tensor.storage_bytes for tensor in tensors}
    for tensor in without_shared(tensors):
        segments.extend(_segments(tensor, num_blocks, logical_order))
    view = BlockView(num_blocks, tuple(segments)).coalesced()
    view.check([storage_bytes.get(index, 0) for index in range(max(storage_bytes) + 1)])
    return view


def without_shared(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Each of those that lie in the same place once."""
    seen = {(t.storage, t.storage_offset_bytes, t.shape, t.strides, t.itemsize): t for t in reversed(tensors)}
    return [tensor for tensor in tensors if any(tensor is kept for kept in seen.values())]


def memory_order(tensor: TensorInfo) -> str:
    """Axis numbers from the largest to the smallest stride, for a LayerIdentity's ``order``: ``0213``."""
    return "".join(str(a) for a in sorted(range(len(tensor.shape)), key=lambda a: (-tensor.strides[a], a)))


def block_axis(tensor: TensorInfo, num_blocks: int) -> int:
    """0 or 1; LayoutError if neither or both can be the block axis."""
    shape = tensor.shape
    first = shape[0] % num_blocks == 0
    second = shape[0] in (1, 2) and shape[1] % num_blocks == 0
    # With one block both readings are the same bytes in the same order.
    if first and second and num_blocks > 1:
        raise tensor.refuse(f"has two axes that could be the {num_blocks} blocks")
    if first:
        return 0
    if second:
        return 1
    raise tensor.refuse(f"has no axis of a multiple of {num_blocks} blocks")


def content_strides_bytes(tensor: TensorInfo, num_blocks: int) -> tuple[int, ...]:
    """How far apart neighbors of each axis are in a block's content, which has the order of memory and no
    gaps; on the block axis, the pieces that make up a block.
    """
    inner, order = _inner(tensor, num_blocks)
    strides, run_bytes = [0] * len(inner), tensor.itemsize
    for axis in reversed(order):
        strides[axis] = run_bytes
        run_bytes *= inner[axis].size
    return tuple(strides)


def _inner(tensor: TensorInfo, num_blocks: int) -> tuple[list[_Axis], list[int]]:
    """The axes within one block, and their numbers in the order of memory."""
    _check_shape(tensor)
    axis = block_axis(tensor, num_blocks)
    inner = [_Axis(n, s) for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    inner[axis] = _Axis(tensor.shape[axis] // num_blocks, tensor.strides[axis])
    return inner, sorted(range(len(inner)), key=lambda a: -inner[a].stride)


def _segments(tensor: TensorInfo, num_blocks: int, logical_order: bool) -> list[Segment]:
    axes, order = _inner(tensor, num_blocks)
    block = axes[block_axis(tensor, num_blocks)]
    if logical_order:
        order = [*range(len(axes))]
    inner = [axes[a] for a in order if axes[a].size > 1]
    run_elements = 1
    while inner and inner[-1].stride == run_elements:
        run_elements *= inner.pop().size
    if prod(a.size for a in inner) > MAX_SEGMENTS_PER_TENSOR:
        raise tensor.refuse("falls into too many pieces")
    return [
        Segment(
            tensor.storage,
            tensor.storage_offset_bytes + tensor.itemsize * sum(offset),
            block.size * block.stride * tensor.itemsize,
            run_elements * tensor.itemsize,
        )
        for offset in product(*([i * a.stride for i in range(a.size)] for a in inner))
    ]


def _check_shape(tensor: TensorInfo) -> None:
    if len(tensor.shape) < 2 or len(tensor.shape) != len(tensor.strides):
        raise tensor.refuse("has no known rank")
    if min(tensor.shape) < 1 or tensor.itemsize < 1 or tensor.storage < 0:
        raise tensor.refuse("is empty")
    used_elements = 1
    for size, stride in sorted(zip(tensor.shape, tensor.strides, strict=True), key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride < used_elements:
            raise tensor.refuse("has zero, negative or overlapping strides")
        used_elements += (size - 1) * stride
    end_bytes = tensor.storage_offset_bytes + used_elements * tensor.itemsize
    if tensor.storage_offset_bytes < 0 or end_bytes > tensor.storage_bytes:
        raise tensor.refuse(f"does not fit its storage of {tensor.storage_bytes} bytes")
