"""The engine of object stores keeps the promises of every ObjectEngine on SeaweedFS and on moto."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from kvbm_core.config.remote_url import remote_bucket
from kvbm_core.errors import Outcome
from kvbm_core.storage.remote import s3
from kvbm_core.storage.remote.engine import Got, ObjectEngine
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.s3 import S3Engine
from kvbm_core.storage.remote.s3_client import S3Options, store_maker
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store
from kvbm_core.testing.engine_contract import LONG_S, EngineContract, content_of
from kvbm_core.testing.extent_contract import ExtentStoreContract
from kvbm_core.testing.store_contract import BlockStoreContract
from tests.engines.object_servers import BUCKET, MotoServer, ObjectServer, SeaweedServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]


class OnAServer:
    """A server for the tests of one class, and a prefix for each of them."""

    kind: ClassVar[type[ObjectServer]]
    server: ClassVar[ObjectServer]
    last_prefix = 0

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with cls.kind(tmp_path_factory.mktemp("server")) as server:
            server.make_bucket()
            cls.server = server
            yield

    @pytest.fixture(autouse=True)
    def _environment(self, _serve: None, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.server.client_environment.items():
            monkeypatch.setenv(name, value)

    def new_url(self) -> str:
        """Of an empty place."""
        OnAServer.last_prefix += 1
        return f"s3://{BUCKET}/place/{OnAServer.last_prefix}"

    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        """See EngineContract."""
        bucket = remote_bucket(self.new_url())
        yield lambda: S3Engine(store_maker(bucket, S3Options()), bucket, LONG_S)


class OfS3(OnAServer, EngineContract):
    """What is S3's own."""

    def test_renewing_makes_it_young_and_leaves_nothing_beside_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = content_of("old", 5000)
        with self.opened() as engine:
            self.put(engine, old=content)
            (before,) = engine.scan("", deadline_s=LONG_S)
            time.sleep(1.1)  # S3 tells seconds
            assert engine.renew(["old", "absent"], deadline_s=LONG_S) == [Outcome.OK, Outcome.MISS]
            assert list(engine.scan("", deadline_s=LONG_S)) == [before], "it is young enough"
            monkeypatch.setattr(s3, "RENEW_AFTER_S", 0.5)
            assert engine.renew(["old", "absent"], deadline_s=LONG_S) == [Outcome.OK, Outcome.MISS]
            (after,) = engine.scan("", deadline_s=LONG_S)
            assert after.name == "old" and after.changed_s > before.changed_s
            assert self.get(engine, "old", 5000) == (Got(Outcome.OK, 5000), content)


class TestSeaweed(OfS3):
    kind = SeaweedServer


class TestMoto(OfS3):
    kind = MotoServer


class OpenedByUrl(OnAServer):
    kind = MotoServer
    payload_bytes: int

    @contextmanager
    def stores(self) -> Iterator[RecordStore]:
        """See BlockStoreContract."""
        options = StoreOptions(deadline_s=LONG_S)
        store = open_store(StoreSpec(self.new_url(), self.payload_bytes, "a meaning", "0of1", "m", options))
        assert isinstance(store, RecordStore)
        yield store


class TestBlocksOnMoto(OpenedByUrl, BlockStoreContract):
    payload_bytes = BlockStoreContract.payload_bytes

    def test_more_blocks_than_fit_cost_old_ones_and_never_bytes(self) -> None:
        """A bucket bounds nothing by itself; a lifecycle rule does."""


class TestExtentsOnMoto(OpenedByUrl, ExtentStoreContract):
    payload_bytes = ExtentStoreContract.payload_bytes
