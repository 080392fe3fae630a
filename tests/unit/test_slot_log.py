"""The log of slots: what is told is heard, what is damaged is left out, what is lost is told again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvbm_core.storage.disk import slot_log as module
from kvbm_core.storage.disk.allocate import DiskError, FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.slot_log import (
    CHUNK_ENTRIES,
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_ENTRIES_PER_SLOT,
    Block,
    LogFollower,
    LogHeader,
    SlotLog,
    log_path,
    pack_entry,
    pack_header,
    unpack_entry,
    unpack_header,
)
from kvbm_core.testing.store_contract import key_of
from kvbm_core.types import BlockKey
from tests.open_files import open_files

GEOMETRY = Geometry(8, 4096, b"slot log".ljust(16))
HEADER = LogHeader(b"i" * 16, b"l" * 16, b"f" * 16, 1 << 40, 1 << 33)
BUFFERED = FileOptions(is_direct=False)


@pytest.fixture(autouse=True)
def no_open_files_are_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


class Bench:
    """A block file with its log, and a follower."""

    def __init__(self, folder: Path, geometry: Geometry = GEOMETRY) -> None:
        self.file = BlockFile(folder / "log.blocks", geometry, BUFFERED)
        self.path = log_path(self.file.path)
        self.log = SlotLog(self.file)
        self.follower = LogFollower(self.file.path, geometry)

    def told(self) -> list[Block]:
        """All that the follower has not heard."""
        return heard_by(self.follower)

    def close(self) -> None:
        self.follower.close()
        self.log.close()
        self.log.close()
        self.file.close()


def heard_by(follower: LogFollower) -> list[Block]:
    told: list[Block] = []
    while (blocks := follower.read_on()) is not None:
        assert len(blocks) <= CHUNK_ENTRIES
        told += blocks
    return told


def heard_anew(bench: Bench) -> list[Block]:
    """By a follower that comes now."""
    follower = LogFollower(bench.file.path, bench.file.geometry)
    try:
        return heard_by(follower)
    finally:
        follower.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def block(number: int, slot: int) -> Block:
    return key_of(number), slot


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("key", [b"k", bytes(32), b"ends in zeros".ljust(33, b"\0"), b"\xff" * 40])
def test_an_entry_comes_back_as_it_was_and_with_any_bit_changed_not_at_all(key: bytes) -> None:
    for slot in (0, 1, (1 << 33) - 1):
        data = pack_entry((BlockKey(key), slot), HEADER)
        assert len(data) == ENTRY_BYTES and unpack_entry(data, HEADER) == (key, slot)
        assert unpack_entry(data, HEADER._replace(log_id=b"j" * 16)) is None, "it is of one log"
        assert unpack_entry(data, HEADER._replace(num_slots=slot)) is None, "there is no such slot"
        for bit in range(8 * ENTRY_BYTES):
            assert unpack_entry(flipped(data, bit), HEADER) is None
        for end in range(ENTRY_BYTES):
            assert unpack_entry(data[:end], HEADER) is None
            torn = data[:end].ljust(ENTRY_BYTES, b"\0")
            assert torn == data or unpack_entry(torn, HEADER) is None


def test_a_header_comes_back_as_it_was_and_with_any_bit_changed_not_at_all() -> None:
    data = pack_header(HEADER)
    assert len(data) == HEADER_BYTES and unpack_header(data) == HEADER
    read = {unpack_header(flipped(data, bit)) for bit in range(8 * HEADER_BYTES)}
    assert read == {None, HEADER}, "what fills it up does not matter"
    assert all(unpack_header(flipped(data, bit)) is None for bit in range(8 * 88))
    assert unpack_header(data[:-1]) is None and unpack_header(b"") is None


@pytest.mark.parametrize("key", [b"", bytes(41)])
def test_a_key_of_no_record_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="does not go into a record"):
        pack_entry((BlockKey(key), 0), HEADER)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---------------------------------------------------------------- told and heard


def test_what_is_appended_is_heard_once_and_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.told() == [] and bench.follower.header is not None
    assert bench.follower.header[1:] == (bench.file.life, GEOMETRY.fingerprint, 4096, 8)
    sizes: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: sizes.append(len(data)) or pwrite(fd, data, at))
    first, second = [block(0, 3), block(1, 1), block(0, 2)], [block(2, 3)]
    bench.log.append(first)
    bench.log.append([])
    assert bench.told() == first and bench.told() == []
    bench.log.append(second)
    assert sizes == [3 * ENTRY_BYTES, ENTRY_BYTES], "one write for each call"
    assert bench.told() == second and heard_anew(bench) == first + second


def test_a_long_log_is_heard_in_chunks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Geometry(3 * CHUNK_ENTRIES, 4096, bytes(16)))
    blocks = [block(number, number) for number in range(2 * CHUNK_ENTRIES + 5)]
    bench.log.append(blocks)
    heard = [bench.follower.read_on() for _ in range(4)]
    assert [len(chunk or ()) for chunk in heard] == [CHUNK_ENTRIES, CHUNK_ENTRIES, 5, 0]
    assert [entry for chunk in heard if chunk for entry in chunk] == blocks
    bench.close()


def test_a_log_that_grew_too_long_is_written_again_with_the_last_of_each_slot(
    bench: Bench, rng: Random
) -> None:
    most_bytes = HEADER_BYTES + MAX_ENTRIES_PER_SLOT * GEOMETRY.num_slots * ENTRY_BYTES
    newest: dict[int, Block] = {}
    inodes = set()
    for number in range(300):
        slots = rng.sample(range(8), rng.randrange(4))
        blocks = [block(10 * number + slot, slot) for slot in slots]
        bench.log.append(blocks)
        for key, slot in blocks:
            newest.pop(slot, None)
            newest[slot] = (key, slot)
        assert newest_of(heard_anew(bench)) == list(newest.values())
        heard = bench.told()
        assert heard[len(heard) - len(blocks) :] == blocks
        assert bench.path.stat().st_size <= most_bytes
        inodes.add(bench.path.stat().st_ino)
    assert len(inodes) > 1, "or this test saw no compaction"
    assert sorted(path.name for path in bench.path.parent.iterdir()) == ["log.blocks", "log.slots"]


def newest_of(told: list[Block]) -> list[Block]:
    """The last of each slot, in order."""
    last = {slot: number for number, (_, slot) in enumerate(told)}
    return [told[number] for number in sorted(last.values())]


def test_the_rewritten_log_keeps_the_order_in_which_it_was_told(bench: Bench) -> None:
    for slot in (5, 2, 7, 2, 5):  # one key that moves
        bench.log.append([block(1, slot)])
    bench.path.unlink()
    bench.log.append([block(3, 0)])
    assert heard_anew(bench) == [block(1, 7), block(1, 2), block(1, 5), block(3, 0)]


def test_begun_anew_it_is_empty_and_of_the_new_life(bench: Bench) -> None:
    bench.log.append([block(1, 1)])
    assert bench.told()
    last = bench.follower.header
    bench.file.begin_new_life()
    bench.log.begin()
    assert bench.told() == [] and bench.follower.header is not None and last is not None
    assert bench.follower.header.life == bench.file.life != last.life
    assert bench.follower.header.log_id != last.log_id
    bench.log.append([block(2, 2)])
    assert bench.told() == [block(2, 2)]
    bench.path.unlink()
    bench.log.append([block(3, 3)])
    assert bench.told() == [block(2, 2), block(3, 3)]
    assert bench.path.stat().st_size == HEADER_BYTES + 2 * ENTRY_BYTES, (
        "told again it has nothing of the earlier life"
    )


@pytest.mark.parametrize("other", [Geometry(8, 4097, GEOMETRY.fingerprint), Geometry(8, 4096, bytes(16))])
def test_a_log_of_other_blocks_is_none(bench: Bench, other: Geometry) -> None:
    bench.log.append([block(1, 1)])
    follower = LogFollower(bench.file.path, other)
    assert follower.read_on() is None and follower.header is None
    wider = LogFollower(bench.file.path, Geometry(99, 4096, GEOMETRY.fingerprint))
    assert wider.read_on() == [block(1, 1)] and wider.header is not None and wider.header.num_slots == 8
    wider.close()


def test_a_follower_that_comes_first_waits(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "log.blocks", GEOMETRY)
    assert follower.read_on() is None and follower.header is None
    bench = Bench(tmp_path)
    bench.log.append([block(1, 1)])
    assert heard_by(follower) == [block(1, 1)]
    follower.close()
    assert heard_by(follower) == [block(1, 1)], "closed, it begins at the beginning"
    follower.close()
    bench.close()


# ---------------------------------------------------------------- damage


def gone(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_the_header(path: Path) -> None:
    os.truncate(path, HEADER_BYTES - 1)


def cut_to_one_entry_and_a_half(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + 3 * ENTRY_BYTES // 2)


def longer_by_half_an_entry(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\x55" * (ENTRY_BYTES // 2))


def another_file(path: Path) -> None:
    path.with_name("other").write_bytes(b"KVBMSLOT" * 100)
    path.with_name("other").rename(path)


DAMAGES = [
    gone,
    emptied,
    cut_in_the_header,
    cut_to_one_entry_and_a_half,
    longer_by_half_an_entry,
    another_file,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("heard_before", [0, 1, 3])
def test_damage_is_no_error_and_the_next_append_mends_it(
    bench: Bench, damage: Callable[[Path], None], heard_before: int
) -> None:
    blocks = [block(number, number) for number in range(3)]
    bench.log.append(blocks[:heard_before])
    assert bench.told() == blocks[:heard_before]
    bench.log.append(blocks[heard_before:])
    damage(bench.path)
    told = bench.told()
    assert set(told) <= set(blocks), "nothing that was never said"
    if damage in (gone, emptied, cut_in_the_header, another_file):
        assert bench.follower.header is None and told == []
    bench.log.append([block(3, 3)])
    assert bench.told() == heard_anew(bench) == [*blocks, block(3, 3)]


def test_flipped_bits_cost_the_entries_that_they_hit(bench: Bench, rng: Random) -> None:
    blocks = [block(number, number) for number in range(8)]
    bench.log.append(blocks)
    whole = bench.path.read_bytes()
    for _ in range(200):
        bits = rng.sample(range(8 * HEADER_BYTES, 8 * len(whole)), rng.randrange(1, 12))
        spoiled = whole
        for bit in bits:
            spoiled = flipped(spoiled, bit)
        bench.path.write_bytes(spoiled)
        hit = {(bit // 8 - HEADER_BYTES) // ENTRY_BYTES for bit in bits}
        assert heard_anew(bench) == [entry for number, entry in enumerate(blocks) if number not in hit]


def test_an_entry_that_is_not_all_there_yet_is_looked_at_once_more(bench: Bench) -> None:
    blocks = [block(number, number) for number in range(4)]
    bench.log.append(blocks)
    whole = bench.path.read_bytes()
    at = HEADER_BYTES + ENTRY_BYTES
    bench.path.write_bytes(whole[:at] + bytes(ENTRY_BYTES) + whole[at + ENTRY_BYTES :])
    assert bench.follower.read_on() == blocks[:1]
    bench.path.write_bytes(whole)
    assert bench.told() == blocks[1:]


def test_what_the_disk_takes_in_part_is_told_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block(number, number) for number in range(6)]
    with monkeypatch.context() as patch:
        pwrite = os.pwrite
        patch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: 5 * ENTRY_BYTES // 2], at))
        bench.log.append(blocks[:4])
    assert bench.told() == blocks[:2]
    bench.log.append(blocks[4:])
    assert bench.told() == blocks


def test_a_full_disk_is_logged_once_and_made_good_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(os, "write", full)
        for number in range(4):
            bench.log.append([block(number, number)])
            assert bench.told() == []
        assert caplog.text.count("No space left") == 1
        assert "other processes do not see new blocks" in caplog.text
    bench.log.append([block(4, 4)])
    assert bench.told() == [block(number, number) for number in range(5)]
    assert sorted(path.name for path in bench.path.parent.iterdir()) == ["log.blocks", "log.slots"]


def test_a_log_that_cannot_be_begun_anew_goes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append([block(1, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", lambda fd, data: len(data) - 1)
        bench.log.begin()
    assert not bench.path.exists() and bench.told() == [], "what it said is over"
    bench.log.append([block(2, 2)])
    assert bench.told() == [block(2, 2)]


def test_a_log_that_can_neither_be_replaced_nor_removed_is_an_error_of_one_line(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "log.blocks", GEOMETRY, BUFFERED)
    log_path(file.path).mkdir()
    with pytest.raises(DiskError) as caught:
        SlotLog(file)
    assert "log.slots" in str(caught.value) and "\n" not in str(caught.value)
    follower = LogFollower(file.path, GEOMETRY)
    assert follower.read_on() is None and follower.header is None
    file.close()
