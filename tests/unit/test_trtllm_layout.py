"""TensorRT-LLM's KV memory as blocks: every byte where the pool has it, and a refusal where that is in
doubt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's KV memory; torch is missing")

from kvbm_core.errors import LayoutError  # noqa: E402
from kvbm_core.tiers.groups import GroupSpec  # noqa: E402
from kvbm_core.types import MAX_GROUPS  # noqa: E402
from kvbm_trtllm.layout import KvMemory, Ranks, layout_memory, pool_memory  # noqa: E402

ALONE = Ranks(0, 1)
NUM_BLOCKS, NUM_LAYERS, ELEMENTS = 7, 3, 16
BLOCK_TOKENS = 4


def random_bytes(rng: random.Random, *shape: int) -> Any:
    """A uint8 tensor."""
    return torch.frombuffer(bytearray(rng.randbytes(prod(shape))), dtype=torch.uint8).reshape(shape)


def raw(tensor: Any) -> bytes:
    """A tensor's bytes in the order of its indices."""
    found: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def content(memory: KvMemory, group: int, block: int) -> bytes:
    """A block's bytes by its view, which is what executors copy."""
    storages = memory.memory.storages
    regions = memory.memory.views[group].regions(block)
    return b"".join(storages[s][at : at + count].tobytes() for s, at, count in regions)


def write(memory: KvMemory, group: int, block: int, content_bytes: bytes) -> None:
    """The other direction."""
    position = 0
    for storage, at, count in memory.memory.views[group].regions(block):
        target = memory.memory.storages[storage][at : at + count]
        target[:] = list(content_bytes[position : position + count])
        position += count
    assert position == len(content_bytes)


# ---------------------------------------------------------------- the pool of V1


def pool(rng: random.Random, shape: Sequence[int] = (NUM_BLOCKS, NUM_LAYERS, 2, ELEMENTS)) -> Any:
    """A float16 pool as V1 has it: one piece of memory, blocks outermost."""
    return random_bytes(rng, *shape[:-1], 2 * shape[-1]).view(torch.float16)


def padded(rng: random.Random) -> Any:
    """Blocks, and elements of them, that are further apart than they are long."""
    return pool(rng, (NUM_BLOCKS, NUM_LAYERS + 1, 2, ELEMENTS + 4))[:, :NUM_LAYERS, :, :ELEMENTS]


def layers_first(rng: random.Random) -> Any:
    """A pool whose layers are outermost in memory."""
    return pool(rng, (NUM_LAYERS, NUM_BLOCKS, 2, ELEMENTS)).transpose(0, 1)


def keys_first(rng: random.Random) -> Any:
    """A pool whose keys and values are outermost in memory."""
    return pool(rng, (2, NUM_BLOCKS, NUM_LAYERS, ELEMENTS)).permute(1, 2, 0, 3)


POOLS: dict[str, Callable[[random.Random], Any]] = {
    "keys and values": pool,
    "MLA": lambda rng: pool(rng, (NUM_BLOCKS, NUM_LAYERS, 1, ELEMENTS)),
    "FP8": lambda rng: random_bytes(rng, NUM_BLOCKS, NUM_LAYERS, 2, ELEMENTS).view(torch.float8_e4m3fn),
    "one layer": lambda rng: pool(rng, (NUM_BLOCKS, 1, 2, ELEMENTS)),
    "padded": padded,
    "layers first": layers_first,
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_block_of_the_pool_is_all_of_its_layers(kind: str, rng: random.Random) -> None:
    tensor = POOLS[kind](rng)
    memory = pool_memory(tensor, BLOCK_TOKENS, ALONE)
    view = memory.memory.views[0]
    assert memory.groups == (GroupSpec(0, BLOCK_TOKENS),)
    assert view.num_blocks == NUM_BLOCKS
    assert view.block_bytes == tensor[0].numel() * tensor.element_size()
    for block in range(NUM_BLOCKS):
        assert content(memory, 0, block) == raw(tensor[block])


@pytest.mark.parametrize("kind", POOLS)
def test_what_is_written_to_a_block_is_there_and_nowhere_else(kind: str, rng: random.Random) -> None:
    tensor = POOLS[kind](rng)
    memory = pool_memory(tensor, BLOCK_TOKENS, ALONE)
    before = [raw(tensor[block]) for block in range(NUM_BLOCKS)]
    around = memory.memory.storages[0].sum(dtype="u8") - sum(map(sum, before))
    write(memory, 0, 2, before[5])
    after = [raw(tensor[block]) for block in range(NUM_BLOCKS)]
    assert after == [*before[:2], before[5], *before[3:]]
    assert memory.memory.storages[0].sum(dtype="u8") - sum(map(sum, after)) == around, (
        "padding stays as it was"
    )


def test_a_block_in_one_piece_of_memory_is_copied_as_one(rng: random.Random) -> None:
    view = pool_memory(pool(rng), BLOCK_TOKENS, ALONE).memory.views[0]
    assert len(view.segments) == 1
    assert len(pool_memory(layers_first(rng), BLOCK_TOKENS, ALONE).memory.views[0].segments) == NUM_LAYERS


@pytest.mark.parametrize(
    "shape",
    [
        (NUM_BLOCKS, NUM_LAYERS, ELEMENTS),
        (NUM_BLOCKS, NUM_LAYERS, 2, 2, ELEMENTS),
        (NUM_BLOCKS, NUM_LAYERS, 3, ELEMENTS),
        (NUM_BLOCKS, 2, NUM_LAYERS, ELEMENTS),
        (ELEMENTS,),
    ],
)
def test_other_shapes_are_refused_in_one_line(shape: tuple[int, ...], rng: random.Random) -> None:
    with pytest.raises(LayoutError) as caught:
        pool_memory(pool(rng, shape), BLOCK_TOKENS, ALONE)
    line = str(caught.value)
    assert line.startswith("kvbm: ") and len(line.splitlines()) == 1
    assert str(shape) in line


@pytest.mark.parametrize("shape", [(0, NUM_LAYERS, 2, ELEMENTS), (NUM_BLOCKS, 0, 2, ELEMENTS)])
def test_a_pool_of_nothing_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        pool_memory(torch.zeros(shape), BLOCK_TOKENS, ALONE)


def test_blocks_that_share_memory_are_refused(rng: random.Random) -> None:
    with pytest.raises(LayoutError, match="overlapping strides"):
        pool_memory(pool(rng)[:1].expand(NUM_BLOCKS, -1, -1, -1), BLOCK_TOKENS, ALONE)


def test_a_fingerprint_is_of_what_bytes_mean(rng: random.Random) -> None:
    plain = pool_memory(pool(rng), BLOCK_TOKENS, ALONE).fingerprint
    assert (
        pool_memory(pool(rng, (2 * NUM_BLOCKS, NUM_LAYERS, 2, ELEMENTS)), BLOCK_TOKENS, ALONE).fingerprint
        == plain
    )
    assert pool_memory(padded(rng), BLOCK_TOKENS, ALONE).fingerprint == plain, (
        "where blocks lie does not matter"
    )
    others = [
        pool_memory(pool(rng, (NUM_BLOCKS, NUM_LAYERS + 1, 2, ELEMENTS)), BLOCK_TOKENS, ALONE),
        pool_memory(pool(rng, (NUM_BLOCKS, NUM_LAYERS, 2, 2 * ELEMENTS)), BLOCK_TOKENS, ALONE),
        pool_memory(pool(rng, (NUM_BLOCKS, NUM_LAYERS, 1, 2 * ELEMENTS)), BLOCK_TOKENS, ALONE),
        pool_memory(pool(rng).view(torch.bfloat16), BLOCK_TOKENS, ALONE),
        pool_memory(pool(rng), 2 * BLOCK_TOKENS, ALONE),
        pool_memory(pool(rng), BLOCK_TOKENS, Ranks(0, 2)),
        pool_memory(pool(rng), BLOCK_TOKENS, Ranks(1, 2)),
    ]
    found = [memory.fingerprint for memory in others]
    assert len({plain, *found}) == len(found) + 1


def test_pools_of_another_order_have_another_fingerprint_or_the_same_content(rng: random.Random) -> None:
    plain = pool_memory(pool(rng), BLOCK_TOKENS, ALONE)
    tensor = keys_first(rng)
    other = pool_memory(tensor, BLOCK_TOKENS, ALONE)
    assert other.fingerprint != plain.fingerprint or content(other, 0, 1) == raw(tensor[1])


# ---------------------------------------------------------------- the layer groups of V2


@dataclass(frozen=True)
class Buffer:
    """One buffer of one layer inside a region."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class Region:
    """Bytes that repeat once per slot. ``rows``: uint8 ``[num_slots, size]``, which may be strided."""

    rows: Any
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        """Bytes of one slot."""
        return int(self.rows.shape[1])

    @property
    def num_slots(self) -> int:
        """Slots of the region."""
        return int(self.rows.shape[0])

    def as_tensor(self) -> Any:
        """The rows."""
        return self.rows


@dataclass(frozen=True)
class Group:
    """Layers that share page indices. ``replicated_regions`` came later than the rest."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[Region, ...]
    replicated_regions: tuple[Region, ...] = ()


@dataclass(frozen=True)
class OldGroup:
    """A group of before there were replicated regions, and of before windows."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Layout:
    """A whole cache."""

    groups: tuple[Any, ...]
    tokens_per_block: int = BLOCK_TOKENS
    dtype: str = "float16"


def region(
    rng: random.Random, *buffers: Buffer, size: int = 48, padding: int = 0, num_slots: int = 6
) -> Region:
    """A region of memory of its own, with bytes between the slots that are nobody's."""
    return Region(random_bytes(rng, num_slots, size + padding)[:, :size], buffers)


def buffers(*layers: int, roles: Sequence[str] = ("key", "value")) -> tuple[Buffer, ...]:
    """Keys and values of layers, in memory order."""
    return tuple(Buffer(layer, role) for layer in layers for role in roles)


def one_group(rng: random.Random) -> Layout:
    return Layout((Group(0, (0, 1), None, (region(rng, *buffers(0, 1)),)),))


def padded_slots(rng: random.Random) -> Layout:
    return Layout((Group(0, (0, 1), None, (region(rng, *buffers(0, 1), padding=8),)),))


def split_regions(rng: random.Random) -> Layout:
    """Keys and values apart, each with slots of its own size."""
    sides = (
        region(rng, *buffers(0, 1, roles=("key",)), size=32),
        region(rng, *buffers(0, 1, roles=("value",)), size=24),
    )
    return Layout((Group(0, (0, 1), None, sides),))


def one_memory(rng: random.Random) -> Layout:
    """Two regions of the same slots, with a gap between them."""
    rows = random_bytes(rng, 6, 64)
    sides = (Region(rows[:, :24], buffers(0)), Region(rows[:, 40:56], buffers(1)))
    return Layout((Group(0, (0, 1), None, sides),))


def several_groups(rng: random.Random) -> Layout:
    """Full attention, a window, and a window whose layers have more bytes; each with slots of its own
    number.
    """
    return Layout(
        (
            Group(0, (0, 3), None, (region(rng, *buffers(0, 3), num_slots=9),)),
            Group(1, (1,), 8, (region(rng, *buffers(1), num_slots=5, padding=16),)),
            Group(2, (2,), 16, (region(rng, *buffers(2), num_slots=4, size=96),)),
        )
    )


def replicated(rng: random.Random) -> Layout:
    """A side cache that all ranks have alike, beside what is the rank's own."""
    own = (region(rng, *buffers(0, 1)),)
    return Layout((Group(0, (0, 1), None, own, (region(rng, Buffer(0, "index_key"), size=8),)),))


def older(rng: random.Random) -> Layout:
    return Layout((OldGroup(0, (0, 1), (region(rng, *buffers(0, 1)),)),))


LAYOUTS: dict[str, Callable[[random.Random], Layout]] = {
    "one group": one_group,
    "padding": padded_slots,
    "split regions": split_regions,
    "one memory": one_memory,
    "several groups": several_groups,
    "replicated": replicated,
    "older": older,
}


def all_regions(group: Any) -> list[Region]:
    """What belongs to a block of a group, in order."""
    return [*group.regions, *getattr(group, "replicated_regions", ())]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_block_of_a_group_is_its_slot_in_every_region(kind: str, rng: random.Random) -> None:
    layout = LAYOUTS[kind](rng)
    memory = layout_memory(layout, ALONE)
    windows = [getattr(group, "window_size", None) for group in layout.groups]
    assert memory.groups == tuple(GroupSpec(g, BLOCK_TOKENS, window) for g, window in enumerate(windows))
    for g, group in enumerate(layout.groups):
        regions = all_regions(group)
        assert memory.memory.views[g].num_blocks == regions[0].num_slots
        for slot in range(regions[0].num_slots):
            assert content(memory, g, slot) == b"".join(raw(found.rows[slot]) for found in regions)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_is_written_to_a_slot_is_there_and_nowhere_else(kind: str, rng: random.Random) -> None:
    layout = LAYOUTS[kind](rng)
    memory = layout_memory(layout, ALONE)

    def everything() -> list[list[bytes]]:
        return [[raw(row) for row in found.rows] for group in layout.groups for found in all_regions(group)]

    for g, group in enumerate(layout.groups):
        before = everything()
        total = sum(int(storage.sum(dtype="u8")) for storage in memory.memory.storages)
        write(memory, g, 1, content(memory, g, 3))
        mine = sum(len(all_regions(other)) for other in layout.groups[:g])
        for number in range(mine, mine + len(all_regions(group))):
            total += sum(before[number][3]) - sum(before[number][1])
            before[number][1] = before[number][3]
        assert everything() == before
        assert sum(int(storage.sum(dtype="u8")) for storage in memory.memory.storages) == total, "padding"


REFUSED: dict[str, tuple[Callable[[random.Random], Layout], str]] = {
    "no group": (lambda rng: Layout(()), "layer groups"),
    "a gap between groups": (
        lambda rng: Layout(several_groups(rng).groups[::2]),
        "layer groups [0, 2]",
    ),
    "groups in disorder": (
        lambda rng: Layout(tuple(reversed(several_groups(rng).groups))),
        "layer groups [2, 1, 0]",
    ),
    "too many groups": (
        lambda rng: Layout(
            tuple(Group(g, (g,), None, (region(rng, *buffers(g)),)) for g in range(MAX_GROUPS + 1)),
        ),
        f"0 to {MAX_GROUPS - 1}",
    ),
    "no region": (lambda rng: Layout((Group(0, (0,), None, ()),)), "layer group 0"),
    "slots that differ in number": (
        lambda rng: Layout(
            (Group(0, (0,), None, (region(rng, *buffers(0)), region(rng, *buffers(1), num_slots=5))),),
        ),
        "different numbers of slots",
    ),
    "replicated slots that differ in number": (
        lambda rng: Layout(
            (Group(0, (0,), None, (region(rng, *buffers(0)),), (region(rng, Buffer(0, "x"), num_slots=5),)),),
        ),
        "different numbers of slots",
    ),
    "a layer with blocks of its own size": (
        lambda rng: Layout(
            (Group(0, (0,), None, (region(rng, Buffer(0, "key", 2), Buffer(0, "value", 2)),)),)
        ),
        "blocks of their own size",
    ),
    "one layer among others": (
        lambda rng: Layout(
            (Group(0, (0, 1), None, (region(rng, *buffers(0), Buffer(1, "key", 4), Buffer(1, "value")),)),)
        ),
        "blocks of their own size",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_doubt_is_refused_in_one_line(case: str, rng: random.Random) -> None:
    make, words = REFUSED[case]
    with pytest.raises(LayoutError) as caught:
        layout_memory(make(rng), ALONE)
    line = str(caught.value)
    assert line.startswith("kvbm: ") and len(line.splitlines()) == 1
    assert words in line


def test_fingerprints_of_layouts_differ_where_their_bytes_do(rng: random.Random) -> None:
    made = {kind: layout_memory(make(rng), ALONE).fingerprint for kind, make in LAYOUTS.items()}
    assert made.pop("padding") == made.pop("older") == made["one group"]
    made["other roles"] = layout_memory(
        Layout((Group(0, (0, 1), None, (region(rng, *reversed(buffers(0, 1))),)),)), ALONE
    ).fingerprint
    made["other tokens"] = layout_memory(Layout(one_group(rng).groups, 2 * BLOCK_TOKENS), ALONE).fingerprint
    made["other numbers"] = layout_memory(Layout(one_group(rng).groups, dtype="bfloat16"), ALONE).fingerprint
    made["rank 0 of 2"] = layout_memory(one_group(rng), Ranks(0, 2)).fingerprint
    made["rank 1 of 2"] = layout_memory(one_group(rng), Ranks(1, 2)).fingerprint
    assert len(set(made.values())) == len(made)
