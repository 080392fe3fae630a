"""Records on an engine in memory keep the promises of a BlockStore and of an ExtentStore, however encoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.records import trailer_bytes
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.testing.extent_contract import ExtentStoreContract
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine, MemoryObjects
from kvbm_core.testing.store_contract import NUM_BLOCKS, BlockStoreContract, key_of
from kvbm_core.types import BlockKey

MEANING = Meaning("model", b"model", bytes(range(16)))
SECRET = Secret(b"a secret of sixteen bytes, or more")


class Blocks(BlockStoreContract):
    codec = "none"
    secret: Secret | None = None
    encrypts = False
    faults = EngineFaults()

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        encoding = Encoding(self.codec, self.secret if self.encrypts else None)
        record_bytes = encoding.stored_bytes(self.payload_bytes) + trailer_bytes(1)
        engine = MemoryEngine(self.faults, MemoryObjects(NUM_BLOCKS * record_bytes))
        yield RecordStore(engine, RecordNames(MEANING, self.secret), self.payload_bytes, encoding)

    def scanned(self, store: BlockStore) -> list[BlockKey]:
        found = super().scanned(store)
        if self.secret is None:
            return found
        assert found == [], "names tell nothing"
        every = [key_of(number, group) for number in range(3 * NUM_BLOCKS) for group in (0, 3)]
        held = self.contained(store, every)
        return [key for key, outcome in zip(every, held, strict=True) if outcome is Outcome.OK]


class TestBlocks(Blocks):
    pass


class TestBlocksOfASlowEngine(TestBlocks):
    faults = EngineFaults(latency_ms=0.2)


class TestBlocksInParts(TestBlocks):
    payload_bytes = 10_007
    part_bytes = 3_000
    skew_bytes = 13


class OfASecret(Blocks):
    secret = SECRET

    def test_a_scan_outlives_changes(self) -> None:
        """It has nothing to say."""


class TestBlocksWithASecret(OfASecret):
    pass


class TestEncryptedBlocks(OfASecret):
    encrypts = True


class TestEncryptedBlocksInParts(TestEncryptedBlocks):
    payload_bytes = 10_007
    part_bytes = 3_000
    skew_bytes = 13


class TestCompressedBlocks(TestBlocks):
    codec = "zstd"


class TestCompressedAndEncryptedBlocks(OfASecret):
    codec = "zstd"
    encrypts = True


class Extents(ExtentStoreContract):
    codec = "none"
    secret: Secret | None = None
    encrypts = False

    @contextmanager
    def stores(self) -> Iterator[RecordStore]:
        encoding = Encoding(self.codec, self.secret if self.encrypts else None)
        yield RecordStore(MemoryEngine(), RecordNames(MEANING, self.secret), self.payload_bytes, encoding)


class TestExtents(Extents):
    pass


class TestExtentsInParts(Extents):
    payload_bytes = 5_003
    part_bytes = 1_000


class TestExtentsWithASecret(Extents):
    secret = SECRET


class TestEncryptedExtents(Extents):
    secret = SECRET
    encrypts = True


class TestEncryptedExtentsInParts(TestEncryptedExtents):
    payload_bytes = 5_003
    part_bytes = 1_000


class TestCompressedExtents(Extents):
    codec = "zstd"


class TestCompressedAndEncryptedExtents(Extents):
    codec = "zstd"
    secret = SECRET
    encrypts = True
