"""Blocks of any shape, written by one number of ranks and read by another one, are those of the reader's own.

Each rank's tensors are cut out of one whole tensor as engines do, in memory of any order of axes, and a slot
holds what ``view_of_tensors`` says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvbm_core.errors import LayoutError, Outcome
from kvbm_core.layout.heads import HeadGroup, HeadShards, divide_heads, head_tensors
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.extents import Extent, ExtentStore
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.testing import memory_engine
from kvbm_core.testing.store_contract import key_of
from kvbm_core.types import BlockKey
from tests.effort import tries

NUM_BLOCKS = 3
LONG_S = 30.0
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class Model:
    """``heads`` None: MLA. ``layers``: of each group. ``inner``: the sizes of all other axes but the tokens.
    ``pieces``: kernel blocks that make up a block.
    """

    heads: int | None
    layers: tuple[int, ...]
    tokens: int
    inner: tuple[int, ...]
    itemsize: int
    max_shards: int
    seed: int
    pieces: int = 1

    def whole(self, group: int, layer: int) -> npt.NDArray[np.uint8]:
        """[blocks, heads, tokens, inner..., bytes of an element]"""
        shape = (NUM_BLOCKS, self.heads or 1, self.tokens, *self.inner, self.itemsize)
        made = np.random.default_rng((self.seed, group, layer))
        return made.integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """One of an engine's, with blocks of its own; ``orders``: of the axes in memory, of each group."""

    def __init__(self, model: Model, rank: int, num_ranks: int, random_order: random.Random) -> None:
        self.model = model
        groups = [self._group(g, rank, num_ranks, random_order) for g in range(len(model.layers))]
        self.contents = [contents for contents, _ in groups]
        self.slot_bytes = max(len(content) for contents in self.contents for content in contents) + 5
        self.heads = divide_heads(
            [group for _, group in groups], model.heads, rank, num_ranks, model.max_shards
        )

    def _group(
        self, group: int, rank: int, num_ranks: int, random_order: random.Random
    ) -> tuple[list[bytes], HeadGroup]:
        model = self.model
        num_axes = 3 + len(model.inner)
        order = (0, *random_order.sample(range(1, num_axes), num_axes - 1))
        infos, storages = [], []
        for layer in range(model.layers[group]):
            whole = model.whole(group, layer)
            own = whole if model.heads is None else whole[:, own_heads(model.heads, rank, num_ranks)]
            cut = own.reshape(*own.shape[:2], model.pieces, model.tokens // model.pieces, *own.shape[3:])
            own = cut.swapaxes(1, 2).reshape(-1, own.shape[1], *cut.shape[3:])
            memory = np.ascontiguousarray(own.transpose(*order, num_axes))
            strides = [0] * num_axes
            for place, axis in enumerate(order):
                strides[axis] = memory.strides[place] // model.itemsize
            storages.append(memory.reshape(-1))
            shape = own.shape[:-1]
            if model.heads is None:  # no axis of theirs
                shape, strides = (shape[0], *shape[2:]), [strides[0], *strides[2:]]
            infos.append(
                TensorInfo(
                    f"layer {group}.{layer}", shape, tuple(strides), model.itemsize, DTYPES[model.itemsize],
                    layer, 0, memory.nbytes,
                )
            )  # fmt: skip
        view = view_of_tensors(infos, NUM_BLOCKS)
        contents = [
            b"".join(storages[s][at : at + size].tobytes() for s, at, size in view.regions(block))
            for block in range(NUM_BLOCKS)
        ]
        axis = None if model.heads is None else 1
        return contents, HeadGroup(model.tokens, head_tensors(infos, NUM_BLOCKS, axis))

    def slot(self, group: int, block: int) -> bytes:
        """What its host slot holds; blocks of smaller groups do not fill it."""
        return self.contents[group][block].ljust(self.slot_bytes, b"\xaa")

    def open(self, url: str) -> Any:
        """Its store: a BlockStore and an ExtentStore."""
        spec = StoreSpec(url, self.slot_bytes, "its own", "0of1", heads=self.heads)
        store = open_store(spec)
        assert isinstance(store, ExtentStore)
        return store


def own_heads(heads: int, rank: int, num_ranks: int) -> slice:
    """As QKVParallelLinear does it: where ranks are more than heads, neighbors have the same one."""
    if num_ranks >= heads:
        head = rank // (num_ranks // heads)
        return slice(head, head + 1)
    count = heads // num_ranks
    return slice(rank * count, (rank + 1) * count)


def ranks_of(model: Model, num_ranks: int, rng: random.Random) -> list[Rank]:
    """An engine whose memory has an order of its own, the same on all its ranks."""
    seed = rng.random()
    return [Rank(model, rank, num_ranks, random.Random(seed)) for rank in range(num_ranks)]


def write(ranks: Sequence[Rank], url: str) -> None:
    """All blocks of all groups: alone, and those of group 0 as an extent too."""
    for rank in ranks:
        store = rank.open(url)
        for group, block in product(range(len(rank.contents)), range(NUM_BLOCKS)):
            slot = memoryview(rank.slot(group, block))
            assert store.put_many([key(block, group)], [slot], deadline_s=LONG_S) == [Outcome.OK]
        slots = [memoryview(rank.slot(0, block)) for block in (0, 1)]
        assert store.put_extents([RUN], [slots], deadline_s=LONG_S) == [Outcome.OK]
        store.close()


def key(block: int, group: int) -> BlockKey:
    """Of one of them."""
    return key_of(block, group)


RUN = Extent(2, (key(0, 0), key(1, 0)))


def read(rank: Rank, url: str) -> set[Outcome]:
    """What all blocks answered; the bytes of those that were found have been compared."""
    store, outcomes = rank.open(url), set()
    for group, block in product(range(len(rank.contents)), range(NUM_BLOCKS)):
        size = len(rank.contents[group][block])
        target = memoryview(bytearray(b"\x55" * rank.slot_bytes))
        outcomes |= {*store.contains_many([key(block, group)], deadline_s=LONG_S)}
        (outcome,) = store.get_many([key(block, group)], [target], deadline_s=LONG_S)
        outcomes.add(outcome)
        if outcome is Outcome.OK:
            assert target[:size] == rank.contents[group][block], "other bytes than its own"
    targets = [memoryview(bytearray(rank.slot_bytes)) for _ in range(2)]
    outcomes |= {*store.contains_extents([RUN], deadline_s=LONG_S)}
    ends = store.get_extents([RUN], [targets], deadline_s=LONG_S)[0]
    outcomes |= {*ends}
    for block, (target, end) in enumerate(zip(targets, ends, strict=True)):
        content = rank.contents[0][block]
        assert end is not Outcome.OK or target[: len(content)] == content
    store.close()
    return outcomes


def some_model(rng: random.Random, heads: int | None) -> Model:
    """Of these heads, and any shape."""
    tokens = rng.choice([1, 4, 16])
    return Model(
        heads,
        tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 3))),
        tokens,
        tuple(rng.choice([1, 2, 3, 8]) for _ in range(rng.randrange(1, 3))),
        rng.choice([*DTYPES]),
        4,
        rng.getrandbits(32),
        rng.choice([1, 1, tokens // 2 or 1]),
    )


@pytest.fixture
def url() -> Any:
    """Of a store that ranks share."""
    memory_engine.register()
    yield "memory://heads"
    memory_engine.forget_all()


@pytest.mark.parametrize("heads", [8, 4, 2, 1, 12, None], ids=lambda heads: f"{heads or 'latent'}")
@pytest.mark.parametrize("number", range(tries(4, nightly=100)))
def test_what_ranks_read_is_what_they_would_have_computed(
    heads: int | None, number: int, url: str, rng: random.Random
) -> None:
    model = some_model(rng, heads)
    for writers, readers in product((1, 2, 4), repeat=2):
        write(ranks_of(model, writers, rng), url)
        for rank in ranks_of(model, readers, rng):
            assert read(rank, url) == {Outcome.OK}
        memory_engine.forget_all()


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 8},
        {"heads": 2},
        {"layers": (2,)},
        {"layers": (3, 3)},
        {"tokens": 8},
        {"inner": (16,)},
        {"inner": (2, 4)},
        {"itemsize": 4},
        {"max_shards": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("readers", [1, 2])
def test_what_means_something_else_is_not_there(
    change: dict[str, Any], readers: int, url: str, rng: random.Random
) -> None:
    model = Model(4, (3,), 4, (8,), 2, 4, rng.getrandbits(32))
    write(ranks_of(model, 2, rng), url)
    for rank in ranks_of(replace(model, **change), readers, rng):
        assert read(rank, url) == {Outcome.MISS}


def test_the_same_number_of_bytes_in_another_type_is_something_else(rng: random.Random) -> None:
    ranks = ranks_of(Model(4, (1,), 4, (8,), 2, 4, 0), 1, rng)
    group = ranks[0].heads.groups[0]
    other = group._replace(tensors=tuple(t._replace(dtype="float16") for t in group.tensors))
    assert divide_heads([other], 4, 0, 1, 4).meaning != ranks[0].heads.meaning


@pytest.mark.parametrize(
    ("heads", "num_ranks", "max_shards", "why"),
    [
        (8, 4, 2, "4 ranks have 2 of 8 KV heads each, and a shard has 4: set it to a multiple of 4"),
        (8, 3, 4, "3 ranks do not share 8 KV heads evenly"),
        (3, 4, 4, "4 ranks do not share 3 KV heads evenly"),
    ],
)
def test_ranks_that_do_not_go_with_the_shards_are_refused(
    heads: int, num_ranks: int, max_shards: int, why: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        divide_heads([HeadGroup(4, ())], heads, 0, num_ranks, max_shards)
    assert str(refused.value) == why


def test_every_head_has_one_keeper() -> None:
    num_divided = 0
    for heads, num_ranks, max_shards in product((1, 2, 4, 8, 12, 40), (1, 2, 4, 8, 16), (1, 2, 4, 8, 12)):
        try:
            ranks = [divided(heads, rank, num_ranks, max_shards) for rank in range(num_ranks)]
        except LayoutError as error:
            assert "KV heads" in str(error)
            continue
        num_divided += 1
        kept = sorted(shard for rank in ranks if rank.is_keeper for shard in rank.own)
        assert kept == [*range(ranks[0].num_shards)], f"{heads} heads, {num_ranks} ranks"
        assert {shard for rank in ranks for shard in rank.own} == {*kept}
    assert num_divided > 80


def divided(heads: int, rank: int, num_ranks: int, max_shards: int) -> HeadShards:
    """Of a model with one layer."""
    local = max(1, heads // num_ranks)
    info = TensorInfo("a", (7, local, 4), (local * 4, 4, 1), 1, "uint8", 0, 0, 28 * local)
    return divide_heads([HeadGroup(4, head_tensors([info], 7, 1))], heads, rank, num_ranks, max_shards)


def test_what_a_group_does_not_fill_is_zeros(url: str, rng: random.Random) -> None:
    """And not what was in that memory before, which may be somebody else's."""
    (rank,) = ranks_of(Model(2, (4, 1), 4, (8,), 2, 2, 1), 1, rng)
    store: BlockStore = rank.open(url)
    for group in (0, 1):
        slot = memoryview(rank.slot(group, 0))
        assert store.put_many([key(0, group)], [slot], deadline_s=LONG_S) == [Outcome.OK]
    store.close()
    objects = memory_engine.OPENED[-1].objects.objects
    records = [entry.content for name, entry in objects.items() if name.endswith("-1x1")]
    used_bytes, shard_bytes = rank.heads.shard_bytes // 4, rank.heads.shard_bytes
    assert [record[used_bytes:shard_bytes] for record in records] == [bytes(shard_bytes - used_bytes)] * 2


def test_the_meaning_alone_tells_models_apart(rng: random.Random) -> None:
    """Names of blocks depend on it, which are not kept with their size."""
    model = Model(4, (3,), 4, (2, 4), 2, 4, 0)
    changes: list[dict[str, Any]] = [
        {},
        {"heads": 8, "max_shards": 4},
        {"heads": 4, "max_shards": 2},
        {"layers": (2,)},
        {"layers": (3, 3)},
        {"tokens": 8},
        {"inner": (4, 2)},
        {"inner": (8,)},
        {"inner": (2, 8)},
        {"itemsize": 1},
        {"pieces": 2},
    ]
    meanings = {
        rank.heads.meaning
        for change in changes
        for ranks in (1, 2, 4)
        if "max_shards" not in change or ranks < 4
        for rank in ranks_of(replace(model, **change), ranks, rng)
    }
    assert len(meanings) == len(changes)
