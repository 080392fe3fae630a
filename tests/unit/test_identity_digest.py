"""What tells weights from others of the same name: every byte, read once and remembered."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvbm_core.identity import digest
from kvbm_core.identity.digest import (
    MAX_REMEMBERED,
    READ_BYTES,
    READS_AHEAD,
    WEIGHT_SUFFIXES,
    Content,
    Digester,
    DigestMemory,
    Signature,
    StoppedError,
    UnreadableError,
    _is_cached,
    _open_direct,
    _pieces,
    signatures_of,
)
from kvbm_core.identity.hub import folder_of, snapshot_of

SOON_NS = 100_000_000
SIZE_BYTES = 2 * READ_BYTES + 4097
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path, rng: random.Random) -> Path:
    """A folder as models have them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in (1, 2):
        (folder / f"model-{shard}.safetensors").write_bytes(rng.randbytes(SIZE_BYTES))
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "modeling_own.py").write_text("pass")
    (folder / "README.md").write_text("words")
    return folder


def content(path: Path, memory: Path | None = None) -> Content:
    """What ``path`` holds, asked as a new process would."""
    return Digester(DigestMemory(memory)).content(path)


def flip(path: Path, at: int, num_bytes: int = 1) -> None:
    """Other bytes, the same size."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(num_bytes)
        file.seek(at)
        file.write(bytes(byte ^ 1 for byte in old))


def age(*paths: Path) -> None:
    """Lets files look as if they had been there for long: as far as a test can, which is not their ctime."""
    for path in paths:
        os.utime(path, (1, 1))


# ---------------------------------------------------------------- what it sees


def test_a_copy_elsewhere_has_the_same_digest(model: Path, tmp_path: Path) -> None:
    first = content(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    age(*copy.iterdir())
    assert content(copy).sha256 == first.sha256 == content(model).sha256
    assert len(first.sha256) == 64 and first.read_bytes > 2 * SIZE_BYTES


def test_any_byte_of_the_weights_counts(model: Path, rng: random.Random) -> None:
    path, before = model / "model-2.safetensors", content(model).sha256
    places = [0, SIZE_BYTES - 1, READ_BYTES - 1, READ_BYTES, *(rng.randrange(SIZE_BYTES) for _ in range(8))]
    for at in places:
        flip(path, at)
        assert content(model).sha256 != before, at
        flip(path, at)
    assert content(model).sha256 == before


def test_a_part_of_the_tensors_in_the_middle_of_a_file_counts_and_the_old_ones_are_known_again(
    model: Path,
) -> None:
    path, before = model / "model-1.safetensors", content(model).sha256
    start, num_bytes = SIZE_BYTES * 3 // 10, SIZE_BYTES * 16 // 100  # seven of 47 tensors
    flip(path, start, num_bytes)
    changed = content(model).sha256
    flip(path, start, num_bytes)
    assert changed != before == content(model).sha256


def test_names_configuration_code_and_new_files_count(model: Path) -> None:
    seen = [content(model).sha256]
    (model / "config.json").write_text('{"layers": 3}')
    seen.append(content(model).sha256)
    (model / "modeling_own.py").write_text("other")
    seen.append(content(model).sha256)
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    seen.append(content(model).sha256)
    (model / "model-1.safetensors").rename(model / "model-1.bin")
    seen.append(content(model).sha256)
    (model / "deeper").mkdir()
    (model / "deeper" / "adapter.bin").write_bytes(b"x")
    seen.append(content(model).sha256)
    (model / "model-1.bin").unlink()
    seen.append(content(model).sha256)
    assert len(set(seen)) == len(seen)


def test_bytes_that_move_from_one_file_to_the_next_count(tmp_path: Path) -> None:
    seen = set()
    for cut in (0, 3, 6):
        (tmp_path / "a.bin").write_bytes(b"abcdef"[:cut])
        (tmp_path / "b.bin").write_bytes(b"abcdef"[cut:])
        seen.add(content(tmp_path).sha256)
    assert len(seen) == 3


def test_what_shapes_no_block_does_not_count(model: Path) -> None:
    before = content(model).sha256
    for name in (
        "README.md",
        "events.log",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        (model / name).write_text("other words")
    for name in (".git", "checkpoint-500", "__pycache__"):
        (model / name).mkdir()
        (model / name / "optimizer.bin").write_bytes(b"x")
    assert content(model).sha256 == before


@pytest.mark.parametrize(
    "name", ["merges.txt", "table.csv", "runs/modeling.py", "logs/fast.so", "checkpoint-7/code.py"]
)
def test_what_only_code_that_comes_with_the_weights_may_read_counts_for_it(model: Path, name: str) -> None:
    digester = Digester(DigestMemory(None))
    before = [digester.content(model, any_file=any_file) for any_file in (False, True)]
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("1")
    after = [digester.content(model, any_file=any_file) for any_file in (False, True)]
    assert after[0].sha256 == before[0].sha256 and after[1].sha256 != before[1].sha256
    assert after[1].signatures == signatures_of(model, any_file=True) != signatures_of(model)


def test_what_no_code_is_built_of_does_not_count_for_it_either(model: Path) -> None:
    digester = Digester(DigestMemory(None))
    before = digester.content(model, any_file=True)
    for name in ("README.md", "tokenizer.json", "runs/events.bin", ".cache/a.py", "__pycache__/a.so"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("1")
    assert digester.content(model, any_file=True).sha256 == before.sha256


@pytest.mark.parametrize(
    "suffix", sorted({*WEIGHT_SUFFIXES, ".bin", ".ckpt", ".gguf", ".pt", ".safetensors"})
)
def test_every_kind_of_weights_counts_also_as_a_single_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(b"one")
    first = content(path).sha256
    assert first == content(tmp_path).sha256
    path.write_bytes(b"two")
    assert content(path).sha256 != first


def test_a_file_that_comes_in_parts_is_all_of_them(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    for path in (first, second, tmp_path / "other.gguf"):
        path.write_bytes(b"one")
    before = content(first).sha256
    (tmp_path / "other.gguf").write_bytes(b"two")
    assert content(first).sha256 == before
    second.write_bytes(b"two")
    assert content(first).sha256 != before


def test_links_are_followed_and_end(model: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in model.iterdir():
        (links / path.name).symlink_to(path)
    assert content(links).sha256 == content(model).sha256
    (model / "round").symlink_to(model)
    (model / "nowhere.bin").symlink_to(model / "gone")
    assert content(model).sha256 == content(links).sha256


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    for name in ("empty", "absent", "config.json"):
        with pytest.raises(UnreadableError):
            content(tmp_path / name)
    assert Digester(DigestMemory(None)).content(tmp_path, is_code=True).sha256


def test_a_file_that_cannot_be_opened_is_an_error_not_less_weights(model: Path) -> None:
    (model / "model-2.safetensors").unlink()
    os.mkfifo(model / "model-2.safetensors")  # no file: nothing is waited for
    content(model)
    locked = model / "model-1.safetensors"
    locked.unlink()
    locked.symlink_to("model-1.safetensors")  # a loop
    with pytest.raises(UnreadableError, match="Too many levels"):
        content(model)


# ---------------------------------------------------------------- while it is read


class Meanwhile(Digester):
    """Does something when so many bytes have been read."""

    def __init__(self, at_bytes: int, action: object) -> None:
        super().__init__(DigestMemory(None), self._look)
        self._at_bytes, self._action = at_bytes, action

    def _look(self) -> bool:
        if self.read_bytes >= self._at_bytes and callable(self._action):
            action, self._action = self._action, None
            action()
        return False


@pytest.mark.parametrize("at_bytes", [READ_BYTES, 2 * READ_BYTES])
def test_weights_that_change_while_they_are_read_have_no_digest(model: Path, at_bytes: int) -> None:
    changes = (
        lambda: flip(model / "model-1.safetensors", 0),
        lambda: os.truncate(model / "model-1.safetensors", SIZE_BYTES + 5),
        lambda: shutil.copy(model / "model-2.safetensors", model / "model-1.safetensors"),
        lambda: (model / "model-3.safetensors").write_bytes(b"x"),
        lambda: os.replace(
            shutil.copy(model / "config.json", model / "c.tmp"), model / "model-1.safetensors"
        ),
    )
    for change in changes:
        (model / "model-3.safetensors").unlink(missing_ok=True)
        (model / "model-2.safetensors").write_bytes(bytes(100))
        (model / "model-1.safetensors").write_bytes(bytes(SIZE_BYTES))
        with pytest.raises(UnreadableError, match="changed while it was read"):
            Meanwhile(at_bytes, change).content(model)


def test_it_stops_within_one_read(model: Path) -> None:
    digester = Digester(DigestMemory(None), lambda: digester.read_bytes >= READ_BYTES)
    with pytest.raises(StoppedError):
        digester.content(model)
    assert digester.read_bytes < digester.total_bytes


def test_what_is_not_in_memory_is_read_past_the_page_cache(model: Path) -> None:
    file = model / "model-1.safetensors"
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    with file.open("rb") as opened:
        fd = opened.fileno()
        assert _is_cached(fd, SIZE_BYTES)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        direct_fd = _open_direct(fd)
        if direct_fd is None or _is_cached(fd, SIZE_BYTES):
            pytest.skip("NOT RUN: the file system of the temporary folder has no reads past the page cache")
        os.close(direct_fd)
        digest = hashlib.sha256()
        with closing(_pieces(fd, SIZE_BYTES)) as pieces:
            for piece in pieces:
                digest.update(piece)
        assert digest.hexdigest() == expected
        assert not _is_cached(fd, SIZE_BYTES)


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_next_pieces_are_read_while_one_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """And not into the same memory; reads may give less than was asked for."""
    sent = random.Random(7).randbytes(6 * READ_BYTES + 4097)
    (tmp_path / "x").write_bytes(sent)
    changed, ends, preadv = threading.Condition(), [0], os.preadv

    def in_parts(fd: int, buffers: list[memoryview], place: int) -> int:
        got = preadv(fd, [buffers[0][: READ_BYTES // 2 + 5]], place)
        with changed:
            ends[0] = max(ends[0], place + got)
            changed.notify_all()
        return got

    monkeypatch.setattr(os, "preadv", in_parts)
    monkeypatch.setattr("kvbm_core.identity.digest._is_cached", lambda fd, size_bytes: is_cached)
    fd, received = os.open(tmp_path / "x", os.O_RDONLY), b""
    try:
        with closing(_pieces(fd, len(sent))) as pieces:
            for piece in pieces:
                end = min(len(sent), len(received) + len(piece) + READS_AHEAD * READ_BYTES)
                with changed:
                    assert changed.wait_for(lambda end=end: ends[0] >= end, 20.0), "nothing is read ahead"
                received += piece
    finally:
        os.close(fd)
    assert received == sent


# ---------------------------------------------------------------- what is remembered


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Waits until a change of any file in a folder would have another time stamp.

    That is a few ticks of the files' clock, and taken for enough here: RACY_NS is for file systems that have
    whole seconds only.
    """
    monkeypatch.setattr(digest, "RACY_NS", SOON_NS)

    def wait(folder: Path) -> None:
        newest = max(path.stat().st_ctime_ns for path in folder.iterdir())
        while time.time_ns() - newest <= SOON_NS:
            threading.Event().wait(0.01)

    return wait


def test_a_second_start_reads_nothing(model: Path, tmp_path: Path, settled: Callable[[Path], None]) -> None:
    memory = tmp_path / "memory"
    settled(model)
    first = content(model, memory)
    before = _bytes_read_by_this_process()
    second = content(model, memory)
    assert (second.sha256, second.read_bytes) == (first.sha256, 0)
    assert _bytes_read_by_this_process() - before < 4096  # the entries
    flip(model / "model-1.safetensors", READ_BYTES)
    third = content(model, memory)
    assert third.sha256 != first.sha256 and third.read_bytes == SIZE_BYTES


def _bytes_read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_a_file_that_has_just_been_written_is_not_remembered(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    flip(model / "model-1.safetensors", 0)
    age(model / "model-1.safetensors")  # its mtime is of long ago, its ctime is not
    content(model, memory)
    assert content(model, memory).read_bytes > 2 * SIZE_BYTES


@pytest.mark.parametrize("base", ["disk", "/dev/shm"])
def test_a_page_that_is_mapped_and_written_twice_is_read_again(
    model: Path,
    tmp_path: Path,
    base: str,
    settled: Callable[[Path], None],
) -> None:
    """The second write finds a page that is still to be written back: it changes no time stamp."""
    memory = tmp_path / "memory"
    with tempfile.TemporaryDirectory(dir=tmp_path if base == "disk" else base) as folder:
        path = Path(shutil.copy(model / "model-1.safetensors", folder))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
            pages[0] ^= 1
            settled(Path(folder))
            first = content(Path(folder), memory)
            pages[0] ^= 1
            assert content(Path(folder), memory).sha256 != first.sha256


def test_a_memory_that_is_damaged_foreign_or_somebody_elses_is_not_believed(
    model: Path,
    tmp_path: Path,
    settled: Callable[[Path], None],
) -> None:
    memory = tmp_path / "memory"
    settled(model)
    sha256 = content(model, memory).sha256
    entries = sorted(memory.iterdir())
    assert len(entries) == 4 and memory.stat().st_mode & 0o777 == 0o700
    wrong = entries[0].read_text().rsplit(" ", 1)[0] + " " + "0" * 64 + "\n"
    for spoil in (
        lambda entry: entry.write_text("nonsense"),
        lambda entry: entry.write_bytes(b"\xff" * 1000),
        lambda entry: entry.write_text(entry.read_text()[:-2]),
        lambda entry: entry.write_text(wrong) if entry != entries[0] else entry.unlink(),
        lambda entry: (entry.write_text(wrong), entry.chmod(0o666)) if entry == entries[0] else None,
        lambda entry: (entry.unlink(), os.mkfifo(entry)),
        lambda entry: (entry.unlink(), entry.mkdir()),
    ):
        for entry in entries:
            if entry.is_dir():
                entry.rmdir()
            elif entry.exists():
                entry.unlink()
        content(model, memory)
        for entry in entries:
            spoil(entry)
        assert content(model, memory).sha256 == sha256


def test_the_memory_stays_small(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    for number in range(MAX_REMEMBERED):
        (memory / f"0-{number:x}").touch(mode=0o600)
    signature = Signature(7, 7, 7, 7, 7)
    DigestMemory(memory).remember(signature, "a" * 64)
    assert DigestMemory(memory).find(signature) == "a" * 64
    assert len(list(memory.iterdir())) <= MAX_REMEMBERED


def test_without_a_place_for_it_nothing_is_remembered(
    model: Path, tmp_path: Path, settled: Callable[[Path], None]
) -> None:
    (tmp_path / "file").write_text("x")
    settled(model)
    for place in (None, tmp_path / "file", tmp_path / "file" / "below"):
        content(model, place)
        assert content(model, place).read_bytes > 2 * SIZE_BYTES
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    content(model, shared)
    assert not list(shared.iterdir())


# ---------------------------------------------------------------- the hub's cache


@pytest.fixture
def cached(tmp_path: Path, rng: random.Random) -> Path:
    """A model as the hub's cache keeps it; the cache's folder."""
    folder = tmp_path / "hub" / "models--org--name"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    weights, config = rng.randbytes(SIZE_BYTES), b'{"layers": 2}'
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,%d]}}' % SIZE_BYTES
    files = {
        "model.safetensors": len(header).to_bytes(8, "little") + header + weights,
        "extra.bin": weights,
        "config.json": config,
    }
    for name, data in files.items():
        blob = hashlib.sha256(data).hexdigest()
        if name == "config.json":
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (folder / "blobs" / blob).write_bytes(data)
        (folder / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{blob}")
    return tmp_path / "hub"


def test_what_the_hubs_cache_names_by_its_content_is_read_once(
    cached: Path, tmp_path: Path, settled: Callable[[Path], None]
) -> None:
    snapshot = snapshot_of("org/name", "", str(cached))
    assert snapshot is not None and snapshot.folder.name == COMMIT
    settled(snapshot.folder)
    known = content(snapshot.folder, tmp_path / "memory")
    assert known.read_bytes > 2 * SIZE_BYTES and known.changed_ns == 0
    assert content(snapshot.folder, tmp_path / "memory") == known._replace(read_bytes=0)
    plain = shutil.copytree(snapshot.folder, tmp_path / "plain")
    assert content(plain).sha256 == known.sha256


def test_a_blob_that_was_touched_after_its_download_is_not_what_its_name_says(
    cached: Path, tmp_path: Path
) -> None:
    snapshot = cached / "models--org--name" / "snapshots" / COMMIT
    before = content(snapshot)
    flip(snapshot / "extra.bin", 1000)
    after = content(snapshot)
    assert after.sha256 != before.sha256 and after.changed_ns
    flip(snapshot / "extra.bin", 1000)
    again = content(snapshot)
    assert again.sha256 == before.sha256 and again.changed_ns, "an engine may have read it in between"
    flip(snapshot / "extra.bin", 1000)
    copy = shutil.copytree(cached, tmp_path / "copy", symlinks=True) / snapshot.relative_to(cached)
    for link in copy.iterdir():
        target = link.readlink()
        link.unlink()
        link.symlink_to(target)  # newer than its blob, as after a download, and after cp -r
    copied = content(copy)
    assert copied.sha256 == after.sha256 and copied.changed_ns


def test_where_the_hubs_cache_has_a_model(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached / "models--org--name" / "snapshots" / COMMIT
    assert folder_of("org/name", COMMIT, str(cached)) == snapshot
    assert folder_of(str(snapshot)) == snapshot
    for name, revision in (
        ("org/other", ""),
        ("org/name", "v2"),
        ("org/name", "../main"),
        ("../x", ""),
        ("", ""),
    ):
        assert snapshot_of(name, revision, str(cached)) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(cached))
    assert folder_of("org/name") == snapshot
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert folder_of("org/name") == snapshot
