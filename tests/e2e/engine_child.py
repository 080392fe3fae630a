"""Runs one real vLLM engine in a fresh process, and says what its result must be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines import REPOSITORY
from tests.engines.job import run_job

TIMEOUT_S = 420


def run_engine(
    folder: Path, job: dict[str, Any], module: str = "tests.e2e.offline", **environment: str
) -> dict[str, Any]:
    """The result of one job of ``module``; "bytes" is the byte ledger of each rank."""
    env = {
        **os.environ,
        "DYN_KVBM_CPU_CACHE_GB": "0.5",
        "KVBM_TEST_BYTES_REPORT": str(folder / "bytes"),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environment,
    }
    result = run_job(sys.executable, module, job, folder, environment=env, timeout_s=TIMEOUT_S)
    return result | {"bytes": [json.loads(path.read_text()) for path in sorted(folder.glob("bytes.*"))]}


def answers(result: dict[str, Any], round_index: int) -> list[list[int]]:
    """The tokens of every answer of one round."""
    return [entry["tokens"] for entry in result["rounds"][round_index]]


def cached(result: dict[str, Any], round_index: int) -> list[int]:
    """How many prompt tokens were not computed, prompt by prompt."""
    return [entry["cached_tokens"] for entry in result["rounds"][round_index]]


def assert_nothing_left(result: dict[str, Any]) -> None:
    """No job, request, lease or half-written block is left over, and no guard was needed."""
    assert set(result["open"].values()) == {0}, result["open"]
    guarded = {name: value for name, value in result["metrics"].items() if "guarded" in name and value}
    assert not guarded, guarded


def assert_bytes_equal(result: dict[str, Any], ranks: int, at_least: int) -> None:
    """On every rank, blocks came back, and all of them with the bytes that were written."""
    assert len(result["bytes"]) == ranks, result["log"][-2000:]
    for counts in result["bytes"]:
        assert counts["onboarded"] >= at_least, counts
        assert (counts["different"], counts["unknown"]) == (0, 0), counts
