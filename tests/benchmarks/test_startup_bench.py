"""The benchmark of a start with much on the disk: it finds everything again, notices if not, and leaves no
file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from benchmarks.storage import startup
from benchmarks.suite import WrongAnswer


def test_a_start_that_misses_a_record_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = startup._write_headers
    monkeypatch.setattr(startup, "_write_headers", lambda file, slots: real(file, slots[1:]))
    with pytest.raises(WrongAnswer, match=r"392 of 400 records were found again"):
        startup.measure(tmp_path, 1, lambda text: None, stored_bytes=100 << 20)
    assert not list(tmp_path.iterdir())
