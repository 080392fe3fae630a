"""One engine in a process of its own: it is given a job as JSON and leaves its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tests.engines.forks import Start
from tests.engines.process import in_folder

_number = count()


class EngineFailed(Exception):
    """It ended without a result; the message says whether it was ended, and has the last lines of its log."""


class EngineLate(EngineFailed, TimeoutError):
    """It was ended, as its time was over."""


def run_job(
    start: Start,
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    environment: Mapping[str, str],
    timeout_s: float,
) -> dict[str, Any]:
    """The result of ``python -m module JOB.json RESULT.json``; its "log" is what it wrote. The files are in
    ``folder``, and several jobs may share one.

    It has a session of its own: a job that kills itself takes its workers along, and nobody else. In the log
    of one that takes too long, or crashes, is where its threads were; one that somebody kills says nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = next(_number)
    job_file, result_file, log_file = (
        folder / f"{name}-{number}.{suffix}"
        for name, suffix in (("job", "json"), ("result", "json"), ("log", "txt"))
    )
    job_file.write_text(json.dumps(job))
    arguments = [str(job_file), str(result_file)]
    with (
        log_file.open("w") as log,
        open(os.devnull) as nothing,
        tempfile.TemporaryDirectory(prefix="kvbm-job-", ignore_cleanup_errors=True) as scratch,
    ):
        files = [nothing.fileno(), log.fileno(), log.fileno()]
        variables = in_folder(environment, Path(scratch) / "tmp")
        process = start(module, arguments, {"PYTHONFAULTHANDLER": "1", **variables}, files)
        how, failed = "ended", EngineFailed
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            how, failed = f"had {timeout_s:g} s, and was ended", EngineLate
            process.abort()
        finally:
            process.kill()
    log_text = log_file.read_text(errors="replace")
    if not result_file.is_file():
        raise failed(f"the engine {how} without a result:\n{log_text[-4000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result | {"log": log_text}
