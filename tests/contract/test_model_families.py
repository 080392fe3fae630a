"""What the table of model families says of vLLM's models stands in its sources."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.model_families import FAMILIES, Family

VLLM = find_spec("vllm")
REGISTRY = "model_executor/models/registry.py"
SIGNS = {
    "MambaMixer2",
    "MambaMixer",
    "ShortConv",
    "QwenGatedDeltaNetAttention",
    "CrossAttention",
    "ChunkedLocalAttention",
    "StaticSinkAttention",
    "PrefillPrefixLMAttention",
}
"""Classes of layers that keep something other than plain KV."""

pytestmark = pytest.mark.skipif(VLLM is None, reason="NOT RUN: vLLM's model files; vLLM is not installed")


def source(path: str) -> str:
    """The text of a file of the installed vLLM."""
    assert VLLM is not None and VLLM.origin is not None
    return (Path(VLLM.origin).parent / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_keeps_what_its_files_say(family: Family) -> None:
    assert not family.architecture or f'"{family.architecture}": ' in source(REGISTRY)
    for path, words in family.sources.items():
        text = source(path)
        assert all(word in text for word in words), (path, words)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_of_plain_kv_has_no_other_layers(family: Family) -> None:
    """A model that gets states, or chunks, in a new vLLM has to be looked at."""
    kinds = {kind for layers in family.groups for kind, _ in layers}
    if kinds <= {"FullAttentionSpec", "SlidingWindowSpec"} and "chunk" not in family.name:
        words = {word for words in family.sources.values() for word in words}
        for path in family.sources:
            assert not {sign for sign in SIGNS if f"{sign}(" in source(path)} - words, path
