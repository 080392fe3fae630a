"""Runs real vLLM engines, each in a process of its own, and says what their results must be."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvbm_core.testing.verdicts import judges
from tests.engines import REPOSITORY
from tests.engines.forks import Forks
from tests.engines.job import run_job
from tests.engines.worker import Worker

TIMEOUT_S = 420
AUDITED = "KVBM_TEST_AUDITED"
"""The variable that names a file to which the audit's counters of all jobs go, but of those that spoil
blocks.
"""
IMPORTED = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm")


@cache
def forks() -> Forks:
    """Where engines are forked, with vLLM imported."""
    started = Forks(sys.executable, IMPORTED, {"VLLM_LOGGING_LEVEL": "WARNING", **_plain_variables()})
    atexit.register(started.close)
    return started


def run_engine(
    folder: Path, job: dict[str, Any], module: str = "tests.e2e.offline", **environment: str
) -> dict[str, Any]:
    """The result of one job of ``module``; "bytes" is the byte ledger of each rank."""
    env = _variables(folder, environment)
    result = run_job(forks().start, module, job, folder, environment=env, timeout_s=TIMEOUT_S)
    _note_audits(result, job.get("rounds", ()))
    return result | {"bytes": _ledgers(folder)}


class Engine:
    """One engine that several tests ask. It starts when it is made; ``close`` ends it."""

    def __init__(self, folder: Path, job: dict[str, Any], **environment: str) -> None:
        self._folder = folder
        folder.mkdir()
        self._worker = Worker(forks().start, _variables(folder, environment), folder / "log.txt")
        self._worker.run("tests.e2e.offline:start", job=job)

    def serve(self, rounds: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        """What ``run_engine`` returns, of these rounds alone. ``how``: see tests.e2e.offline.serve."""
        before = _ledgers(self._folder)
        result: dict[str, Any] = self._worker.run("tests.e2e.offline:serve", rounds=rounds, **how)
        _note_audits(result, rounds)
        after = _ledgers(self._folder)
        counted = [
            {name: number - (before[rank][name] if before else 0) for name, number in counts.items()}
            for rank, counts in enumerate(after)
        ]
        return result | {"bytes": counted, "log": self._worker.log.read_text(errors="replace")}

    def close(self) -> None:
        """Ends its process."""
        self._worker.close()


def _note_audits(result: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> None:
    if AUDITED in os.environ and not any(spec.get("swaps") for spec in rounds):
        counted = {name: n for name, n in result.get("metrics", {}).items() if "audited" in name}
        with open(os.environ[AUDITED], "a") as file:
            file.write(json.dumps(counted) + "\n")


def _variables(folder: Path, more: dict[str, str]) -> dict[str, str]:
    own = {"DYN_KVBM_CPU_CACHE_GB": "0.5", "KVBM_TEST_BYTES_REPORT": str(folder / "bytes")}
    own["KVBM_START_WAIT_S"] = "60"  # or on a busy machine the first request may come before the disk
    return {**_plain_variables(), **own, **more}


def _plain_variables() -> dict[str, str]:
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths}


def _ledgers(folder: Path) -> list[dict[str, int]]:
    """Of each rank, as far as it has been written."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("bytes.?"))]


def answers(result: dict[str, Any], round_index: int) -> list[list[int]]:
    """The tokens of every answer of one round."""
    return [entry["tokens"] for entry in result["rounds"][round_index]]


def cached(result: dict[str, Any], round_index: int) -> list[int]:
    """How many prompt tokens were not computed, prompt by prompt."""
    return [entry["cached_tokens"] for entry in result["rounds"][round_index]]


@judges
def assert_nothing_left(result: dict[str, Any]) -> None:
    """No job, request, lease or half-written block is left over, and no guard was needed."""
    assert set(result["open"].values()) == {0}, result["open"]
    guarded = {name: value for name, value in result["metrics"].items() if "guarded" in name and value}
    assert not guarded, guarded


@judges
def assert_bytes_equal(result: dict[str, Any], ranks: int, at_least: int) -> None:
    """On every rank, blocks came back, and all of them with the bytes that were written."""
    assert len(result["bytes"]) == ranks, result["log"][-2000:]
    for counts in result["bytes"]:
        assert counts["onboarded"] >= at_least, counts
        assert (counts["different"], counts["unknown"]) == (0, 0), counts
