"""Starts tests.e2e.offline in a fresh process and reads back what it and the byte ledger wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 420


def run_engine(folder: Path, job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """The result of one job; "bytes" is the ledger of each rank. Fails with the child's last lines if it
    failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file, result_file, log_file = folder / "job.json", folder / "result.json", folder / "log.txt"
    job_file.write_text(json.dumps(job))
    env = {
        **os.environ,
        "DYN_KVBM_CPU_CACHE_GB": "0.5",
        "KVBM_TEST_BYTES_REPORT": str(folder / "bytes"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environment,
    }
    command = [sys.executable, "-m", "tests.e2e.offline", str(job_file), str(result_file)]
    with log_file.open("w") as log:
        # A session of its own: a job that kills itself takes its workers along, and nobody else.
        done = subprocess.run(
            command,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    assert result_file.is_file(), f"engine ended with {done.returncode}:\n{log_file.read_text()[-4000:]}"
    result: dict[str, Any] = json.loads(result_file.read_text())
    result["bytes"] = [json.loads(path.read_text()) for path in sorted(folder.glob("bytes.*"))]
    result["log"] = log_file.read_text()
    return result


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
