"""A shared directory that hangs, fails, fills up, goes away, and files in it that nobody of us wrote."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from kvbm_core.clock import Clock, ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.call_pool import _Call
from kvbm_core.storage.directory import store as store_module
from kvbm_core.storage.directory.names import file_name, key_in
from kvbm_core.storage.directory.record_files import CHECK_EVERY_S
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.disk.record import FORMAT_VERSION
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.names import FINGERPRINT_BYTES, Meaning
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from tests.unit.directory_stores import (
    CALLS,
    MEANING,
    PAYLOAD_BYTES,
    FaultyCalls,
    files_below,
    get,
    opened,
    path_of,
    put,
)

OK, MISS = Outcome.OK, Outcome.MISS
KEYS = [key_of(number) for number in range(6)]
SHORT_S = 0.05
GIVEN_UP = [Outcome.TIMED_OUT] * 2


def until(is_so: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not come to be"
        time.sleep(0.001)


@contextmanager
def over_when(is_so: Callable[[], bool]) -> Iterator[None]:
    """Calls meanwhile have time until then, however fast the machine is."""

    def wait(call: _Call, ends_at_s: float, clock: Clock) -> None:
        until(is_so)
        with call._lock:
            call.give_up()

    with patch.object(_Call, "wait", wait):
        yield


# ---------------------------------------------------------------- names


def test_names_say_what_they_name_and_nothing_else_is_a_block() -> None:
    for key in (key_of(1), key_of(1, group=255)):
        assert key_in(file_name(key)) == key
    name = file_name(key_of(1))
    for other in (
        name.upper(),
        name[1:],
        name + "x",
        name.replace("-0.", "-00."),
        name.replace("-0.", "-256."),
    ):
        assert key_in(other) is None
    folder = Meaning("../Org/Model 7B/..", b"n", bytes(16)).namespace_folder
    assert "/" not in folder and not folder.startswith(".")
    assert FORMAT_VERSION == 1, (
        "another record's version is in another folder: see names.TOP and docs/remote.md"
    )


def test_a_fingerprint_of_another_size_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"takes {FINGERPRINT_BYTES}"):
        DirectoryStore(tmp_path, MEANING._replace(fingerprint=b"short"), PAYLOAD_BYTES)


# ---------------------------------------------------------------- a share that hangs


@pytest.mark.parametrize("call", ["stat", "open", "fstat", "preadv", "close"])
def test_a_read_that_hangs_is_given_up_and_holds_its_memory(tmp_path: Path, call: str) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, calls=calls) as store:
        assert put(store, KEYS) == [OK] * 6
    with opened(tmp_path, calls=calls) as store:  # "stat" is its very first look
        calls.hangs = {call}
        targets = buffers(3, PAYLOAD_BYTES)
        with over_when(lambda: calls.hanging == 2):
            assert store.get_many(KEYS[:2], targets[:2], deadline_s=LONG_S) == GIVEN_UP
        assert [LATE.holds(ranges_of(target)) for target in targets] == [True, True, False]
        assert LATE.holds(ranges_of([targets[2], targets[1][4096:]])), "any part of it counts"
        assert store.stuck_threads == 2
        # All threads hang: at once, though there is time enough to wait in vain.
        assert get(store, KEYS) == [Outcome.BUSY] * 6
        assert store.contains_many(KEYS[:1], deadline_s=LONG_S) == [Outcome.BUSY]
        assert not calls.gate.is_set()
        calls.hangs = set()
        calls.gate.set()
        until(lambda: not LATE.holds(ranges_of(targets)))
        assert store.stuck_threads == 0
        assert get(store, KEYS) == [OK] * 6
        assert not store._readers._calls, "nothing is kept of what is over"


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, calls=calls) as store:
        put(store, KEYS)
        calls.hangs = {"preadv", "lstat"}
        for act in (get, put):
            assert act(store, KEYS[:2], SHORT_S) == GIVEN_UP
        assert not calls.gate.is_set()
        calls.gate.set()


def test_what_waits_behind_a_hanging_read_is_never_begun(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, DirectoryOptions(num_threads=1), calls=calls) as store:
        put(store, KEYS)
        calls.hangs = {"preadv"}
        targets = buffers(6, PAYLOAD_BYTES)
        with over_when(lambda: calls.hanging == 1):
            assert store.get_many(KEYS, targets, deadline_s=LONG_S) == [Outcome.TIMED_OUT] * 6
        assert [LATE.holds(ranges_of(target)) for target in targets] == [True] + [False] * 5
        calls.gate.set()
        until(lambda: store.stuck_threads == 0)
        assert not any(any(target) for target in targets[1:])


def test_a_write_that_was_given_up_is_never_seen(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, calls=calls) as store:
        assert put(store, KEYS[:1]) == [OK]
        calls.hangs = {"pwritev"}
        payloads = buffers(2, PAYLOAD_BYTES)
        with over_when(lambda: calls.hanging == 2):
            assert store.put_many(KEYS[1:3], payloads, deadline_s=LONG_S) == GIVEN_UP
        for payload in payloads:  # the caller has its memory back
            payload[:] = b"x" * PAYLOAD_BYTES
        assert put(store, KEYS[3:4]) == [Outcome.BUSY]
        assert get(store, KEYS[:1]) == [OK], "reads have threads of their own"
        calls.hangs = set()
        calls.gate.set()
        until(lambda: store.stuck_threads == 0)
        assert get(store, KEYS[:3]) == [OK, MISS, MISS]
        assert [path.name[0] for path in files_below(tmp_path)] == [path_of(tmp_path, KEYS[0]).name[0]]
        assert put(store, KEYS) == get(store, KEYS) == [OK] * 6


def test_close_does_not_wait_for_a_share_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CLOSE_TIMEOUT_S", SHORT_S)
    calls = FaultyCalls()
    before = threading.active_count()
    with opened(tmp_path, calls=calls) as store:
        put(store, KEYS)
        calls.hangs = {"preadv"}
        answers: list[list[Outcome]] = []
        caller = threading.Thread(target=lambda: answers.append(get(store, KEYS, 10 * LONG_S)))
        caller.start()
        until(lambda: calls.hanging == 2)
        store.close()  # though the call under way has minutes left
        caller.join(LONG_S)
        assert answers == [[Outcome.TIMED_OUT] * 6]
        assert put(store, KEYS) == [Outcome.REJECTED] * 6
        calls.gate.set()
        until(lambda: threading.active_count() <= before)


# ---------------------------------------------------------------- a share that fails


@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE]
)
def test_an_error_is_an_outcome_whatever_call_it_comes_from(tmp_path: Path, code: int) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, calls=calls) as store:
        put(store, KEYS[:3])
        full = code in (errno.ENOSPC, errno.EDQUOT)
        for name in CALLS:
            calls.fails = {name: code}
            calls.seen.clear()
            wrote, read = put(store, KEYS[3:4]), get(store, KEYS[:1])
            looked = store.contains_many(KEYS[:1], deadline_s=LONG_S)
            calls.fails = {}
            if {"open": True, "pwritev": True, "close": True, "rename": True}.get(name):
                assert wrote == [Outcome.NO_SPACE if full else Outcome.IO_ERROR], name
            if name in ("open", "fstat", "preadv"):
                bad = Outcome.NO_SPACE if full else Outcome.IO_ERROR
                assert read == [MISS if code == errno.ESTALE else bad], name
            assert {*wrote, *read, *looked} <= {OK, MISS, Outcome.IO_ERROR, Outcome.NO_SPACE}
            store.remove_many(KEYS[3:4], deadline_s=LONG_S)
            assert get(store, KEYS[:3]) == [OK] * 3, "what was there is still there"
        assert len(files_below(tmp_path)) == 3 + calls_left(tmp_path), "nothing half done is left"


def calls_left(folder: Path) -> int:
    """Temporary files that could not be removed, as unlink itself failed."""
    return sum(path.name.startswith(".") for path in files_below(folder))


def test_a_file_that_cannot_grow_is_no_space(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as store:
        assert put(store, KEYS[:1]) == [OK]
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD_BYTES, hard))
        try:
            outcomes = put(store, KEYS[1:3])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert outcomes == [Outcome.NO_SPACE] * 2
        assert get(store, KEYS[:3]) == [OK, MISS, MISS]
        assert files_below(tmp_path) == [path_of(tmp_path, KEYS[0])]


def test_a_directory_that_is_not_there_is_not_made_and_is_used_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "share"
    with opened(path) as store:
        assert put(store, KEYS[:2]) == [Outcome.IO_ERROR] * 2
        assert not path.exists()
        path.mkdir()
        assert put(store, KEYS[:2]) == get(store, KEYS[:2]) == [OK] * 2


def test_a_directory_that_goes_away_comes_back(tmp_path: Path) -> None:
    path, away = tmp_path / "share", tmp_path / "away"
    path.mkdir()
    calls = FaultyCalls()
    with opened(path, calls=calls) as store:
        put(store, KEYS[:2])
        path.rename(away)
        assert get(store, KEYS[:2]) == [MISS] * 2
        assert put(store, KEYS[:2]) == [Outcome.IO_ERROR] * 2
        assert not path.exists()
        path.mkdir()  # the mount point of what is not mounted: another file system
        plain = calls.stat
        calls.stat = lambda at: _on_device(plain(at), 12345)  # type: ignore[method-assign]
        assert put(store, KEYS[:2]) == [Outcome.IO_ERROR] * 2
        assert list(path.iterdir()) == [], "nothing is written below the mount point"
        calls.stat = plain  # type: ignore[method-assign]
        path.rmdir()
        away.rename(path)
        assert get(store, KEYS[:2]) == [OK] * 2
        assert put(store, KEYS) == get(store, KEYS) == [OK] * 6


def _not_there(path: Path) -> None:
    pass


def _file(path: Path) -> None:
    path.touch()


def _open_to_others(path: Path) -> None:
    (path / "kvbm1").mkdir(parents=True)
    (path / "kvbm1").chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_not_there, "No such file or directory; make it, or mount the file system that it is on"),
        (_file, "Not a directory; name a directory"),
        (_open_to_others, "others can write to"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_line_and_one_when_it_can(
    tmp_path: Path, spoil: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "share"
    spoil(path)
    with opened(path) as store:
        for _ in range(3):
            assert put(store, KEYS) == get(store, KEYS) == [Outcome.IO_ERROR] * 6
        (line,) = caplog.messages
        assert line.startswith(f"kvbm: KVBM_REMOTE_URL: {path} cannot be used: ") and said in line
        assert line.endswith("; the engine serves without it until it can")
        caplog.clear()
        if path.exists():
            path.rename(tmp_path / "away")
        path.mkdir()
        for _ in range(2):
            assert put(store, KEYS) == get(store, KEYS) == [OK] * 6
        assert caplog.messages == [f"kvbm: KVBM_REMOTE_URL: {path} is used again"]


def test_blocks_that_cannot_be_written_are_one_line_and_one_when_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls, clock = FaultyCalls(), ManualClock()
    with opened(tmp_path, calls=calls, clock=clock) as store:
        put(store, KEYS[:1])
        for _ in range(3):  # within some minutes
            calls.fails = {"pwritev": errno.ENOSPC}
            for _ in range(3):
                assert put(store, KEYS[1:]) == [Outcome.NO_SPACE] * 5
                assert put(store, KEYS[:1]) == get(store, KEYS[:1]) == [OK], "nothing is written for this"
            calls.fails = {}
            assert put(store, KEYS[1:]) == [OK] * 5
            store.remove_many(KEYS[1:], deadline_s=LONG_S)
    where = f"kvbm: KVBM_REMOTE_URL: blocks in {tmp_path}"
    assert caplog.messages == [
        f"{where} cannot be written: No space left on device; make room, or set a smaller "
        "KVBM_REMOTE_CACHE_GB; the engine serves without them",
        f"{where} are written again",
    ]


def test_folders_that_were_removed_are_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS)
        (tmp_path / "kvbm1").rename(tmp_path / "gone")
        assert get(store, KEYS) == [MISS] * 6
        assert put(store, KEYS) == get(store, KEYS) == [OK] * 6


def _on_device(status: os.stat_result, device: int) -> os.stat_result:
    return os.stat_result((*status[:2], device, *status[3:]))


# ---------------------------------------------------------------- who may write there


def _owned(status: os.stat_result, *, uid: int, gid: int | None = None) -> os.stat_result:
    return os.stat_result((*status[:4], uid, status[5] if gid is None else gid, *status[6:]))


def _of_another(fstat: Callable[[int], os.stat_result], gid: int) -> Callable[[int], os.stat_result]:
    """As if files were another user's."""
    return lambda fd: _owned(fstat(fd), uid=os.geteuid() + 1, gid=gid)


def test_folders_that_others_can_write_to_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS[:1])
    top = tmp_path / "kvbm1"
    for mode, trusts_group, is_used in (
        (0o770, False, False),
        (0o2770, True, True),
        (0o702, False, False),
        (0o772, True, False),
        (0o755, False, True),
    ):
        top.chmod(mode)
        with opened(tmp_path, DirectoryOptions(trusts_group=trusts_group)) as store:
            outcomes = store.contains_many(KEYS[:1], deadline_s=LONG_S)
            assert outcomes == [OK if is_used else Outcome.IO_ERROR], oct(mode)
            assert put(store, KEYS[1:2]) == [OK if is_used else Outcome.IO_ERROR]
            top.chmod(0o700)
            store.remove_many(KEYS[1:2], deadline_s=LONG_S)


def test_a_folder_of_another_user_is_refused_until_it_is_ours(tmp_path: Path) -> None:
    calls = FaultyCalls()
    plain = calls.lstat
    with opened(tmp_path, calls=calls) as store:
        put(store, KEYS[:1])
    calls.lstat = lambda at: _owned(plain(at), uid=os.geteuid() + 1, gid=-2)  # type: ignore[method-assign]
    for trusts_group in (False, True):
        with opened(tmp_path, DirectoryOptions(trusts_group=trusts_group), calls=calls) as store:
            assert get(store, KEYS[:1]) == put(store, KEYS[:1]) == [Outcome.IO_ERROR]
    with opened(tmp_path, calls=calls) as store:
        assert get(store, KEYS[:1]) == [Outcome.IO_ERROR]
        calls.lstat = plain  # type: ignore[method-assign]
        assert get(store, KEYS[:1]) == [OK], "no restart is needed"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_folder_that_is_opened_to_others_while_it_is_used_is_refused(tmp_path: Path, level: int) -> None:
    clock = ManualClock()
    with opened(tmp_path, clock=clock) as store:
        put(store, KEYS[:1])
        folder = path_of(tmp_path, KEYS[0]).parents[4 - level]
        folder.chmod(0o777)
        clock.advance(CHECK_EVERY_S)
        assert get(store, KEYS[:1]) == put(store, KEYS[1:2]) == [Outcome.IO_ERROR]
        folder.chmod(0o700)
        assert get(store, KEYS[:1]) == put(store, KEYS[1:2]) == [OK], "no restart is needed"


def test_looking_again_makes_nothing_below_a_mount_that_is_gone(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "share"
    path.mkdir()
    with opened(path, clock=clock) as store:
        put(store, KEYS[:1])
        path.rename(tmp_path / "away")
        path.mkdir()
        clock.advance(CHECK_EVERY_S)
        assert get(store, KEYS[:1]) == [MISS] and list(path.iterdir()) == []


def test_a_file_of_another_user_is_read_only_where_the_group_is_trusted(tmp_path: Path) -> None:
    for trusts_group, other_gid, outcome in (
        (False, os.getegid(), MISS),
        (True, os.getegid(), OK),
        (True, os.getegid() + 1, MISS),
    ):
        folder = tmp_path / f"{trusts_group}-{other_gid}"
        folder.mkdir()
        calls = FaultyCalls()
        plain = calls.fstat
        with opened(folder, DirectoryOptions(trusts_group=trusts_group), calls=calls) as store:
            assert put(store, KEYS[:1]) == get(store, KEYS[:1]) == [OK]
            calls.fstat = _of_another(plain, other_gid)  # type: ignore[method-assign]
            assert get(store, KEYS[:1]) == [outcome]
            path = path_of(folder, KEYS[0])
            assert path.exists(), "another's file is not ours to remove"
            calls.fstat = plain  # type: ignore[method-assign]
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o660 if trusts_group else 0o600)
            path.chmod(0o666)
            assert get(store, KEYS[:1]) == [MISS], "anybody can have written to it"
            assert put(store, KEYS[:1]) == get(store, KEYS[:1]) == [OK], "a new one takes its place"


def test_a_user_whom_the_share_takes_for_nobody_finds_what_is_its_own(tmp_path: Path) -> None:
    calls = FaultyCalls()
    for name in ("fstat", "lstat"):
        plain = getattr(calls, name)
        setattr(calls, name, lambda at, plain=plain: _owned(plain(at), uid=65534))
    with opened(tmp_path, calls=calls) as store:
        assert put(store, KEYS) == get(store, KEYS) == [OK] * 6


# ---------------------------------------------------------------- files that nobody of us wrote


def _link(path: Path, other: Path) -> None:
    path.symlink_to(other)


def _folder(path: Path, other: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def _other_key(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())
    path.chmod(0o600)


def _truncated(path: Path, other: Path) -> None:
    _other_key(path, other)
    os.truncate(path, path.stat().st_size - 1)


def _huge(path: Path, other: Path) -> None:
    _other_key(path, other)
    os.truncate(path, 1 << 40)


def _zeros(path: Path, other: Path) -> None:
    _other_key(path, other)
    path.write_bytes(bytes(path.stat().st_size))


def _fifo(path: Path, other: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [_link, _folder, _fifo, _other_key, _truncated, _huge, _zeros])
def test_whatever_has_the_name_of_a_block_is_a_miss_and_gives_way(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS[:2])
        path, other = (path_of(tmp_path, key) for key in KEYS[:2])
        content = other.read_bytes()
        path.unlink()
        make(path, other)
        outcomes = get(store, KEYS[:2])
        assert outcomes[1] is OK and outcomes[0] in (MISS, Outcome.CORRUPT)
        again = put(store, KEYS[:1])
        if make is _folder:
            assert again == [Outcome.IO_ERROR] and path.is_dir()
        else:
            assert again == get(store, KEYS[:1]) == [OK]
            assert path.is_file() and not path.is_symlink()
        assert other.read_bytes() == content, "what a link led to is as it was"


def test_a_record_of_another_meaning_rank_or_model_does_not_count(tmp_path: Path) -> None:
    others = (
        MEANING._replace(rank=1, world=2),
        MEANING._replace(model="other"),
        MEANING._replace(fingerprint=b"fingerpr" + b"another!"),  # the same folder
    )
    for meaning in others:
        with opened(tmp_path) as ours, opened(tmp_path, meaning=meaning) as theirs:
            assert put(ours, KEYS[:1]) == [OK]
            there = path_of(tmp_path, KEYS[0], meaning)
            put(theirs, KEYS[1:2])
            there.parent.mkdir(exist_ok=True)
            if there != path_of(tmp_path, KEYS[0]):
                there.write_bytes(path_of(tmp_path, KEYS[0]).read_bytes())
                there.chmod(0o600)
            (outcome,) = get(theirs, KEYS[:1])
            assert outcome in (MISS, Outcome.INCOMPATIBLE)
            assert put(theirs, KEYS[:1]) == get(theirs, KEYS[:1]) == [OK]


@pytest.mark.parametrize("is_direct", [True, False])
def test_every_bit_counts(tmp_path: Path, is_direct: bool) -> None:
    with opened(tmp_path, DirectoryOptions(is_direct=is_direct)) as store:
        path = path_of(tmp_path, KEYS[0])
        for at in (
            *range(0, 128, 3),
            4079,
            4080,
            4095,
            4096,
            4096 + PAYLOAD_BYTES // 2,
            4095 + PAYLOAD_BYTES,
        ):
            assert put(store, KEYS[:1]) == get(store, KEYS[:1]) == [OK]
            record = bytearray(path.read_bytes())
            record[at] ^= 4
            path.write_bytes(record)
            assert get(store, KEYS[:1])[0] in (Outcome.CORRUPT, Outcome.INCOMPATIBLE, MISS), at
            assert not path.exists()


def test_a_link_to_a_good_record_and_a_record_with_a_tail_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS[:1])
        path = path_of(tmp_path, KEYS[0])
        with path.open("ab") as file:
            file.write(b"!")
        assert get(store, KEYS[:1]) == [Outcome.CORRUPT] and not path.exists()
        put(store, KEYS[:1])
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert store.contains_many(KEYS[:1], deadline_s=LONG_S) == get(store, KEYS[:1]) == [MISS]
        assert put(store, KEYS[:1]) == get(store, KEYS[:1]) == [OK]


# ---------------------------------------------------------------- what was used when


def test_a_hit_renews_a_files_time_once_an_hour(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, calls=calls) as store:
        put(store, KEYS[:1])
        path = path_of(tmp_path, KEYS[0])
        now_s = time.time()
        for act in (get, put):
            for age_s, is_renewed in ((3500, False), (3700, True)):
                os.utime(path, (now_s - age_s, now_s - age_s))
                assert act(store, KEYS[:1]) == [OK]
                assert (path.stat().st_mtime > now_s - 60) is is_renewed, (act, age_s)


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, KEYS)
        inodes = [path.stat().st_ino for path in files_below(tmp_path)]
        assert put(two, KEYS) == [OK] * 6
        assert [path.stat().st_ino for path in files_below(tmp_path)] == inodes


def test_pages_are_given_back_where_the_page_cache_is_used(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with opened(tmp_path, DirectoryOptions(is_direct=False), calls=calls) as store:
        put(store, KEYS[:1])
        get(store, KEYS[:1])
        assert calls.seen.count("posix_fadvise") == 2


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("/mnt/a/Qwen3-0.6B", "/data/models/Qwen3-0.6B/", True),
        ("Qwen/Qwen3-0.6B", "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", False),
    ],
)
def test_a_model_may_lie_elsewhere_on_another_machine(
    one: str, other: str, is_same: bool, tmp_path: Path
) -> None:
    found = []
    for model in (one, other):
        store = open_store(StoreSpec(f"file://{tmp_path}", PAYLOAD_BYTES, "layout", "0of1", model))
        found.append(store.contains_many(KEYS, deadline_s=LONG_S) == [OK] * len(KEYS))
        assert put(store, KEYS) == [OK] * len(KEYS)
        store.close()
    assert found == [False, is_same]
