"""A store kept within a size: which records go, which stay, beside other sweepers and with faults."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.names import Meaning, ObjectInfo
from kvbm_core.storage.remote.inspect import RecordInspection
from kvbm_core.storage.remote.names import BESIDE, RecordNames
from kvbm_core.storage.remote.sweep import LISTING_S, LOW_MARK, Sweeper, SweepLimits, Swept
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine, MemoryObjects
from kvbm_core.testing.store_contract import key_of

NOW_S = 2_000_000_000.0
HOUR_S = 3600.0
NAMES = RecordNames(Meaning("org/Model-7B", b"one", b"fingerprint".ljust(16)))
OTHER_NAMES = RecordNames(Meaning("other/Model", b"two", b"fingerprint".ljust(16)))
SIZE = 10


def nothing(_: int, __: int | None) -> None:
    """Of progress."""


class Bench:
    """Objects in memory, whose times are chosen."""

    def __init__(self, faults: EngineFaults | None = None) -> None:
        self.objects = MemoryObjects()
        self.engine = MemoryEngine(faults, self.objects)
        self.store = RecordInspection(self.engine, "memory://here")

    def put(self, name: str, used_s: float, num_bytes: int = SIZE) -> str:
        """An object that was used then."""
        if not self.objects.objects:
            self.objects.put("made", b"")
        made = next(iter(self.objects.objects.values()))
        self.objects.objects[name] = made._replace(content=bytes(num_bytes), changed_s=used_s)
        self.objects.used_bytes += num_bytes
        return name

    def put_many(self, count: int, ages_s: Callable[[int], float], names: RecordNames = NAMES) -> list[str]:
        """Records of one block."""
        return [self.put(names.name_of(key_of(n), 1), NOW_S - ages_s(n)) for n in range(count)]

    @property
    def left(self) -> set[str]:
        """The names of what is there, but for the first."""
        return set(self.objects.objects) - {"made"}

    def sweep(self, max_bytes: int, *models: str, is_dry: bool = False, **more: float) -> Swept:
        """At NOW_S."""
        limits = SweepLimits(max_bytes, **more)  # type: ignore[arg-type]
        sweeper = Sweeper(self.store, limits, models, lambda: NOW_S)
        return sweeper.sweep(nothing, nothing, is_dry=is_dry)


def hours(rng: random.Random, count: int) -> list[float]:
    """Ages in seconds, two hours and more, all different, in no order."""
    ages = [(2 + number) * HOUR_S for number in range(count)]
    rng.shuffle(ages)
    return ages


def test_ten_thousand_objects_go_down_to_nine_tenths_oldest_first(rng: random.Random) -> None:
    bench, ages = Bench(), hours(rng, 10_000)
    names = bench.put_many(10_000, ages.__getitem__)
    max_bytes = 6000 * SIZE
    assert bench.sweep(max_bytes, is_dry=True).removed == 4600 and len(bench.left) == 10_000
    swept = bench.sweep(max_bytes)
    kept = int(LOW_MARK * 6000)
    newest = sorted(range(10_000), key=ages.__getitem__)[:kept]
    assert bench.left == {names[number] for number in newest}
    assert (swept.records, swept.removed, swept.left_bytes) == (10_000, 4600, kept * SIZE)
    assert swept.oldest_s == NOW_S - max(ages) and not swept.trouble
    bench.engine.calls.clear()
    assert bench.sweep(kept * SIZE).removed == 0
    assert [call for call, _ in bench.engine.calls] == ["scan"], "within the limit it only looks"


def test_more_than_is_held_at_once_goes_in_the_same_order(rng: random.Random) -> None:
    bench, ages = Bench(), hours(rng, 1000)
    names = bench.put_many(1000, ages.__getitem__)
    bench.sweep(500 * SIZE, candidates=100)
    newest = sorted(range(1000), key=ages.__getitem__)[:450]
    assert bench.left == {names[number] for number in newest}


def test_what_was_used_within_the_grace_stays_and_is_told() -> None:
    bench = Bench()
    names = bench.put_many(100, lambda number: 30.0 * number)  # 49.5 minutes, and less
    for grace_s, left in ((HOUR_S, 100), (1800.0, 61), (0.0, 9)):
        swept = bench.sweep(10 * SIZE, grace_s=grace_s)
        assert bench.left == set(names[:left])
        assert swept.left_bytes == left * SIZE and not swept.trouble


def test_what_was_used_since_the_store_was_listed_is_newer_in_the_next_listing() -> None:
    """A listing is not believed for longer than LISTING_S."""
    bench, clock = Bench(), ManualClock()
    names = bench.put_many(600, lambda number: (1000 - number) * HOUR_S)
    limits = SweepLimits(100 * SIZE)
    sweeper = Sweeper(bench.store, limits, (), lambda: NOW_S, clock)

    def on_removed(_: int, __: int | None) -> None:
        clock.advance(LISTING_S + 1)
        for name in names[300:350]:
            if name in bench.objects.objects:
                bench.objects.objects[name] = bench.objects.objects[name]._replace(changed_s=NOW_S)

    sweeper.sweep(nothing, on_removed)
    assert bench.left == {*names[300:350], *names[560:]}


def test_names_that_are_none_of_ours_stay_and_count_for_nothing() -> None:
    bench = Bench()
    ours = bench.put_many(20, lambda _: 48 * HOUR_S)
    folder = NAMES.folder
    strangers = [
        "notes",
        "kvbm1/" + ours[0].partition("/")[2],
        "kvbm2/README",
        "kvbm2/not-a-model/x",
        folder + "x",
        folder + "abc/" + "0" * 64 + "-0x1",
        ours[0].upper(),
        ours[0] + "x",
        ours[0] + BESIDE + BESIDE,
        ours[0].replace("-0x1", "-256x1000"),
    ]
    for name in strangers:
        bench.put(name, NOW_S - 96 * HOUR_S, 100 * SIZE)
    bench.put(ours[3] + BESIDE, NOW_S - 96 * HOUR_S)
    swept = bench.sweep(10 * SIZE)
    assert (swept.records, swept.removed) == (21, 12)
    assert bench.left >= set(strangers) and len(bench.left) == len(strangers) + 9
    assert ours[3] + BESIDE not in bench.left, "a copy that somebody has left there is ours, and the oldest"


def test_models_are_bounded_together_or_those_that_are_named() -> None:
    bench = Bench()
    ours = bench.put_many(50, lambda _: 3 * HOUR_S)
    others = bench.put_many(50, lambda _: 2 * HOUR_S, OTHER_NAMES)
    assert bench.sweep(60 * SIZE, ours[0].split("/")[1]).removed == 0
    assert bench.sweep(10 * SIZE, others[0].split("/")[1]).removed == 41
    assert set(ours) <= bench.left
    assert bench.sweep(50 * SIZE).removed == 14 and len(set(ours) & bench.left) == 36


@pytest.mark.parametrize("step_s", [HOUR_S, 0.0], ids=["apart", "alike"])
def test_two_sweepers_at_once_remove_no_more_than_one(step_s: float) -> None:
    """Both have listed the store before either removes anything."""
    bench = Bench()
    names = bench.put_many(2000, lambda number: 2 * HOUR_S + number * step_s)
    barrier, swept = threading.Barrier(2, timeout=30), list[Swept]()

    def sweep() -> None:
        sweeper = Sweeper(bench.store, SweepLimits(1000 * SIZE), (), lambda: NOW_S)
        is_first = iter([True])

        def wait(seen: int, _: int | None) -> None:
            if seen == 2000 and next(is_first, False):
                barrier.wait()

        swept.append(sweeper.sweep(wait, nothing))

    threads = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = names[:900] if step_s else sorted(names)[1100:]
    assert bench.left == set(expected)
    assert [one.removed for one in swept] == [1100, 1100], "what the other one has removed is gone as well"


class Breaking(MemoryEngine):
    """Fails for good after so many removals."""

    def __init__(self, objects: MemoryObjects, after: int) -> None:
        super().__init__(objects=objects)
        self._left = after

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        if self._left <= 0:
            self.faults = EngineFaults(fails=1.0)
        self._left -= 1
        return super().remove(names, deadline_s=deadline_s)


def test_an_engine_that_fails_in_the_middle_ends_it_and_what_was_done_is_told(rng: random.Random) -> None:
    bench, ages = Bench(), hours(rng, 2000)
    names = bench.put_many(2000, ages.__getitem__)
    bench.store = RecordInspection(Breaking(bench.objects, after=2), "memory://here")
    swept = bench.sweep(1000 * SIZE)
    assert swept.trouble == "nothing more can be removed: io_error"
    assert (swept.removed, swept.left_bytes) == (512, 1488 * SIZE)
    oldest = sorted(range(2000), key=lambda number: -ages[number])[:512]
    assert bench.left == set(names) - {names[number] for number in oldest}


def test_an_engine_that_cannot_be_listed_later_keeps_what_was_done(rng: random.Random) -> None:
    bench, ages = Bench(), hours(rng, 1000)
    bench.put_many(1000, ages.__getitem__)
    scans = iter([EngineFaults(), EngineFaults(fails=1.0)])

    class Unlisted(MemoryEngine):
        def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
            self.faults = next(scans)
            return super().scan(prefix, deadline_s=deadline_s)

    bench.store = RecordInspection(Unlisted(objects=bench.objects), "memory://here")
    swept = bench.sweep(500 * SIZE, candidates=100)
    assert (swept.removed, swept.trouble) == (100, "the memory engine cannot list its objects: io_error")
    scans = iter([EngineFaults(fails=1.0)])
    with pytest.raises(OSError, match="cannot list"):
        bench.sweep(500 * SIZE)


class Stubborn(MemoryEngine):
    """Removes nothing before it has been asked three times."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects=objects)
        self._asked = Counter[str]()

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine."""
        self._asked.update(names)
        ready = [name for name in names if self._asked[name] > 2]
        super().remove(ready, deadline_s=deadline_s)
        return [Outcome.OK if name in ready else Outcome.TIMED_OUT for name in names]


def test_an_engine_that_fails_now_and_then_is_asked_again(rng: random.Random) -> None:
    bench, ages = Bench(), hours(rng, 1000)
    names = bench.put_many(1000, ages.__getitem__)
    bench.store = RecordInspection(Stubborn(bench.objects), "memory://here")
    assert not bench.sweep(500 * SIZE).trouble
    newest = sorted(range(1000), key=ages.__getitem__)[:450]
    assert bench.left == {names[number] for number in newest}
