"""What the tests with SGLang share: a process with its classes, and tiny models for its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.engines.sglang.engine import forks
from tests.engines.sglang.environment import variables
from tests.engines.worker import Worker


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """SGLang's classes without an engine."""
    worker = Worker(forks().start, variables(), tmp_path_factory.mktemp("sglang") / "log.txt")
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def tiny(sglang: Worker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model with random weights, by its kind (see tests.engines.tiny_model)."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def build(kind: str) -> Path:
        sglang.run("tests.engines.tiny_model:build", folder=str(folder / kind), kind=kind)
        return folder / kind

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny: Callable[[str], Path]) -> Path:
    """A tiny Qwen3: keys and values of every head."""
    return tiny("qwen3")
