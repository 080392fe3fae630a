"""What the real-engine tests share: a tiny hybrid model, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.tiny_model import build_model


@pytest.fixture(scope="session")
def tiny_hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma3 with sliding windows in every other layer: two KV cache groups."""
    return build_model(tmp_path_factory.mktemp("tiny") / "gemma3", "gemma3")
