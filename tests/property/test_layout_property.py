"""Views against a naive twin: the address of every single byte, from numpy's own index arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.errors import LayoutError
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.layout.view import BlockView, Segment, pair_segments


def element_offsets(info: TensorInfo) -> np.ndarray:
    """Byte offset of each element of the tensor, in the tensor's shape."""
    offsets = np.full(info.shape, info.storage_offset_bytes, dtype=np.int64)
    for index in np.ndindex(*info.shape):
        offsets[index] += info.itemsize * sum(i * s for i, s in zip(index, info.strides, strict=True))
    return offsets


def naive_block_bytes(info: TensorInfo, axis: int, num_blocks: int, block: int) -> list[tuple[int, int]]:
    """(storage, byte) of everything that block ``block`` of one tensor holds, in the order of the indices."""
    per_block = info.shape[axis] // num_blocks
    chosen = np.take(element_offsets(info), range(block * per_block, (block + 1) * per_block), axis=axis)
    return [(info.storage, int(start) + i) for start in chosen.reshape(-1) for i in range(info.itemsize)]


def view_block_bytes(view: BlockView, block: int) -> list[tuple[int, int]]:
    """The same as the view says it, in content order."""
    return [(storage, start + i) for storage, start, n in view.regions(block) for i in range(n)]


@st.composite
def cache_tensors(draw: st.DrawFn) -> tuple[list[TensorInfo], int, int]:
    """A group's layers over one storage: any memory order of [layer, axes..], a gap after any axis."""
    num_blocks = draw(st.integers(3, 5))
    per_block = draw(st.integers(1, 2))
    outer_first = draw(st.booleans())
    sizes = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    outer = [draw(st.integers(1, 2))] if outer_first else []
    shape = (*outer, num_blocks * per_block, *sizes)
    layers, itemsize = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    full = (layers, *shape)
    strides = [0] * len(full)
    extent = 1
    for axis in draw(st.permutations(range(len(full)))):
        strides[axis] = extent
        extent = extent * full[axis] + draw(st.sampled_from([0, 0, 0, 5]))
    start = draw(st.integers(0, 3)) * itemsize
    infos = [
        TensorInfo(
            name=f"layer.{layer}",
            shape=shape,
            strides=tuple(strides[1:]),
            itemsize=itemsize,
            dtype="any",
            storage=0,
            storage_offset_bytes=start + layer * strides[0] * itemsize,
            storage_bytes=start + extent * itemsize,
        )
        for layer in range(layers)
    ]
    return infos, num_blocks, int(outer_first)


@given(cache_tensors())
def test_logical_order_is_the_order_of_the_indices(case: tuple[list[TensorInfo], int, int]) -> None:
    infos, num_blocks, axis = case
    view = view_of_tensors(infos, num_blocks, logical_order=True)
    for block in range(num_blocks):
        naive = [byte for info in infos for byte in naive_block_bytes(info, axis, num_blocks, block)]
        assert view_block_bytes(view, block) == naive


@given(cache_tensors())
def test_memory_order_has_the_same_bytes_layer_by_layer_ascending(
    case: tuple[list[TensorInfo], int, int],
) -> None:
    infos, num_blocks, axis = case
    view = view_of_tensors(infos, num_blocks)
    for block in range(num_blocks):
        naive = [byte for info in infos for byte in sorted(naive_block_bytes(info, axis, num_blocks, block))]
        assert view_block_bytes(view, block) == naive


@given(cache_tensors())
def test_coalescing_changes_nothing_but_the_number_of_pieces(case: tuple[list[TensorInfo], int, int]) -> None:
    infos, num_blocks, _ = case
    view = view_of_tensors(infos, num_blocks, logical_order=True)
    merged = view.coalesced()
    assert len(merged.segments) <= len(view.segments)
    for block in range(num_blocks):
        assert view_block_bytes(merged, block) == view_block_bytes(view, block)


@given(
    st.integers(1, 5),
    st.lists(
        st.builds(Segment, st.just(0), st.integers(0, 40), st.sampled_from([4, 6, 8, 12]), st.integers(1, 8)),
        min_size=1,
        max_size=4,
    ),
)
def test_check_agrees_with_listing_every_byte(num_blocks: int, segments: list[Segment]) -> None:
    view = BlockView(num_blocks, tuple(segments))
    listed = [byte for block in range(num_blocks) for byte in view_block_bytes(view, block)]
    is_sound = len(set(listed)) == len(listed) and max(offset for _, offset in listed) < 60
    try:
        view.check([60])
    except LayoutError:
        assert not is_sound
    else:
        assert is_sound


def storages_of(view: BlockView, sizes: list[int], seed: int) -> list[np.ndarray]:
    """Random memory that the view fits."""
    view.check(sizes)
    return [np.random.default_rng(seed + i).integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)]


def copy_block(
    pairs: tuple[tuple[Segment, Segment], ...],
    src: list[np.ndarray],
    dst: list[np.ndarray],
    src_block: int,
    dst_block: int,
) -> None:
    """What any executor must do, piece by piece."""
    for a, b in pairs:
        start, target = (
            a.offset_bytes + src_block * a.block_stride_bytes,
            b.offset_bytes + dst_block * b.block_stride_bytes,
        )
        dst[b.storage][target : target + b.nbytes] = src[a.storage][start : start + a.nbytes]


def content(view: BlockView, storages: list[np.ndarray], block: int) -> bytes:
    """The bytes of a block, one at a time."""
    return bytes(int(storages[s][offset]) for s, offset in view_block_bytes(view, block))


NUM_LAYERS = 3
REGION_BYTES = 16  # K or V of one layer of one block: 4 tokens x 2 elements x 2 bytes


def in_one_piece(num_blocks: int, gap_bytes: int) -> tuple[BlockView, list[int]]:
    """``[block, layer, outer, page]`` in one storage, with a gap after each block."""
    stride = 2 * NUM_LAYERS * REGION_BYTES + gap_bytes
    starts = range(0, 2 * NUM_LAYERS * REGION_BYTES, REGION_BYTES)
    view = BlockView(num_blocks, tuple(Segment(0, start, stride, REGION_BYTES) for start in starts))
    return view, [num_blocks * stride]


def a_storage_per_layer(num_blocks: int, gap_bytes: int, *, outer_first: bool) -> tuple[BlockView, list[int]]:
    """``[outer, block, page]`` or ``[block, outer, page]`` in each layer's storage, gaps between blocks."""
    stride = (REGION_BYTES if outer_first else 2 * REGION_BYTES) + gap_bytes
    value = num_blocks * stride if outer_first else REGION_BYTES  # from K to V of the same block
    segments = [
        Segment(layer, outer * value, stride, REGION_BYTES) for layer in range(NUM_LAYERS) for outer in (0, 1)
    ]
    return BlockView(num_blocks, tuple(segments)), [value + num_blocks * stride] * NUM_LAYERS


@st.composite
def views(draw: st.DrawFn) -> tuple[str, BlockView, list[int]]:
    """All layouts of blocks of 3 layers x 2 x 16 bytes = 96 bytes."""
    num_blocks = draw(st.integers(3, 5))
    gap_bytes = draw(st.sampled_from([0, 16, 48]))
    kind = draw(st.sampled_from(["full", "outer", "block", "packed", "permuted"]))
    if kind == "full":
        return kind, *in_one_piece(num_blocks, gap_bytes)
    if kind in ("outer", "block"):
        return kind, *a_storage_per_layer(num_blocks, gap_bytes, outer_first=kind == "outer")
    axes = [NUM_LAYERS, num_blocks, 2, 4, 2]
    order = draw(st.permutations(range(5))) if kind == "permuted" else [1, 0, 2, 3, 4]
    strides = {axis: math.prod(axes[other] for other in order[i + 1 :]) for i, axis in enumerate(order)}
    total = 2 * math.prod(axes)
    shape, steps = tuple(axes[1:]), tuple(strides[axis] for axis in range(1, 5))
    infos = [TensorInfo(f"{i}", shape, steps, 2, "f", 0, 2 * i * strides[0], total) for i in range(3)]
    return kind, view_of_tensors(infos, num_blocks, logical_order=True), [total]


@given(views(), views(), st.data())
def test_blocks_go_from_any_layout_to_any_other_and_back(
    left: tuple[str, BlockView, list[int]], right: tuple[str, BlockView, list[int]], data: st.DataObject
) -> None:
    (_, a, a_sizes), (_, b, b_sizes) = left, right
    src, dst = storages_of(a, a_sizes, 1), storages_of(b, b_sizes, 50)
    source = data.draw(st.integers(0, a.num_blocks - 1))
    target = data.draw(st.integers(0, b.num_blocks - 1))
    back = data.draw(st.integers(0, a.num_blocks - 1))
    original = content(a, src, source)
    others = {block: content(b, dst, block) for block in range(b.num_blocks) if block != target}
    copy_block(pair_segments(a, b), src, dst, source, target)
    assert content(b, dst, target) == original
    assert {block: content(b, dst, block) for block in others} == others
    copy_block(pair_segments(b, a), dst, src, target, back)
    assert content(a, src, back) == original


@given(cache_tensors(), st.integers(2, 7))
def test_a_block_count_that_does_not_fit_is_refused(
    case: tuple[list[TensorInfo], int, int], num_blocks: int
) -> None:
    infos, _, _ = case
    shape = infos[0].shape
    readings = [shape[0] % num_blocks == 0, shape[0] in (1, 2) and shape[1] % num_blocks == 0]
    if sum(readings) == 1:
        assert view_of_tensors(infos, num_blocks).num_blocks == num_blocks
    else:
        with pytest.raises(LayoutError):
            view_of_tensors(infos, num_blocks)
