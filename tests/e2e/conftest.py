"""What the real-engine tests share: a tiny hybrid model, built once per run; one thread for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.tiny_model import build_model
from tests.engines.vllm_server import ONE_THREAD


@pytest.fixture(scope="session")
def tiny_hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma3 with sliding windows in every other layer: two KV cache groups."""
    return build_model(tmp_path_factory.mktemp("tiny") / "gemma3", "gemma3")


@pytest.fixture(scope="package", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Several threads would wait for each other by spinning, and vLLM would bind those of all engines that
    run beside each other to the same core.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield
