"""Which starts of SGLang share pages: its own arguments and model configuration, each in a folder of its own.

Runs in SGLang's process.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbm_core.identity.roots import NO_ADAPTER, Roots
from kvbm_core.identity.weights import CLOCK_TICK_NS, WeightsIdentity
from kvbm_sglang.engine_settings import code_of, describe_engine, effective
from kvbm_sglang.identity import device_namespace_of
from kvbm_sglang.weights import weight_sources
from tests.engines import PATIENCE_S

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}


def keys(setups: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """For each start the parent of its first page, and whether it lasts. A start: ``arguments`` of SGLang,
    ``model`` (of config.json), ``files`` beside the weights, ``environ``.
    """
    return [_key(setup) for setup in setups]


def _key(setup: dict[str, Any]) -> tuple[str, bool]:
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"model.safetensors": "weights", **setup.get("files", {})}
        files["config.json"] = json.dumps({**MODEL, **setup.get("model", {})})
        for file, text in files.items():
            (folder / file).write_text(text)
        args = ServerArgs(
            model_path=name, **{"device": "cpu", "skip_tokenizer_init": True, **setup.get("arguments", {})}
        )
        engine = describe_engine(args, environ={**os.environ, **setup.get("environ", {})})
        weights = _weights_of(effective(args), folder, code_of(args))
        namespace = device_namespace_of("model", (), 64, {}, engine)
        root = Roots(namespace, weights.stamp, is_lasting=engine.is_lasting).of(NO_ADAPTER, None, "layout")
        return root.hash.hex(), root.is_lasting


def _weights_of(args: Any, folder: Path, code: frozenset[str]) -> WeightsIdentity:
    """As an engine has them that begins now, and has found out what they are."""
    while time.time_ns() - max(path.stat().st_ctime_ns for path in folder.iterdir()) < 2 * CLOCK_TICK_NS:
        pass
    weights = WeightsIdentity(weight_sources(args, str(folder), code), time.time_ns())
    weights.start()
    assert weights.wait(PATIENCE_S)
    weights.close()
    return weights
