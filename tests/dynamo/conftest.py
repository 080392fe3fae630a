"""What the tests under Dynamo share: the tiny model, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tiny_model import build_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights."""
    return build_model(tmp_path_factory.mktemp("tiny") / "qwen3")
