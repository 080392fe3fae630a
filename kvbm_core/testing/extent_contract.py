# ruff: noqa: S101  (a conformance suite is made of asserts)
"""What every ExtentStore must do beside what a BlockStore does: subclass the class, run pytest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from random import Random
from typing import Protocol

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS, Extent, ExtentStore
from kvbm_core.testing.store_contract import LONG_S, NOT_NOW, buffers, content_in, content_of, fill, key_of
from kvbm_core.testing.together import run_together
from kvbm_core.types import BlockKey

SIZES = (1, 4, 64)
"""Of extents."""


class SharedStore(BlockStore, ExtentStore, Protocol):
    """What the suite is about."""


def extent_of(number: int, num_blocks: int, group: int = 0) -> Extent:
    """The same for the same arguments."""
    return Extent(num_blocks, tuple(key_of(1000 * number + index, group) for index in range(num_blocks)))


def last_of(extent: Extent, count: int) -> Extent:
    """As it is looked for by somebody who wants its last ``count`` blocks."""
    return extent._replace(keys=extent.keys[-count:])


class ExtentStoreContract(ABC):
    """The promises of ``storage.extents.ExtentStore``."""

    payload_bytes = 4096
    part_bytes: int | None = None
    """Memory of a block is in parts of this size; None: in one piece."""
    content = staticmethod(content_of)
    """What the suite puts under a key."""

    @abstractmethod
    def stores(self) -> AbstractContextManager[SharedStore]:
        """A new and empty store with room for 300 blocks of ``payload_bytes`` in extents of any size."""

    @contextmanager
    def opened(self) -> Iterator[SharedStore]:
        """A store, closed afterwards."""
        with self.stores() as store:
            try:
                yield store
            finally:
                store.close()

    # ---------------------------------------------------------------- helpers

    def memory(self, count: int, content: Callable[[int], bytes] | None = None) -> list[Memory]:
        """Of blocks, far from each other."""
        size, part = self.payload_bytes, self.part_bytes or self.payload_bytes
        made: list[Memory] = []
        for index in range(count):
            parts = [buffers(1, min(part, size - at))[0] for at in range(0, size, part)]
            if content is not None:
                fill(parts, content(index))
            made.append(parts if self.part_bytes else parts[0])
        return made

    def payloads(self, extent: Extent) -> list[Memory]:
        """What belongs to its keys."""
        return self.memory(
            len(extent.keys), lambda index: self.content(extent.keys[index], self.payload_bytes)
        )

    def put(self, store: ExtentStore, extents: Sequence[Extent], deadline_s: float = LONG_S) -> list[Outcome]:
        """Puts the content of their keys."""
        return store.put_extents(extents, list(map(self.payloads, extents)), deadline_s=deadline_s)

    def get(
        self, store: ExtentStore, extents: Sequence[Extent], deadline_s: float = LONG_S
    ) -> list[list[Outcome]]:
        """Gets the blocks of their keys, and checks every byte of what is OK."""
        targets = [self.memory(len(extent.keys)) for extent in extents]
        outcomes = store.get_extents(extents, targets, deadline_s=deadline_s)
        assert [len(own) for own in outcomes] == [len(extent.keys) for extent in extents]
        for extent, own, ends in zip(extents, targets, outcomes, strict=True):
            for key, target, outcome in zip(extent.keys, own, ends, strict=True):
                is_right = content_in(target) == self.content(key, self.payload_bytes)
                assert outcome is not Outcome.OK or is_right, "wrong bytes"
        return outcomes

    # ---------------------------------------------------------------- what is there

    def test_what_was_put_is_got_and_what_was_not_is_a_miss(self) -> None:
        put = [extent_of(number, size) for number, size in enumerate(SIZES)]
        absent = [extent_of(number + 50, size) for number, size in enumerate(SIZES)]
        mixed = [extent for pair in zip(put, absent, strict=True) for extent in pair]
        with self.opened() as store:
            assert store.contains_extents(mixed, deadline_s=LONG_S) == [Outcome.MISS] * 6
            assert self.put(store, put) == [Outcome.OK] * 3
            held = [Outcome.OK, Outcome.MISS] * 3
            assert store.contains_extents(mixed, deadline_s=LONG_S) == held
            for extents in (mixed, mixed[::-1]):
                there = held if extents is mixed else held[::-1]
                expected = [[end] * len(extent.keys) for extent, end in zip(extents, there, strict=True)]
                assert self.get(store, extents) == expected
            assert self.put(store, put) == [Outcome.OK] * 3, "again"

    def test_nothing_asked_is_nothing_answered(self) -> None:
        with self.opened() as store:
            assert self.put(store, []) == store.contains_extents([], deadline_s=LONG_S) == []
            assert self.get(store, []) == []

    def test_any_last_blocks_of_an_extent_are_got(self) -> None:
        whole = extent_of(1, 16)
        with self.opened() as store:
            assert self.put(store, [whole]) == [Outcome.OK]
            for count in (1, 2, 7, 8, 9, 15, 16):
                part = last_of(whole, count)
                assert store.contains_extents([part], deadline_s=LONG_S) == [Outcome.OK]
                assert self.get(store, [part]) == [[Outcome.OK] * count], f"the last {count}"
            every = [last_of(whole, count) for count in range(1, 17)]
            assert self.get(store, every) == [[Outcome.OK] * count for count in range(1, 17)]

    def test_extents_of_another_size_and_group_are_others(self) -> None:
        whole = extent_of(1, 4)
        two, one = last_of(whole, 2)._replace(num_blocks=2), last_of(whole, 1)._replace(num_blocks=1)
        other = extent_of(1, 4, group=2)
        with self.opened() as store:
            self.put(store, [whole])
            others = [two, one, other]
            assert store.contains_extents(others, deadline_s=LONG_S) == [Outcome.MISS] * 3
            assert self.get(store, others) == [[Outcome.MISS] * 2, [Outcome.MISS], [Outcome.MISS] * 4]
            assert self.put(store, others) == [Outcome.OK] * 3
            assert self.get(store, [*others, whole]) == [[Outcome.OK] * count for count in (2, 1, 4, 4)]

    def test_a_block_is_an_extent_of_one(self) -> None:
        one, two = extent_of(1, 1), extent_of(2, 1)
        with self.opened() as store:
            self.put(store, [one])
            payloads = self.payloads(two)
            assert store.put_many(two.keys, payloads, deadline_s=LONG_S) == [Outcome.OK]
            keys: list[BlockKey] = [*one.keys, *two.keys]
            assert store.contains_many(keys, deadline_s=LONG_S) == [Outcome.OK] * 2
            assert self.get(store, [one, two]) == [[Outcome.OK]] * 2
            assert store.remove_many(keys, deadline_s=LONG_S) == [Outcome.OK] * 2
            assert store.contains_extents([one, two], deadline_s=LONG_S) == [Outcome.MISS] * 2

    def test_the_largest_extent(self) -> None:
        whole = extent_of(3, 256)
        with self.opened() as store:
            assert self.put(store, [whole]) == [Outcome.OK]
            assert self.get(store, [whole, last_of(whole, 3)]) == [[Outcome.OK] * 256, [Outcome.OK] * 3]

    # ---------------------------------------------------------------- misuse, time, end, threads

    def test_what_is_no_extent_is_refused(self) -> None:
        whole, size = extent_of(1, 4), self.payload_bytes
        with self.opened() as store:
            good = self.payloads(whole)
            bad: list[tuple[Extent, Sequence[Memory]]] = [
                (last_of(whole, 3), good[:3]),  # a key is missing
                (whole, good[:3]),
                (whole, [*good[:3], good[3][: size - 1] if isinstance(good[3], memoryview) else []]),
                (Extent(3, whole.keys), good),
                (Extent(0, ()), []),
                (Extent(4, ()), []),
                (extent_of(1, MAX_EXTENT_BLOCKS + 1), self.memory(MAX_EXTENT_BLOCKS + 1)),
            ]
            for extent, payloads in bad:
                _refuses(store.put_extents, [extent], [payloads])
            for extent, payloads in bad[1:]:
                _refuses(store.get_extents, [extent], [payloads])
            _refuses(store.put_extents, [whole, whole], [good])
            _refuses(store.get_extents, [whole, whole], [good])
            _refuses(store.get_extents, [whole], [[memoryview(bytes(size)) for _ in range(4)]])
            assert store.contains_extents([whole], deadline_s=LONG_S) == [Outcome.MISS]

    def test_a_call_without_time_answers_and_does_no_harm(self) -> None:
        whole, other = extent_of(1, 4), extent_of(2, 4)
        with self.opened() as store:
            self.put(store, [whole])
            for deadline_s in (0.0, -1.0):
                assert set(self.put(store, [other], deadline_s)) <= NOT_NOW
                for outcomes in self.get(store, [whole, other], deadline_s):
                    assert set(outcomes) <= NOT_NOW
                assert len(store.contains_extents([whole], deadline_s=deadline_s)) == 1
            assert self.get(store, [whole]) == [[Outcome.OK] * 4]

    def test_after_close_everything_is_rejected(self) -> None:
        whole = extent_of(1, 4)
        with self.stores() as store:
            self.put(store, [whole])
            store.close()
            assert self.put(store, [whole]) == [Outcome.REJECTED]
            assert self.get(store, [whole]) == [[Outcome.REJECTED] * 4]
            assert store.contains_extents([whole], deadline_s=LONG_S) == [Outcome.REJECTED]

    def test_many_threads_at_once_see_only_right_bytes(self) -> None:
        counts = dict.fromkeys(Outcome, 0)

        def work(number: int) -> None:
            rng = Random(number)  # noqa: S311 (a test's randomness)
            for _ in range(20):
                sizes = [rng.choice((1, 2, 8)) for _ in range(rng.randrange(1, 4))]
                extents = [extent_of(rng.randrange(6), size) for size in sizes]
                if rng.random() < 0.5:
                    ends = self.put(store, extents)
                else:
                    parts = [last_of(extent, rng.randrange(len(extent.keys)) + 1) for extent in extents]
                    ends = [end for own in self.get(store, parts) for end in own]
                for end in ends:
                    counts[end] += 1

        with self.opened() as store:
            run_together([partial(work, number) for number in range(5)])
        assert sum(counts.values()) == counts[Outcome.OK] + counts[Outcome.MISS], counts
        assert counts[Outcome.OK] > 50, counts


def _refuses(
    call: Callable[..., object], extents: Sequence[Extent], memory: Sequence[Sequence[Memory]]
) -> None:
    try:
        call(extents, memory, deadline_s=LONG_S)
    except ValueError:
        return
    raise AssertionError("ValueError was not raised")
