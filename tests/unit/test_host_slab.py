"""The host slab: background readiness, failure, close."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from kvbm_core.layout.view import Segment
from kvbm_core.storage import host_slab
from kvbm_core.storage.host_slab import HUGE_PAGE_BYTES, HostSlab
from kvbm_core.testing.executor_bench import LONG_S, is_mapped
from tests.threads import threads_since

SLOT_BYTES = 768 << 10


def test_slots_become_ready_chunk_by_chunk_after_being_prepared() -> None:
    calls: list[tuple[int, int]] = []
    ready: list[int] = []
    slab = HostSlab(
        6,
        SLOT_BYTES,
        prepare=lambda address, nbytes: calls.append((address, nbytes)),
        on_ready=ready.append,
        chunk_bytes=1,
    )
    assert slab.wait_ready(LONG_S)
    slab.close()
    assert slab.chunk_bytes == HUGE_PAGE_BYTES
    assert ready == [2, 5, 6]
    assert calls == [
        (slab.address, HUGE_PAGE_BYTES),
        (slab.address + HUGE_PAGE_BYTES, HUGE_PAGE_BYTES),
        (slab.address + 2 * HUGE_PAGE_BYTES, 6 * SLOT_BYTES - 2 * HUGE_PAGE_BYTES),
    ]


def test_the_memory_is_aligned_zero_and_writable_to_the_last_byte() -> None:
    slab = HostSlab(3, 5000)
    assert slab.wait_ready(LONG_S)
    assert slab.address % HUGE_PAGE_BYTES == 0
    assert slab.array.shape == (15000,) and not slab.array.any()
    slab.array[-1] = 1
    slab.close()


def test_a_chunk_is_not_ready_before_it_is_prepared() -> None:
    gate, entered = threading.Event(), threading.Event()

    def prepare(address: int, nbytes: int) -> None:
        entered.set()
        assert gate.wait(LONG_S)

    slab = HostSlab(4, HUGE_PAGE_BYTES, prepare=prepare, chunk_bytes=HUGE_PAGE_BYTES)
    assert entered.wait(LONG_S)
    assert slab.ready_slots == 0
    assert not slab.wait_ready(0.0)
    gate.set()
    assert slab.wait_ready(LONG_S) and slab.ready_slots == 4
    slab.close()


def test_what_was_prepared_is_undone_at_close_even_if_preparing_failed_later() -> None:
    undone: list[int] = []

    def prepare(address: int, nbytes: int) -> object:
        if address != slab_start.setdefault("address", address):
            raise RuntimeError("no more pinned memory")
        return lambda: undone.append(address)

    slab_start: dict[str, int] = {}
    chunk_bytes = HUGE_PAGE_BYTES
    slab = HostSlab(4, HUGE_PAGE_BYTES, prepare=prepare, chunk_bytes=chunk_bytes)  # type: ignore[arg-type]
    assert not slab.wait_ready(LONG_S)
    assert slab.ready_slots == 1
    assert slab.failure == "RuntimeError: no more pinned memory"
    assert undone == []
    slab.close()
    slab.close()
    assert undone == [slab.address]


def test_close_ends_the_thread_early_and_unmaps() -> None:
    gate, entered = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def prepare(address: int, nbytes: int) -> None:
        entered.set()
        assert gate.wait(LONG_S)

    slab = HostSlab(4, HUGE_PAGE_BYTES, prepare=prepare, chunk_bytes=HUGE_PAGE_BYTES)
    assert entered.wait(LONG_S)
    closer = threading.Thread(target=slab.close)
    closer.start()
    while not slab._stopping:
        closer.join(0.001)
    gate.set()
    closer.join(LONG_S)
    assert slab.ready_slots == 1
    assert not threads_since(before)
    gc.collect()
    assert not is_mapped(slab.address)
    with pytest.raises(ValueError, match="closed"):
        _ = slab.array


def test_an_array_in_use_outlives_close() -> None:
    slab = HostSlab(1, 4096)
    array = slab.array
    slab.close()
    array[0] = 5
    assert is_mapped(slab.address)
    del array
    gc.collect()
    assert not is_mapped(slab.address)


def test_an_old_kernel_without_populate_is_touched_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "_MADV_POPULATE_WRITE", 9999)
    slab = HostSlab(4, SLOT_BYTES)
    assert slab.wait_ready(LONG_S)
    assert resident_bytes(slab.address) >= 4 * SLOT_BYTES
    slab.close()


def test_ready_memory_is_resident() -> None:
    slab = HostSlab(4, SLOT_BYTES)
    assert slab.wait_ready(LONG_S)
    assert resident_bytes(slab.address) >= 4 * SLOT_BYTES
    slab.close()


def resident_bytes(address: int) -> int:
    """Rss of the mapping (or mappings) that begin at or before ``address`` and reach beyond it."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and first == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def test_the_view_is_one_piece_per_slot() -> None:
    slab = HostSlab(3, 4096)
    assert slab.view().segments == (Segment(0, 0, 4096, 4096),)
    assert slab.view(100).segments == (Segment(0, 0, 4096, 100),)
    slab.view().check([slab.array.nbytes])
    for wrong in (0, 4097):
        with pytest.raises(ValueError, match="do not fit"):
            slab.view(wrong)
    slab.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 1), (1, 0), (-1, 4096)])
def test_an_empty_slab_is_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slots and bytes"):
        HostSlab(num_slots, slot_bytes)
