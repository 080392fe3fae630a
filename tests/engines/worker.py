"""A process that runs functions, one after the other: an engine takes long to import and to start.

A line of JSON in, {"call": "module:function", "kwargs": {...}}, a line of JSON out: {"result": ...} or
{"error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engines.forks import Start
from tests.engines.process import in_folder


class Worker:
    """The process, from the tests' side. ``log``: what the engine and kvbm write. A call that is interrupted
    ends the process, as nobody would read its answer; the next one begins another.
    """

    def __init__(self, start: Start, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._start, self._environment = start, environment
        self._begin()

    def run(self, call: str, **kwargs: Any) -> Any:
        """The function's result; AssertionError with its traceback if it raised."""
        if self._answers.closed:
            self._begin()
        line = ""
        try:
            self._orders.write(json.dumps({"call": call, "kwargs": kwargs}) + "\n")
            self._orders.flush()
            line = self._answers.readline()
        finally:
            if not line:
                self.close()
        assert line, f"the process ended:\n{self.log.read_text(errors='replace')[-4000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """Ends it, with what it has started. Idempotent."""
        with suppress(BrokenPipeError):
            self._orders.close()
        self._process.kill()
        self._answers.close()
        self._scratch.cleanup()

    def _begin(self) -> None:
        asked, orders = os.pipe()
        answered, answers = os.pipe()
        self._orders, self._answers = os.fdopen(orders, "w"), os.fdopen(answered)
        self._scratch = tempfile.TemporaryDirectory(prefix="kvbm-worker-", ignore_cleanup_errors=True)
        variables = in_folder(self._environment, Path(self._scratch.name) / "tmp")
        with self.log.open("a") as file:
            self._process = self._start(
                "tests.engines.worker", (), variables, [asked, answers, file.fileno()]
            )
        os.close(asked)
        os.close(answers)


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
