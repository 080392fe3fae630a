# ruff: noqa: S101  (a conformance suite is made of asserts)
"""What every BlockStore must do: subclass the class, say how to make a store, run pytest."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory, parts_of
from kvbm_core.testing.file_io_contract import memory_of
from kvbm_core.testing.together import open_files, run_together, wait_for
from kvbm_core.types import BlockKey, SequenceHash, block_key

LONG_S = 120.0
"""A deadline longer than anything here takes."""
NUM_BLOCKS = 24
"""What the stores under test have room for."""
NOT_NOW = {Outcome.OK, Outcome.MISS, Outcome.BUSY, Outcome.TIMED_OUT, Outcome.NO_SPACE, Outcome.IO_ERROR}
"""What a call without time may answer; CORRUPT would be a block that nobody damaged."""


def key_of(number: int, group: int = 0) -> BlockKey:
    """A key; different for different arguments."""
    return block_key(SequenceHash(Random(number).randbytes(32)), group)  # noqa: S311 (a test's randomness)


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    """The bytes that the suite puts under ``key``: all of them depend on all of it."""
    return Random(bytes(key)).randbytes(num_bytes)  # noqa: S311 (a test's randomness)


def buffers(count: int, num_bytes: int, *, skew_bytes: int = 0) -> list[memoryview]:
    """Writable memory from pages' starts on, or ``skew_bytes`` behind them. Any address will do for a
    store.
    """
    step_bytes = -(-(num_bytes + skew_bytes) // 4096) * 4096
    memory = memory_of(count * step_bytes).data
    return [memory[start : start + num_bytes] for start in range(skew_bytes, count * step_bytes, step_bytes)]


def fill(memory: Memory, content: bytes) -> None:
    """Puts ``content`` there."""
    for part in parts_of(memory):
        part[:], content = content[: part.nbytes], content[part.nbytes :]


def content_in(memory: Memory) -> bytes:
    """What is there."""
    return b"".join(parts_of(memory))


class BlockStoreContract(ABC):
    """The promises of ``storage.base.BlockStore``."""

    payload_bytes = 8192
    skew_bytes = 0
    """How far behind a page's start the buffers, and their parts, begin."""
    part_bytes: int | None = None
    """Buffers are made of parts of this size, and a shorter last one, far from each other; None: in one
    piece.
    """
    content = staticmethod(content_of)
    """What the suite puts under a key."""
    after_removal = Outcome.MISS
    """What is known of a block right after it was removed."""

    @abstractmethod
    def stores(self) -> AbstractContextManager[BlockStore]:
        """A new and empty store with room for NUM_BLOCKS blocks of ``payload_bytes``; what it needs goes
        afterwards.

        It is closed by the suite.
        """

    @contextmanager
    def opened(self) -> Iterator[BlockStore]:
        """A store, closed afterwards."""
        with self.stores() as store:
            try:
                yield store
            finally:
                store.close()

    def settle(self, store: BlockStore) -> None:  # noqa: B027 - most stores have nothing to wait for
        """Waits until ``store`` is within its size, for one that makes room in the background."""

    # ---------------------------------------------------------------- helpers

    def scanned(self, store: BlockStore) -> list[BlockKey]:
        """The keys held now; for a store that does not tell them, asked for by name."""
        return list(store.scan())

    def new_buffers(self, count: int) -> list[Memory]:
        """Of the size of blocks, full of zeros."""
        size = self.payload_bytes
        if self.part_bytes is None:
            return list(buffers(count, size, skew_bytes=self.skew_bytes))
        sizes = [min(self.part_bytes, size - start) for start in range(0, size, self.part_bytes)]
        return list(zip(*(buffers(count, part, skew_bytes=self.skew_bytes) for part in sizes), strict=True))

    def put(self, store: BlockStore, keys: Sequence[BlockKey], deadline_s: float = LONG_S) -> list[Outcome]:
        """Puts each key's ``content_of``; the memory is overwritten afterwards, as it is the caller's
        again.
        """
        payloads = self.new_buffers(len(keys))
        for key, payload in zip(keys, payloads, strict=True):
            fill(payload, self.content(key, self.payload_bytes))
        outcomes = store.put_many(keys, payloads, deadline_s=deadline_s)
        assert len(outcomes) == len(keys)
        if Outcome.TIMED_OUT not in outcomes:
            for payload in payloads:
                fill(payload, bytes(self.payload_bytes))
        return outcomes

    def get(self, store: BlockStore, keys: Sequence[BlockKey], deadline_s: float = LONG_S) -> list[Outcome]:
        """Gets them and checks every byte of what is OK."""
        targets = self.new_buffers(len(keys))
        outcomes = store.get_many(keys, targets, deadline_s=deadline_s)
        assert len(outcomes) == len(keys)
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            assert outcome is not Outcome.OK or content_in(target) == self.content(key, self.payload_bytes), (
                "wrong bytes"
            )
        return outcomes

    @staticmethod
    def contained(store: BlockStore, keys: Sequence[BlockKey]) -> list[Outcome]:
        """``contains_many`` with time enough."""
        return store.contains_many(keys, deadline_s=LONG_S)

    # ---------------------------------------------------------------- what is there

    def test_what_was_put_is_got_and_what_was_not_is_a_miss(self) -> None:
        keys = [key_of(number) for number in range(6)] + [key_of(0, group=3)]
        with self.opened() as store:
            assert self.scanned(store) == []
            assert self.contained(store, keys) == self.get(store, keys) == [Outcome.MISS] * 7
            assert self.put(store, keys[::2]) == [Outcome.OK] * 4
            held = [Outcome.OK, Outcome.MISS] * 3 + [Outcome.OK]
            assert self.contained(store, keys) == held
            assert self.get(store, keys) == held, "the misses between them cost nothing"
            assert self.get(store, keys[::-1]) == held[::-1], "the answers are in the order of the keys"
            assert set(self.scanned(store)) == set(keys[::2])
            assert len(self.scanned(store)) == 4

    def test_nothing_asked_is_nothing_answered(self) -> None:
        with self.opened() as store:
            assert self.contained(store, []) == self.put(store, []) == self.get(store, []) == []
            assert store.remove_many([], deadline_s=LONG_S) == []

    def test_removed_blocks_are_gone_and_can_be_put_again(self) -> None:
        keys = [key_of(number) for number in range(5)]
        with self.opened() as store:
            self.put(store, keys)
            removed = store.remove_many([keys[1], key_of(99), keys[3]], deadline_s=LONG_S)
            assert removed == [Outcome.OK, Outcome.MISS, Outcome.OK]
            held = [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.MISS, Outcome.OK]
            assert self.contained(store, keys) == self.get(store, keys) == held
            assert set(self.scanned(store)) == {keys[0], keys[2], keys[4]}
            assert store.remove_many(keys[1:2], deadline_s=LONG_S) == [Outcome.MISS]
            assert self.put(store, keys) == self.get(store, keys) == [Outcome.OK] * 5

    def test_a_key_may_be_given_twice_in_one_call(self) -> None:
        one, two, other = (key_of(number) for number in range(3))
        with self.opened() as store:
            assert self.put(store, [one, two, one, one]) == [Outcome.OK] * 4
            held = [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK, Outcome.MISS]
            assert self.get(store, [one, other, one, two, other]) == held
            assert sorted(self.scanned(store)) == sorted([one, two])
            removed = store.remove_many([one, one], deadline_s=LONG_S)
            assert Outcome.OK in removed and set(removed) <= {Outcome.OK, Outcome.MISS}
            assert self.contained(store, [one, two]) == [self.after_removal, Outcome.OK]

    def test_putting_a_block_again_is_ok(self) -> None:
        keys = [key_of(number) for number in range(3)]
        with self.opened() as store:
            for _ in range(3):
                assert self.put(store, keys) == self.get(store, keys) == [Outcome.OK] * 3
            assert len(self.scanned(store)) == 3

    def test_a_target_is_divided_as_it_likes(self) -> None:
        keys, size = [key_of(number) for number in range(3)], self.payload_bytes
        with self.opened() as store:
            self.put(store, keys)
            for part_bytes in {size, -(-size // 2), -(-size // 3), 4096}:
                sizes = [min(part_bytes, size - start) for start in range(0, size, part_bytes)]
                targets = [[buffers(1, part)[0] for part in sizes] for _ in keys]
                assert store.get_many(keys, targets, deadline_s=LONG_S) == [Outcome.OK] * 3
                for key, target in zip(keys, targets, strict=True):
                    assert content_in(target) == self.content(key, size)

    def test_more_blocks_than_fit_cost_old_ones_and_never_bytes(self) -> None:
        keys = [key_of(number) for number in range(3 * NUM_BLOCKS)]
        with self.opened() as store:
            for start in range(0, len(keys), 4):
                assert self.put(store, keys[start : start + 4]) == [Outcome.OK] * 4, "room is made"
                assert self.get(store, keys[start : start + 4]) == [Outcome.OK] * 4
            self.settle(store)
            held = self.scanned(store)
            assert 4 <= len(held) == len(set(held)) <= NUM_BLOCKS
            outcomes = self.get(store, keys)
            assert {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK} == set(
                held
            )
            assert set(outcomes) == {Outcome.OK, Outcome.MISS}

    def test_more_blocks_in_one_call_than_fit(self) -> None:
        keys = [key_of(number) for number in range(2 * NUM_BLOCKS)]
        with self.opened() as store:
            outcomes = self.put(store, keys)
            assert Outcome.OK in outcomes and set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
            put = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
            assert self.get(store, put) == [Outcome.OK] * len(put), "OK means that it can be got"

    def test_a_scan_outlives_changes(self) -> None:
        keys = [key_of(number) for number in range(6)]
        with self.opened() as store:
            self.put(store, keys)
            found = store.scan()
            seen = {next(found)}
            store.remove_many(keys[:3], deadline_s=LONG_S)
            self.put(store, [key_of(50)])
            seen |= set(found)
            assert set(keys[3:]) <= seen <= {*keys, key_of(50)}

    # ---------------------------------------------------------------- misuse

    def test_buffers_of_another_size_are_refused(self) -> None:
        keys = [key_of(0), key_of(1)]
        with self.opened() as store:
            self.put(store, keys[:1])
            for size in (self.payload_bytes - 1, self.payload_bytes + 1, 0):
                wrong = [self.new_buffers(1)[0], memoryview(bytearray(size))]
                _refuses(store.put_many, keys, wrong)
                _refuses(store.get_many, keys, wrong)
            for count in (1, 3):
                uneven = self.new_buffers(count)
                _refuses(store.put_many, keys, uneven)
                _refuses(store.get_many, keys, uneven)
            assert self.contained(store, keys) == [Outcome.OK, Outcome.MISS], "what raised changed nothing"
            self._still_has_all_its_room(store)

    def test_memory_that_cannot_be_used_is_refused(self) -> None:
        keys, size = [key_of(0), key_of(1)], self.payload_bytes
        with self.opened() as store:
            self.put(store, keys)
            apart = memoryview(bytearray(2 * size))[::2]
            read_only = memoryview(bytes(size))
            (good,) = buffers(1, size)
            _refuses(store.put_many, [key_of(2), key_of(3)], [good, apart])
            _refuses(store.get_many, keys, [good, apart])
            _refuses(store.get_many, keys, [good, read_only])
            for bad in (apart, read_only):  # in one piece of several
                _refuses(store.get_many, keys, [good, [bad[: size // 2], good[size // 2 :]]])
            for uneven in ([], [good, good[:1]], [good[: size // 2]]):
                _refuses(store.put_many, [key_of(2), key_of(3)], [good, uneven])
            payload = memoryview(self.content(key_of(4), size))
            assert store.put_many([key_of(4)], [payload], deadline_s=LONG_S) == [Outcome.OK], (
                "it is only read"
            )
            assert self.get(store, [*keys, key_of(4)]) == [Outcome.OK] * 3
            self._still_has_all_its_room(store)

    def _still_has_all_its_room(self, store: BlockStore) -> None:
        """Nothing that was refused holds a place: as many blocks as ever can be put, all of them new."""
        for turn in range(2):
            keys = [key_of(1000 * turn + number + 500) for number in range(NUM_BLOCKS)]
            assert self.put(store, keys) == self.get(store, keys) == [Outcome.OK] * NUM_BLOCKS

    # ---------------------------------------------------------------- time, end, threads

    def test_a_call_without_time_answers_and_does_no_harm(self) -> None:
        keys = [key_of(number) for number in range(8)]
        kept: list[Memory] = []  # a late read may still write there
        with self.opened() as store:
            self.put(store, keys[:4])
            for deadline_s in (0.0, -1.0, -0.001):
                assert set(self.put(store, keys[4:], deadline_s)) <= NOT_NOW
                kept += self.new_buffers(8)
                outcomes = store.get_many(keys, kept[-8:], deadline_s=deadline_s)
                assert set(outcomes) <= NOT_NOW
                for key, target, outcome in zip(keys, kept[-8:], outcomes, strict=True):
                    assert outcome is not Outcome.OK or content_in(target) == self.content(
                        key, self.payload_bytes
                    )
                assert len(store.contains_many(keys, deadline_s=deadline_s)) == 8
                assert len(store.remove_many(keys[3:4], deadline_s=deadline_s)) == 1
            assert set(self.get(store, keys)) <= {Outcome.OK, Outcome.MISS}
            wait_for(lambda: self.put(store, keys[4:]) == self.get(store, keys[4:]) == [Outcome.OK] * 4)

    def test_after_close_everything_is_rejected(self) -> None:
        keys = [key_of(0), key_of(1)]
        with self.stores() as store:
            self.put(store, keys)
            store.close()
            store.close()
            rejected = [Outcome.REJECTED] * 2
            assert self.contained(store, keys) == self.put(store, keys) == self.get(store, keys) == rejected
            assert store.remove_many(keys, deadline_s=LONG_S) == rejected

    def test_many_threads_at_once_see_only_right_bytes(self) -> None:
        counts = dict.fromkeys(Outcome, 0)

        def work(number: int) -> None:
            rng = Random(number)  # noqa: S311 (a test's randomness)
            for _ in range(30):
                keys = [key_of(rng.randrange(3 * NUM_BLOCKS // 2)) for _ in range(rng.randrange(1, 6))]
                what = rng.random()
                if what < 0.4:
                    outcomes = self.put(store, keys)
                elif what < 0.9:
                    outcomes = self.get(store, keys)
                else:
                    outcomes = store.remove_many(keys, deadline_s=LONG_S)
                    set(self.scanned(store))
                for outcome in outcomes:
                    counts[outcome] += 1

        with self.opened() as store:
            run_together([partial(work, number) for number in range(6)])
            bad = {outcome for outcome, count in counts.items() if count}
            assert bad <= {Outcome.OK, Outcome.MISS, Outcome.NO_SPACE}, counts
            assert counts[Outcome.OK] > counts[Outcome.MISS] / 4, counts
            self._still_has_all_its_room(store)

    def test_close_while_others_work_ends_their_calls(self) -> None:
        keys = [key_of(number) for number in range(8)]
        at_work = threading.Barrier(4)

        def work() -> None:
            at_work.wait(LONG_S)
            while Outcome.REJECTED not in (outcomes := self.put(store, keys) + self.get(store, keys)):
                assert set(outcomes) <= {Outcome.OK, Outcome.MISS, Outcome.NO_SPACE}

        def close() -> None:
            at_work.wait(LONG_S)
            store.close()

        with self.opened() as store:
            run_together([work] * 3, close)

    def test_close_gives_back_files_and_threads(self) -> None:
        with self.opened() as store:  # what is loaded with the first one may stay
            self.put(store, [key_of(0)])
        files, threads = open_files(), set(threading.enumerate())
        for _ in range(3):
            with self.opened() as store:
                self.put(store, [key_of(0)])
                self.get(store, [key_of(0), key_of(1)])
        wait_for(
            lambda: len(open_files()) <= len(files)
        )  # a server in this process has its ends of connections
        wait_for(lambda: set(threading.enumerate()) <= threads)


def _refuses(call: Callable[..., object], keys: Sequence[BlockKey], memory: Sequence[Memory]) -> None:
    try:
        call(keys, memory, deadline_s=LONG_S)
    except ValueError:
        return
    raise AssertionError("ValueError was not raised")
