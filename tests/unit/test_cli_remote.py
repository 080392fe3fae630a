"""``kvbm remote``: what it counts, finds, removes and leaves, beside running stores."""

from __future__ import annotations

import errno
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.testing.store_contract import key_of
from tests.unit.directory_stores import MEANING, PAYLOAD_BYTES, files_below, get, opened, path_of, put

KEYS = [key_of(number) for number in range(12)]
OTHER = MEANING._replace(model="other/Model", rank=1, world=2)
FILE_BYTES = record_bytes(PAYLOAD_BYTES)
NAME, OTHER_NAME = MEANING.namespace_folder, OTHER.namespace_folder


def kvbm(command: str, folder: Path, *more: str, **options: str) -> Result:
    """``kvbm remote`` in this process."""
    line = ["remote", command, f"file://{folder}", *more]
    return CliRunner().invoke(app, line, **options)  # type: ignore[arg-type]


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A directory with blocks of two models, one of them used a day ago, and what is none of ours."""
    folder = tmp_path / "a share"
    folder.mkdir()
    with opened(folder) as one, opened(folder, meaning=OTHER) as two:
        put(one, KEYS[:8])
        put(two, KEYS[8:])
        one.evictor.evict()
    path = path_of(folder, KEYS[0])
    then_s = time.time() - 90_000
    os.utime(path, (then_s, then_s))
    (path.parent / f".{path.name}.{'a' * 16}").write_bytes(b"half")
    (path.parent / "notes [1]").touch()
    for name in ("README", "notes"):
        (folder / "kvbm1" / NAME / name).write_text("by hand")
    (folder / "kvbm9").mkdir()
    (folder / "kvbm9" / path.name).touch()
    return folder


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "rm", "sweep"])
def test_one_store_at_a_time(command: str) -> None:
    more = ["--max-gb", "1"] if command == "sweep" else []
    for urls in ("file:///mnt/kv s3://kv-cache/team", "s3://kv-cache/team,file:///mnt/kv"):
        done = CliRunner().invoke(app, ["remote", command, urls, *more])
        said = f"kvbm remote {command}: 2 stores are named; name one of them\n"
        assert (done.exit_code, done.stderr) == (2, said)


def test_ls_and_inspect_say_what_is_there(share: Path) -> None:
    listed = kvbm("ls", share)
    assert listed.exit_code == 0
    assert NAME in listed.output and OTHER_NAME in listed.output and "all" in listed.output
    inspected = kvbm("inspect", share)
    assert inspected.exit_code == 0
    assert f"{NAME}/{MEANING.shard_folder}: 1 name is not kvbm's" in inspected.output
    assert f"{NAME}: 2 names are not kvbm's" in inspected.output
    assert f"last evicted by {os.uname().nodename} {os.getpid()}" in inspected.output
    for command in ("ls", "inspect"):
        told = json.loads(kvbm(command, share, "--json").output)
        ours, theirs = (told["namespaces"][name] for name in (NAME, OTHER_NAME))
        assert (ours["blocks"], theirs["blocks"]) == (8, 4) == (ours["records"], theirs["records"])
        assert (ours["bytes"], theirs["bytes"]) == (8 * FILE_BYTES + 4, 4 * FILE_BYTES)
        (shard,) = ours["shards"]
        assert (shard["name"], shard["half_written"], shard["strange"]) == (MEANING.shard_folder, 1, 1)
        assert shard["records_by_last_use"] == {"last_hour": 7, "last_day": 0, "last_week": 1, "older": 0}
        assert ours["last_used_unix_s"] - ours["least_recently_used_unix_s"] > 80_000
        assert theirs["evictor"] is None
        assert (ours["strange"], theirs["strange"]) == (2, 0)


def test_verify_finds_what_is_damaged_and_removes_it_if_told_to(share: Path) -> None:
    sound = kvbm("verify", share)
    assert (sound.exit_code, "all 12 records are good" in sound.output) == (0, True)
    paths = [path_of(share, key) for key in KEYS[:8]]
    with paths[0].open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    with paths[1].open("r+b") as file:
        file.write(b"?")
    os.truncate(paths[2], FILE_BYTES - 1)
    paths[3].write_bytes(paths[4].read_bytes())
    there = path_of(share, KEYS[5], OTHER)
    there.parent.mkdir(exist_ok=True)
    there.write_bytes(paths[5].read_bytes())
    paths[6].unlink()
    paths[6].symlink_to(paths[7])
    bad = kvbm("verify", share)
    assert bad.exit_code == 1
    assert "5 of 13 records are damaged, 1 unreadable" in bad.output
    for what, count in (
        ("the payload does not match its checksum", 1),
        ("the header does not verify", 1),
        ("its length is not what its header says", 1),
        ("it is another block's", 2),
    ):
        assert bad.output.count(what) == count, what
    with opened(share) as store:
        assert "5 damaged records removed" in kvbm("verify", share, "--remove-damaged").output
        assert get(store, KEYS[:8]) == [Outcome.MISS] * 4 + [Outcome.OK] * 2 + [Outcome.MISS, Outcome.OK]
    assert "0 of 8 records are damaged, 1 unreadable" in kvbm("verify", share).output


def test_rm_removes_a_models_blocks_and_nothing_else(share: Path) -> None:
    with opened(share) as one, opened(share, meaning=OTHER) as two:
        assert kvbm("rm", share, NAME, input="n\n").exit_code == 1
        assert get(one, KEYS[:8]) == [Outcome.OK] * 8
        removed = kvbm("rm", share, NAME, "--yes")
        assert removed.exit_code == 0 and "8 records removed" in removed.output
        assert f"{NAME}: 3 names are not kvbm's and left alone" in removed.output
        listed = kvbm("ls", share).output
        assert NAME not in listed and OTHER_NAME in listed, "what has no blocks is not listed"
        assert get(one, KEYS[:8]) == [Outcome.MISS] * 8
        assert get(two, KEYS[8:]) == [Outcome.OK] * 4
        assert put(one, KEYS[:2]) == [Outcome.OK] * 2, "an engine that runs goes on"
        assert kvbm("rm", share, "--all", "--yes").exit_code == 0
    left = {path.name for path in files_below(share)}
    assert left == {"notes [1]", "README", "notes", path_of(share, KEYS[0]).name}  # this of another version
    assert (share / "kvbm9" / path_of(share, KEYS[0]).name).exists()
    empty = kvbm("ls", share)
    assert empty.exit_code == 0 and empty.output.startswith("no blocks below")


def test_sweep_removes_what_was_used_longest_ago_and_nothing_else(share: Path) -> None:
    strange = {path for path in files_below(share) if path.suffix != ".kv"}
    for number, key in enumerate(KEYS):
        then_s = time.time() - 7200 - number * 60
        path = path_of(share, key, MEANING if number < 8 else OTHER)
        path.write_bytes(path.read_bytes().ljust(200_000, b"\0"))
        os.utime(path, (then_s, then_s))
    link = path_of(share, KEYS[0]).with_name("f" * 64 + "-0.kv")
    link.symlink_to(share / "kvbm1" / NAME / "README")
    strange.add(link)
    told = kvbm("sweep", share, "--max-gb", "0.001", "--dry-run")
    assert told.exit_code == 0 and "12 records, 2.4 MB, limit 1 MB: 8 records, 1.6 MB would be" in told.output
    assert kvbm("sweep", share, "--max-gb", "0.001", "--grace-s", "8000").exit_code == 1
    assert kvbm("sweep", share, "--max-gb", "0.001", OTHER_NAME).output.endswith("nothing to remove\n")
    told = kvbm("sweep", share, "--max-gb", "0.001")
    assert told.exit_code == 0 and told.output.count("\n") == 1
    left = [path_of(share, key) for key in KEYS[:4]]
    assert {path for path in files_below(share / "kvbm1") if path.suffix == ".kv"} == {*left, link}
    assert strange <= set(files_below(share))


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "rm"])
@pytest.mark.parametrize("level", [".", "kvbm1", f"kvbm1/{NAME}"])
def test_where_it_may_not_look_it_does_not_say_that_nothing_is_there(
    share: Path, command: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = share / level
    _close(closed, monkeypatch)
    result = kvbm(command, share, *(["--all", "--yes"] if command == "rm" else []))
    assert result.exit_code == 2 and "\n" not in result.output.strip()
    assert f"{closed}: Permission denied; run this as the engine's user" in result.output


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_part_that_it_may_not_look_into_is_said_and_tells_by_the_status(
    share: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (share / "kvbm1" / OTHER_NAME).rename(share / "elsewhere")
    _close(share / "kvbm1" / NAME / MEANING.shard_folder, monkeypatch)
    for more in ([], ["--json"]) if command != "verify" else ([],):
        result = kvbm(command, share, *more)
        line = f"{NAME}/{MEANING.shard_folder}: folders or files that cannot be read: 1"
        assert (result.exit_code, line in result.output) == (1, True)
        assert "no blocks below" not in result.output
        assert command != "verify" or "no records that can be read" in result.output


def _close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may not read ``folder``; root, whom tests may run as, may read all."""
    listdir, scandir = os.listdir, os.scandir

    def look(call: Any, path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(path)

    monkeypatch.setattr(os, "listdir", partial(look, listdir))
    monkeypatch.setattr(os, "scandir", partial(look, scandir))


def test_rm_of_all_where_nothing_is_asks_nothing_and_says_so(tmp_path: Path) -> None:
    for more in ([], ["--yes"]):
        result = kvbm("rm", tmp_path, "--all", *more)
        assert (result.exit_code, result.output) == (0, f"no blocks below {tmp_path} (kvbm1/)\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [((), "name the models"), (("no-such-model",), "no no-such-model"), (("x", "--all"), "name")],
)
def test_rm_wants_to_know_what(share: Path, more: tuple[str, ...], said: str) -> None:
    result = kvbm("rm", share, *more, "--yes")
    assert result.exit_code == 2 and said in result.output and "\n" not in result.output.strip()
    assert sum(path.suffix == ".kv" for path in files_below(share / "kvbm1")) == 12


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "rm"])
def test_a_directory_that_is_not_there_or_no_url_is_one_line(tmp_path: Path, command: str) -> None:
    for folder, said in ((tmp_path / "none", "No such file"), (Path("relative"), "file:///mnt/kv")):
        result = kvbm(command, folder, *(["--all"] if command == "rm" else []))
        assert result.exit_code == 2 and said in result.output and "\n" not in result.output.strip()
    if command != "rm":
        empty = kvbm(command, tmp_path)
        assert empty.exit_code == 0 and "no blocks below" in empty.output
