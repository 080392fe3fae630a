"""A real server keeps the promises of every ObjectEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvbm_core.storage.remote.engine import ObjectEngine
from kvbm_core.storage.remote.resp import Deadline
from kvbm_core.testing.engine_contract import EngineContract
from tests.engines.valkey_server import ValkeyServer

pytestmark = pytest.mark.valkey


@pytest.fixture(scope="class")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One for all tests of a class."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as started:
        yield started


class TestValkey(EngineContract):
    server: ValkeyServer

    @pytest.fixture(autouse=True)
    def _has_server(self, server: ValkeyServer) -> None:
        self.server = server

    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        cleaner = self.server.engine()
        with cleaner._connections.lent(Deadline(10.0)) as connection:
            assert connection.ask(b"FLUSHALL") == "OK"
        cleaner.close()
        yield self.server.engine
