"""The benchmark of a checked start: it notices what is not found, and leaves no file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from benchmarks.storage import checking
from benchmarks.suite import WrongAnswer
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.record import slot_offset_bytes

GEOMETRY = Geometry(40, 256 << 10, checking.FINGERPRINT)


@pytest.mark.parametrize("measure", [checking.checked_gb_s, checking.read_gb_s])
def test_a_damaged_block_is_noticed(tmp_path: Path, rng: random.Random, measure: object) -> None:
    assert callable(measure)
    with checking.filled(tmp_path / "a.blocks", GEOMETRY, rng) as (path, keys):
        assert len(keys) == 40 and measure(path, GEOMETRY) > 0
        with path.open("r+b") as file:
            file.seek(
                slot_offset_bytes(17, GEOMETRY.payload_bytes) + 4096 + rng.randrange(GEOMETRY.payload_bytes)
            )
            old = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([old[0] ^ 1]))
        with pytest.raises(WrongAnswer, match="39 of 40"):
            measure(path, GEOMETRY)
    assert not path.exists()
