"""The stamp of a running engine's weights: what makes it lasting, and what takes that away."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm_core.identity import weights as module
from kvbm_core.identity.digest import READ_BYTES, DigestMemory
from kvbm_core.identity.weights import (
    CLOCK_TICK_NS,
    Source,
    WeightsIdentity,
    files_of_sources,
    process_began_ns,
)
from tests.threads import threads_since

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path, rng: random.Random) -> Path:
    """A folder as models have them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(rng.randbytes(3 * READ_BYTES))
    (folder / "config.json").write_text("{}")
    return folder


def now_ns(folder: Path) -> int:
    """A moment at which all that has been done to ``folder`` is in the past, by its files' clock."""
    newest = max(path.lstat().st_ctime_ns for path in (folder, *folder.rglob("*")))
    while time.time_ns() - newest < 2 * CLOCK_TICK_NS:
        os.sched_yield()
    return time.time_ns()


def identity(began_ns: int, **sources: Source) -> WeightsIdentity:
    """Of an engine that began to load then, and has found out what it has."""
    weights = WeightsIdentity(sources, began_ns, DigestMemory(None))
    weights.start()
    assert weights.wait(20.0)
    weights.close()
    return weights


def text_of(*folders: Path) -> str:
    """The stamp, lasting, of weights that lie there."""
    began_ns = max(map(now_ns, folders))
    sources = {f"part{number}": Source(str(folder)) for number, folder in enumerate(folders)}
    stamp = identity(began_ns, **sources).stamp()
    assert stamp.is_lasting
    return stamp.text


def test_weights_that_were_there_before_the_engine_have_a_stamp_that_lasts(
    model: Path, tmp_path: Path
) -> None:
    text = text_of(model)
    assert text.startswith("sha256:") and text == text_of(shutil.copytree(model, tmp_path / "copy"))
    (model / "model.safetensors").write_bytes(bytes(3 * READ_BYTES))
    assert text_of(model) != text


def test_all_sources_count_by_what_they_are_for(model: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(model, tmp_path / "draft")
    (draft / "model.safetensors").write_bytes(b"other")
    assert len({text_of(model), text_of(draft), text_of(model, draft), text_of(draft, model)}) == 4


def test_which_of_the_files_are_read_counts(model: Path) -> None:
    (model / "old.bin").write_bytes(b"others")
    sources = [
        Source(str(model), load_format=name) for name in ("auto", "safetensors", "npcache", "sharded_state")
    ]
    stamps = [identity(now_ns(model), model=source).stamp() for source in sources]
    assert all(stamp.is_lasting for stamp in stamps)
    assert stamps[0] == stamps[1] and len(set(stamps)) == 3


@pytest.mark.parametrize("how", ["runs_code", "is_code"])
def test_code_may_read_any_of_its_files(model: Path, how: str) -> None:
    source = Source(str(model), **{how: True})  # type: ignore[arg-type]
    stamps = []
    for text in ("a", "b"):
        (model / "table.txt").write_text(text)
        stamps.append(identity(now_ns(model), model=source).stamp())
    assert stamps[0] != stamps[1] and stamps[0].is_lasting and stamps[1].is_lasting
    began = files_of_sources({"model": source})
    (model / "table.txt").write_text("changed")
    weights = WeightsIdentity({"model": source}, now_ns(model), DigestMemory(None), beginning=began)
    weights.start()
    assert weights.wait(20.0)
    weights.close()
    assert not weights.stamp().is_lasting


def test_an_index_that_cannot_be_read_leaves_nothing_that_lasts(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    source = Source(str(model), load_format="runai_streamer")
    assert not identity(now_ns(model), model=source).stamp().is_lasting


def test_until_it_is_known_and_after_its_end_the_stamp_is_this_process_own(model: Path) -> None:
    first, second = (
        WeightsIdentity({"model": Source(str(model))}, now_ns(model), DigestMemory(None)) for _ in range(2)
    )
    assert not first.stamp().is_lasting and first.stamp() != second.stamp()
    assert first.wait(0.0), "nobody has asked to find out"
    first.close()
    first.start()
    assert not first.stamp().is_lasting


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "model.safetensors").write_bytes(bytes(3 * READ_BYTES)),
        lambda model: os.utime(shutil.copy(model / "config.json", model / "new.json"), (1, 1)),
        lambda model: os.replace(shutil.copy(model / "config.json", model / "x.tmp"), model / "config.json"),
        lambda model: (model.rename(model.with_name("old")), shutil.move(model.with_name("next"), model)),
        lambda model: (model.rename(model.with_name("old")), model.symlink_to(model.with_name("next"))),
    ],
)
def test_what_changed_after_the_engine_began_to_load_may_not_be_what_it_has(
    model: Path, change: object, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(model, model.with_name("next"))
    began_ns = max(now_ns(model), now_ns(model.with_name("next")))
    assert identity(began_ns, model=Source(str(model))).stamp().is_lasting
    assert callable(change)
    change(model)
    with caplog.at_level(logging.WARNING, "kvbm"):
        assert not identity(began_ns, model=Source(str(model))).stamp().is_lasting
    assert caplog.text.count("changed after the engine began to load") == 1
    assert identity(now_ns(model.parent), model=Source(str(model))).stamp().is_lasting, "the next engine"


def parent_swapped(folder: Path) -> None:
    """Others are put in place of what is above the model's folder."""
    (folder / "one").rename(folder / "old")
    (folder / "two").rename(folder / "one")


def link_retargeted(folder: Path) -> None:
    """The second of two links leads elsewhere: the first is as it was."""
    (folder / "new").symlink_to("two")
    (folder / "new").rename(folder / "stable")


@pytest.mark.parametrize(
    ("path", "swap"),
    [
        ("one/model", parent_swapped),
        ("one/snapshots/prod", parent_swapped),
        ("current/model", link_retargeted),
    ],
)
def test_others_put_in_place_further_up_are_not_what_the_engine_has(
    model: Path, tmp_path: Path, path: str, swap: Callable[[Path], None]
) -> None:
    for name in ("one", "two"):
        for place in ("model", "snapshots/prod"):
            shutil.copytree(model, tmp_path / name / place)
    (tmp_path / "stable").symlink_to("one")
    (tmp_path / "current").symlink_to("stable")
    sources = {"model": Source(str(tmp_path / path))}
    began_ns = now_ns(tmp_path)
    engines = [
        WeightsIdentity(sources, began_ns, DigestMemory(None), beginning=files_of_sources(sources))
        for _ in range(2)
    ]
    for engine, is_swapped in zip(engines, (False, True), strict=True):
        if is_swapped:
            swap(tmp_path)
        engine.start()
        assert engine.wait(20.0)
        engine.close()
        assert engine.stamp().is_lasting != is_swapped


def test_a_link_on_the_way_that_was_made_after_the_engine_began_is_seen_later_too(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "two")
    (tmp_path / "stable").symlink_to("model")
    (tmp_path / "current").symlink_to("stable")
    source = Source(str(tmp_path / "current"))
    began_ns = now_ns(tmp_path)
    assert identity(began_ns, model=source).stamp().is_lasting
    link_retargeted(tmp_path)
    assert not identity(began_ns, model=source).stamp().is_lasting


def test_a_link_far_from_the_folder_that_leads_to_another_file_is_seen(model: Path, tmp_path: Path) -> None:
    """Of a chain of links to a file: neither the folder nor the file at its end has changed."""
    store = tmp_path / "store"
    store.mkdir()
    (model / "model.safetensors").rename(store / "1")
    (store / "2").write_bytes(b"others")
    (store / "now").symlink_to("1")
    (model / "model.safetensors").symlink_to(store / "now")
    began_ns = now_ns(tmp_path)
    assert identity(began_ns, model=Source(str(model))).stamp().is_lasting
    (store / "now").unlink()
    (store / "now").symlink_to("2")
    assert not identity(began_ns, model=Source(str(model))).stamp().is_lasting


def test_what_a_source_is_for_counts(model: Path) -> None:
    both = [{"model": Source(str(model)), role: Source(str(model))} for role in ("audio_model_id", "draft")]
    stamps = [identity(now_ns(model), **sources).stamp() for sources in both]
    assert stamps[0] != stamps[1] and all(stamp.is_lasting for stamp in stamps)


@pytest.mark.parametrize(("later_ns", "is_lasting"), [(-1, False), (1, True)])
def test_the_files_clock_may_be_behind_by_a_tick(model: Path, later_ns: int, is_lasting: bool) -> None:
    now_ns(model)
    newest_ns = max(path.lstat().st_ctime_ns for path in (model, *model.rglob("*")))
    weights = identity(newest_ns + CLOCK_TICK_NS + later_ns, model=Source(str(model)))
    assert weights.stamp().is_lasting is is_lasting


def test_a_branch_that_is_a_link_to_another_one_is_seen_to_change(tmp_path: Path) -> None:
    hub = tmp_path / "models--org--name"
    for number, commit in enumerate((COMMIT, COMMIT[::-1])):
        (hub / "snapshots" / commit).mkdir(parents=True)
        (hub / "snapshots" / commit / "model.safetensors").write_bytes(bytes([number]))
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / str(number)).write_text(commit)
    (hub / "refs" / "main").symlink_to("0")
    source = Source("org/name", cache_dir=str(tmp_path))
    began_ns = now_ns(tmp_path)
    assert identity(began_ns, model=source).stamp().is_lasting
    (hub / "refs" / "main").unlink()
    (hub / "refs" / "main").symlink_to("1")
    assert not identity(began_ns, model=source).stamp().is_lasting


@pytest.mark.parametrize(
    "name", ["snapshots/prod", "models--org--name/snapshots/prod", f"mine/snapshots/{COMMIT}"]
)
def test_any_folder_called_snapshots_is_not_the_hubs(model: Path, tmp_path: Path, name: str) -> None:
    used = tmp_path / name
    for folder in (used, used.with_name("next")):
        shutil.copytree(model, folder)
    source = Source(str(used))
    began_ns = now_ns(tmp_path)
    assert identity(began_ns, model=source).stamp().is_lasting
    used.rename(used.with_name("old"))
    used.with_name("next").rename(used)
    assert not identity(began_ns, model=source).stamp().is_lasting


def test_a_models_download_in_this_very_start_is_known_by_its_names(tmp_path: Path) -> None:
    began_ns = time.time_ns()
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    name = hashlib.sha256(b"weights").hexdigest()
    (repository / "blobs" / name).write_bytes(b"weights")
    (snapshot / "model.bin").symlink_to(f"../../blobs/{name}")
    (repository / "refs" / "main").write_text(COMMIT)
    source = Source("org/name", cache_dir=str(tmp_path))
    assert identity(began_ns, model=source).stamp().is_lasting
    (repository / "snapshots" / ("b" * 40)).mkdir()  # another revision: which one did the engine read?
    assert not identity(began_ns, model=source).stamp().is_lasting
    assert identity(now_ns(repository), model=source).stamp().is_lasting
    assert identity(began_ns, model=Source("org/name", COMMIT, str(tmp_path))).stamp().is_lasting


@pytest.mark.parametrize("unknown", ["", "made up"])
def test_what_is_not_here_has_no_lasting_stamp_and_says_so_once(
    model: Path, unknown: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(model) if unknown else "s3://bucket/model"
    with caplog.at_level(logging.WARNING, "kvbm"):
        weights = identity(time.time_ns() + 10**9, model=Source(name, unknown=unknown))
    assert not weights.stamp().is_lasting
    assert len(caplog.records) == 1 and (unknown or name) in caplog.text


# ---------------------------------------------------------------- generations


def test_a_change_in_place_makes_a_generation_that_never_lasts(model: Path) -> None:
    weights = identity(now_ns(model), model=Source(str(model)))
    seen = [weights.stamp()]
    for generation in (1, 2):
        weights.changed("told to")
        assert weights.generation == generation
        seen.append(weights.stamp())
    assert len(set(seen)) == 3 and [stamp.is_lasting for stamp in seen] == [True, False, False]


def test_a_change_while_it_is_found_out_is_not_undone_by_the_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    find_out = module.content_of

    def slow(*args: object) -> object:
        found = find_out(*args)  # type: ignore[arg-type]
        reading.set()
        assert go_on.wait(20.0)
        return found

    monkeypatch.setattr(module, "content_of", slow)
    weights = WeightsIdentity({"model": Source(str(model))}, now_ns(model), DigestMemory(None))
    weights.start()
    assert reading.wait(20.0)
    weights.changed("told to")
    stamp = weights.stamp()
    go_on.set()
    assert weights.wait(20.0)
    assert weights.stamp() == stamp and not stamp.is_lasting
    weights.close()


# ---------------------------------------------------------------- its threads


def test_what_the_log_says_when_they_are_known(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of a disk: whether there is one, and joins, is not known here."""
    with caplog.at_level(logging.INFO, "kvbm"):
        stamp = identity(now_ns(model), model=Source(str(model))).stamp()
    (line,) = caplog.messages
    assert f"the weights are {stamp.text[:23]}" in line
    assert "disk" not in line and "tier" not in line


def test_its_end_is_soon_and_progress_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, before = threading.Event(), set(threading.enumerate())

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "GB/s" in record.getMessage() and "no block goes to a disk" in record.getMessage():
                told.set()

    handler = Told()
    logging.getLogger("kvbm").addHandler(handler)
    preadv = os.preadv

    def read_once_more(fd: int, buffers: list[memoryview], place: int) -> int:
        return preadv(fd, buffers, place % READ_BYTES)  # a file that never ends

    monkeypatch.setattr(os, "preadv", read_once_more)
    weights = WeightsIdentity(
        {"model": Source(str(model))}, now_ns(model), DigestMemory(None), progress_s=0.01
    )
    with caplog.at_level(logging.INFO, "kvbm"):
        weights.start()
        assert told.wait(20.0)
        weights.close()
    logging.getLogger("kvbm").removeHandler(handler)
    assert not weights.stamp().is_lasting
    assert not threads_since(before)
    weights.close()


def test_it_yields_to_all_other_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    preadv = os.preadv

    def look(fd: int, buffers: list[memoryview], place: int) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return preadv(fd, buffers, place)

    monkeypatch.setattr(os, "preadv", look)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    identity(now_ns(model), model=Source(str(model)))
    assert seen and min(seen) >= 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_when_a_process_began() -> None:
    before_ns = time.time_ns()
    program = "from kvbm_core.identity.weights import process_began_ns; print(process_began_ns())"
    began_ns = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
    assert before_ns - tick_ns - 1_000_000 <= began_ns <= time.time_ns()
    assert process_began_ns() <= before_ns


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not threads_since(before, "kvbm-weights")
