"""Two stores in one shared directory against a dict: damage, eviction and restarts included."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm_core.errors import Outcome
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from kvbm_core.types import BlockKey
from tests.effort import tries
from tests.unit.directory_stores import MEANING, path_of

PAYLOAD_BYTES = 4500
MAX_BLOCKS = 8
UNIVERSE = [key_of(number) for number in range(9)] + [key_of(0, group=1)]
SOME_KEYS = st.lists(st.sampled_from(UNIVERSE), max_size=6)
WHICH = st.integers(0, 1)
BAD = (Outcome.MISS, Outcome.CORRUPT)


def payload(key: BlockKey, version: int) -> bytes:
    """Bytes of no other key or version."""
    return Random(key + version.to_bytes(8, "little")).randbytes(PAYLOAD_BYTES)


class DirectoryMachine(RuleBasedStateMachine):
    """The twin: for each key, the version that is there; ``damaged`` ones are there and must not be got."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvbm-directory-property-")
        self.path = Path(self.folder.name)
        self.version = 0
        self.there: dict[BlockKey, int] = {}
        self.damaged: set[BlockKey] = set()
        self.stores = [self.open(), self.open()]

    def open(self) -> DirectoryStore:
        options = DirectoryOptions(MAX_BLOCKS * record_bytes(PAYLOAD_BYTES), num_threads=2)
        return DirectoryStore(self.path, MEANING, PAYLOAD_BYTES, options)

    @rule(which=WHICH, keys=SOME_KEYS, skew_bytes=st.sampled_from([0, 8]))
    def put(self, which: int, keys: list[BlockKey], skew_bytes: int) -> None:
        keys = list(dict.fromkeys(keys))
        self.version += 1
        payloads = buffers(len(keys), PAYLOAD_BYTES, skew_bytes=skew_bytes)
        for key, memory in zip(keys, payloads, strict=True):
            memory[:] = payload(key, self.version)
        outcomes = self.stores[which].put_many(keys, payloads, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK] * len(keys)
        for key in keys:
            self.there.setdefault(key, self.version)

    @rule(which=WHICH, keys=SOME_KEYS, skew_bytes=st.sampled_from([0, 8]))
    def get(self, which: int, keys: list[BlockKey], skew_bytes: int) -> None:
        targets = buffers(len(keys), PAYLOAD_BYTES, skew_bytes=skew_bytes)
        outcomes = self.stores[which].get_many(keys, targets, deadline_s=LONG_S)
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            if key in self.there and key not in self.damaged:
                assert outcome is Outcome.OK and target == payload(key, self.there[key])
            else:
                assert outcome in BAD
        for key in self.damaged & set(keys):  # it has been removed
            self.damaged.discard(key)
            del self.there[key]

    @rule(which=WHICH, keys=SOME_KEYS)
    def remove(self, which: int, keys: list[BlockKey]) -> None:
        keys = list(dict.fromkeys(keys))
        outcomes = self.stores[which].remove_many(keys, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK if key in self.there else Outcome.MISS for key in keys]
        for key in keys:
            self.there.pop(key, None)
            self.damaged.discard(key)

    @rule(key=st.sampled_from(UNIVERSE), at=st.integers(0, 4096 + PAYLOAD_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, key: BlockKey, at: int, bit: int) -> None:
        if key in self.there and key not in self.damaged:
            with path_of(self.path, key).open("r+b") as file:
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
            self.damaged.add(key)

    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        seen = self.stores[which].evictor.evict()
        assert seen.blocks == len(self.there)
        left = set(self.stores[which].scan())
        assert left <= set(self.there)
        if len(self.there) <= MAX_BLOCKS:
            assert len(left) == len(self.there), "nothing goes without need"
        else:
            assert len(left) == int(0.9 * MAX_BLOCKS), "nor more than needed"
        self.there = {key: version for key, version in self.there.items() if key in left}
        self.damaged &= left

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.open()

    @invariant()
    def both_see_the_same(self) -> None:
        held = [Outcome.OK if key in self.there else Outcome.MISS for key in UNIVERSE]
        for store in self.stores:
            assert store.contains_many(UNIVERSE, deadline_s=LONG_S) == held
            assert sorted(store.scan()) == sorted(self.there)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()


DirectoryMachine.TestCase.settings = settings(max_examples=tries(12, nightly=80), stateful_step_count=15)
TestDirectoryAgainstADict = DirectoryMachine.TestCase
