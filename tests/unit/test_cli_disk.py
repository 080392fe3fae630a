"""``kvbm disk inspect`` on real files, free and in use; what both commands of ``kvbm disk`` have in
common.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import inspect
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import SECTOR_BYTES, pack_file, record_bytes, slot_offset_bytes
from kvbm_core.storage.disk.store import DiskStore
from tests.unit.block_files import (
    GEOMETRY,
    HOUR_NS,
    PAYLOAD_BYTES,
    WAIT_S,
    files_of,
    flip,
    held_by_another_process,
    key,
    only_file,
    path_fixture,  # noqa: F401
    state,
    write,
)
from tests.unit.test_cli import on_one_line, run


def test_inspect_says_how_full_and_how_hot(tmp_path: Path, path: Path) -> None:
    write(path, range(3), age_ns=HOUR_NS // 2)
    write(path, range(3, 10), age_ns=5 * HOUR_NS)
    write(path, range(10, 12), age_ns=50 * HOUR_NS)
    write(path, [40], age_ns=20 * 24 * HOUR_NS)
    result = run("disk", "inspect", str(tmp_path))
    assert result.exit_code == 0
    text = on_one_line(result.stdout)
    assert "kvbm/model-0/rank-0-of-1.blocks 1 no 64 13 51 6 kB 1.84 MB 30 min 20 d" in text
    since = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 20 * 86_400))
    (row,) = [line for line in result.stdout.splitlines() if since in line]
    assert row.count("█") == 1 + 4 + 1  # of eight each: 3, 7, 2 and 1 of 13
    assert [int(cell.split()[-1]) for cell in row.split("│")[2:6]] == [3, 7, 2, 1]


def test_one_file_is_shown_by_its_name(tmp_path: Path, path: Path) -> None:
    write(path, range(3))
    text = on_one_line(run("disk", "inspect", str(path)).stdout)
    assert "rank-0-of-1.blocks 1 no 64 3 61" in text
    assert "kvbm/model-0/rank-0-of-1.blocks 1 no" not in text
    assert "rank-0-of-1.blocks no 3 3" in on_one_line(run("disk", "verify", str(path)).stdout)


def test_inspect_as_json_has_stable_keys(tmp_path: Path, path: Path) -> None:
    write(path, [0, 5, 63], age_ns=2 * HOUR_NS)
    found = only_file(tmp_path)
    newest, oldest = found.pop("newest_since_unix_s"), found.pop("oldest_since_unix_s")
    assert isinstance(newest, float)
    assert newest == oldest == pytest.approx(time.time() - 7200, abs=WAIT_S)
    assert found.pop("allocated_bytes") == path.stat().st_blocks * 512
    assert found == {
        "path": str(path),
        "kind": "blocks",
        "detail": "",
        "format_version": 1,
        "in_use": False,
        "pid": None,
        "file_bytes": GEOMETRY.file_bytes,
        "slots": 64,
        "used_slots": 3,
        "free_slots": 61,
        "damaged_headers": 0,
        "unreadable_headers": 0,
        "block_bytes": PAYLOAD_BYTES,
        "slot_bytes": record_bytes(PAYLOAD_BYTES),
        "used_slots_by_age": {"last_hour": 0, "last_day": 3, "last_week": 0, "older": 0},
    }


def test_the_keys_are_those_of_the_docs(tmp_path: Path, path: Path) -> None:
    write(path, [0])
    page = (Path(__file__).resolve().parents[2] / "docs" / "disk-files.md").read_text(encoding="utf-8")
    example = json.loads(page.split("```json\n")[1].split("```")[0])
    found = only_file(tmp_path)
    assert list(found) == list(example)
    for kind in inspect.Kind:
        assert f"| `{kind.value}` |" in page


def test_inspect_sums_several_files_and_takes_one_by_name(tmp_path: Path, path: Path) -> None:
    other = path.with_name("rank-1-of-2.blocks")
    write(path, range(4))
    write(other, range(6))
    result = run("disk", "inspect", str(tmp_path))
    (total,) = [line for line in result.stdout.splitlines() if " all " in line]
    assert "10" in total.split("│")[2]
    assert [found["used_slots"] for found in files_of(run("disk", "inspect", str(tmp_path), "--json"))] == [
        4,
        6,
    ]
    assert only_file(other)["path"] == str(other)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_looking_changes_nothing(tmp_path: Path, path: Path, command: str) -> None:
    write(path, range(20))
    flip(path, 3, SECTOR_BYTES + 5)
    flip(path, 4, 100)
    before = state(tmp_path)
    assert run("disk", command, str(tmp_path)).exit_code in (0, 1)
    assert state(tmp_path) == before
    BlockFile(path, GEOMETRY).close()  # and no lock is left


def test_inspect_names_the_process_with_the_file(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, range(2))
    with held_by_another_process(path) as pid:
        found = only_file(tmp_path)
        assert (found["in_use"], found["pid"], found["used_slots"]) == (True, pid, 2)
        assert f"blocks 1 by pid {pid} 64" in on_one_line(run("disk", "inspect", str(tmp_path)).stdout)
        # In a container the kernel's list does not show the others' locks.
        monkeypatch.setattr(inspect, "LOCKS", tmp_path / "not-there")
        found = only_file(tmp_path)
        assert (found["in_use"], found["pid"]) == (True, None)
        assert "blocks 1 yes 64" in on_one_line(run("disk", "inspect", str(tmp_path)).stdout)
    assert only_file(tmp_path)["in_use"] is False


def test_a_store_works_on_while_it_is_inspected(tmp_path: Path, path: Path) -> None:
    store = DiskStore(path, GEOMETRY)
    assert store.wait_recovered(WAIT_S)
    payload = memoryview(bytearray(os.urandom(PAYLOAD_BYTES)))
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for number in range(3):
        assert store.put_many([key(number)], [payload], deadline_s=WAIT_S) == [Outcome.OK]
        assert only_file(tmp_path)["used_slots"] == number + 1
        assert store.get_many([key(number)], [target], deadline_s=WAIT_S) == [Outcome.OK]
        assert target == payload
    store.clear()
    assert only_file(tmp_path)["used_slots"] == 0
    store.close()


def test_what_another_life_or_geometry_left_is_free(tmp_path: Path, path: Path) -> None:
    write(path, range(64))
    write(path, [1], geometry=Geometry(40, 9000, GEOMETRY.fingerprint))
    found = only_file(tmp_path)
    assert (found["used_slots"], found["damaged_headers"], found["slots"]) == (1, 0, 40)
    result = run("disk", "verify", str(tmp_path))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all 1 records are good")


def test_files_that_are_none_of_ours_are_a_line_each(tmp_path: Path, path: Path) -> None:
    write(path, range(2))
    folder = tmp_path / "x"
    folder.mkdir()
    sector = path.read_bytes()[:SECTOR_BYTES]
    (folder / "foreign.blocks").write_bytes(b"KVBMFILE\x07\x00" + sector[10:])
    (folder / "damaged.blocks").write_bytes(sector[:100] + b"!" + sector[101:])
    (folder / "empty.blocks").touch()
    (folder / "short.blocks").write_bytes(b"KVB")
    (folder / "te\x1bxt.blocks").write_bytes(b"hello" * 2000)
    (folder / "loop.blocks").symlink_to("loop.blocks")
    (folder / "folder.blocks").mkdir()
    (folder / "ignored.txt").write_bytes(sector)
    os.mkfifo(folder / "pipe.blocks")
    result = run("disk", "inspect", str(tmp_path))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-7:] == [
        "x/damaged.blocks: damaged header: the file's header does not verify; an engine begins it anew",
        "x/empty.blocks: empty: nothing has been written to it",
        "x/foreign.blocks: foreign format: format 7; this kvbm reads format 1",
        "x/loop.blocks: unreadable: Too many levels of symbolic links",
        "x/pipe.blocks: not a block file: no regular file",
        "x/short.blocks: not a block file: none of kvbm's files",
        "x/te?xt.blocks: not a block file: none of kvbm's files",
    ]
    kinds = {
        Path(str(found["path"])).stem: found["kind"]
        for found in files_of(run("disk", "inspect", str(tmp_path), "--json"))
    }
    assert kinds["loop"] == "unreadable"
    assert kinds["foreign"] == "foreign_format"
    checked = run("disk", "verify", str(tmp_path))
    assert checked.exit_code == 1
    assert "2 files or folders could not be checked" in checked.stdout
    (folder / "damaged.blocks").unlink()
    (folder / "loop.blocks").unlink()
    assert run("disk", "inspect", str(tmp_path)).exit_code == 0
    assert run("disk", "verify", str(tmp_path)).exit_code == 0


def test_a_header_that_claims_too_much_does_not_keep_us_reading(tmp_path: Path, path: Path) -> None:
    write(path, range(3))
    header = inspect.identify(path).header
    assert header is not None
    with path.open("r+b") as file:
        file.write(pack_file(header._replace(num_slots=1 << 50)))
    found = only_file(tmp_path)
    assert (found["slots"], found["used_slots"]) == (1 << 50, 3)
    assert run("disk", "verify", str(tmp_path)).exit_code == 0


def test_a_file_shorter_than_its_header_says(tmp_path: Path, path: Path) -> None:
    write(path, range(64))
    os.truncate(path, slot_offset_bytes(20, PAYLOAD_BYTES) + SECTOR_BYTES)  # one header whose payload is gone
    result = run("disk", "inspect", str(tmp_path))
    assert "kvbm/model-0/rank-0-of-1.blocks: 537 kB shorter than its header says" in result.stdout
    checked = run("disk", "verify", str(tmp_path))
    assert checked.exit_code == 1
    assert f"slot 20 key {key(20).hex()[:12]}…: the file ends before the record does" in checked.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_empty_directory_is_no_error(tmp_path: Path, command: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = run("disk", command, str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, f"no block files below {tmp_path}\n")
    if command == "inspect":
        assert files_of(run("disk", "inspect", str(tmp_path), "--json")) == []


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path, command: str) -> None:
    result = run("disk", command, str(tmp_path / "nowhere"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"kvbm disk {command}: no such directory: {tmp_path / 'nowhere'}: name the directory"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "inspect",
            [
                "Example: kvbm disk inspect /mnt/nvme",
                "changes nothing",
                "used_slots_by_age",
                "Exit status: 0;",
            ],
        ),
        (
            "verify",
            ["Example: kvbm disk verify /mnt/nvme", "Changes nothing, unless", "--erase-damaged", "1 if any"],
        ),
    ],
)
def test_help_teaches(command: str, words: list[str]) -> None:
    text = on_one_line(run("disk", command, "--help").output)
    for word in words:
        assert word in text
