"""Memory in use moves into huge pages, and keeps its bytes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvbm_core.storage.huge_pages import HUGE_PAGE_BYTES, HugePages

PAGES = 4


def memory_in_small_pages() -> npt.NDArray[np.uint8]:
    """Touched before anybody asked for huge pages: it begins and ends in the middle of one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = np.frombuffer(mmap.mmap(-1, (PAGES + 2) * HUGE_PAGE_BYTES, flags=flags), np.uint8)
    skip = -int(whole.ctypes.data) % HUGE_PAGE_BYTES + mmap.PAGESIZE
    memory = whole[skip : skip + PAGES * HUGE_PAGE_BYTES]
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    return memory


def huge_bytes_at(address: int) -> int:
    """AnonHugePages of the mapping that holds ``address``."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(found[1], 16) <= address < int(found[2], 16)
        elif is_it and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def huge_bytes_after_moving(memory: npt.NDArray[np.uint8], folder: Path) -> int:
    pages = HugePages([memory], folder / "enabled")
    while pages:
        pages.step()
    return huge_bytes_at(memory.ctypes.data + len(memory) // 2)


def test_whole_huge_pages_inside_of_memory_in_use_are_moved_and_keep_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never")
    memory = memory_in_small_pages()
    before = memory.copy()
    moved_bytes = huge_bytes_after_moving(memory, tmp_path)
    assert np.array_equal(memory, before)
    if not moved_bytes:
        pytest.skip("NOT RUN: huge pages: this kernel moves no memory into them")
    assert moved_bytes >= HUGE_PAGE_BYTES  # the pages at both ends belong to others too


@pytest.mark.parametrize("text", ["always madvise [never]", None])
def test_where_the_machine_says_never_nothing_is_moved(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    assert not HugePages([memory_in_small_pages()], tmp_path / "enabled")


def test_memory_that_nobody_has_touched_does_not_keep_the_rest_from_moving(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("[always] madvise never")
    memory = memory_in_small_pages()
    mapping = mmap.mmap(-1, (PAGES + 1) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    untouched = np.frombuffer(mapping, np.uint8)
    pages = HugePages([untouched, memory], tmp_path / "enabled")
    while pages:
        pages.step()
    is_possible = huge_bytes_after_moving(memory_in_small_pages(), tmp_path) > 0
    assert (huge_bytes_at(memory.ctypes.data + len(memory) // 2) > 0) == is_possible
    assert not untouched.any()


def test_without_memory_left_it_ends(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("[always] madvise never")
    mapping = mmap.mmap(-1, (PAGES + 1) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    pages = HugePages([memory], tmp_path / "enabled")
    del memory
    mapping.close()  # the kernel's answer to memory that is gone is the one to too little of it: ENOMEM
    pages.step()
    assert not pages
