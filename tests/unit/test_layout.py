"""Where the bytes of a block are: tensors as engines make them, and refusals."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from kvbm_core.errors import LayoutError
from kvbm_core.layout.fingerprint import LayerIdentity, LayoutIdentity
from kvbm_core.layout.tensors import MAX_SEGMENTS_PER_TENSOR, TensorInfo, memory_order, view_of_tensors
from kvbm_core.layout.view import BlockView, Segment, pair_segments

TOO_MANY = MAX_SEGMENTS_PER_TENSOR + 1


def info(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, **changes: Any) -> TensorInfo:
    """A float16 tensor; without strides it is contiguous in a storage of its own size."""
    if strides is None:
        strides = tuple(_product(shape[i + 1 :]) for i in range(len(shape)))
    made = TensorInfo("layer.0", shape, strides, 2, "float16", 0, 0, 2 * _product(shape))
    return replace(made, **changes)


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((2, 10, 4, 3, 8), 2),  # K and V apart, block second
        ((10, 2, 4, 3, 8), 1),  # K and V in one page
        ((10, 3, 4, 16), 1),  # packed
        ((10, 4, 8), 1),  # MLA
        ((1, 10, 4, 8), 1),  # an outer axis of one
        ((10, 7), 1),
    ],
)
def test_contiguous_tensors_as_engines_make_them(shape: tuple[int, ...], pieces: int) -> None:
    view = view_of_tensors([info(shape)], 10)
    assert len(view.segments) == pieces
    assert view.block_bytes == 2 * _product(shape) // 10


def test_permuted_strides_keep_pages_whole_unless_the_logical_order_is_wanted() -> None:
    blocks, heads, tokens, content = 6, 2, 4, 8
    nhd = info((blocks, heads, tokens, content), (heads * tokens * content, content, heads * content, 1))
    assert view_of_tensors([nhd], blocks).segments == (Segment(0, 0, 128, 128),)
    logical = view_of_tensors([nhd], blocks, logical_order=True)
    assert [s.offset_bytes for s in logical.segments] == [0, 32, 64, 96, 16, 48, 80, 112]
    assert memory_order(nhd) == "0213"


def test_layers_interleaved_in_one_block_are_one_piece() -> None:
    page, layers, blocks = 24, 3, 5
    tensors = [
        info((blocks, page), (layers * page, 1), storage_offset_bytes=2 * i * page, storage_bytes=2 * 5 * 72)
        for i in range(layers)
    ]
    assert view_of_tensors(tensors, blocks).segments == (Segment(0, 0, 144, 144),)


def test_several_kernel_blocks_make_one_block() -> None:
    view = view_of_tensors([info((12, 2, 3))], 4)
    assert view.segments == (Segment(0, 0, 36, 36),)
    apart = view_of_tensors([info((2, 12, 3))], 4)
    assert apart.segments == (Segment(0, 0, 18, 18), Segment(0, 72, 18, 18))


def test_a_layer_that_shares_a_tensor_adds_nothing() -> None:
    one, shared = info((4, 8)), info((4, 8), name="layer.1")
    assert view_of_tensors([one, shared], 4) == view_of_tensors([one], 4)


@pytest.mark.parametrize(
    ("tensor", "num_blocks", "why"),
    [
        (info((8,)), 8, "no known rank"),
        (info((8, 4), (4,)), 8, "no known rank"),
        (info((0, 4)), 1, "empty"),
        (info((7, 4)), 8, "no axis"),
        (info((3, 8, 4)), 8, "no axis"),
        (info((2, 8, 4)), 2, "two axes"),
        (info((8, 4), (0, 1)), 8, "strides"),
        (info((8, 4), (-4, 1)), 8, "strides"),
        (info((8, 4), (3, 1)), 8, "strides"),
        (info((8, 4), (5, 1)), 8, "does not fit"),
        (info((8, 4), storage_offset_bytes=2), 8, "does not fit"),
        (info((8, 4), storage_offset_bytes=-2), 8, "does not fit"),
        (info((2, TOO_MANY), (2 * TOO_MANY, 2), storage_bytes=1 << 24), 2, "pieces"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(tensor: TensorInfo, num_blocks: int, why: str) -> None:
    with pytest.raises(LayoutError, match=why) as refusal:
        view_of_tensors([tensor], num_blocks)
    line = str(refusal.value)
    assert "\n" not in line
    assert all(str(part) in line for part in (tensor.name, tensor.shape, tensor.strides))


def test_tensors_that_overlap_each_other_are_refused() -> None:
    with pytest.raises(LayoutError, match="overlap"):
        view_of_tensors([info((8, 4)), info((8, 4), storage_offset_bytes=4, storage_bytes=80)], 8)


def test_no_tensors_or_no_blocks_are_refused() -> None:
    with pytest.raises(LayoutError):
        view_of_tensors([], 4)
    with pytest.raises(LayoutError):
        view_of_tensors([info((4, 4))], 0)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(1, 0, 8, 8),),
        (Segment(0, -1, 8, 8),),
        (Segment(0, 0, 8, 0),),
        (Segment(0, 0, -8, 8),),
        (Segment(0, 0, 7, 8),),
        (Segment(0, 0, 0, 8),),
        (Segment(0, 0, 8, 8), Segment(0, 30, 8, 2)),
        (Segment(0, 0, 16, 4), Segment(0, 4, 12, 4)),
        (Segment(0, 0, 16, 8), Segment(0, 24, 16, 8), Segment(0, 4, 16, 2)),
        (),
    ],
)
def test_check_finds_what_is_out_of_bounds_or_overlaps(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(LayoutError):
        BlockView(4, segments).check([100])


def test_check_accepts_what_is_interleaved_without_touching() -> None:
    BlockView(4, (Segment(0, 0, 16, 8), Segment(0, 8, 16, 8))).check([64])
    BlockView(4, (Segment(0, 0, 16, 8), Segment(0, 24, 16, 8))).check([80])
    BlockView(2, (Segment(0, 0, 16, 4), Segment(0, 4, 8, 4))).check([20])
    BlockView(1, (Segment(0, 0, 0, 8), Segment(0, 8, 0, 8))).check([16])


def test_regions_know_their_blocks() -> None:
    view = BlockView(4, (Segment(0, 0, 8, 8),))
    for block in (-1, 4):
        with pytest.raises(IndexError):
            view.regions(block)


def test_blocks_of_different_size_cannot_be_paired() -> None:
    with pytest.raises(LayoutError, match="8 and of 9"):
        pair_segments(BlockView(1, (Segment(0, 0, 8, 8),)), BlockView(1, (Segment(0, 0, 9, 9),)))


def test_pairs_are_cut_at_the_boundaries_of_both_sides() -> None:
    left = BlockView(2, (Segment(0, 0, 6, 6), Segment(1, 0, 4, 4)))
    right = BlockView(3, (Segment(0, 0, 20, 3), Segment(0, 4, 20, 7)))
    assert pair_segments(left, right) == (
        (Segment(0, 0, 6, 3), Segment(0, 0, 20, 3)),
        (Segment(0, 3, 6, 3), Segment(0, 4, 20, 3)),
        (Segment(1, 0, 4, 4), Segment(0, 7, 20, 4)),
    )


IDENTITY = LayoutIdentity(
    layers=(LayerIdentity("float16", 64, "NHD"),) * 3,
    block_size_tokens=16,
    kv_heads_local=2,
    head_size=8,
    extra=(("a", "b"),),
)


@pytest.mark.parametrize("name", [field.name for field in fields(LayoutIdentity)])
def test_every_field_changes_the_fingerprint(name: str) -> None:
    value = getattr(IDENTITY, name)
    others: dict[type, Any] = {int: 7, tuple: value[:2] if name == "layers" else ()}
    changed = replace(IDENTITY, **{name: others[type(value)]})
    assert changed.fingerprint() != IDENTITY.fingerprint()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"page_bytes": 65}, {"order": "HND"}])
def test_every_layer_changes_the_fingerprint(number: int, change: dict[str, Any]) -> None:
    layers = list(IDENTITY.layers)
    layers[number] = layers[number]._replace(**change)
    assert replace(IDENTITY, layers=tuple(layers)).fingerprint() != IDENTITY.fingerprint()


def test_the_fingerprint_is_stable_and_does_not_run_fields_together() -> None:
    assert pickle.loads(pickle.dumps(IDENTITY)).fingerprint() == IDENTITY.fingerprint()
    assert len(IDENTITY.fingerprint()) == 32
    assert int(IDENTITY.fingerprint(), 16) >= 0
    left, right = replace(IDENTITY, extra=(("ab", "c"),)), replace(IDENTITY, extra=(("a", "bc"),))
    assert left.fingerprint() != right.fingerprint()
