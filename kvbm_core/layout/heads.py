"""Which bytes of a block belong to which KV heads, so that engines with other numbers of ranks can read it.

A block of the whole model is divided into *head shards*; each has the same number of heads, of all layers. A
rank has one or more shards, or several ranks have the same one. The bytes of a shard are in one order,
however this rank's engine arranges them: layer, head, then the tensor's other axes as the engine numbers
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from kvbm_core.errors import LayoutError
from kvbm_core.layout.tensors import TensorInfo, block_axis, content_strides_bytes, without_shared
from kvbm_core.tokens.hashing import encode_fields

HEADS_VERSION = 1
ITEM_SIZES = (1, 2, 4, 8)
NO_CODEC, FP8 = "none", "fp8"
FP8_VERSION = 1
FP8_DTYPES = ("bfloat16", "float16", "float32")
SCALE_BYTES = 4


class HeadTensor(NamedTuple):
    """One layer's tensor within a block's content. The first axis of ``shape`` and ``strides_bytes`` is that
    of the heads (of size 1 if the tensor has none); the other axes follow.
    """

    name: str
    dtype: str
    itemsize: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a block."""
        return prod(self.shape[1:]) * self.itemsize

    @property
    def cuts(self) -> tuple[int, ...]:
        """Into how many parts a head's axes are cut where each part has a scale: the last two are halved.

        K and V are in a tensor as halves of each row, or as halves of all rows (on GPUs, on CPUs): no part
        has both.
        """
        inner = self.shape[1:]
        return tuple(2 if a >= len(inner) - 2 and n % 2 == 0 else 1 for a, n in enumerate(inner))

    def stored_head_bytes(self, codec: str) -> int:
        """What one head of a block takes in a store."""
        return self.head_bytes if codec == NO_CODEC else prod(self.cuts) * SCALE_BYTES + prod(self.shape[1:])


class HeadGroup(NamedTuple):
    """One KV cache group, layer by layer."""

    block_tokens: int
    tensors: tuple[HeadTensor, ...]


def head_tensors(
    tensors: Sequence[TensorInfo], num_blocks: int, head_axis: int | None
) -> tuple[HeadTensor, ...]:
    """The tensors of ``view_of_tensors(tensors, num_blocks)``, in its order. ``head_axis`` None: the tensors
    have no axis of heads, and are the same on every rank. LayoutError if a tensor cannot be divided.
    """
    made: list[HeadTensor] = []
    at_bytes = 0
    for tensor in without_shared(tensors):
        axis = block_axis(tensor, num_blocks)
        if head_axis == axis or tensor.itemsize not in ITEM_SIZES:
            raise tensor.refuse("cannot be divided by heads")
        sizes = list(tensor.shape)
        sizes[axis] //= num_blocks
        strides = content_strides_bytes(tensor, num_blocks)
        first = [] if head_axis is None else [head_axis]
        order = [*first, axis, *(a for a in range(len(sizes)) if a != axis and a not in first)]
        shape, own = tuple(sizes[a] for a in order), tuple(strides[a] for a in order)
        if head_axis is None:
            shape, own = (1, *shape), (0, *own)
        made.append(HeadTensor(tensor.name, tensor.dtype, tensor.itemsize, at_bytes, shape, own))
        at_bytes += prod(sizes) * tensor.itemsize
    return tuple(made)


@dataclass(frozen=True, slots=True)
class HeadShards:
    """How the blocks of one rank are made of head shards.

    ``num_shards``: of a block of the whole model. ``own``: the shards that this rank has. ``is_keeper``: of
    the ranks with the same shards, this one stores them. ``shard_bytes``: the same for every group; a smaller
    group is filled up with zeros. ``meaning``: 32 hex digits, equal wherever the bytes of a shard mean the
    same. ``codec``: NO_CODEC, or FP8: numbers as storage/remote/fp8.py keeps them.
    """

    num_shards: int
    own: range
    is_keeper: bool
    shard_bytes: int
    meaning: str
    groups: tuple[HeadGroup, ...]
    codec: str = NO_CODEC


def divide_heads(
    groups: Sequence[HeadGroup],
    total_heads: int | None,
    rank: int,
    num_ranks: int,
    max_shards: int,
    *,
    codec: str = NO_CODEC,
) -> HeadShards:
    """The shards of rank ``rank``. ``num_ranks`` ranks share ``total_heads`` heads evenly, in order; with
    more ranks than heads, neighbors have the same head. None: all ranks have the same bytes (MLA). The
    number of shards is the largest that divides both ``total_heads`` and ``max_shards``; with None it is 1.

    LayoutError, the end of a line for people, if the groups are not divided like this, or a rank would have
    less than a shard.
    """
    if total_heads is None:
        num_shards, own, is_keeper = 1, range(1), rank == 0
        local_heads = shard_heads = 1
    else:
        if total_heads % num_ranks and num_ranks % total_heads:
            raise LayoutError(f"{num_ranks} ranks do not share {total_heads} KV heads evenly")
        num_shards = gcd(total_heads, max_shards)
        shard_heads = total_heads // num_shards
        local_heads, num_same = max(1, total_heads // num_ranks), max(1, num_ranks // total_heads)
        if local_heads % shard_heads:
            why = f"{num_ranks} ranks have {local_heads} of {total_heads} KV heads each"
            raise LayoutError(f"{why}, and a shard has {shard_heads}: set it to a multiple of {num_ranks}")
        first = rank // num_same * local_heads // shard_heads
        own, is_keeper = range(first, first + local_heads // shard_heads), rank % num_same == 0
    for tensor in (tensor for group in groups for tensor in group.tensors):
        if tensor.shape[0] != local_heads:
            raise LayoutError(f"{tensor.name} has {tensor.shape[0]} KV heads here, not {local_heads}")
        if codec == FP8 and tensor.dtype not in FP8_DTYPES:
            known = ", ".join(FP8_DTYPES)
            raise LayoutError(f"{tensor.name} is {tensor.dtype}, and only {known} can be made smaller")
    shard_bytes = max(
        shard_heads * sum(tensor.stored_head_bytes(codec) for tensor in group.tensors) for group in groups
    )
    meaning = _meaning(groups, total_heads or 0, num_shards, codec)
    return HeadShards(num_shards, own, is_keeper, shard_bytes, meaning, tuple(groups), codec)


def _meaning(groups: Sequence[HeadGroup], total_heads: int, num_shards: int, codec: str) -> str:
    fields: list[str | int] = ["kvbm-heads", HEADS_VERSION, total_heads, num_shards, len(groups)]
    if codec != NO_CODEC:
        fields += [codec, FP8_VERSION]
    for group in groups:
        fields += [group.block_tokens, len(group.tensors)]
        for tensor in group.tensors:
            fields += [tensor.name, tensor.dtype, tensor.itemsize, len(tensor.shape), *tensor.shape[1:]]
    return hashlib.sha256(encode_fields(*fields)).hexdigest()[:32]
