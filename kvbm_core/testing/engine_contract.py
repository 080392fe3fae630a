# ruff: noqa: S101  (a conformance suite is made of asserts)
"""What every ObjectEngine must do: subclass the class, say how to open an engine, run pytest."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import GetItem, Got, ObjectEngine, PutItem
from kvbm_core.testing.together import open_files, run_together, wait_for

LONG_S = 120.0
"""A deadline longer than anything here takes."""
ROOM_BYTES = 8 << 20
"""What the engines under test have room for, at least."""
NO_TIME_S = (0.0, -0.001, -1.0)
CLOCKS_DIFFER_S = 3600.0
LONGEST_NAME = "a.b_c-d/" + "0123456789abcdef" * 12
"""200 characters, of each kind that a name may have."""


def content_of(name: str, num_bytes: int, version: int = 0) -> bytes:
    """The bytes that the suite puts under ``name``: all of them depend on all of it."""
    return Random(f"{name} {version} {num_bytes}").randbytes(num_bytes)  # noqa: S311 (a test's randomness)


def cut(content: bytes, *sizes: int) -> list[memoryview]:
    """``content`` in pieces of these sizes, each in memory of its own; what is left is the last piece."""
    pieces, at = [], 0
    for size in (*sizes, len(content) - sum(sizes)):
        pieces.append(memoryview(bytearray(content[at : at + size])))
        at += size
    return pieces


def room(*sizes: int) -> list[memoryview]:
    """Memory to read into."""
    return [memoryview(bytearray(size)) for size in sizes]


class EngineContract(ABC):
    """The promises of ``storage.remote.engine.ObjectEngine``."""

    sizes_bytes: Sequence[int] = (1, 4095, 4096, 4097, 100_003, 1 << 20)
    """Of objects that the suite puts; those above the engine's own limit are left out."""
    listed_objects = 1_100
    """More than a store lists in one answer."""
    misses_what_goes = True
    """Whether a read of what another client removes or overwrites meanwhile is a miss, and never an error."""
    keeps_what_is_read = True
    """Whether a read beside a client that removes or overwrites the object is never OK with other bytes than
    one object's; else the check of a record has to find them.
    """

    @abstractmethod
    def store(self) -> AbstractContextManager[Callable[[], ObjectEngine]]:
        """A new and empty store with room for ROOM_BYTES, which goes afterwards; each call of what is yielded
        is one more client of it. The suite closes them.
        """

    @contextmanager
    def opened(self) -> Iterator[ObjectEngine]:
        """One client, closed afterwards."""
        with self.store() as connect:
            engine = connect()
            try:
                yield engine
            finally:
                engine.close()

    # ---------------------------------------------------------------- helpers

    def sizes(self, engine: ObjectEngine) -> list[int]:
        """Those of ``sizes_bytes`` that it takes."""
        most = engine.traits.max_object_bytes
        return [size for size in self.sizes_bytes if most is None or size <= most]

    def largest(self, engine: ObjectEngine) -> int:
        """Of them."""
        return max(self.sizes(engine))

    @staticmethod
    def put(engine: ObjectEngine, **objects: bytes) -> None:
        """Puts them; all must be OK."""
        items = [PutItem(name, [memoryview(content)]) for name, content in objects.items()]
        assert engine.put(items, deadline_s=LONG_S) == [Outcome.OK] * len(items)

    @staticmethod
    def get(engine: ObjectEngine, name: str, num_bytes: int, offset_bytes: int = 0) -> tuple[Got, bytes]:
        """What came, and the bytes that were filled."""
        (piece,) = room(num_bytes)
        (got,) = engine.get([GetItem(name, [piece], offset_bytes)], deadline_s=LONG_S)
        return got, bytes(piece[: got.num_bytes])

    # ---------------------------------------------------------------- what is there

    def test_what_was_put_is_got_and_what_was_not_is_a_miss(self) -> None:
        with self.opened() as engine:
            sizes = self.sizes(engine)
            names = [f"a/{size}" for size in sizes]
            absent = [f"a/{size}x" for size in sizes]
            items = [
                PutItem(name, [memoryview(content_of(name, size))])
                for name, size in zip(names, sizes, strict=True)
            ]
            assert engine.exists(names, deadline_s=LONG_S) == [Outcome.MISS] * len(names)
            assert engine.put(items, deadline_s=LONG_S) == [Outcome.OK] * len(items)
            mixed = [name for pair in zip(names, absent, strict=True) for name in pair]
            held = [Outcome.OK, Outcome.MISS] * len(names)
            assert engine.exists(mixed, deadline_s=LONG_S) == held
            pieces = [room(size) for size in sizes for _ in range(2)]
            wanted = [GetItem(name, piece) for name, piece in zip(mixed, pieces, strict=True)]
            got = engine.get(wanted, deadline_s=LONG_S)
            assert [one.outcome for one in got] == held, "the answers are in the order of the items"
            for name, size, (piece,), one in zip(names, sizes, pieces[::2], got[::2], strict=True):
                assert one.num_bytes == size and piece == content_of(name, size), "wrong bytes"

    def test_nothing_asked_is_nothing_answered(self) -> None:
        with self.opened() as engine:
            assert not engine.put([], deadline_s=LONG_S) and not engine.get([], deadline_s=LONG_S)
            assert engine.exists([], deadline_s=LONG_S) == engine.remove([], deadline_s=LONG_S) == []
            assert engine.renew([], deadline_s=LONG_S) == []

    def test_pieces_make_up_an_object_however_it_is_divided(self) -> None:
        with self.opened() as engine:
            size = self.largest(engine)
            rng = Random(size)  # noqa: S311 (a test's randomness)
            for number in range(12):
                name = f"pieces/{number}"
                content = content_of(name, size)
                cuts = [rng.randrange(size // 4) for _ in range(rng.randrange(4))]
                item = PutItem(name, cut(content, *cuts, 0))
                assert engine.put([item], deadline_s=LONG_S) == [Outcome.OK]
                cuts = [rng.randrange(size // 4) for _ in range(rng.randrange(4))]
                pieces = room(*cuts, 0, size - sum(cuts))
                got = engine.get([GetItem(name, pieces)], deadline_s=LONG_S)
                assert got == [Got(Outcome.OK, size)], f"read in pieces of {cuts}"
                assert b"".join(pieces) == content, f"wrong bytes, read in pieces of {cuts}"

    def test_hundreds_of_pieces_make_up_an_object(self) -> None:
        with self.opened() as engine:
            size = self.largest(engine)
            content = content_of("many", size)
            step = max(1, size // 700)
            sizes = [min(step, size - start) for start in range(0, size, step)]
            assert engine.put([PutItem("many", cut(content, *sizes))], deadline_s=LONG_S) == [Outcome.OK]
            pieces = room(*sizes)
            assert engine.get([GetItem("many", pieces)], deadline_s=LONG_S) == [Got(Outcome.OK, size)]
            assert b"".join(pieces) == content

    def test_memory_is_the_callers_again_after_a_put(self) -> None:
        with self.opened() as engine:
            size = self.largest(engine)
            content = content_of("once", size)
            memory = memoryview(bytearray(content))
            assert engine.put([PutItem("once", [memory])], deadline_s=LONG_S) == [Outcome.OK]
            memory[:] = bytes(size)
            assert self.get(engine, "once", size) == (Got(Outcome.OK, size), content)

    def test_an_object_shorter_than_the_pieces_fills_their_beginning(self) -> None:
        with self.opened() as engine:
            content = content_of("short", 4097)
            self.put(engine, short=content)
            pieces = room(4000, 0, 3000)
            assert engine.get([GetItem("short", pieces)], deadline_s=LONG_S) == [Got(Outcome.OK, 4097)]
            assert b"".join(pieces)[:4097] == content

    def test_an_object_longer_than_the_pieces_is_corrupt_if_read_from_its_start(self) -> None:
        with self.opened() as engine:
            size = self.largest(engine)
            self.put(engine, long=content_of("long", size), good=content_of("good", 100))
            for fewer in (1, size // 2, size - 1):
                items = [GetItem("long", room(size - fewer)), GetItem("good", room(100))]
                outcomes = [got.outcome for got in engine.get(items, deadline_s=LONG_S)]
                assert outcomes == [Outcome.CORRUPT, Outcome.OK]
            assert self.get(engine, "long", size)[1] == content_of("long", size), "it is left as it is"

    def test_a_part_is_read_from_an_offset(self) -> None:
        with self.opened() as engine:
            size = self.largest(engine)
            content = content_of("part", size)
            self.put(engine, part=content)
            for offset, wanted in ((1, 1), (size // 3, size // 3), (size - 1, 1), (size // 2, size)):
                got, found = self.get(engine, "part", wanted, offset)
                assert got.outcome is Outcome.OK
                assert found == content[offset : offset + wanted], f"{wanted} bytes from {offset} on"
            assert self.get(engine, "absent", 10, 5)[0].outcome is Outcome.MISS

    def test_nothing_is_behind_the_end_of_an_object(self) -> None:
        with self.opened() as engine:
            self.put(engine, end=content_of("end", 1000))
            for offset in (1000, 1001, 1 << 30):
                got, _ = self.get(engine, "end", 10, offset)
                assert got.outcome is not Outcome.OK or got.num_bytes == 0

    def test_a_name_may_be_given_twice_in_one_call(self) -> None:
        with self.opened() as engine:
            content = content_of("one", 5000)
            items = [PutItem(name, [memoryview(content)]) for name in ("one", "two", "one", "one")]
            assert engine.put(items, deadline_s=LONG_S) == [Outcome.OK] * 4
            pieces = [room(5000) for _ in range(4)]
            names = ("one", "absent", "one", "two")
            wanted = [GetItem(name, piece) for name, piece in zip(names, pieces, strict=True)]
            got = [one.outcome for one in engine.get(wanted, deadline_s=LONG_S)]
            held = [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
            assert got == engine.exists(names, deadline_s=LONG_S) == held
            assert all(piece == content for (piece,), one in zip(pieces, got, strict=True) if one == "ok")
            removed = engine.remove(["one", "one"], deadline_s=LONG_S)
            assert Outcome.OK in removed and set(removed) <= {Outcome.OK, Outcome.MISS}

    def test_more_items_than_a_batch_takes(self) -> None:
        with self.opened() as engine:
            count = 2 * engine.traits.batch_items + 3
            names = [f"batch/{number}" for number in range(count)]
            items = [PutItem(name, [memoryview(content_of(name, 300))]) for name in names]
            assert engine.put(items, deadline_s=LONG_S) == [Outcome.OK] * count
            pieces = [room(300) for _ in names]
            wanted = [GetItem(name, piece) for name, piece in zip(names, pieces, strict=True)]
            assert engine.get(wanted, deadline_s=LONG_S) == [Got(Outcome.OK, 300)] * count
            assert all(piece == content_of(name, 300) for name, (piece,) in zip(names, pieces, strict=True))
            assert engine.exists(names, deadline_s=LONG_S) == [Outcome.OK] * count
            assert engine.remove(names, deadline_s=LONG_S) == [Outcome.OK] * count
            assert engine.exists(names, deadline_s=LONG_S) == [Outcome.MISS] * count

    def test_names_are_of_up_to_200_characters(self) -> None:
        assert len(LONGEST_NAME) == 200
        with self.opened() as engine:
            names = [LONGEST_NAME, LONGEST_NAME[:-1] + "g", LONGEST_NAME[:-1], "x", "x.y/z_1-2/w"]
            for name in names:
                self.put(engine, **{name: content_of(name, 77)})
            assert {info.name for info in engine.scan("", deadline_s=LONG_S)} == set(names)
            for name in names:
                assert self.get(engine, name, 77) == (Got(Outcome.OK, 77), content_of(name, 77))
            assert engine.remove(names, deadline_s=LONG_S) == [Outcome.OK] * 5

    def test_what_was_removed_is_gone_and_can_be_put_again(self) -> None:
        with self.opened() as engine:
            self.put(engine, one=content_of("one", 900), two=content_of("two", 900))
            removed = engine.remove(["one", "absent"], deadline_s=LONG_S)
            assert removed[0] is Outcome.OK and removed[1] in (Outcome.OK, Outcome.MISS)
            assert engine.exists(["one", "two"], deadline_s=LONG_S) == [Outcome.MISS, Outcome.OK]
            assert self.get(engine, "one", 900)[0].outcome is Outcome.MISS
            assert [info.name for info in engine.scan("", deadline_s=LONG_S)] == ["two"]
            self.put(engine, one=content_of("one", 1000))
            assert self.get(engine, "one", 1000) == (Got(Outcome.OK, 1000), content_of("one", 1000))

    def test_what_is_put_again_is_there_once_and_whole(self) -> None:
        with self.opened() as engine:
            one, two = content_of("again", 1000, 1), content_of("again", 1700, 2)
            for content in (one, two, one):
                self.put(engine, again=content)
                got, found = self.get(engine, "again", 2000)
                assert got.outcome is Outcome.OK and found in (one, two), "the old one or the new one"
            assert len(list(engine.scan("", deadline_s=LONG_S))) == 1

    def test_a_scan_finds_what_begins_with_the_prefix(self) -> None:
        names = ["a/b1/c", "a/b1/d", "a/b2/c", "a/bzz", "a/c", "b/b1/c"]
        with self.opened() as engine:
            for number, name in enumerate(names):
                self.put(engine, **{name: content_of(name, 100 + number)})
            for prefix in ("", "a/", "a/b", "a/b1/", "a/b1/c", "b", "c"):
                found = {info.name: info for info in engine.scan(prefix, deadline_s=LONG_S)}
                assert set(found) == {name for name in names if name.startswith(prefix)}, prefix
                for number, name in enumerate(names):
                    if name in found:
                        assert self._is_true(found[name], 100 + number)
            engine.remove(["a/b1/c"], deadline_s=LONG_S)
            assert [info.name for info in engine.scan("a/b1", deadline_s=LONG_S)] == ["a/b1/d"]

    @staticmethod
    def _is_true(info: ObjectInfo, num_bytes: int) -> bool:
        return info.num_bytes == num_bytes and abs(info.changed_s - time.time()) < CLOCKS_DIFFER_S

    def test_a_scan_finds_all(self) -> None:
        names = {f"many/{number:04}" for number in range(self.listed_objects)}
        with self.opened() as engine:
            items = [PutItem(name, [memoryview(b"x")]) for name in sorted(names)]
            assert engine.put(items, deadline_s=4 * LONG_S) == [Outcome.OK] * len(items)
            found = [info.name for info in engine.scan("many/", deadline_s=LONG_S)]
            assert set(found) == names and len(found) == len(names)

    def test_what_is_renewed_is_as_it_was(self) -> None:
        with self.opened() as engine:
            self.put(engine, one=content_of("one", 500))
            renewed = engine.renew(["one", "absent"], deadline_s=LONG_S)
            assert renewed[0] is Outcome.OK and renewed[1] in (Outcome.OK, Outcome.MISS)
            (info,) = engine.scan("one", deadline_s=LONG_S)
            assert self._is_true(info, 500), "it was used just now"
            assert self.get(engine, "one", 500) == (Got(Outcome.OK, 500), content_of("one", 500))
            assert engine.exists(["one", "absent"], deadline_s=LONG_S) == [Outcome.OK, Outcome.MISS]

    def test_what_is_too_large_for_the_engine_is_not_kept(self) -> None:
        with self.opened() as engine:
            most = engine.traits.max_object_bytes
            if most is None:
                return
            items = [PutItem("big", [memoryview(bytes(most + 1))]), PutItem("good", [memoryview(b"good")])]
            outcomes = engine.put(items, deadline_s=LONG_S)
            assert outcomes[0] in (Outcome.NO_SPACE, Outcome.REJECTED) and outcomes[1] is Outcome.OK
            assert engine.exists(["big", "good"], deadline_s=LONG_S) == [Outcome.MISS, Outcome.OK]

    def test_what_one_client_puts_another_one_gets(self) -> None:
        with self.store() as connect:
            one, two = connect(), connect()
            try:
                self.put(one, shared=content_of("shared", 3000))
                assert self.get(two, "shared", 3000) == (Got(Outcome.OK, 3000), content_of("shared", 3000))
                one.close()
                assert self.get(two, "shared", 3000)[0] == Got(Outcome.OK, 3000), "it outlives its writer"
                assert two.remove(["shared"], deadline_s=LONG_S) == [Outcome.OK]
            finally:
                one.close()
                two.close()

    # ---------------------------------------------------------------- time, end, threads

    def test_a_call_without_time_answers_and_does_no_harm(self) -> None:
        kept: list[memoryview] = []  # a late read may still write there
        with self.opened() as engine:
            size = self.largest(engine)
            content = content_of("there", size)
            self.put(engine, there=content)
            for number, deadline_s in enumerate(NO_TIME_S):
                new = content_of(f"new{number}", size)
                kept += [memoryview(new), *room(size, size)]
                put = engine.put([PutItem(f"new{number}", kept[-3:-2])], deadline_s=deadline_s)
                assert len(put) == 1
                wanted = [GetItem("there", kept[-2:-1]), GetItem("absent", kept[-1:])]
                got = engine.get(wanted, deadline_s=deadline_s)
                assert len(got) == 2 and got[1].outcome is not Outcome.OK
                assert got[0].outcome is not Outcome.OK or kept[-2] == content
                assert {one.outcome for one in got} <= {*Outcome} - {Outcome.CORRUPT, Outcome.REJECTED}
                exist = engine.exists(["there", "absent"], deadline_s=deadline_s)
                assert exist[0] is not Outcome.MISS, "not known is not absent"
                assert exist[1] is not Outcome.OK
                assert len(engine.remove(["absent"], deadline_s=deadline_s)) == 1
                assert len(engine.renew(["there"], deadline_s=deadline_s)) == 1
            wait_for(lambda: self.get(engine, "there", size) == (Got(Outcome.OK, size), content))
            for number in range(len(NO_TIME_S)):
                got_late, found = self.get(engine, f"new{number}", size)
                assert got_late.outcome is Outcome.MISS or found == content_of(f"new{number}", size)

    def test_after_close_everything_is_rejected(self) -> None:
        with self.store() as connect:
            engine = connect()
            self.put(engine, one=b"one")
            engine.close()
            engine.close()
            rejected = [Outcome.REJECTED]
            assert engine.put([PutItem("two", [memoryview(b"two")])], deadline_s=LONG_S) == rejected
            (got,) = engine.get([GetItem("one", room(3))], deadline_s=LONG_S)
            assert got.outcome is Outcome.REJECTED
            assert engine.exists(["one"], deadline_s=LONG_S) == rejected
            assert engine.remove(["one"], deadline_s=LONG_S) == rejected
            assert engine.renew(["one"], deadline_s=LONG_S) == rejected
            try:
                found = list(engine.scan("", deadline_s=LONG_S))
            except OSError:
                return
            raise AssertionError(f"a closed engine lists {found}")

    def test_an_object_is_seen_whole_or_not_at_all(self) -> None:
        """Threads of two clients overwrite, remove and read the same names, with contents of many sizes."""
        counts = dict.fromkeys(Outcome, 0)
        names = [f"hot/{number}" for number in range(3)]
        all_have_read = threading.Barrier(6)

        def sizes_of(engine: ObjectEngine) -> list[int]:
            most = min(200_000, self.largest(engine))
            return [most // (version + 1) for version in range(4)]

        def work(engine: ObjectEngine, number: int) -> None:
            rng = Random(number)  # noqa: S311 (a test's randomness)
            sizes = sizes_of(engine)
            for turn in range(40):
                name, what = rng.choice(names), rng.random() if turn else 1.0
                if what < 0.4:
                    version = rng.randrange(len(sizes))
                    content = content_of(name, sizes[version], version)
                    engine.put([PutItem(name, cut(content, sizes[version] // 3))], deadline_s=LONG_S)
                elif what < 0.5:
                    engine.remove([name], deadline_s=LONG_S)
                else:
                    got, found = self.get(engine, name, sizes[0])
                    counts[got.outcome] += 1
                    if got.outcome is Outcome.OK and self.keeps_what_is_read:
                        version = sizes.index(got.num_bytes)
                        assert found == content_of(name, sizes[version], version), "of two writers"
                if not turn:
                    all_have_read.wait(LONG_S)

        with self.store() as connect:
            engines = [connect(), connect()]
            try:
                size = sizes_of(engines[0])[0]
                self.put(engines[0], **{name: content_of(name, size) for name in names})
                run_together([partial(work, engines[number % 2], number) for number in range(6)])
            finally:
                for engine in engines:
                    engine.close()
        assert counts[Outcome.OK] >= 6, counts
        expected = {Outcome.OK, Outcome.MISS} | (set() if self.misses_what_goes else {Outcome.IO_ERROR})
        assert {outcome for outcome, count in counts.items() if count} <= expected, counts

    def test_close_while_others_work_ends_their_calls(self) -> None:
        at_work = threading.Barrier(4)

        def work(engine: ObjectEngine, number: int) -> None:
            content = content_of(str(number), 1000)
            at_work.wait(LONG_S)
            while True:
                (put,) = engine.put([PutItem(str(number), [memoryview(content)])], deadline_s=LONG_S)
                got, found = self.get(engine, str(number), 1000)
                assert got.outcome is not Outcome.OK or found == content
                if Outcome.REJECTED in (put, got.outcome):
                    return

        def close() -> None:
            at_work.wait(LONG_S)
            engine.close()

        with self.opened() as engine:
            run_together([partial(work, engine, number) for number in range(3)], close)

    def test_close_gives_back_files_and_threads(self) -> None:
        with self.store() as connect:
            self._use(connect())  # what is loaded with the first one may stay
            files, threads = open_files(), set(threading.enumerate())
            for _ in range(3):
                self._use(connect())
            wait_for(lambda: set(threading.enumerate()) <= threads)
            wait_for(lambda: len(open_files()) <= len(files))

    def _use(self, engine: ObjectEngine) -> None:
        self.put(engine, used=b"used")
        assert self.get(engine, "used", 4)[1] == b"used"
        assert list(engine.scan("used", deadline_s=LONG_S))
        engine.close()
