"""``kvbm disk verify`` on real files: damage of every kind is found, named, and erased when asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest

from kvbm_core.storage.disk import files, inspect, scan, verify
from kvbm_core.storage.disk.io import Transfer
from kvbm_core.storage.disk.record import SECTOR_BYTES, record_bytes, slot_offset_bytes
from kvbm_core.storage.disk.store import DiskStore
from tests.faults.doubles import FailingIo, HeldIo
from tests.unit.block_files import (
    GEOMETRY,
    PAYLOAD_BYTES,
    WAIT_S,
    flip,
    held_by_another_process,
    key,
    only_file,
    path_fixture,  # noqa: F401
    state,
    write,
)
from tests.unit.test_cli import on_one_line, run


def verified(path: Path, on_bytes: inspect.OnProgress = lambda _: None) -> verify.Findings:
    """The findings of one file."""
    return verify.verify(inspect.identify(path), on_bytes=on_bytes)


def test_verify_of_good_records(tmp_path: Path, path: Path) -> None:
    write(path, [*range(30), 50])
    result = run("disk", "verify", str(tmp_path))
    assert result.exit_code == 0
    text = on_one_line(result.stdout)
    assert "rank-0-of-1.blocks no 31 31 0 0" in text
    assert f"{31 * record_bytes(PAYLOAD_BYTES) / 1000:.3g} kB read in" in text
    assert text.endswith("all 31 records are good")


def test_verify_says_what_is_wrong(tmp_path: Path, path: Path) -> None:
    write(path, range(10))
    flip(path, 2, SECTOR_BYTES + PAYLOAD_BYTES - 1)
    flip(path, 4, 60)
    flip(path, 9, SECTOR_BYTES + PAYLOAD_BYTES)  # padding means nothing
    with path.open("r+b") as file:  # a record written to the wrong place
        file.seek(slot_offset_bytes(7, PAYLOAD_BYTES))
        record = file.read(record_bytes(PAYLOAD_BYTES))
        file.seek(slot_offset_bytes(30, PAYLOAD_BYTES))
        file.write(record)
    result = run("disk", "verify", str(tmp_path))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    name = "kvbm/model-0/rank-0-of-1.blocks"
    assert [line for line in lines if line.startswith("damaged")] == [
        f"damaged: {name} slot 2 key {key(2).hex()[:12]}…: the payload does not verify",
        f"damaged: {name} slot 4 key unknown: the header does not verify",
        f"damaged: {name} slot 30 key {key(7).hex()[:12]}…: it belongs into slot 7",
    ]
    assert "rank-0-of-1.blocks no 11 8 3 0" in on_one_line(result.stdout)
    assert "3 of 11 records are damaged, 0 unreadable" in result.stdout
    assert only_file(tmp_path)["damaged_headers"] == 2
    assert (
        f"{name}: damaged headers: 2; kvbm disk verify names them"
        in run("disk", "inspect", str(tmp_path)).stdout
    )


def test_verify_finds_every_flipped_bit(tmp_path: Path, path: Path, rng: Random) -> None:
    write(path, range(8))
    for _ in range(40):
        slot, byte, bit = rng.randrange(8), rng.randrange(SECTOR_BYTES + PAYLOAD_BYTES), rng.randrange(8)
        flip(path, slot, byte, bit)
        findings = verified(path)
        assert (list(findings.damaged), findings.good) == ([slot], 7), (slot, byte, bit)
        flip(path, slot, byte, bit)


def test_records_larger_than_the_memory_are_read_one_by_one(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "IN_FLIGHT_BYTES", SECTOR_BYTES)
    monkeypatch.setattr(scan, "STEP_BYTES", SECTOR_BYTES)
    write(path, range(5))
    assert run("disk", "verify", str(tmp_path)).exit_code == 0
    flip(path, 3, SECTOR_BYTES + 5000)
    os.truncate(path, slot_offset_bytes(4, PAYLOAD_BYTES) + 2 * SECTOR_BYTES)
    result = run("disk", "verify", str(tmp_path))
    assert "slot 3 key 000300030003…: the payload does not verify" in result.stdout
    assert "slot 4 key 000400040004…: the file ends before the record does" in result.stdout
    assert "2 of 5 records are damaged" in result.stdout


def test_at_most_twenty_lines_of_damage(tmp_path: Path, path: Path) -> None:
    write(path, range(64))
    write(path.with_name("second.blocks"), range(5))
    for slot in range(33):
        flip(path, slot, SECTOR_BYTES)
    flip(path.with_name("second.blocks"), 0, SECTOR_BYTES)
    lines = run("disk", "verify", str(tmp_path)).stdout.splitlines()
    assert len([line for line in lines if line.startswith("damaged:")]) == 20
    assert "and 14 more" in lines


def ends_with_an_error(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of this place in a file fail, by whatever way it is read."""

    def is_bad(transfer: Transfer, is_write: bool) -> bool:
        return transfer.offset_bytes <= offset < transfer.offset_bytes + transfer.num_bytes

    monkeypatch.setattr(inspect, "make_file_io", lambda fd, **_: FailingIo(fd, is_bad, -errno.EIO))


def test_a_place_that_cannot_be_read_costs_one_record(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, range(10))
    ends_with_an_error(slot_offset_bytes(6, PAYLOAD_BYTES) + SECTOR_BYTES, monkeypatch)
    result = run("disk", "verify", str(tmp_path))
    assert result.exit_code == 1
    name = f"kvbm/model-0/rank-0-of-1.blocks slot 6 key {key(6).hex()[:12]}…"
    assert f"unreadable: {name}: it cannot be read" in result.stdout
    assert "rank-0-of-1.blocks no 10 9 0 1" in on_one_line(result.stdout)


def test_headers_that_cannot_be_read_are_counted(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, range(10))
    ends_with_an_error(slot_offset_bytes(6, PAYLOAD_BYTES), monkeypatch)
    found = only_file(tmp_path)
    assert (found["used_slots"], found["unreadable_headers"]) == (9, 1)
    assert "headers that cannot be read: 1" in run("disk", "inspect", str(tmp_path)).stdout
    assert "slot 6 key unknown: it cannot be read" in run("disk", "verify", str(tmp_path)).stdout


def test_a_disk_that_does_not_answer_ends_the_command(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ios: list[HeldIo] = []

    def make_io(fd: int, **_: object) -> HeldIo:
        ios.append(HeldIo(fd, lambda transfer, _: len(transfer.pieces) > 1))  # all but headers alone
        return ios[-1]

    monkeypatch.setattr(inspect, "make_file_io", make_io)
    monkeypatch.setattr(scan, "DEADLINE_S", 0.01)
    write(path, range(10))
    result = run("disk", "verify", str(tmp_path))
    assert result.exit_code == 1
    assert "rank-0-of-1.blocks no 10 0 0 10" in on_one_line(result.stdout)
    (left,) = [file for file in files._files if file.path == path]
    ios[-1].let_go()
    assert ios[-1].close(WAIT_S)
    left.close()


def test_a_record_written_meanwhile_is_read_again(path: Path) -> None:
    write(path, range(3))
    flip(path, 1, SECTOR_BYTES)
    flip(path, 2, SECTOR_BYTES)
    with held_by_another_process(path):
        findings = verified(path, on_bytes=lambda _: flip(path, 1, SECTOR_BYTES))
    assert (findings.good, list(findings.damaged)) == (2, [2])


# -------------------------------------------------------------------- erasing


def test_erasing_frees_the_damaged_and_nothing_else(tmp_path: Path, path: Path) -> None:
    write(path, range(10))
    flip(path, 2, SECTOR_BYTES)
    flip(path, 4, 60)
    before = path.read_bytes()
    result = run("disk", "verify", str(tmp_path), "--erase-damaged")
    assert result.exit_code == 1
    assert "2 damaged records erased" in result.stdout
    assert "rank-0-of-1.blocks no 10 8 2 0" in on_one_line(result.stdout)  # our own lock is nobody's use
    expected = bytearray(before)
    for slot in (2, 4):
        at = slot_offset_bytes(slot, PAYLOAD_BYTES)
        expected[at : at + SECTOR_BYTES] = bytes(SECTOR_BYTES)
    assert path.read_bytes() == expected
    again = run("disk", "verify", str(tmp_path), "--erase-damaged")
    assert (again.exit_code, again.stdout.splitlines()[-1]) == (0, "all 8 records are good")
    store = DiskStore(path, GEOMETRY)
    assert store.wait_recovered(WAIT_S)
    assert set(store.scan()) == {key(slot) for slot in range(10)} - {key(2), key(4)}
    store.close()


def test_erasing_is_refused_while_any_file_is_in_use(tmp_path: Path, path: Path) -> None:
    other = path.with_name("another.blocks")
    for one in (path, other):
        write(one, range(3))
        flip(one, 1, SECTOR_BYTES)
    with held_by_another_process(path):
        before = state(tmp_path)
        result = run("disk", "verify", str(tmp_path), "--erase-damaged")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{path} is in use by a process; stop its engine first" in result.stderr
        assert result.stderr.count("\n") == 1
        assert state(tmp_path) == before
        looked = run("disk", "verify", str(tmp_path))
        assert (looked.exit_code, "some are in a file in use" in looked.stdout) == (1, True)
    assert run("disk", "verify", str(tmp_path), "--erase-damaged").exit_code == 1
    assert run("disk", "verify", str(tmp_path)).exit_code == 0
