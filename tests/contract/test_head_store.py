"""Blocks that are kept as head shards keep the promises of a BlockStore and of an ExtentStore."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from kvbm_core.errors import Outcome
from kvbm_core.layout.heads import FP8, NO_CODEC, HeadGroup, HeadShards, divide_heads, head_tensors
from kvbm_core.layout.tensors import TensorInfo
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.directory.store import DirectoryStore
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.storage.late import ranges_of
from kvbm_core.storage.remote.head_store import WORST_FIRST, HeadRecords, HeadStore
from kvbm_core.storage.remote.records import trailer_bytes
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store, record_store
from kvbm_core.testing.extent_contract import ExtentStoreContract, extent_of
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine, MemoryObjects
from kvbm_core.testing.store_contract import (
    LONG_S,
    NUM_BLOCKS,
    BlockStoreContract,
    buffers,
    content_of,
    key_of,
)
from kvbm_core.types import BlockKey

HEADS, TOKENS, LAYERS = 4, 16, 2
MAX_GROUPS = 4
ORDERS = {"heads outside": (1, 2, 3), "tokens outside": (2, 1, 3), "heads inside": (3, 2, 1)}


def heads_of(
    payload_bytes: int,
    order: str = "tokens outside",
    rank: int = 0,
    num_ranks: int = 1,
    codec: str = NO_CODEC,
) -> HeadShards:
    """Of a block of this size, all of which is some head's, in groups that are alike."""
    dtype, itemsize = ("bfloat16", 2) if codec == FP8 else ("uint8", 1)
    axes = [NUM_BLOCKS, HEADS // num_ranks, TOKENS, payload_bytes // (LAYERS * HEADS * TOKENS * itemsize)]
    strides, run = [0] * 4, 1
    for axis in reversed((0, *ORDERS[order])):
        strides[axis], run = run, run * axes[axis]
    infos = [
        TensorInfo(f"{n}", tuple(axes), tuple(strides), itemsize, dtype, n, 0, run * itemsize)
        for n in range(LAYERS)
    ]
    group = HeadGroup(TOKENS, head_tensors(infos, NUM_BLOCKS, 1))
    return divide_heads([group] * MAX_GROUPS, HEADS, rank, num_ranks, HEADS, codec=codec)


def spec_of(payload_bytes: int, url: str, options: StoreOptions | None = None) -> StoreSpec:
    """A rank that has all heads."""
    options = options or StoreOptions()
    heads = heads_of(payload_bytes, codec=FP8 if options.codec == FP8 else NO_CODEC)
    return StoreSpec(url, payload_bytes, "", "0of1", options=options, heads=heads)


def float8_content(key: BlockKey, num_bytes: int) -> bytes:
    """Numbers in bfloat16 between 2 and 512 that are also numbers in float8."""
    bits = np.frombuffer(content_of(key, num_bytes), np.uint16)
    return (bits & 0x83F0 | 0x4000).astype(np.uint16).tobytes()


class TestRecords(BlockStoreContract):
    faults = EngineFaults()
    codec = "none"

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        spec = spec_of(self.payload_bytes, "memory://", StoreOptions(codec=self.codec))
        assert spec.heads is not None
        shard_bytes = spec.heads.shard_bytes + trailer_bytes(1)
        engine = MemoryEngine(self.faults, MemoryObjects(NUM_BLOCKS * HEADS * shard_bytes))
        yield record_store(engine, spec)

    def test_more_blocks_in_one_call_than_fit(self) -> None:
        """A shard makes room for itself by forgetting others, also those of blocks of this call."""
        keys = [key_of(number) for number in range(2 * NUM_BLOCKS)]
        with self.opened() as store:
            assert set(self.put(store, keys)) <= {Outcome.OK, Outcome.NO_SPACE}
            assert set(self.get(store, keys)) <= {Outcome.OK, Outcome.MISS}


class TestRecordsOfASlowEngine(TestRecords):
    faults = EngineFaults(latency_ms=0.2)


class TestCompressedRecords(TestRecords):
    codec = "zstd"


class TestRecordsInFloat8(TestRecords):
    codec = "fp8"
    content = staticmethod(float8_content)


class TestRecordsOfBlocksInParts(TestRecords):
    payload_bytes = 10 * 1024
    part_bytes = 3_000
    skew_bytes = 13


class TestDirectory(BlockStoreContract):
    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        limit_bytes = NUM_BLOCKS * HEADS * record_bytes(self.payload_bytes // HEADS)
        with tempfile.TemporaryDirectory(prefix="kvbm-store-") as folder:
            yield open_store(spec_of(self.payload_bytes, f"file://{folder}", StoreOptions(limit_bytes)))

    def settle(self, store: BlockStore) -> None:
        assert isinstance(store, HeadStore)
        for of_shard in store._stores:
            assert isinstance(of_shard, DirectoryStore)
            of_shard.evictor.evict()

    def test_more_blocks_than_fit_cost_old_ones_and_never_bytes(self) -> None:
        """Of what was used in the same minute, the evictor takes any shards first."""
        keys = [key_of(number) for number in range(3 * NUM_BLOCKS)]
        with self.opened() as store:
            assert self.put(store, keys) == self.get(store, keys) == [Outcome.OK] * len(keys)
            self.settle(store)
            held = self.scanned(store)
            outcomes = self.get(store, keys)
            assert [key for key, end in zip(keys, outcomes, strict=True) if end is Outcome.OK] == sorted(
                held, key=keys.index
            )
            assert len(held) <= NUM_BLOCKS and set(outcomes) <= {Outcome.OK, Outcome.MISS}


class TestExtents(ExtentStoreContract):
    codec = "none"

    @contextmanager
    def stores(self) -> Iterator[HeadRecords]:
        spec = spec_of(self.payload_bytes, "memory://", StoreOptions(codec=self.codec))
        store = record_store(MemoryEngine(), spec)
        assert isinstance(store, HeadRecords)
        yield store


class TestExtentsInParts(TestExtents):
    part_bytes = 1_000


class TestExtentsInFloat8(TestExtents):
    codec = "fp8"
    content = staticmethod(float8_content)


# ---------------------------------------------------------------- what is not in the contracts


def records(engine: MemoryEngine, heads: HeadShards, payload_bytes: int) -> HeadRecords:
    """Of one rank."""
    store = record_store(engine, StoreSpec("memory://", payload_bytes, "", "0of1", heads=heads))
    assert isinstance(store, HeadRecords)
    return store


def test_every_outcome_has_its_place() -> None:
    assert sorted(WORST_FIRST) == sorted(Outcome)


def test_a_damaged_shard_is_the_block_s_and_no_other_block_s() -> None:
    engine, payload_bytes = MemoryEngine(), 8192
    store = records(engine, heads_of(payload_bytes), payload_bytes)
    keys = [key_of(number) for number in range(3)]
    assert store.put_many(keys, buffers(3, payload_bytes), deadline_s=LONG_S) == [Outcome.OK] * 3
    name = next(name for name in engine.objects.objects if "-2of4/" in name and keys[1].hex() in name)
    engine.objects.damage(name, lambda content: b"\1" + content[1:])
    ends = store.get_many(keys, buffers(3, payload_bytes), deadline_s=LONG_S)
    assert ends == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    ends = store.get_many(keys, buffers(3, payload_bytes), deadline_s=LONG_S)
    assert ends == store.contains_many(keys, deadline_s=LONG_S) == [Outcome.OK, Outcome.MISS, Outcome.OK]
    store.close()


def test_of_ranks_that_share_heads_one_stores() -> None:
    engine, payload_bytes = MemoryEngine(), 2048
    keeper, other = (heads_of(payload_bytes, "tokens outside", rank, 4) for rank in (0, 1))
    twin = HeadShards(4, keeper.own, False, keeper.shard_bytes, keeper.meaning, keeper.groups)
    with_others, with_keeper, with_other = stores = [
        records(engine, heads, payload_bytes) for heads in (twin, keeper, other)
    ]
    key, memory = key_of(1), buffers(1, payload_bytes)
    assert with_others.put_many([key], memory, deadline_s=LONG_S) == [Outcome.OK]
    assert not engine.objects.objects
    assert with_keeper.put_many([key], memory, deadline_s=LONG_S) == [Outcome.OK]
    assert with_others.contains_many([key], deadline_s=LONG_S) == [Outcome.OK]
    assert with_other.contains_many([key], deadline_s=LONG_S) == [Outcome.MISS]
    for store in stores:
        store.close()


def test_a_call_that_needs_more_memory_than_there_is_goes_in_steps() -> None:
    engine, payload_bytes = MemoryEngine(), 1 << 20
    store = records(engine, heads_of(payload_bytes), payload_bytes)
    extents = [extent_of(number, 8) for number in range(6)]
    (memory,) = buffers(1, payload_bytes)
    memory[:] = bytes(range(256)) * (payload_bytes // 256)
    payloads = [[memory] * 8] * len(extents)
    assert store.put_extents(extents, payloads, deadline_s=LONG_S) == [Outcome.OK] * len(extents)
    puts = [names for kind, names in engine.calls if kind == "put"]
    assert len(puts) > HEADS, "in one step"
    assert sorted(name for names in puts for name in names) == sorted(engine.objects.objects)
    target = buffers(1, payload_bytes)[0]
    for extent in extents:
        alone = extent._replace(keys=extent.keys[-1:])
        assert store.get_extents([alone], [[target]], deadline_s=LONG_S) == [[Outcome.OK]]
        assert target == memory
    store.close()


def test_memory_of_a_late_read_is_not_lent_again() -> None:
    engine, payload_bytes = MemoryEngine(EngineFaults(is_late=1.0)), 8192
    store = records(engine, heads_of(payload_bytes), payload_bytes)
    key, memory = key_of(1), buffers(1, payload_bytes)
    assert store.put_many([key], memory, deadline_s=LONG_S) == [Outcome.OK]
    target = buffers(1, payload_bytes)
    assert store.get_many([key], target, deadline_s=LONG_S) == [Outcome.TIMED_OUT]
    places = sorted(span for _, pieces, *_ in engine._late for span in ranges_of(pieces))
    assert places and all(end <= start for (_, end), (start, _) in pairwise(places))
    assert sum(map(len, store._scratch._free)) < store._scratch.num_bytes
    engine.land()
    assert sum(map(len, store._scratch._free)) == store._scratch.num_bytes
    store.close()


def test_a_block_that_float8_cannot_hold_costs_no_other_one() -> None:
    """Its extent is not kept. Nothing of it is anywhere."""
    engine, payload_bytes = MemoryEngine(), 8192
    spec = spec_of(payload_bytes, "memory://", StoreOptions(codec=FP8))
    store = record_store(engine, spec)
    assert isinstance(store, HeadRecords)
    extents = [extent_of(number, 4) for number in range(3)]
    payloads = [
        [memoryview(bytearray(float8_content(key, payload_bytes))) for key in e.keys] for e in extents
    ]
    payloads[1][2].cast("H")[100] = 0x7F80  # infinity
    ends = store.put_extents(extents, payloads, deadline_s=LONG_S)
    assert ends == [Outcome.OK, Outcome.REJECTED, Outcome.OK]
    assert len(engine.objects.objects) == 2 * HEADS
    for extent, own, is_there in zip(extents, payloads, (True, False, True), strict=True):
        targets = buffers(4, payload_bytes)
        ends = store.get_extents([extent], [targets], deadline_s=LONG_S)
        assert ends == [[Outcome.OK if is_there else Outcome.MISS] * 4]
        assert not is_there or targets == own
    keys = [key_of(number) for number in range(3)]
    assert store.put_many(keys, payloads[1][1:], deadline_s=LONG_S) == [
        Outcome.OK,
        Outcome.REJECTED,
        Outcome.OK,
    ]
    assert store.put_many(keys[1:2], payloads[1][2:3], deadline_s=LONG_S) == [Outcome.REJECTED]
    store.close()


def test_what_is_in_a_small_shard_is_all_written() -> None:
    """A group that does not fill it leaves zeros, and not what was in that memory before."""
    engine, payload_bytes = MemoryEngine(), 8192
    heads = heads_of(payload_bytes, codec=FP8)
    small = HeadGroup(TOKENS, heads.groups[0].tensors[:1])
    heads = divide_heads([heads.groups[0], small], HEADS, 0, 1, HEADS, codec=FP8)
    spec = StoreSpec("memory://", payload_bytes, "", "0of1", options=StoreOptions(codec=FP8), heads=heads)
    store = record_store(engine, spec)
    memory = [memoryview(float8_content(key_of(1), payload_bytes))]
    for group in (0, 1):
        assert store.put_many([key_of(1, group)], memory, deadline_s=LONG_S) == [Outcome.OK]
    records = [entry.content for name, entry in engine.objects.objects.items() if name.endswith("-1x1")]
    used_bytes = heads.shard_bytes // 2
    assert [record[used_bytes : heads.shard_bytes] for record in records] == [bytes(used_bytes)] * HEADS
    store.close()
