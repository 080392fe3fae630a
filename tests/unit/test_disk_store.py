"""DiskStore: what its books promise beyond the contract of all stores."""

from __future__ import annotations

from pathlib import Path

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.tiers.disk_store import DiskStore
from kvbm_core.types import BlockKey

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
