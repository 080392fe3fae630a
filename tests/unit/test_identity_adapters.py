"""Adapters are known by what the engine has in memory, not by what lies on the disk now."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_core.identity.digest import DigestMemory
from kvbm_core.identity.roots import Stamp
from kvbm_core.identity.weights import CLOCK_TICK_NS
from kvbm_vllm.adapters import AdapterIdentities
from tests.threads import threads_since

PATIENCE_S = 20.0


@pytest.fixture
def adapters() -> Iterator[AdapterIdentities]:
    """Of one engine."""
    before = set(threading.enumerate())
    each = AdapterIdentities(DigestMemory(None))
    yield each
    each.close()
    assert not threads_since(before)


@pytest.fixture
def lora(tmp_path: Path, rng: random.Random) -> Path:
    """An adapter's folder."""
    return write(tmp_path / "lora", rng.randbytes(5000))


def write(folder: Path, weights: bytes) -> Path:
    """Writes an adapter, and lets its files grow as old as time stamps are fine."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    """Until what happens next has another time stamp."""
    while time.time_ns() - max(path.stat().st_ctime_ns for path in folder.iterdir()) < 2 * CLOCK_TICK_NS:
        os.sched_yield()


def lasting(adapters: AdapterIdentities, number: int, folder: Path) -> Stamp:
    """The stamp once the adapter's digest is known."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        stamp = adapters.stamp_of(number, str(folder))
        assert stamp is not None
        if stamp.is_lasting:
            return stamp
        os.sched_yield()
    raise AssertionError("the adapter did not become known")


def test_an_adapter_is_known_by_its_content_once_it_has_been_read(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    first = adapters.stamp_of(1, str(lora))
    assert first is not None
    known = lasting(adapters, 1, lora)
    copy = shutil.copytree(lora, tmp_path / "copy")
    settle(copy)
    assert lasting(adapters, 2, copy) == known
    assert lasting(adapters, 3, write(tmp_path / "other", b"other")) != known


def test_overwritten_between_load_and_first_request_it_is_not_what_lies_there(
    adapters: AdapterIdentities, lora: Path
) -> None:
    adapters.changes(1, str(lora))  # the engine loads it
    write(lora, b"other weights")
    assert adapters.stamp_of(1, str(lora)) is None
    adapters.changes(1, str(lora))  # loaded anew
    assert lasting(adapters, 1, lora).text.startswith("sha256:")


def test_overwritten_after_it_was_known_nobody_can_tell_what_a_later_load_has(
    adapters: AdapterIdentities, lora: Path
) -> None:
    lasting(adapters, 1, lora)
    write(lora, b"other weights")
    assert adapters.stamp_of(1, str(lora)) is None
    assert adapters.stamp_of(1, str(lora)) is None


def test_put_in_place_by_a_link_or_a_rename_it_is_another_one(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    other, link = shutil.copytree(lora, tmp_path / "other"), tmp_path / "link"
    link.symlink_to(lora)
    settle(other)
    lasting(adapters, 1, link)
    lasting(adapters, 2, lora)
    link.unlink()
    link.symlink_to(other)
    lora.rename(tmp_path / "gone")
    other.rename(lora)
    assert adapters.stamp_of(1, str(link)) is None
    assert adapters.stamp_of(2, str(lora)) is None


def test_loaded_in_place_and_rolled_back_each_load_has_what_it_read(
    adapters: AdapterIdentities, lora: Path, rng: random.Random
) -> None:
    old, new = rng.randbytes(100), rng.randbytes(100)
    stamps = []
    for weights in (old, new, old):
        write(lora, weights)
        adapters.changes(1, str(lora))
        stamps.append(lasting(adapters, 1, lora))
    assert stamps[0] == stamps[2] != stamps[1]


def test_a_change_while_it_is_loaded_leaves_it_to_this_process(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", b"other")
    (lora / "adapter_model.safetensors").write_bytes(b"now")  # may be before or after the engine's read
    adapters.changes(1, str(lora))
    first = adapters.stamp_of(1, str(lora))
    lasting(adapters, 2, other)  # one after the other: the first has been looked at
    assert first is not None and adapters.stamp_of(1, str(lora)) == first and not first.is_lasting


def test_a_number_means_what_was_loaded_under_it_first(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", b"other")
    assert adapters.stamp_of(1, str(lora)) is not None
    assert adapters.stamp_of(1, str(other)) is None, "the engine goes on with the first one"
    adapters.changes(1, None)
    assert lasting(adapters, 1, other)


def test_once_a_number_was_asked_with_another_path_nobody_can_tell_what_is_in_memory(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    """The engine may have made room for others in between, and has loaded the other path then."""
    other = write(tmp_path / "other", b"other")
    known = lasting(adapters, 1, lora)
    assert adapters.stamp_of(1, str(other)) is None
    assert adapters.stamp_of(1, str(lora)) is None
    adapters.changes(1, str(lora))
    assert lasting(adapters, 1, lora) == known


def test_a_number_whose_requests_load_it_anew_is_not_known_any_more(
    adapters: AdapterIdentities, lora: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", b"other")
    lasting(adapters, 1, lora)
    assert adapters.reloads(1, str(other))
    assert not adapters.reloads(1, str(other))
    assert adapters.stamp_of(1, str(lora)) is None
    adapters.changes(1, str(lora))  # such a request may run on, and load the other one again
    assert adapters.stamp_of(1, str(lora)) is None
    assert lasting(adapters, 2, lora)


def test_what_is_not_here_is_known_to_this_process_alone(adapters: AdapterIdentities, tmp_path: Path) -> None:
    first = adapters.stamp_of(1, "org/adapter")
    assert first is not None and not first.is_lasting and first == adapters.stamp_of(1, "org/adapter")
    assert adapters.stamp_of(2, "org/adapter") != first
    adapters.changes(1, "org/adapter")
    assert adapters.stamp_of(1, "org/adapter") != first


def test_without_notice_of_loads_nothing_is_known(lora: Path) -> None:
    assert AdapterIdentities(DigestMemory(None), sees_loads=False).stamp_of(1, str(lora)) is None


def test_where_nobody_keeps_blocks_for_others_no_file_is_read(
    lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("it was read"))
    adapters = AdapterIdentities(DigestMemory(None), digests=False)
    stamp = adapters.stamp_of(1, str(lora))
    adapters.close()
    assert stamp is not None and not stamp.is_lasting


def test_the_scheduler_does_not_wait_for_a_digest(
    adapters: AdapterIdentities, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    preadv = os.preadv

    def read(fd: int, buffers: list[memoryview], place: int) -> int:
        assert threading.current_thread() is not threading.main_thread() and may_read.wait(PATIENCE_S)
        return preadv(fd, buffers, place)

    monkeypatch.setattr(os, "preadv", read)
    stamp = adapters.stamp_of(1, str(lora))
    assert stamp is not None and not stamp.is_lasting
    may_read.set()
    lasting(adapters, 1, lora)
