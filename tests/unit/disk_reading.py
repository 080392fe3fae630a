"""A small file that a DiskStore shares, and what is asked of it in the tests of DiskReader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, buffers, content_of, key_of
from kvbm_core.types import BlockKey
from tests.open_files import open_files

NUM_SLOTS, PAYLOAD_BYTES = 4, 8192
GEOMETRY = Geometry(NUM_SLOTS, PAYLOAD_BYTES, b"reader".ljust(16))
BUFFERED = FileOptions(is_direct=False)
OK, MISS, REJECTED = Outcome.OK, Outcome.MISS, Outcome.REJECTED
KEYS = [key_of(number) for number in range(16)]


@pytest.fixture(autouse=True)
def no_open_files_are_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "reader.blocks"


@pytest.fixture(name="reader")
def reader_fixture(path: Path) -> Iterator[DiskReader]:
    """It is there before the file is."""
    made = DiskReader(path, GEOMETRY, BUFFERED)
    yield made
    made.close()


@pytest.fixture(name="writer")
def writer_fixture(path: Path) -> Iterator[DiskStore]:
    made = writer_of(path)
    yield made
    made.close()


def writer_of(path: Path, geometry: Geometry = GEOMETRY, *, shares: bool = True) -> DiskStore:
    store = DiskStore(path, geometry, BUFFERED, shares=shares)
    assert store.wait_recovered(LONG_S)
    return store


def put(store: DiskStore, keys: Sequence[BlockKey], size: int = PAYLOAD_BYTES) -> None:
    payloads = [memoryview(content_of(key, size)) for key in keys]
    assert store.put_many(keys, payloads, deadline_s=LONG_S) == [OK] * len(keys)


def get(reader: DiskReader, keys: Sequence[BlockKey], size: int = PAYLOAD_BYTES) -> list[Outcome]:
    """The outcomes; the bytes of what is OK are checked."""
    targets = buffers(len(keys), size)
    outcomes = reader.get_many(keys, targets, deadline_s=LONG_S)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert outcome is not OK or target == content_of(key, size), "wrong bytes"
    return outcomes


def contained(reader: DiskReader, keys: Sequence[BlockKey]) -> list[Outcome]:
    return reader.contains_many(keys, deadline_s=LONG_S)


def nothing_is_there(reader: DiskReader) -> None:
    assert contained(reader, KEYS) == get(reader, KEYS) == [MISS] * len(KEYS)
    assert list(reader.scan()) == []
