"""A process that runs functions, one after the other: an engine takes long to import and to start.

A line of JSON in, {"call": "module:function", "kwargs": {...}}, a line of JSON out: {"result": ...} or
{"error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END_TIMEOUT_S = 60.0


class Worker:
    """The process, from the tests' side. ``log``: what the engine and kvbm write."""

    def __init__(self, python: str | Path, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(python), "-m", "tests.engines.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=dict(environment),
            )

    def run(self, call: str, **kwargs: Any) -> Any:
        """The function's result; AssertionError with its traceback if it raised."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"call": call, "kwargs": kwargs}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the process ended:\n{self.log.read_text(errors='replace')[-4000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """Ends it."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def serve() -> None:
    """The process itself."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is log
    for line in sys.stdin:
        asked = json.loads(line)
        module, _, function = asked["call"].partition(":")
        try:
            result = getattr(importlib.import_module(module), function)(**asked["kwargs"])
            answer = json.dumps({"result": result})
        except Exception:
            answer = json.dumps({"error": traceback.format_exc()})
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
