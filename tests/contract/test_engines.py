"""Engines that need no server keep the promises of every ObjectEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbm_core.storage.remote.engine import EngineTraits, ObjectEngine
from kvbm_core.testing.engine_contract import ROOM_BYTES, EngineContract
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine, MemoryObjects


class TestMemoryEngine(EngineContract):
    faults = EngineFaults()
    traits = EngineTraits(8, 16)

    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        objects = MemoryObjects(ROOM_BYTES)
        yield lambda: MemoryEngine(self.faults, objects, self.traits)


class TestMemoryEngineOfSmallObjects(TestMemoryEngine):
    faults = EngineFaults(latency_ms=0.2)
    traits = EngineTraits(4, 1, max_object_bytes=100_003)
