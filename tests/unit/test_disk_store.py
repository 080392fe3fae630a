"""DiskStore: what its books promise beyond the contract of all stores."""

from __future__ import annotations

import time
from pathlib import Path

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.types import BlockKey
from tests.faults.doubles import HeldIo, store_on

PAYLOAD_BYTES, NUM_SLOTS, DEADLINE_S = 8192, 4, 30.0


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def put(store: DiskStore, *numbers: int) -> list[Outcome]:
    payloads = [memoryview(bytes([number]) * PAYLOAD_BYTES) for number in numbers]
    return store.put_many([key_of(number) for number in numbers], payloads, deadline_s=DEADLINE_S)


def test_a_block_makes_no_room_for_another_of_its_own_call(tmp_path: Path) -> None:
    store = DiskStore(
        tmp_path / "a.blocks", Geometry(NUM_SLOTS, PAYLOAD_BYTES, bytes(16)), FileOptions(is_direct=False)
    )
    try:
        assert store.wait_recovered(DEADLINE_S)
        assert put(store, 1) + put(store, 2) + put(store, 3) + put(store, 4) == [Outcome.OK] * 4
        assert put(store, 1, 2, 5) == [Outcome.OK] * 3, "1 and 2 were the least recent"
        assert set(store.scan()) == {key_of(1), key_of(2), key_of(5), key_of(4)}
        assert store.evicted_blocks_total == 1
        assert put(store, 1, 2, 4, 5, 6).count(Outcome.NO_SPACE) == 1, "there are only four slots"
        assert set(store.scan()) == {key_of(1), key_of(2), key_of(4), key_of(5)}
    finally:
        store.close()


def test_a_late_write_keeps_its_slot_until_it_has_ended(tmp_path: Path) -> None:
    """Else it would land on a block that was written there since."""
    clock, ios = ManualClock(), list[HeldIo]()
    is_held = True

    def make_io(fd: int) -> HeldIo:
        ios.append(HeldIo(fd, lambda transfer, is_write: is_write and is_held, clock))
        return ios[-1]

    geometry = Geometry(1, PAYLOAD_BYTES, b"late".ljust(16))
    with store_on(tmp_path / "x.blocks", geometry, make_io, clock=clock) as store:
        assert store.wait_recovered(DEADLINE_S)
        assert put(store, 1) == [Outcome.TIMED_OUT]
        is_held = False
        assert put(store, 2) == [Outcome.NO_SPACE]
        for io in ios:
            io.let_go()
        record_io, ends_at_s = store._writer.record_io, time.monotonic() + DEADLINE_S
        while record_io.late_requests:
            assert time.monotonic() < ends_at_s
            record_io.reap()
        assert put(store, 2) == [Outcome.OK]
        target = bytearray(PAYLOAD_BYTES)
        assert store.get_many([key_of(2)], [memoryview(target)], deadline_s=DEADLINE_S) == [Outcome.OK]
        assert set(target) == {2}
