"""Two engines under vLLM's own scheduler on one shared directory that fills up: it costs misses only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.storage.directory.evictor import LEAST_BETWEEN_S, LOW_MARK, Evictor
from kvbm_core.storage.directory.names import is_temporary
from tests.unit.directory_stores import files_below
from tests.unit.doctor_bench import mounted
from tests.vllm.kvbm_engine import KvbmEngine

LIMIT_BYTES = 500_000
FILE_SYSTEM = "size=1m"
"""Engines write more than the limit between two passes of the evictor."""
WHOLE_TOKENS = 48
WRITE_FAILURES, READ_FAILURES = "kvbm_object_write_failures", "kvbm_object_read_failures"


@pytest.fixture
def evictors(monkeypatch: pytest.MonkeyPatch) -> list[Evictor]:
    """Those of all engines, each of which works when the test says so and not before."""
    made: list[Evictor] = []
    make = Evictor.__init__

    def noted(self: Evictor, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Evictor, "__init__", noted)
    monkeypatch.setattr(Evictor, "_work", lambda self: None)
    return made


class Asker:
    """Asks one of the engines, each time with an empty device and host; what it answers is right."""

    def __init__(self, engine: KvbmEngine, alone: KvbmEngine) -> None:
        self.engine, self._alone = engine, alone
        self._numbers = count()

    def ask(self, start: int) -> int:
        """How many tokens of this prompt came from the directory."""
        prompt, name = range(start, start + 50), f"{start} {next(self._numbers)}"
        expected = self._alone.ask(f"{name} {id(self)}", prompt, 4)
        assert self.engine.ask(name, prompt, 4) == expected
        return self.engine.external_tokens(name)

    def forget(self) -> None:
        self.engine.settle()
        assert self.engine.reset_device(with_connector=True)

    def failed(self, what: str = WRITE_FAILURES) -> float:
        return self.engine.metric(what)


def blocks_below(share: Path) -> list[Path]:
    """The files of blocks."""
    return [path for path in files_below(share) if path.suffix == ".kv"]


def use_in_turns(one: Asker, two: Asker, starts: Iterator[int]) -> None:
    """Both store what is new, and find what is new of the other one."""
    for writer, reader in ((one, two), (two, one)):
        start, failed = next(starts), writer.failed()
        assert writer.ask(start) == 0
        writer.forget()
        assert writer.failed() == failed
        assert reader.ask(start) == WHOLE_TOKENS
        reader.forget()


def test_a_directory_that_fills_up_costs_misses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evictors: list[Evictor]
) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(SystemClock, "now_s", lambda self: time.monotonic() + ahead_s)
    extra = {"remote_cache_gb": LIMIT_BYTES / 1e9, "remote_load": "always"}
    with mounted(tmp_path / "share", "tmpfs", FILE_SYSTEM) as share:
        engine = {"host_blocks": 60, "store": f"file://{share}", "extra": extra}
        with (
            KvbmEngine(tmp_path, host_blocks=60) as alone,
            KvbmEngine(tmp_path, **engine) as first,  # type: ignore[arg-type]
            KvbmEngine(tmp_path, **engine) as second,  # type: ignore[arg-type]
        ):
            one, two, starts = Asker(first, alone), Asker(second, alone), count(0, 100)
            use_in_turns(one, two, starts)

            while not (one.failed() and two.failed()):  # both at once, into what is left
                shared, *own = (next(starts) for _ in range(3))
                for asker, start in zip((one, two), own, strict=True):
                    asker.ask(start)
                    asker.ask(shared)
                one.forget(), two.forget()
            assert sum(path.stat().st_size for path in blocks_below(share)) > LIMIT_BYTES
            for asker in (one, two):  # what is there is read, and what is new is computed
                assert asker.ask(0) == WHOLE_TOKENS and asker.ask(next(starts)) == 0
                asker.forget()

            ahead_s += LEAST_BETWEEN_S
            passes = [seen for evictor in evictors if (seen := evictor.tick()) is not None]
            (seen,) = passes
            assert seen.removed_blocks and seen.left_bytes <= LOW_MARK * LIMIT_BYTES
            use_in_turns(one, two, starts)

            filler = share / "by somebody else"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            for asker in (one, two):
                start, failed = next(starts), asker.failed()
                assert asker.ask(start) == 0
                asker.forget()
                assert asker.failed() > failed and asker.ask(start) == 0, "it was not kept"
                asker.forget()
            filler.unlink()
            use_in_turns(one, two, starts)

            assert one.failed(READ_FAILURES) == two.failed(READ_FAILURES) == 0
            assert not [path for path in files_below(share) if is_temporary(path.name)]
            assert os.statvfs(share).f_bavail
            for asker in (one, two):
                asker.engine.assert_clean()
