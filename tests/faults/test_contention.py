"""Many at one store, with hardly any time, or with somebody who forgets everything: no wrong byte, no lost
slot.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, NOT_NOW, buffers, content_of, key_of
from kvbm_core.testing.together import run_together

NUM_SLOTS, NUM_KEYS, NUM_THREADS, NUM_CALLS = 12, 18, 4, 60
KEYS = [key_of(number) for number in range(NUM_KEYS)]


def make_store(path: Path, payload_bytes: int, *, is_direct: bool) -> DiskStore:
    """An empty one."""
    geometry = Geometry(NUM_SLOTS, payload_bytes, b"contention".ljust(16))
    store = DiskStore(path, geometry, FileOptions(is_direct=is_direct))
    assert store.wait_recovered(LONG_S)
    return store


def in_threads(work: Callable[[Random], None], rng: Random) -> None:
    """Runs ``work`` in several threads at once, each with randomness of its own."""
    run_together([partial(work, Random(rng.getrandbits(32))) for _ in range(NUM_THREADS)])


class Caller:
    """Puts and gets random blocks, and checks each byte. Memory is kept: a late read may still write to
    it.
    """

    def __init__(self, store: DiskStore, payload_bytes: int, deadlines_s: list[float]) -> None:
        self.store = store
        self.payload_bytes = payload_bytes
        self.deadlines_s = deadlines_s
        self.contents = {key: content_of(key, payload_bytes) for key in KEYS}
        self.kept: list[memoryview] = []
        self.counts: Counter[Outcome] = Counter()

    def work(self, rng: Random) -> None:
        """NUM_CALLS calls."""
        for _ in range(NUM_CALLS):
            keys = rng.sample(KEYS, rng.randrange(1, 7))
            memory = buffers(len(keys), self.payload_bytes)
            self.kept += memory
            deadline_s = rng.choice(self.deadlines_s)
            if rng.random() < 0.4:
                for key, payload in zip(keys, memory, strict=True):
                    payload[:] = self.contents[key]
                outcomes = self.store.put_many(keys, memory, deadline_s=deadline_s)
            else:
                outcomes = self.store.get_many(keys, memory, deadline_s=deadline_s)
                for key, target, outcome in zip(keys, memory, outcomes, strict=True):
                    assert outcome is not Outcome.OK or target == self.contents[key], "wrong bytes"
            assert set(outcomes) <= NOT_NOW, outcomes
            self.counts.update(outcomes)

    def check_that_all_slots_are_there(self) -> None:
        """As many blocks as ever fit, each of them got."""
        for keys in (KEYS[:NUM_SLOTS], KEYS[-NUM_SLOTS:]):
            self.store.remove_many(KEYS, deadline_s=LONG_S)
            outcomes: list[Outcome] = []
            while set(outcomes) != {Outcome.OK}:  # as soon as the last late write has ended
                outcomes = self.store.put_many(
                    keys, [memoryview(self.contents[key]) for key in keys], deadline_s=LONG_S
                )
                assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
            targets = buffers(len(keys), self.payload_bytes)
            assert self.store.get_many(keys, targets, deadline_s=LONG_S) == [Outcome.OK] * NUM_SLOTS
            assert targets == [self.contents[key] for key in keys]
        self.store._tier.check_integrity()
        assert self.store._tier.live_leases == self.store._tier.pending_blocks == 0


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("payload_bytes", [262_144, 100_000])
def test_calls_with_hardly_any_time(tmp_path: Path, payload_bytes: int, is_direct: bool, rng: Random) -> None:
    store = make_store(tmp_path / "hurried.blocks", payload_bytes, is_direct=is_direct)
    caller = Caller(store, payload_bytes, [0.0, 0.0002, 0.001, 0.01, LONG_S])
    in_threads(caller.work, rng)
    assert caller.counts[Outcome.TIMED_OUT] and caller.counts[Outcome.OK], caller.counts
    caller.check_that_all_slots_are_there()
    store.close()
    assert store._file.fd == -1, "all that was late has ended"


@pytest.mark.parametrize("payload_bytes", [8192, 5000])
def test_everything_is_forgotten_while_others_work(tmp_path: Path, payload_bytes: int, rng: Random) -> None:
    path = tmp_path / "cleared.blocks"
    store = make_store(path, payload_bytes, is_direct=False)
    caller = Caller(store, payload_bytes, [LONG_S])
    at_work = threading.Event()

    def work(rng: Random) -> None:
        try:
            caller.work(rng)
        finally:
            at_work.set()

    def clear_often(rng: Random) -> None:
        while not at_work.is_set():
            store.clear()

    clearing = threading.Thread(target=clear_often, args=(rng,))
    clearing.start()
    in_threads(work, rng)
    clearing.join()
    assert set(caller.counts) <= {Outcome.OK, Outcome.MISS, Outcome.NO_SPACE} and caller.counts[Outcome.OK]
    caller.check_that_all_slots_are_there()
    store.clear()
    store.close()
    again = make_store(path, payload_bytes, is_direct=False)
    assert list(again.scan()) == []
    again.close()
