"""A shared directory keeps the contract of every BlockStore, whatever its memory and its way of I/O."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory, parts_of
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.storage.names import Meaning
from kvbm_core.testing.store_contract import NUM_BLOCKS, BlockStoreContract, key_of
from kvbm_core.types import BlockKey

MEANING = Meaning("org/Model-7B", b"a namespace", b"contract".ljust(16))


class TestDirect(BlockStoreContract):
    """Past the page cache."""

    is_direct = True
    trusts_group = False
    store_class = DirectoryStore

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        with tempfile.TemporaryDirectory(prefix="kvbm-store-") as folder:
            limit_bytes = NUM_BLOCKS * record_bytes(self.payload_bytes)
            options = DirectoryOptions(limit_bytes, self.trusts_group, self.is_direct, num_threads=4)
            yield self.store_class(Path(folder), MEANING, self.payload_bytes, options)

    def settle(self, store: BlockStore) -> None:
        assert isinstance(store, DirectoryStore)
        store.evictor.evict()


class TestDirectParts(TestDirect):
    """Layers apart."""

    payload_bytes = 72 * 4096
    part_bytes = 4096


class TestBuffered(TestDirect):
    is_direct = False


class TestGroup(TestBuffered):
    trusts_group = True


class TestOddSize(TestDirect):
    payload_bytes = 5003


class TestSkewed(TestDirect):
    skew_bytes = 24


class TestUnevenParts(TestDirect):
    payload_bytes = 5003
    part_bytes = 777


def test_more_pieces_than_one_call_takes() -> None:
    class Suite(TestDirect):
        payload_bytes = 1100 * 4096
        part_bytes = 4096

    suite = Suite()
    with suite.opened() as store:
        assert suite.put(store, [key_of(0)]) == suite.get(store, [key_of(0)]) == [Outcome.OK]

    # ---------------------------------------------------------------- the suite sees what is wrong

    def _path(self, key: BlockKey) -> Path:
        return super()._path(BlockKey(key[:1] * 32))


class OneBitOff(DirectoryStore):
    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        outcomes = super().get_many(keys, targets, deadline_s=deadline_s)
        for target in targets:
            parts_of(target)[-1][-1] ^= 1
        return outcomes


def test_the_contract_catches_wrong_bytes() -> None:
    class Suite(TestBuffered):
        store_class = OneBitOff

    with pytest.raises(AssertionError, match="wrong bytes"):
        Suite().test_what_was_put_is_got_and_what_was_not_is_a_miss()


def test_o_direct_is_taken_where_it_works() -> None:
    suite = TestDirect()
    with suite.opened() as store:
        assert isinstance(store, DirectoryStore)
        suite.put(store, [key_of(0)])
        try:
            fd = os.open(Path(tempfile.gettempdir()), os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
        except OSError:
            pytest.skip(f"NOT RUN: O_DIRECT in {tempfile.gettempdir()}: the file system has none")
        os.close(fd)
        assert store._folder.takes_direct
