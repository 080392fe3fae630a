"""A real pool keeps the promises of every ObjectEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from kvbm_core.storage.remote.engine import ObjectEngine
from kvbm_core.testing.engine_contract import EngineContract
from tests.engines.mooncake_pool import MooncakePool

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="class")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    """One for all tests of a class."""
    with MooncakePool(tmp_path_factory.mktemp("mooncake")) as started:
        yield started


@pytest.fixture(scope="class")
def cleaner(pool: MooncakePool) -> Iterator[ObjectEngine]:
    """A client takes a second to join, and one to leave."""
    engine = pool.engine()
    yield engine
    engine.close()


class TestMooncake(EngineContract):
    misses_what_goes = False  # its memory may be gone by the time that the transfer begins
    keeps_what_is_read = False  # or be another object's: removals and overwrites do not wait for readers
    pool: MooncakePool
    cleaner: ObjectEngine

    @pytest.fixture(autouse=True)
    def _has_pool(self, pool: MooncakePool, cleaner: ObjectEngine) -> None:
        self.pool, self.cleaner = pool, cleaner

    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        names = [info.name for info in self.cleaner.scan("", deadline_s=10.0)]
        self.cleaner.remove(names, deadline_s=10.0)
        yield self.pool.engine

    @contextmanager
    def opened(self) -> Iterator[ObjectEngine]:
        """The same one for all tests but those of its end."""
        with self.store():
            yield self.cleaner

    def test_close_while_others_work_ends_their_calls(self) -> None:
        with patch.object(self, "opened", super().opened):
            super().test_close_while_others_work_ends_their_calls()
