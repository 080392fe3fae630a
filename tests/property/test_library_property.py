"""The library against a dict: what comes back was put under that name; with room for all, all of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvbm
from tests.effort import tries

SPEC = kvbm.BlockSpec("some-model", shape=(3, 5), dtype="int32", tokens=2)
TOKENS = st.lists(st.integers(0, 2), max_size=12)
KEYS = st.lists(st.sampled_from(["a", "b", b"a", b"c"]), unique=True, max_size=4)
NAMES = st.one_of(TOKENS, KEYS)
SALTS = st.sampled_from([None, "", "x"])
HOST_SLOT_BYTES, DISK_RECORD_BYTES = 4096, 8192
Twin = dict[tuple[object, ...], int]


def twin_names(names: list[Any], salt: str | None) -> list[tuple[object, ...]]:
    """What the dict calls the blocks that ``names`` stand for: a prefix, or a key."""
    if names and not isinstance(names[0], int):
        return [("key", salt, name) for name in names]
    return [("tokens", salt, *names[:end]) for end in range(2, len(names) + 1, 2)]


class CacheMachine(RuleBasedStateMachine):
    """The dict: what was put first under a name, since the last clear."""

    host_slots, disk_records = 4, 7
    has_store = False
    forgets = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvbm-library-property-")
        self.twin: Twin = {}
        self.number = 0
        self.open()

    def open(self) -> None:
        """A process that finds what the last one left."""
        more: dict[str, Any] = {}
        if self.has_store:
            (Path(self.folder.name) / "store").mkdir(exist_ok=True)
            more.update(remote=f"file://{self.folder.name}/store", remote_bytes=0)
        if self.disk_records:
            more.update(disk=Path(self.folder.name), disk_bytes=self.disk_records * DISK_RECORD_BYTES)
        self.cache = kvbm.open_cache(SPEC, host_bytes=self.host_slots * HOST_SLOT_BYTES, **more)

    @rule(names=NAMES, salt=SALTS)
    def put(self, names: list[Any], salt: str | None) -> None:
        keys = twin_names(names, salt)
        blocks = np.empty((len(keys), *SPEC.shape), np.int32)
        for i, key in enumerate(keys):
            # Only if the cache has forgotten it may the same name stand for something new.
            self.number += key not in self.twin
            blocks[i] = self.twin.setdefault(key, self.number)
        num_put = self.cache.put(names, blocks, salt=salt, timeout_s=60)
        assert num_put <= len(keys)
        assert self.forgets or num_put == len(keys)

    @rule(names=NAMES, salt=SALTS, room=st.integers(0, 7))
    def get(self, names: list[Any], salt: str | None, room: int) -> None:
        keys = twin_names(names, salt)
        known = next((i for i, key in enumerate(keys) if key not in self.twin), len(keys))
        matched = self.cache.match(names, salt=salt, timeout_s=60)
        out = np.full((room, *SPEC.shape), -1, np.int32)
        found = self.cache.get(names, out, salt=salt, timeout_s=60)
        assert matched <= known and found <= min(known, room)
        assert [block.tolist() for block in out] == [
            np.full(SPEC.shape, self.twin[keys[i]] if i < found else -1).tolist() for i in range(room)
        ]
        if not self.forgets:
            assert found == min(known, room) and matched == known

    @rule()
    def clear(self) -> None:
        if not self.has_store:
            assert self.cache.clear(timeout_s=60)
            self.twin.clear()
            assert self.cache.usage() == {"host": 0, "disk": 0}

    @rule()
    def restart(self) -> None:
        self.cache.close(timeout_s=60)
        if not self.disk_records and not self.has_store:
            self.twin.clear()
        self.open()

    @invariant()
    def the_books_agree(self) -> None:
        self.cache._tiers.check_integrity()
        assert len(self.cache._stage._free) == self.cache._stage.num_blocks

    def teardown(self) -> None:
        """Ends threads and files."""
        self.cache.close()
        self.folder.cleanup()


class RoomForAll(CacheMachine):
    """Nothing is ever missing."""

    host_slots, disk_records, forgets = 128, 128, False


class HostOnly(CacheMachine):
    """No lower tier."""

    disk_records = 0


class Shared(CacheMachine):
    """A directory, with little host memory before it: nothing is missing there either."""

    host_slots, disk_records, has_store, forgets = 16, 0, True, False


EFFORT = settings(max_examples=tries(4, nightly=60), stateful_step_count=20, deadline=None)
TestCache, TestRoomForAll = CacheMachine.TestCase, RoomForAll.TestCase
TestHostOnly, TestShared = HostOnly.TestCase, Shared.TestCase
TestCache.settings = TestRoomForAll.settings = TestHostOnly.settings = TestShared.settings = EFFORT
