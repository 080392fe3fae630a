"""How large a model's folder may grow where no engine is told: one number for all, whatever stands there."""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.cli.doctor.check import Level
from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.directory import size as size_module
from kvbm_core.storage.directory.evictor import LEAST_BETWEEN_S
from kvbm_core.storage.directory.folder import Folder
from kvbm_core.storage.directory.inspect import DirectoryInspection
from kvbm_core.storage.directory.size import LEAST_BYTES, SIZE, SharedSize
from kvbm_core.storage.directory.store import DirectoryOptions
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.testing.store_contract import LONG_S, key_of
from tests.unit.directory_stores import MEANING, PAYLOAD_BYTES, FaultyCalls, files_below, opened, put
from tests.unit.doctor_bench import found, is_well, look

FREE_BYTES = 50 * LEAST_BYTES
SHARED = DirectoryOptions(num_threads=2, shares_size=True)
HOSTILE = (b"", b"-5", b"1e9", b"5 GB", b"\xff\x00", b"9" * 20, b"1" * 10_000, "٣".encode())


@pytest.fixture(autouse=True)
def new_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test says its lines anew."""
    monkeypatch.setattr(size_module, "limited_log", RateLimitedLogger(interval_s=3600.0))


def calls_with(free_bytes: int = FREE_BYTES) -> FaultyCalls:
    """Of a file system with so much room."""
    calls: Any = FaultyCalls()
    calls.statvfs = lambda path: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096)
    return calls  # type: ignore[no-any-return]


def size_in(path: Path, calls: FaultyCalls) -> SharedSize:
    """As an engine has it whose folder is open."""
    folder = Folder(path, MEANING, calls, trusts_group=False)
    folder.open()
    return SharedSize(folder)


def file_in(path: Path) -> Path:
    """Where the number is."""
    return path / "kvbm1" / MEANING.namespace_folder / SIZE


def test_the_first_engine_writes_half_of_what_is_free_and_others_take_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvbm")
    first, second = size_in(tmp_path, calls_with()), size_in(tmp_path, calls_with(10 * FREE_BYTES))
    assert first.look() == second.look() == FREE_BYTES // 2
    assert file_in(tmp_path).read_text() == f"{FREE_BYTES // 2}\n"
    (line,) = caplog.messages
    assert f"{FREE_BYTES / 2e9:g} GB" in line and str(file_in(tmp_path)) in line
    file_in(tmp_path).write_text("0")
    assert first.look() == second.look() == 0, "whoever changes the file changes the size"
    assert "no limit" in caplog.messages[-1]
    assert len(files_below(tmp_path)) == 1


def test_two_that_start_at_the_same_moment_agree(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def link(source: Path, target: Path) -> None:
        both.wait(LONG_S)
        os.link(source, target)

    sizes = []
    for free_bytes in (FREE_BYTES, 3 * FREE_BYTES):
        calls: Any = calls_with(free_bytes)
        calls.link = link
        sizes.append(size_in(tmp_path, calls))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(SharedSize.look, sizes)
    assert one == other and one in (FREE_BYTES // 2, 3 * FREE_BYTES // 2)
    assert len(files_below(tmp_path)) == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_links_the_last_one_counts(tmp_path: Path, code: int) -> None:
    calls = calls_with()
    calls.fails["link"] = code
    size = size_in(tmp_path, calls)
    assert size.look() == size_in(tmp_path, calls_with(2 * FREE_BYTES)).look() == FREE_BYTES // 2
    assert len(files_below(tmp_path)) == 1


@pytest.mark.parametrize("call", ["pwritev", "link", "statvfs"])
def test_nobody_can_tell_for_now(tmp_path: Path, call: str) -> None:
    calls = calls_with()
    size = size_in(tmp_path, calls)
    if call == "statvfs":
        calls.statvfs = calls_with(LEAST_BYTES).statvfs  # type: ignore[method-assign]
    else:
        calls.fails[call] = errno.ENOSPC
    assert size.look() is None and not files_below(tmp_path)
    calls.fails.clear()
    calls.statvfs = calls_with().statvfs  # type: ignore[method-assign]
    assert size.look() == FREE_BYTES // 2


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_number_is_one_line_and_stays(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = size_in(tmp_path, calls_with())
    file_in(tmp_path).write_bytes(content)
    assert size.look() == size.look() == FREE_BYTES // 2
    (line,) = caplog.messages
    assert str(file_in(tmp_path)) in line and "remove it" in line and "\n" not in line
    assert file_in(tmp_path).read_bytes() == content
    file_in(tmp_path).unlink()
    assert size.look() == FREE_BYTES // 2 and file_in(tmp_path).exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_one_line_and_not_waited_for(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = size_in(tmp_path, calls_with())
    {
        "pipe": os.mkfifo,
        "link": lambda path: os.symlink("/etc/passwd", path),
        "folder": os.mkdir,
    }[kind](file_in(tmp_path))
    assert size.look() == FREE_BYTES // 2
    (line,) = caplog.messages
    assert str(file_in(tmp_path)) in line


def test_what_cannot_be_read_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = calls_with()
    size = size_in(tmp_path, calls)
    calls.fails["open"] = errno.EACCES
    assert size.look() == FREE_BYTES // 2
    (line,) = caplog.messages
    assert f"{file_in(tmp_path)} cannot be read: Permission denied" in line


def test_a_store_keeps_to_what_is_written_and_to_its_own_size_if_it_has_one(tmp_path: Path) -> None:
    clock, file_bytes = ManualClock(), record_bytes(PAYLOAD_BYTES)
    keys = [key_of(number) for number in range(20)]
    own = DirectoryOptions(100 * file_bytes, num_threads=2)
    with opened(tmp_path, own, clock=clock) as told:
        assert put(told, keys) == [Outcome.OK] * 20
        assert not file_in(tmp_path).exists(), "an engine that is told writes nothing"
        file_in(tmp_path).write_text(str(10 * file_bytes))
        assert not told.evictor.evict().removed_blocks
    with opened(tmp_path, SHARED, clock=clock) as shared:
        shared.evictor._beat()
        seen = shared.evictor.tick()
        assert seen is not None and seen.left_bytes == 9 * file_bytes
        file_in(tmp_path).write_text(str(5 * file_bytes))
        clock.advance(LEAST_BETWEEN_S)
        seen = shared.evictor.tick()
        assert seen is not None and seen.left_bytes == 4 * file_bytes


def test_the_first_block_that_is_stored_makes_the_size(tmp_path: Path) -> None:
    calls = calls_with()
    with opened(tmp_path, SHARED, calls=calls) as store:
        assert put(store, [key_of(1)]) == [Outcome.OK]
        thread = store.evictor._thread
        assert thread is not None
    thread.join(LONG_S)
    assert file_in(tmp_path).read_text() == f"{FREE_BYTES // 2}\n"
    inspection = DirectoryInspection(tmp_path)
    (namespace,) = inspection.models()
    assert not inspection.count(0, lambda *_: None).models[namespace].strange
    assert not inspection.remove_model(namespace, lambda _: None).strange
    assert not files_below(tmp_path) and not file_in(tmp_path).parent.exists()


def test_the_doctor_says_what_it_is_and_finds_what_is_none(tmp_path: Path) -> None:
    given = {"cpu_cache_gb": 1, "remote_url": f"file://{tmp_path}"}
    said = look("stores", **given)
    assert is_well(said) and any("half of what is free" in finding.seen for finding in said)
    said = look("stores", **given, remote_cache_gb=2)
    assert is_well(said) and any("2 GB" in finding.seen for finding in said)
    size_in(tmp_path, calls_with())
    file_in(tmp_path).write_text("lots")
    found(look("stores", **given), Level.WARNING, "holds no number", "remove it")
    file_in(tmp_path).write_text("5000000000")
    assert is_well(look("stores", **given))
