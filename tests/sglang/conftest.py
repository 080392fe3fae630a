"""What the tests with SGLang share: a process with its classes, and tiny models for its engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.sglang.environment import PYTHON, ROOT, variables
from tests.sglang.worker import Worker


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """SGLang's classes without an engine."""
    worker = Worker(tmp_path_factory.mktemp("sglang") / "log.txt")
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model with random weights, by its kind (see benchmarks.tiny_model)."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def build(kind: str) -> Path:
        command = [str(PYTHON), "-m", "benchmarks.tiny_model", str(folder / kind), "--kind", kind]
        done = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder / kind

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny: Callable[[str], Path]) -> Path:
    """A tiny Qwen3: keys and values of every head."""
    return tiny("qwen3")
