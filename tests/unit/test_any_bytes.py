"""``kvbm disk`` and ``kvbm remote`` on any bytes: they tell in lines what stands in a file or an object."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from kvbm_core.cli.report import age_text, ages_table
from kvbm_core.config import KvbmSettings
from kvbm_core.storage.directory.names import file_name
from kvbm_core.storage.disk.inspect import Contents
from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    MAX_PAYLOAD_BYTES,
    SECTOR_BYTES,
    FileHeader,
    RecordHeader,
    pack_file,
    pack_record,
    payload_digest,
)
from kvbm_core.storage.names import fan_folder
from kvbm_core.storage.remote.names import RecordNames, plain_name
from kvbm_core.storage.remote.records import (
    SALT_BYTES,
    RecordFields,
    StoredBlock,
    digest_of,
    pack_trailer_into,
    trailer_bytes,
)
from kvbm_core.storage.stores import StoreOptions, open_engine
from kvbm_core.testing import memory_engine
from kvbm_core.testing.memory_engine import MemoryObjects
from kvbm_core.testing.store_contract import key_of
from kvbm_core.types import BlockKey
from tests.unit.directory_stores import MEANING

LIFE, FINGERPRINT = b"life".ljust(16), b"fingerprint".ljust(16)
LENGTHS = (0, 1, SECTOR_BYTES, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 1 << 40, 1 << 63, (1 << 64) - 1)
KEYS = [
    BlockKey(b"\0"),
    BlockKey(b"k" * 7),
    BlockKey(b"k" * 32),
    BlockKey(b"k" * 32 + b"\x09"),
    BlockKey(b"k" * 40),
]
URL = "memory://shared"
NUM_DRAWN = 40


def told(group: str, where: str) -> dict[str, str]:
    """What ``inspect`` and ``verify`` print; each ends with an exit status, and prints JSON if asked to."""
    texts = {}
    for command in ("inspect", "verify"):
        done = CliRunner().invoke(app, [group, command, where])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        assert done.exit_code in (0, 1) and done.output.strip(), (command, done.output)
        texts[command] = done.output
        as_json = CliRunner().invoke(app, [group, command, where, "--json"])
        assert as_json.exception is None or isinstance(as_json.exception, SystemExit), as_json.exception
        assert as_json.exit_code == done.exit_code
        json.loads(as_json.stdout)
    return texts


# -------------------------------------------------------------------- block files


@pytest.mark.parametrize("payload_bytes", LENGTHS)
@pytest.mark.parametrize("num_slots", [0, 1, 3, (1 << 64) - 1])
def test_a_sealed_header_of_a_block_file_may_say_anything(
    tmp_path: Path, payload_bytes: int, num_slots: int
) -> None:
    header = FileHeader(LIFE, FINGERPRINT, payload_bytes, num_slots)
    record = RecordHeader(LIFE, FINGERPRINT, 0, (1 << 64) - 1, payload_bytes, KEYS[2], bytes(16))
    file = tmp_path / "rank-0-of-1.blocks"
    file.write_bytes(
        pack_file(header).ljust(FIRST_SLOT_BYTES, b"\0") + pack_record(record) + bytes(3 * SECTOR_BYTES)
    )
    is_possible = 0 < payload_bytes <= MAX_PAYLOAD_BYTES and num_slots > 0
    texts = told("disk", str(tmp_path))
    assert ("damaged header" in texts["inspect"]) != is_possible
    assert ("1 of 1 records are damaged" in texts["verify"]) == is_possible


def test_any_bytes_in_a_block_file_get_lines(tmp_path: Path, rng: random.Random) -> None:
    """A good header of the file, and then sealed records that say anything, and random bytes."""
    file = tmp_path / "rank-0-of-1.blocks"
    for _ in range(NUM_DRAWN):
        num_slots, payload_bytes = rng.randrange(1, 5), rng.choice((1, 100, SECTOR_BYTES))
        content = [
            pack_file(FileHeader(LIFE, FINGERPRINT, payload_bytes, num_slots)).ljust(FIRST_SLOT_BYTES, b"\0")
        ]
        for slot in range(num_slots):
            content.append(rng.choice((drawn_record(rng, slot, payload_bytes), rng.randbytes(SECTOR_BYTES))))
            content.append(rng.randbytes(SECTOR_BYTES))
        all_bytes = b"".join(content)
        file.write_bytes(all_bytes[: rng.choice((len(all_bytes), rng.randrange(len(all_bytes))))])
        told("disk", str(tmp_path))
    for num_bytes in (0, 1, SECTOR_BYTES, 2 * FIRST_SLOT_BYTES):
        file.write_bytes(rng.choice((b"", b"KVBMFILE")) + rng.randbytes(num_bytes))
        told("disk", str(tmp_path))


def drawn_record(rng: random.Random, slot: int, payload_bytes: int) -> bytes:
    """A sealed record's header; each of its fields is often right."""
    return pack_record(
        RecordHeader(
            rng.choice((LIFE, LIFE, bytes(16))),
            rng.choice((FINGERPRINT, FINGERPRINT, bytes(16))),
            rng.choice((slot, slot, 0, (1 << 64) - 1)),
            rng.choice((0, 1, (1 << 64) - 1)),
            rng.choice((payload_bytes, payload_bytes, *LENGTHS)),
            rng.choice(KEYS),
            rng.randbytes(16),
        )
    )


# -------------------------------------------------------------------- shared directories


def test_any_bytes_in_a_shared_directory_get_lines(tmp_path: Path, rng: random.Random) -> None:
    shard = tmp_path / "kvbm1" / MEANING.namespace_folder / MEANING.shard_folder
    for number in range(NUM_DRAWN):
        key, length = key_of(number), rng.choice(LENGTHS)
        header = RecordHeader(MEANING.life, MEANING.fingerprint, 0, number, length, key, payload_digest(b""))
        content = rng.choice(
            (pack_record(header), drawn_record(rng, 0, 0 if length else 1), rng.randbytes(5000))
        )
        fan = shard / fan_folder(file_name(key))
        fan.mkdir(parents=True, exist_ok=True)
        (fan / file_name(key)).write_bytes(content + bytes(rng.choice((0, 1, SECTOR_BYTES))))
    texts = told("remote", f"file://{tmp_path}")
    assert f"{NUM_DRAWN} of {NUM_DRAWN} records are damaged" in texts["verify"]


@pytest.mark.parametrize("seconds", [-(10**17), -(10**12), 10**12, 10**17, 2**63, 10**30])
def test_any_time_of_a_file_is_told(seconds: int) -> None:
    """Some file systems keep times that no calendar has."""
    contents = Contents()
    contents.add(seconds * 10**9, now_ns=0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(ages_table("ages", "file", [(Text("name"), contents)]))
    assert "?" in console.export_text() and age_text(contents.oldest_ns, 0)


# -------------------------------------------------------------------- records


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryObjects]:
    """An empty store."""
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)
    memory_engine.register()
    memory_engine.forget_all()
    open_engine(URL, StoreOptions())
    (engine,) = memory_engine.OPENED
    yield engine.objects
    memory_engine.forget_all()


def test_any_bytes_in_a_record_get_lines(objects: MemoryObjects, rng: random.Random) -> None:
    names = RecordNames(MEANING)
    for number in range(4 * NUM_DRAWN):
        key, num_blocks = key_of(number), rng.choice((1, 4, 8))
        content = rng.choice((drawn_object(rng, names, key, num_blocks), rng.randbytes(rng.randrange(9000))))
        objects.put(names.name_of(key, num_blocks), content)
    secret = plain_name(key_of(0), 0, 1).partition("-")[0]
    objects.put(f"{names.folder}{fan_folder(secret)}/{secret}", drawn_object(rng, names, key_of(0), 0))
    texts = told("remote", URL)
    assert " records are damaged, 0 unreadable" in texts["verify"]


def drawn_object(rng: random.Random, names: RecordNames, key: BlockKey, num_blocks: int) -> bytes:
    """A record with a sealed trailer; each of its fields is often right."""
    block = rng.randbytes(rng.choice((0, 1, 100)))
    num_said = rng.choice((num_blocks, num_blocks, 0, 1, 255))
    fields = RecordFields(
        num_said,
        rng.choice((0, 0, 255)),
        rng.choice((0, 0, 1, 2, 3, 4, 255)),
        rng.choice((names.life, names.life, bytes(16))),
        rng.choice((names.fingerprint, names.fingerprint, bytes(16))),
        rng.choice((names.secret_id, names.secret_id, b"s" * 16)),
        bytes(SALT_BYTES),
        rng.choice((len(block), len(block), *LENGTHS)),
        rng.choice((bytes(key), bytes(key), b"k", b"k" * 40)),
    )
    entry = StoredBlock(
        rng.choice((key[-16:], bytes(16))),
        rng.choice((len(block), len(block), 0, (1 << 32) - 1)),
        digest_of(memoryview(block)),
    )
    trailer = memoryview(bytearray(trailer_bytes(num_said)))
    pack_trailer_into(trailer, fields, [entry] * num_said)
    return block * rng.choice((num_said, num_said, 1)) + bytes(trailer)
