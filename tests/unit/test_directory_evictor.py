"""The evictor: what it removes and what it leaves, who does it, when, and how slowly."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.directory import evictor as evictor_module
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.evictor import (
    BEAT_S,
    LEAST_BETWEEN_S,
    LOCK,
    MOST_BETWEEN_S,
    STALE_S,
    TEMPORARY_S,
    Evictor,
)
from kvbm_core.storage.directory.store import DirectoryOptions
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.testing.store_contract import LONG_S, key_of
from tests.unit.directory_stores import (
    MEANING,
    PAYLOAD_BYTES,
    FaultyCalls,
    files_below,
    get,
    opened,
    path_of,
    put,
)
from tests.unit.doctor_bench import mounted

OK, MISS = Outcome.OK, Outcome.MISS
KEYS = [key_of(number) for number in range(20)]
FILE_BYTES = record_bytes(PAYLOAD_BYTES)


def limit(blocks: int) -> DirectoryOptions:
    """Room for so many."""
    return DirectoryOptions(max_bytes=blocks * FILE_BYTES, num_threads=2)


def used_ago(path: Path, age_s: float) -> None:
    """As if its last use had been then."""
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s), follow_symlinks=False)


def test_the_blocks_used_longest_ago_go_of_all_ranks_together(tmp_path: Path) -> None:
    other = MEANING._replace(rank=1, world=2)
    with opened(tmp_path, limit(10)) as store, opened(tmp_path, limit(10), other) as second:
        put(store, KEYS[:10])
        put(second, KEYS[10:])
        paths = [path_of(tmp_path, key) for key in KEYS[:10]] + [
            path_of(tmp_path, key, other) for key in KEYS[10:]
        ]
        for number, path in enumerate(paths):
            used_ago(path, 120 * (number * 7 % 20 + 1))
        oldest_first = sorted(range(20), key=lambda number: paths[number].stat().st_mtime)
        seen = store.evictor.evict()
        left = {number for number in range(20) if paths[number].exists()}
        assert left == set(oldest_first[11:]), "down to nine tenths of the limit"
        assert (seen.blocks, seen.removed_blocks, seen.left_bytes) == (20, 11, 9 * FILE_BYTES)
        assert store.evictor.evict().removed_blocks == 0, "within its limit nothing goes"
        for rank, keys in ((store, KEYS[:10]), (second, KEYS[10:])):
            assert get(rank, keys) == [OK if KEYS.index(key) in left else MISS for key in keys]


def test_of_equally_old_blocks_no_more_go_than_have_to(tmp_path: Path) -> None:
    with opened(tmp_path, limit(10)) as store:
        put(store, KEYS)
        for number, key in enumerate(KEYS):
            used_ago(path_of(tmp_path, key), 3600 if number < 15 else 7200)
        assert store.evictor.evict().removed_blocks == 11
        assert get(store, KEYS[15:]) == [MISS] * 5, "older ones first"


def test_a_block_that_is_used_while_it_is_counted_stays(tmp_path: Path) -> None:
    with opened(tmp_path, limit(10)) as store:
        put(store, KEYS)
        for number, key in enumerate(KEYS):
            used_ago(path_of(tmp_path, key), 120 * (number + 1) + 7200)
        plain = store.evictor._make_room

        def use_one_first(*args: object) -> None:
            assert get(store, KEYS[-1:]) == [OK]
            plain(*args)  # type: ignore[arg-type]

        store.evictor._make_room = use_one_first  # type: ignore[method-assign]
        store.evictor.evict()
        assert get(store, KEYS[-2:]) == [MISS, OK]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path, limit(1)) as store:
        put(store, KEYS[:3])
        path = path_of(tmp_path, KEYS[0])
        namespace = path.parents[2]
        strange = [
            tmp_path / "kvbm2" / namespace.name / "x" / path.name,  # another version's
            tmp_path / "kvbm1" / "other-model-0123456789ab" / path.parent.parent.name / "000" / path.name,
            namespace / "notes.txt",
            namespace / "notes" / "000" / path.name,
            path.parent / "readme",
            path.parent / ".nfs000000000123",
            path.parent / (path.name + ".bak"),
        ]
        for file in strange:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        folder = path.parent / key_name(900)
        link = path.parent / key_name(901)
        folder.mkdir()
        link.symlink_to(strange[2])
        for file in (*strange, folder, link):
            used_ago(file, 100 * TEMPORARY_S)
        assert store.evictor.evict().removed_blocks == 3
        assert all(file.exists() for file in (*strange, folder, link))


def key_name(number: int) -> str:
    """The file name of a block."""
    return path_of(Path(), key_of(number)).name


def test_what_dead_writers_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    with opened(tmp_path, DirectoryOptions()) as store:
        put(store, KEYS[:1])
        path = path_of(tmp_path, KEYS[0])
        namespace = path.parents[2]
        old, new = (path.parent / f".{path.name}.{digit * 16}" for digit in "ab")
        lock = namespace / f".{LOCK}.{'c' * 16}"
        for file, age_s in ((old, TEMPORARY_S + 60), (new, TEMPORARY_S - 60), (lock, TEMPORARY_S + 60)):
            file.touch()
            used_ago(file, age_s)
        assert store.evictor.evict().removed_temporary == 2
        assert files_below(tmp_path) == sorted([path, new, namespace / LOCK])


# ---------------------------------------------------------------- who, and when


def evictors(folder: Path, count: int, clock: ManualClock) -> list[Evictor]:
    """Of as many instances; the folder holds one block."""
    with opened(folder) as store:
        put(store, KEYS[:1])
    namespace = path_of(folder, KEYS[0]).parents[2]
    return [Evictor(namespace, 10 * FILE_BYTES, clock, FileCalls()) for _ in range(count)]


def test_one_instance_evicts_and_another_when_that_has_died(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = evictors(tmp_path, 2, clock)
    assert one.tick() is not None and two.tick() is None
    for _ in range(20):
        clock.advance(BEAT_S)
        assert one.tick() is None or clock.now_s() >= MOST_BETWEEN_S
        assert two.tick() is None, "the lock is renewed"
    clock.advance(STALE_S - BEAT_S - 1)
    assert two.tick() is None
    clock.advance(BEAT_S + 1)
    assert two.tick() is not None, "the first one is silent for STALE_S"
    clock.advance(MOST_BETWEEN_S)
    assert one.tick() is None, "it is back, and finds another one at work"


def test_it_runs_the_sooner_the_faster_the_folder_fills(tmp_path: Path) -> None:
    clock = ManualClock()
    (evictor,) = evictors(tmp_path, 1, clock)
    assert evictor.tick() is not None
    clock.advance(MOST_BETWEEN_S - 1)
    assert evictor.tick() is None, "nothing has been written"
    evictor._written_bytes = 5 * FILE_BYTES  # of nine that are free
    assert evictor.tick() is not None
    evictor._written_bytes = 5 * FILE_BYTES
    clock.advance(LEAST_BETWEEN_S - 1)
    assert evictor.tick() is None, "not so soon again"
    clock.advance(1)
    assert evictor.tick() is not None
    with opened(tmp_path) as others:  # on another machine
        put(others, KEYS[1:4])
    clock.advance(MOST_BETWEEN_S)
    seen = evictor.tick()
    assert seen is not None and seen.blocks == 4
    clock.advance(MOST_BETWEEN_S - 1)
    assert evictor.tick() is None, "three in ten minutes; six are free"
    clock.advance(1)
    assert evictor.tick() is not None


def test_a_scan_takes_no_more_than_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    (evictor,) = evictors(tmp_path, 1, clock)
    with opened(tmp_path) as store:
        put(store, KEYS)
    evictor._max_bytes = None  # it looks only
    worked_s, paused_s = 0.0, 0.0

    def listdir(folder: Path) -> list[str]:
        nonlocal worked_s
        worked_s += 0.1
        clock.advance(0.1)
        return os.listdir(folder)

    def wait(pause_s: float) -> bool:
        nonlocal paused_s
        paused_s += pause_s
        clock.advance(pause_s)
        return False

    monkeypatch.setattr(evictor._calls, "listdir", listdir)
    monkeypatch.setattr(evictor._stopping, "wait", wait)
    assert evictor.tick() is not None
    fans = len({path.parent for path in files_below(tmp_path) if path.suffix == ".kv"})
    assert paused_s == pytest.approx(fans * 0.1 * (1 / evictor_module.SHARE - 1))
    assert worked_s <= evictor_module.SHARE * (worked_s + paused_s) + 0.3  # the three folders above them


def test_a_pass_ends_when_another_one_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    one, two = evictors(tmp_path, 2, clock)
    with opened(tmp_path) as store:
        put(store, KEYS)
        one._max_bytes = 0

        def wait(pause_s: float) -> bool:
            clock.advance(BEAT_S + 1)
            two._beat()
            return False

        monkeypatch.setattr(one._stopping, "wait", wait)
        assert one.evict().blocks < 20
        assert get(store, KEYS) == [OK] * 20
        assert one._last is None, "what it has not seen all of, it does not judge by"


def test_its_thread_evicts_by_itself_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor_module, "BEAT_S", 0.001)
    before = threading.active_count()
    with opened(tmp_path, limit(4)) as store:
        put(store, KEYS[:12])
        end_s = time.monotonic() + LONG_S
        while sum(path.suffix == ".kv" for path in files_below(tmp_path)) > 3:
            assert time.monotonic() < end_s
            time.sleep(0.001)
    assert threading.active_count() == before


# ---------------------------------------------------------------- a full file system


def blocks_below(folder: Path) -> list[Path]:
    """The files of blocks."""
    return [path for path in files_below(folder) if path.suffix == ".kv"]


def test_a_full_file_system_is_evicted_from_and_takes_blocks_again(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(100, 200)]
    with mounted(tmp_path / "kv", "tmpfs", "size=512k") as folder:
        with opened(folder) as store:
            assert Outcome.NO_SPACE in put(store, keys)
        filler = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
        with suppress(OSError):
            while os.write(filler, bytes(4096)):
                pass
        os.close(filler)
        assert os.statvfs(folder).f_bavail == 0
        there = len(blocks_below(folder))
        with opened(folder, limit(there * 5 // 6)) as one, opened(folder, limit(there * 5 // 6)) as two:
            assert put(one, KEYS[:1]) == [Outcome.NO_SPACE]
            seen = one.evictor.tick()
            assert seen is not None and seen.removed_blocks == there - int(0.9 * (there * 5 // 6))
            assert two.evictor.tick() is None, "one of them evicts"
            assert not [path for path in files_below(folder) if path.name.startswith(".")]
            assert put(two, KEYS[:1]) == get(one, KEYS[:1]) == [OK]
            assert put(one, KEYS[1:3]) == [OK, OK]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
def test_a_lock_that_has_no_space_keeps_nobody_from_evicting(tmp_path: Path, call: str, code: int) -> None:
    clock, faulty = ManualClock(), FaultyCalls()
    one, two = evictors(tmp_path, 2, clock)
    one._calls = faulty
    with opened(tmp_path) as store:
        put(store, KEYS)
    assert one.tick() is not None and len(blocks_below(tmp_path)) == 9
    with opened(tmp_path) as store:
        put(store, KEYS)
    faulty.fails = {call: code}
    for _ in range(int(MOST_BETWEEN_S / BEAT_S)):
        clock.advance(BEAT_S)
        one.tick()
        assert two.tick() is None, "the lock is renewed"
    assert len(blocks_below(tmp_path)) == 9
    assert not [path for path in files_below(tmp_path) if path.name.startswith(".")]


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_without_space_a_lock_that_is_stale_or_gone_is_no_hindrance(tmp_path: Path, call: str) -> None:
    clock, faulty = ManualClock(), FaultyCalls()
    one, two = evictors(tmp_path, 2, clock)
    with opened(tmp_path) as store:
        put(store, KEYS)
    faulty.fails = {call: errno.ENOSPC}
    one._calls = two._calls = faulty
    assert one.tick() is not None and len(blocks_below(tmp_path)) == 9
    faulty.fails = {}
    clock.advance(BEAT_S)
    assert one.tick() is None and two.tick() is None
    with opened(tmp_path) as store:
        put(store, KEYS)
    faulty.fails = {call: errno.ENOSPC}
    clock.advance(STALE_S + 1)
    assert two.tick() is not None and len(blocks_below(tmp_path)) == 9
    assert one.tick() is None, "the lock is the other one's now"


def test_a_lock_that_fails_leaves_no_file(tmp_path: Path) -> None:
    clock, faulty = ManualClock(), FaultyCalls()
    (one,) = evictors(tmp_path, 1, clock)
    one._calls = faulty
    for call in ("pwritev", "close", "rename"):
        faulty.fails = {call: errno.EIO}
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            one.tick()
    assert files_below(tmp_path) == [path_of(tmp_path, KEYS[0])]


def test_an_engine_that_finds_no_space_from_its_start_on_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor_module, "BEAT_S", 10 * LONG_S)  # else its lock would be in the other's way
    with opened(tmp_path) as before:
        put(before, KEYS)
    monkeypatch.setattr(evictor_module, "BEAT_S", 0.001)
    faulty = FaultyCalls()
    with opened(tmp_path, limit(10), calls=faulty) as store:
        faulty.fails = {"pwritev": errno.ENOSPC}
        assert put(store, [key_of(99)]) == [Outcome.NO_SPACE]
        end_s = time.monotonic() + LONG_S
        while len(blocks_below(tmp_path)) > 9:
            assert time.monotonic() < end_s
            time.sleep(0.001)
        faulty.fails = {}
        assert put(store, [key_of(99)]) == [OK]


def test_two_engines_and_both_their_evictors_at_once_never_give_a_wrong_byte(tmp_path: Path) -> None:
    with opened(tmp_path, limit(8)) as one, opened(tmp_path, limit(8)) as two:
        stop = threading.Event()
        failures: list[BaseException] = []

        def evict(evictor: Evictor) -> None:
            try:
                while not stop.is_set():
                    evictor.evict()
            except BaseException as error:
                failures.append(error)

        put(one, KEYS[:1])
        threads = [threading.Thread(target=evict, args=(store.evictor,)) for store in (one, two)]
        for thread in threads:
            thread.start()
        counts = {OK: 0, MISS: 0}
        for turn in range(60):
            keys = [KEYS[(turn * 5 + number) % 20] for number in range(5)]
            writer, reader = (one, two) if turn % 2 else (two, one)
            assert put(writer, keys) == [OK] * 5
            for outcome in get(reader, keys):
                counts[outcome] += 1
        stop.set()
        for thread in threads:
            thread.join(LONG_S)
        assert not failures
        assert counts[OK] > 0
        one.evictor.evict()
        blocks = [path for path in files_below(tmp_path) if path.suffix == ".kv"]
        assert len(blocks) <= 8
