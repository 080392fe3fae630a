"""Records in a real Valkey server and in a real Mooncake Store, opened by their URLs as engines open them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.resp import Deadline
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store
from kvbm_core.testing.extent_contract import ExtentStoreContract
from kvbm_core.testing.store_contract import BlockStoreContract, buffers, content_of, fill, key_of
from tests.engines.mooncake_pool import MooncakePool
from tests.engines.valkey_server import ValkeyServer


@pytest.fixture(scope="class")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One for all tests of a class."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as started:
        yield started


class InValkey:
    server: ValkeyServer
    payload_bytes: int

    @pytest.fixture(autouse=True)
    def _has_server(self, server: ValkeyServer) -> None:
        self.server = server

    @contextmanager
    def opened_by_url(self) -> Iterator[RecordStore]:
        cleaner = self.server.engine()
        with cleaner._connections.lent(Deadline(10.0)) as connection:
            assert connection.ask(b"FLUSHALL") == "OK"
        cleaner.close()
        options = StoreOptions(login=self.server.login())
        spec = StoreSpec(self.server.url, self.payload_bytes, "test", "0of1", "a/model", options)
        yield cast(RecordStore, open_store(spec))


@pytest.mark.valkey
class TestBlocksInValkey(InValkey, BlockStoreContract):
    def test_more_blocks_than_fit_cost_old_ones_and_never_bytes(self) -> None:
        """How many fit, the server says: tests/faults/test_valkey_faults.py."""

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        with self.opened_by_url() as store:
            yield store


@pytest.mark.valkey
class TestExtentsInValkey(InValkey, ExtentStoreContract):
    @contextmanager
    def stores(self) -> Iterator[RecordStore]:
        with self.opened_by_url() as store:
            yield store


@pytest.mark.mooncake
def test_what_one_store_puts_into_a_pool_another_one_gets(tmp_path: Path) -> None:
    size = 100_000
    with MooncakePool(tmp_path) as pool:
        spec = StoreSpec(f"mooncake://{pool.address}", size, "test", "0of1", "a/model")
        writer, reader = cast(RecordStore, open_store(spec)), cast(RecordStore, open_store(spec))
        try:
            keys = tuple(key_of(number) for number in range(8))
            payloads = buffers(8, size)
            for key, payload in zip(keys, payloads, strict=True):
                fill(payload, content_of(key, size))
            extent = Extent(8, keys)
            assert writer.put_extents([extent], [payloads], deadline_s=10.0) == [Outcome.OK]
            assert reader.contains_extents([extent], deadline_s=10.0) == [Outcome.OK]
            for count in (8, 1):  # all, and a part of the object, into memory that is registered or not
                for is_registered in (False, True):
                    targets = buffers(count, size)
                    if is_registered:
                        for target in targets:
                            reader.register(address_of(target), size)
                    some = Extent(8, keys[-count:])
                    (got,) = reader.get_extents([some], [targets], deadline_s=10.0)
                    assert got == [Outcome.OK] * count
                    for key, target in zip(some.keys, targets, strict=True):
                        assert target == content_of(key, size)
        finally:
            writer.close()
            reader.close()


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    import numpy as np

    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


@pytest.mark.parametrize("url", ["redis://:hunter2@kv.example", "valkey://kv.example/x?p=hunter2"])
def test_a_url_that_cannot_be_used_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(StoreSpec(url, 4096, "test", "0of1"))
    assert "hunter2" not in str(caught.value)
