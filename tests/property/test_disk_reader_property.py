"""Reading along against the writer itself: what that has is got with its bytes, the rest is a miss or was
once put.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import scan
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.slot_log import ENTRY_BYTES, HEADER_BYTES, MAX_ENTRIES_PER_SLOT, log_path
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from kvbm_core.types import BlockKey
from tests.effort import tries

PAYLOAD_BYTES = 4500
BUFFERED = FileOptions(is_direct=False)
UNIVERSE = [key_of(number) for number in range(9)] + [key_of(0, group=1)]
SOME_KEYS = st.lists(st.sampled_from(UNIVERSE), max_size=5)
OURS, THEIRS = b"ours".ljust(16), b"theirs".ljust(16)


def payload(key: BlockKey, version: int) -> bytes:
    """Bytes of no other key or version."""
    return Random(key + version.to_bytes(8, "little")).randbytes(PAYLOAD_BYTES)


class ReaderMachine(RuleBasedStateMachine):
    """The twin: what the writer itself gets, and per key all versions that were put in this life of the
    file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(
            scan, "CHUNK_SLOTS", 2
        )  # of two records of a key the writer takes the first chunk's
        self.folder = tempfile.TemporaryDirectory(prefix="kvbm-reader-property-")
        self.path = Path(self.folder.name, "property.blocks")
        self.version = 0
        self.possible: dict[BlockKey, set[int]] = {}
        self.meaning = OURS
        self.num_slots = 6
        self.reader = self.new_reader()
        self.open()

    def open(self) -> None:
        geometry = Geometry(self.num_slots, PAYLOAD_BYTES, self.meaning)
        self.writer = DiskStore(self.path, geometry, BUFFERED, shares=True)
        assert self.writer.wait_recovered(LONG_S)

    def new_reader(self) -> DiskReader:
        return DiskReader(self.path, Geometry(1, PAYLOAD_BYTES, OURS), BUFFERED)

    def got(self, store: DiskStore | DiskReader, keys: list[BlockKey]) -> list[bytes | None]:
        """The bytes of each; None for a miss."""
        targets = buffers(len(keys), PAYLOAD_BYTES)
        outcomes = store.get_many(keys, targets, deadline_s=LONG_S)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS}
        return [
            bytes(target) if outcome is Outcome.OK else None
            for target, outcome in zip(targets, outcomes, strict=True)
        ]

    @rule(keys=SOME_KEYS)
    def put(self, keys: list[BlockKey]) -> None:
        held = set(self.writer.scan())
        self.version += 1
        payloads = [memoryview(payload(key, self.version)) for key in keys]
        outcomes = self.writer.put_many(keys, payloads, deadline_s=LONG_S)
        for key, outcome in zip(keys, outcomes, strict=True):
            if key not in held and outcome is Outcome.OK:
                self.possible.setdefault(key, set()).add(self.version)

    @rule(keys=SOME_KEYS)
    def remove(self, keys: list[BlockKey]) -> None:
        self.writer.remove_many(keys, deadline_s=LONG_S)

    @rule()
    def clear(self) -> None:
        self.writer.clear()
        self.possible = {}

    @rule(num_slots=st.sampled_from([6, 6, 6, 3, 8]), meaning=st.sampled_from([OURS, OURS, OURS, THEIRS]))
    def reopen(self, num_slots: int, meaning: bytes) -> None:
        self.writer.close()
        if meaning != self.meaning:
            self.possible = {}
        self.num_slots, self.meaning = num_slots, meaning
        self.open()

    @rule()
    def begin_anew(self) -> None:
        """Without the file and its log."""
        self.writer.close()
        self.path.unlink()
        log_path(self.path).unlink()
        self.possible = {}
        self.open()

    @rule()
    def lose_the_log(self) -> None:
        """The next put tells all again; it is a put that goes to the disk."""
        log_path(self.path).unlink()
        assert self.got(self.reader, UNIVERSE) == [None] * len(UNIVERSE)
        self.writer.remove_many(UNIVERSE[:1], deadline_s=LONG_S)
        self.put(UNIVERSE[:1])

    @rule()
    def another_reader(self) -> None:
        self.reader.close()
        self.reader = self.new_reader()

    @rule(keys=SOME_KEYS)
    def look(self, keys: list[BlockKey]) -> None:
        if self.meaning != OURS:
            assert self.got(self.reader, keys) == [None] * len(keys)
            return
        for key, ours, theirs in zip(
            keys, self.got(self.reader, keys), self.got(self.writer, keys), strict=True
        ):
            assert theirs is None or ours == theirs, "what the writer has is found, with the same bytes"
            versions = self.possible.get(key, set())
            assert ours is None or any(ours == payload(key, version) for version in versions), "wrong bytes"

    @rule()
    def look_at_all(self) -> None:
        self.look(UNIVERSE)
        held, known = set(self.writer.scan()), set(self.reader.scan())
        assert held <= known if self.meaning == OURS else not known

    @rule(keys=SOME_KEYS)
    def ask(self, keys: list[BlockKey]) -> None:
        held = set(self.writer.scan()) if self.meaning == OURS else set()
        outcomes = self.reader.contains_many(keys, deadline_s=LONG_S)
        assert {
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK
        } >= held & set(keys)

    @invariant()
    def all_is_bounded(self) -> None:
        most_bytes = HEADER_BYTES + MAX_ENTRIES_PER_SLOT * self.num_slots * ENTRY_BYTES
        assert log_path(self.path).stat().st_size <= most_bytes
        places = self.reader._places
        assert {slot: key for key, (slot,) in places._place_of.items()} == places._key_in
        assert len(places._place_of) <= 8

    def teardown(self) -> None:
        self.look_at_all()
        self.reader.close()
        self.writer.close()
        self.folder.cleanup()
        self.patch.undo()


ReaderMachine.TestCase.settings = settings(max_examples=tries(8, nightly=80), stateful_step_count=25)
TestReaderAgainstItsWriter = ReaderMachine.TestCase
