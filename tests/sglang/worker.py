"""Runs functions in a process of SGLang's environment, one after the other: importing SGLang takes seconds.

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
from pathlib import Path
from typing import Any

from tests.engines import REPOSITORY
from tests.engines.sglang.environment import PYTHON, variables


class Worker:
    """The process, from the tests' side. ``log``: what SGLang and kvbm write."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "tests.sglang.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=REPOSITORY,
                env=variables(),
            )

    def run(self, call: str, **kwargs: Any) -> Any:
        """The function's result; AssertionError with its traceback if it raised."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"call": call, "kwargs": kwargs}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the process ended:\n{self._log.read_text()[-3000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


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
