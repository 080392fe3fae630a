"""What SGLang's own code says of model families; runs where SGLang is installed."""

from __future__ import annotations


def have_windows(architectures: list[str]) -> list[bool]:
    """Whether the layers with a window have a pool of their own (SWAKVPool); else they keep all tokens."""
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    return [bool(is_hybrid_swa_model([name])) for name in architectures]
