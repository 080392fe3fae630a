"""What a DiskReader gets of a DiskStore keeps the contract of stores, but for what was removed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, NUM_BLOCKS, BlockStoreContract, key_of
from kvbm_core.types import BlockKey


class Pair:
    """Puts by the writer, gets by the reader."""

    def __init__(self, path: Path, geometry: Geometry, options: FileOptions, *, reads_straight: bool) -> None:
        self.reader = DiskReader(path, geometry, options, reads_straight=reads_straight)
        self.writer = DiskStore(path, geometry, options, shares=True)
        assert self.writer.wait_recovered(LONG_S)
        self.contains_many, self.get_many, self.scan = (
            self.reader.contains_many,
            self.reader.get_many,
            self.reader.scan,
        )

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        return self.writer.put_many(keys, payloads, deadline_s=deadline_s)

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore; but the reader finds them until their slots are used again."""
        return self.writer.remove_many(keys, deadline_s=deadline_s)

    def close(self) -> None:
        """See BlockStore."""
        self.reader.close()
        self.writer.close()


class SharedContract(BlockStoreContract):
    """A pair on one file."""

    is_direct = False
    reads_straight = True
    after_removal = Outcome.OK  # until its slot is used again

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        with tempfile.TemporaryDirectory(prefix="kvbm-shared-") as folder:
            geometry = Geometry(NUM_BLOCKS, self.payload_bytes, b"contract".ljust(16))
            options = FileOptions(is_direct=self.is_direct)
            pair = Pair(Path(folder, "store.blocks"), geometry, options, reads_straight=self.reads_straight)
            if pair.writer._file.is_direct is not self.is_direct:
                pair.close()
                pytest.skip(f"NOT RUN: O_DIRECT in {tempfile.gettempdir()}: the file system has none")
            yield pair

    def test_removed_blocks_are_gone_and_can_be_put_again(self) -> None:
        """Gone when their slots have been used again."""
        keys, others = (
            [key_of(number) for number in range(5)],
            [key_of(100 + number) for number in range(NUM_BLOCKS)],
        )
        with self.opened() as store:
            self.put(store, keys)
            assert store.remove_many(keys, deadline_s=LONG_S) == [Outcome.OK] * 5
            assert self.get(store, keys) == [Outcome.OK] * 5
            assert self.put(store, others) == [Outcome.OK] * NUM_BLOCKS
            assert self.contained(store, keys) == self.get(store, keys) == [Outcome.MISS] * 5
            assert self.put(store, keys) == self.get(store, keys) == [Outcome.OK] * 5


class TestSharedBuffered(SharedContract):
    pass


class TestSharedDirectOddSize(SharedContract):
    is_direct = True
    payload_bytes = 5003


class TestSharedDirectByBounce(SharedContract):
    is_direct = True
    reads_straight = False


class TestSharedDirectParts(SharedContract):
    is_direct = True
    payload_bytes = 72 * 4096
    part_bytes = 4096
