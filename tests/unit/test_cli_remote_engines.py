"""``kvbm remote`` for stores on engines of objects: the same face as for a shared directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.engine import GetItem, Got
from kvbm_core.storage.remote.inspect import RecordInspection
from kvbm_core.storage.remote.names import BESIDE
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.storage.stores import StoreOptions, open_engine
from kvbm_core.testing import memory_engine
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine, MemoryObjects
from kvbm_core.testing.store_contract import key_of
from tests.unit.record_stores import MEANING, Kind, get

URL = "memory://shared"
KEYS = tuple(key_of(number) for number in range(20))
RUN, ALONE, OTHERS = Extent(8, KEYS[:8]), Extent(1, KEYS[8:9]), Extent(4, KEYS[9:13])
OTHER_MEANING = Meaning("other/Model", b"other", b"other".ljust(16), 1, 2)
NAME, OTHER_NAME = MEANING.namespace_folder, OTHER_MEANING.namespace_folder
DAY_S = 86_400


def kvbm(command: str, *more: str, url: str = URL, **options: str) -> Result:
    """``kvbm remote`` in this process."""
    return CliRunner().invoke(app, ["remote", command, url, *more], **options)  # type: ignore[arg-type]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryObjects]:
    """A store with records of two models, one used long ago, and names that are none of ours."""
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)
    memory_engine.register()
    memory_engine.forget_all()
    open_engine(URL, StoreOptions())
    (engine,) = memory_engine.OPENED
    found = engine.objects
    ours(found).put(RUN, ALONE)
    theirs(found).put(OTHERS)
    age(found, ours(found).name_of(ALONE), 3 * DAY_S)
    for name in ("elsewhere/kvbm2", "kvbm2/README", f"kvbm2/{NAME}/notes", f"{ours(found).name_of(RUN)}x"):
        found.put(name, b"by hand")
    found.put(ours(found).name_of(RUN) + BESIDE, b"a copy")
    yield found
    memory_engine.forget_all()


def ours(objects: MemoryObjects) -> Kind:
    """Stores of one model."""
    return Kind(objects=objects)


def theirs(objects: MemoryObjects) -> Kind:
    """Stores of another one."""
    return Kind(codec="zstd", meaning=OTHER_MEANING, objects=objects)


def test_codecs_are_told(objects: MemoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the records themselves tell them; also those that were made with a secret, without it."""
    monkeypatch.setenv("COLUMNS", "200")
    rounded = Meaning("rounded", b"rounded", b"rounded".ljust(16), 0, 1)
    Kind(codec="fp8", meaning=rounded, objects=objects).put(RUN, ALONE)
    sealed = Meaning("sealed", b"sealed", b"sealed".ljust(16), 0, 1)
    secret = Secret(b"a secret that is long enough")
    Kind(codec="fp8", secret=secret, encrypts=True, meaning=sealed, objects=objects).put(RUN)
    broken = Meaning("broken", b"broken", b"broken".ljust(16), 0, 1)
    objects.put(Kind(meaning=broken).name_of(ALONE), b"short")
    found = json.loads(kvbm("ls", "--json").output)["namespaces"]
    codecs = {name.rpartition("-")[0]: model["shards"][0]["codec"] for name, model in found.items()}
    ours_name, theirs_name = (name.rpartition("-")[0] for name in (NAME, OTHER_NAME))
    assert codecs == {
        ours_name: "none",
        theirs_name: "zstd",
        "rounded": "fp8",
        "sealed": "fp8, encrypted",
        "broken": None,
    }
    for command in ("ls", "inspect"):
        told = kvbm(command).output
        assert "fp8, encrypted" in told and "zstd" in told
    told = kvbm("verify").output
    assert "3 records are kept with the codec fp8: numbers in float8, not what engines computed" in told
    assert "fp8" not in kvbm("verify", NAME).output


def age(objects: MemoryObjects, name: str, age_s: float) -> None:
    """It was used so long ago."""
    objects.objects[name] = objects.objects[name]._replace(changed_s=time.time() - age_s)


def test_ls_and_inspect_say_what_is_there(objects: MemoryObjects) -> None:
    listed = kvbm("ls")
    assert listed.exit_code == 0 and "below memory://shared" in listed.output
    assert NAME in listed.output and OTHER_NAME in listed.output and "3 d" in listed.output
    inspected = kvbm("inspect")
    assert inspected.exit_code == 0
    for line in (
        f"{NAME}/{MEANING.shard_folder}: 1 name is not kvbm's",
        f"{NAME}: 1 name is not kvbm's",
        "memory://shared: 1 name is not kvbm's",
    ):
        assert line in inspected.output
    for command in ("ls", "inspect"):
        told = json.loads(kvbm(command, "--json").output)
        assert (told["url"], told["strange"], set(told["namespaces"])) == (URL, 1, {NAME, OTHER_NAME})
        found = told["namespaces"][NAME]
        assert (found["records"], found["blocks"], found["evictor"], found["strange"]) == (2, 9, None, 1)
        assert found["last_used_unix_s"] - found["least_recently_used_unix_s"] > 2 * DAY_S
        (shard,) = found["shards"]
        assert (shard["half_written"], shard["strange"], shard["unreadable"]) == (1, 1, 0)
        assert shard["records_by_last_use"] == {"last_hour": 1, "last_day": 0, "last_week": 1, "older": 0}
        sizes = [len(ours(objects).content(extent)) for extent in (RUN, ALONE)]
        assert found["bytes"] == shard["bytes"] == sum(sizes) + len("a copy")


def test_names_that_were_made_with_a_secret_do_not_tell_how_many_blocks_there_are(
    objects: MemoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.objects.clear()
    path = tmp_path / "secret"
    path.write_text("a secret that is long enough\n")
    Kind(secret=Secret.read(str(path)), encrypts=True, objects=objects).put(RUN, ALONE)
    (found,) = json.loads(kvbm("ls", "--json").output)["namespaces"].values()
    assert (found["records"], found["blocks"]) == (2, None)
    assert "?" in kvbm("ls").output
    told = kvbm("verify")
    assert told.exit_code == 0 and "no records" in told.output
    assert "2 records are not ours to check, and left alone: it was made with another secret" in told.output
    monkeypatch.setenv("KVBM_REMOTE_SECRET_FILE", str(path))
    assert "all 2 records are good" in kvbm("verify").output
    monkeypatch.setenv("KVBM_REMOTE_SECRET_FILE", str(tmp_path / "none"))
    missing = kvbm("verify")
    assert missing.exit_code == 2 and missing.output.startswith("kvbm: KVBM_REMOTE_SECRET_FILE=")


def test_verify_finds_what_is_damaged_and_removes_it_if_told_to(objects: MemoryObjects) -> None:
    sound = kvbm("verify")
    assert (sound.exit_code, "all 3 records are good" in sound.output) == (0, True)
    kind = ours(objects)
    kind.damage(RUN, lambda content: content[:2000] + b"\0\1\2\3" + content[2004:])
    theirs(objects).damage(OTHERS, lambda content: content[:-1])
    objects.put(kind.name_of(Extent(1, KEYS[15:16])), kind.content(ALONE))
    objects.put(kind.name_of(Extent(1, KEYS[16:17])), b"")
    bad = kvbm("verify")
    assert bad.exit_code == 1 and "4 of 5 records are damaged, 0 unreadable" in bad.output
    assert f"damaged: {kind.name_of(RUN)}: a block of it does not verify" in bad.output
    assert bad.output.count(": it does not verify") == 2 and bad.output.count("it is another block's") == 1
    only = kvbm("verify", OTHER_NAME)
    assert only.exit_code == 1 and "1 of 1 records are damaged" in only.output
    assert kvbm("verify", "no-such").exit_code == 2
    before = set(objects.objects)
    assert "4 damaged records removed" in kvbm("verify", "--remove-damaged").output
    assert before - set(objects.objects) == {
        kind.name_of(RUN),
        theirs(objects).name_of(OTHERS),
        kind.name_of(Extent(1, KEYS[15:16])),
        kind.name_of(Extent(1, KEYS[16:17])),
    }
    assert kvbm("verify").exit_code == 0


def test_an_engine_that_wants_to_know_memory_is_told_before_it_reads_and_late_reads_keep_it(
    objects: MemoryObjects,
) -> None:
    engine = Announced(objects)
    store = RecordInspection(engine, URL)
    store.count(0, lambda *_: None)
    (ends,) = engine.known
    assert len(ends) < 1 << 20, "what only counts reads little"
    assert [checked.what for checked in store.verify()] == [""] * 3
    assert len(engine.known) == 2
    engine.faults = EngineFaults(is_late=1.0)
    assert all(checked.is_unreadable for checked in store.verify())
    engine.faults = EngineFaults()
    assert [checked.what for checked in store.verify()] == [""] * 3
    store.close()


class Announced(MemoryEngine):
    """Reads only into memory that it knows."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(EngineFaults(is_late=1e-9), objects)
        self.known: list[range] = []

    def register(self, address: int, num_bytes: int) -> None:
        """See TakesMemory."""
        self.known.append(range(address, address + num_bytes))

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """See ObjectEngine."""
        for start, stop in ranges_of([piece for item in items for piece in item.pieces]):
            assert any(start in known and stop - 1 in known for known in self.known)
            assert not LATE.holds([(start, stop)])
        return super().get(items, deadline_s=deadline_s)


def test_what_cannot_be_read_is_no_damage(objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MemoryEngine.get

    def fails(engine: MemoryEngine, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        return [got._replace(outcome=Outcome.IO_ERROR) for got in read(engine, items, deadline_s=deadline_s)]

    monkeypatch.setattr(MemoryEngine, "get", fails)
    told = kvbm("verify", "--remove-damaged")
    assert told.exit_code == 1 and "0 of 3 records are damaged, 3 unreadable" in told.output
    assert "0 damaged records removed" in told.output and len(objects.objects) == 8


def test_rm_removes_a_models_records_and_nothing_else(objects: MemoryObjects) -> None:
    kind = ours(objects)
    assert kvbm("rm", NAME, input="n\n").exit_code == 1
    assert get(kind.open(), ALONE) == [Outcome.OK]
    removed = kvbm("rm", NAME, "--yes")
    assert removed.exit_code == 0 and f"{NAME}: 2 records removed" in removed.output
    assert f"{NAME}: 2 names are not kvbm's and left alone" in removed.output
    assert get(kind.open(), ALONE) == [Outcome.MISS]
    assert kvbm("rm", "--all", "--yes").exit_code == 0
    left = {"elsewhere/kvbm2", "kvbm2/README", f"kvbm2/{NAME}/notes", f"{kind.name_of(RUN)}x"}
    assert set(objects.objects) == left
    assert kvbm("ls").output == "no blocks below memory://shared (kvbm2/)\n"
    assert kvbm("rm", "no-such", "--yes").exit_code == 2
    assert kvbm("rm", "--yes").exit_code == 2


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "rm", "sweep"])
def test_a_store_that_cannot_be_listed_is_one_line(objects: MemoryObjects, command: str) -> None:
    more = {"rm": ["--all", "--yes"], "sweep": ["--max-gb", "1"]}.get(command, [])
    told = kvbm(command, *more, url=f"{URL}?fails=1")
    assert told.exit_code == 2
    what = f"{URL}?fails=1: the memory engine cannot list its objects: io_error"
    assert told.output == f"kvbm remote {command}: {what}\n"
    nothing = kvbm(command, *more, url="nothing://there")
    assert nothing.exit_code == 2 and nothing.output.count("\n") == 1 and "nothing" in nothing.output


def test_what_cannot_be_removed_is_one_line(objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    kind = ours(objects)
    told = kvbm("rm", NAME, "--yes")
    assert told.exit_code == 1 and told.output.count("\n") == 1
    assert (
        told.output.startswith(f"kvbm remote rm: {URL}: kvbm2/")
        and "cannot be removed: io_error" in told.output
    )
    kind.damage(RUN, lambda content: content[1:])
    told = kvbm("verify", "--remove-damaged")
    assert told.exit_code == 2 and "cannot be removed: io_error" in told.output
    told = kvbm("sweep", "--max-gb", "0.000001")
    assert told.exit_code == 2, "a limit that small is no limit"
    told = kvbm("sweep", "--max-gb", "0.001")
    assert told.exit_code == 0 and "nothing to remove" in told.output


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be removed."""
    monkeypatch.setattr(
        MemoryEngine, "remove", lambda engine, names, *, deadline_s: [Outcome.IO_ERROR] * len(names)
    )


def test_sweep_says_what_it_does(objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ours(objects)
    big = [Extent(1, KEYS[number : number + 1]) for number in range(13, 17)]
    for number, extent in enumerate(big):
        objects.put(kind.name_of(extent), bytes(400_000))
        age(objects, kind.name_of(extent), (number + 1) * 10 * DAY_S)
    refused = pytest.MonkeyPatch()
    refuse(refused)
    told = kvbm("sweep", "--max-gb", "0.001")
    refused.undo()
    assert told.exit_code == 1
    assert "0 records, 0 B removed; 1.62 MB are left; nothing more can be removed: io_error" in told.output
    told = kvbm("sweep", "--max-gb", "0.001", "--dry-run")
    assert told.exit_code == 0 and "2 records, 800 kB would be removed" in told.output
    told = kvbm("sweep", "--max-gb", "0.001", "--grace-s", str(100 * DAY_S))
    assert told.exit_code == 1 and "the rest was used within the last 8640000 s" in told.output
    assert all(kind.is_there(extent) for extent in big)
    assert kvbm("sweep", "--max-gb", "0.001", OTHER_NAME).exit_code == 0
    told = kvbm("sweep", "--max-gb", "0.001")
    assert told.exit_code == 0 and "2 records, 800 kB removed" in told.output
    assert told.output.count("\n") == 1
    assert [kind.is_there(extent) for extent in big] == [True, True, False, False]
    assert not kind.is_there(Extent(1, KEYS[18:19])) and kind.is_there(ALONE)
    assert kvbm("sweep", "--max-gb", "1", "no-such").exit_code == 2
    monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", "1")
    told = kvbm("sweep", "--max-gb", "0.001", url="memory://another")
    assert told.exit_code == 0 and "the server evicts by itself" in told.output


def test_a_password_in_a_url_is_never_repeated(objects: MemoryObjects) -> None:
    for command in ("ls", "rm"):
        for url in (
            "s3://me:hunter2@b",
            "redis://me:/hunter2@host",
            "memory://hunter2@host?x=",
            "://hunter2@",
        ):
            told = kvbm(command, url=url)
            assert told.exit_code == 2 and told.output.count("\n") == 1
            assert "hunter2" not in told.output and "environment" in told.output
