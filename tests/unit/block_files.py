"""Block files as engines write them, for tests of ``kvbm disk``: written, damaged, held by another
process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.storage.disk.record import slot_offset_bytes
from kvbm_core.types import BlockKey
from tests.unit.test_cli import Ran, run

PAYLOAD_BYTES = 6000  # not whole sectors: there is padding
GEOMETRY = Geometry(64, PAYLOAD_BYTES, b"fingerprint-1234")
WAIT_S = 60.0
HOUR_NS = 3600 * 10**9
HOLD = """
import sys
from pathlib import Path
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
file = BlockFile(Path(sys.argv[1]), Geometry(64, 6000, b"fingerprint-1234"))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    """Where an engine would have its file; the folder to look into is ``tmp_path``."""
    return tmp_path / "kvbm" / "model-0" / "rank-0-of-1.blocks"


def key(number: int) -> BlockKey:
    """A key as engines have them."""
    return BlockKey(number.to_bytes(2, "big") * 16)


def write(path: Path, slots: Sequence[int], *, age_ns: int = 0, geometry: Geometry = GEOMETRY) -> None:
    """Records ``key(slot)`` of random bytes in ``slots``, written by a process that started ``age_ns``
    ago.
    """
    file = BlockFile(path, geometry)
    block_io = BlockIo(file, SystemClock(), is_write=True, first_sequence=time.time_ns() - age_ns)
    payloads = [memoryview(bytearray(os.urandom(geometry.payload_bytes))) for _ in slots]
    outcomes = block_io.transfer([(key(slot), slot) for slot in slots], payloads, deadline_s=WAIT_S)
    assert outcomes == [Outcome.OK] * len(slots)
    assert block_io.close(WAIT_S)
    file.close()


def flip(path: Path, slot: int, byte: int, bit: int = 0) -> None:
    """Flips one bit of a record; ``byte`` counts from its header's begin."""
    at = slot_offset_bytes(slot, PAYLOAD_BYTES) + byte
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Size, time of the last change, and content of everything below ``folder``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (status.st_size, status.st_mtime_ns, content)
    return found


@contextmanager
def held_by_another_process(path: Path) -> Iterator[int]:
    """Its process id."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def files_of(result: Ran) -> list[dict[str, object]]:
    """The files of ``inspect --json``."""
    assert result.exit_code in (0, 1), result.output
    files = json.loads(result.stdout)["files"]
    assert isinstance(files, list)
    return files


def only_file(directory: Path) -> dict[str, object]:
    """What ``inspect --json`` says of the only file."""
    (found,) = files_of(run("disk", "inspect", str(directory), "--json"))
    return found
