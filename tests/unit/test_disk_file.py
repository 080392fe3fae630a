"""A block file: its size, its life, its lock, and what stays in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm_core.storage.disk import allocate
from kvbm_core.storage.disk.allocate import DirectoryBusyError, FileOptions, OpenFile, open_file, reserve
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import FIRST_SLOT_BYTES, SECTOR_BYTES, FileHeader, unpack_file

FINGERPRINT = b"file".ljust(16)
GEOMETRY = Geometry(3, 10_000, FINGERPRINT)
OPTIONS = [FileOptions(is_direct=False), FileOptions(), FileOptions(opens_direct=True)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two directories deep, of which none is there."""
    return tmp_path / "cache" / "rank" / "file.blocks"


def header_in(path: Path) -> FileHeader | None:
    """What the file says of itself."""
    return unpack_file(path.read_bytes()[:SECTOR_BYTES])


@pytest.mark.parametrize(
    "wrong", [(0, 1, FINGERPRINT), (-1, 1, FINGERPRINT), (1, 0, FINGERPRINT), (1, 1, b""), (1, 1, bytes(17))]
)
def test_a_geometry_of_nothing_is_refused(wrong: tuple[int, int, bytes]) -> None:
    with pytest.raises(ValueError, match="no geometry"):
        Geometry(*wrong)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_new_file_has_its_size_its_header_and_its_owner_alone(path: Path, options: FileOptions) -> None:
    file = BlockFile(path, GEOMETRY, options)
    assert file.was_empty and file.path == path and file.geometry is GEOMETRY
    assert path.stat().st_size == GEOMETRY.file_bytes == FIRST_SLOT_BYTES + 3 * (4096 + 12288)
    assert header_in(path) == FileHeader(file.life, FINGERPRINT, 10_000, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "what prompts say is nobody else's business"
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()
    assert file.fd == -1


@pytest.mark.parametrize("options", OPTIONS)
def test_a_life_goes_on_until_another_begins(path: Path, options: FileOptions) -> None:
    lives: list[bytes] = []
    for is_first in (True, False, False):
        file = BlockFile(path, GEOMETRY, options)
        assert file.was_empty is is_first
        lives.append(file.life)
        file.close()
    assert len(set(lives)) == 1
    file = BlockFile(path, GEOMETRY, options)
    file.begin_new_life()
    assert file.life not in lives
    assert header_in(path) == FileHeader(file.life, FINGERPRINT, 10_000, 3)
    file.close()
    again = BlockFile(path, GEOMETRY, options)
    assert again.life == file.life and not again.was_empty
    again.close()


def test_two_files_have_different_lives(path: Path) -> None:
    files = [BlockFile(path.with_name(f"{number}.blocks"), GEOMETRY) for number in range(20)]
    assert len({file.life for file in files}) == 20
    for file in files:
        file.close()


def test_a_new_life_is_on_the_disk_before_it_is_answered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BlockFile(path, GEOMETRY)
    done: list[str] = []

    def noted(name: str, call: Callable[..., int | None]) -> Callable[..., int | None]:
        def wrapped(*arguments: object) -> int | None:
            done.append(name)
            return call(*arguments)

        return wrapped

    monkeypatch.setattr(os, "pwritev", noted("write", os.pwritev))
    monkeypatch.setattr(os, "fdatasync", noted("sync", os.fdatasync))
    file.begin_new_life()
    assert done == ["write", "sync"]
    file.close()


def test_a_file_is_its_processes_until_it_is_closed(path: Path) -> None:
    file = BlockFile(path, GEOMETRY)
    for options in OPTIONS:
        with pytest.raises(DirectoryBusyError):
            BlockFile(path, GEOMETRY, options)
    file.close()
    BlockFile(path, GEOMETRY).close()


@pytest.mark.parametrize(
    ("geometry", "stays"),
    [
        (GEOMETRY, True),
        (Geometry(2, 10_000, FINGERPRINT), True),
        (Geometry(9, 10_000, FINGERPRINT), True),
        (Geometry(3, 10_001, FINGERPRINT), False),
        (Geometry(3, 10_000, bytes(16)), False),
    ],
)
def test_what_is_in_a_file_stays_if_it_means_the_same(path: Path, geometry: Geometry, stays: bool) -> None:
    file = BlockFile(path, GEOMETRY)
    file.close()
    with path.open("r+b") as raw:
        raw.seek(FIRST_SLOT_BYTES)
        raw.write(b"record" * 100)
    other = BlockFile(path, geometry)
    assert other.was_empty is not stays and (other.life == file.life) is stays
    assert path.stat().st_size == geometry.file_bytes
    assert path.read_bytes()[FIRST_SLOT_BYTES:][:600] == b"record" * 100
    assert header_in(path) == FileHeader(other.life, *_meaning(geometry))
    other.close()


def _meaning(geometry: Geometry) -> tuple[bytes, int, int]:
    return geometry.fingerprint, geometry.payload_bytes, geometry.num_slots


# ---------------------------------------------------------------- space


@pytest.fixture
def opened(path: Path) -> OpenFile:
    """With 10,000 bytes in it, that are no whole sectors."""
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 10_000)
    return open_file(path, FileOptions(is_direct=False))


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("knows_fallocate", [False, True])
@pytest.mark.parametrize("num_bytes", [4096, 8192, 40_960])
def test_reserving_changes_nothing_of_what_is_there(
    opened: OpenFile, num_bytes: int, knows_fallocate: bool, zero_fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_fallocate:
        monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
    monkeypatch.setattr(allocate, "ZEROS_BYTES", 8192)
    reserve(opened, num_bytes, FileOptions(is_direct=False, zero_fill=zero_fill))
    content = opened.path.read_bytes()
    assert len(content) == num_bytes
    kept = min(num_bytes, 8192 if zero_fill and not knows_fallocate else 10_000)
    assert content[:kept] == b"x" * kept and set(content[10_000:]) <= {0}
    opened.close()
    opened.close()


def test_a_broken_fallocate_is_told(opened: OpenFile) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        allocate._fallocate(-1, 10)
    with pytest.raises(OSError, match="Invalid argument"):
        allocate._fallocate(opened.fd, 0)
    opened.close()
