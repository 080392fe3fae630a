"""Keys of TensorRT-LLM's blocks: all that the bytes of a block depend on is in them, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.identity.roots import MAX_KNOWN_ROOTS, Root, Roots, Stamp
from kvbm_core.identity.weights import CLOCK_TICK_NS, WeightsIdentity
from kvbm_trtllm import identity as engine
from kvbm_trtllm.contract import Identity, identity_of, salt_of

pytest.importorskip("torch", reason="NOT RUN: keys of TensorRT-LLM's blocks; torch is missing")

from tests.trtllm.double.llm_args import classes_of

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32
LAYOUT = "0" * 32
PLAIN = Identity("", None, None, False)


class QuantAlgo(str, Enum):
    """As TensorRT-LLM's."""

    FP8 = "FP8"
    NVFP4 = "NVFP4"


@pytest.fixture
def model(tmp_path: Path, rng: random.Random) -> Path:
    """A folder as models have them."""
    return make_model(tmp_path / "model", rng)


def make_model(folder: Path, rng: random.Random) -> Path:
    """Weights of random bytes."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(rng.randbytes(1000))
    (folder / "config.json").write_text('{"layers": 2}')
    return folder


def llm_args(model: Path | str, *, cache: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Arguments with a field for everything that counts, and some for what does not."""
    values: dict[str, Any] = {
        "model": str(model),
        "revision": None,
        "dtype": "bfloat16",
        "load_format": "auto",
        "quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo=None),
        "tensor_parallel_size": 2,
        "enable_attention_dp": False,
        "moe_config": SimpleNamespace(backend="CUTLASS"),
        "attn_backend": "TRTLLM",
        "sparse_attention_config": None,
        "checkpoint_format": "HF",
        "moe_expert_parallel_size": -1,
        "model_kwargs": None,
        "speculative_config": None,
        "max_batch_size": 64,
    }
    of_cache = {
        "dtype": "auto",
        "tokens_per_block": BLOCK_TOKENS,
        "max_attention_window": None,
        "sink_token_length": 0,
    }
    quantization = {**values, **changes}["quant_config"]
    classes = classes_of("newest")
    return classes["TorchLlmArgs"](
        **{**values, **changes, "quant_config": classes["QuantConfig"](**vars(quantization))},
        kv_cache_config=classes["KvCacheConfig"](**{**of_cache, **(cache or {})}),
    )


def roots_of(args: Any, weights: WeightsIdentity, block_tokens: int = BLOCK_TOKENS) -> Roots:
    """As the leader makes them."""
    description = engine.describe_engine(args)
    namespace = engine.namespace_of(description, block_tokens)
    return Roots(namespace, weights.stamp, is_lasting=description.is_lasting)


def named_roots(args: Any) -> Roots:
    """As ``roots_of``, with weights of a name."""
    description = engine.describe_engine(args)
    return Roots(engine.namespace_of(description, BLOCK_TOKENS), lambda: Stamp("weights", is_lasting=True))


def of(roots: Roots, identity: Identity, layout: str = LAYOUT) -> Root:
    """As the scheduler asks."""
    return roots.of(engine.adapter_of(identity.adapter), identity.salt, layout)


def root_of(
    args: Any, identity: Identity = PLAIN, *, layout: str = LAYOUT, block_tokens: int = BLOCK_TOKENS
) -> bytes:
    """The parent of a request's first block."""
    weights = weights_of(args)
    try:
        return bytes(of(roots_of(args, weights, block_tokens), identity, layout).hash)
    finally:
        weights.close()


def weights_of(args: Any) -> WeightsIdentity:
    """As an engine has them that was started now, and has found out what they are."""
    folder, began_ns = Path(args.model), time.time_ns()
    if folder.is_dir():
        newest_ns = max(path.stat().st_ctime_ns for path in (folder, *folder.iterdir()))
        began_ns = max(began_ns, newest_ns + 2 * CLOCK_TICK_NS)
    weights = engine.weights_identity(args, began_ns)
    weights.start()
    assert weights.wait(20.0)
    return weights


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "KV dtype": {"cache": {"dtype": "fp8"}},
    "KV dtype of the checkpoint": {
        "quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo=QuantAlgo.FP8)
    },
    "quantization": {"quant_config": SimpleNamespace(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=None)},
    "another quantization": {
        "quant_config": SimpleNamespace(quant_algo=QuantAlgo.NVFP4, kv_cache_quant_algo=None)
    },
    "tensor parallel": {"tensor_parallel_size": 4},
    "attention DP": {"enable_attention_dp": True},
    "experts": {"moe_config": SimpleNamespace(backend="TRTLLM")},
    "expert parallel": {"moe_expert_parallel_size": 2},
    "attention backend": {"attn_backend": "FLASHINFER"},
    "sparse attention": {"sparse_attention_config": SimpleNamespace(algorithm="rocket")},
    "checkpoint format": {"checkpoint_format": "mistral"},
    "made-up weights": {"load_format": "dummy"},
    "overrides of the model's configuration": {"model_kwargs": {"rope_theta": 1e6}},
    "an attention window": {"cache": {"max_attention_window": [1024]}},
    "sink tokens": {"cache": {"sink_token_length": 4}},
    "a draft model whose layers share the pool": {
        "speculative_config": SimpleNamespace(speculative_model="draft")
    },
}
NO_CHANGES: dict[str, dict[str, Any]] = {
    "batch size": {"max_batch_size": 8},
    "scheduling": {"enable_chunked_prefill": True, "max_num_tokens": 512, "disable_overlap_scheduler": True},
    "graphs": {"cuda_graph_config": None, "torch_compile_config": None},
    "memory": {"cache": {"free_gpu_memory_fraction": 0.5, "max_tokens": 1000}},
    "reuse": {"cache": {"enable_partial_reuse": False, "enable_block_reuse": True}},
    "the connector": {
        "kv_connector_config": SimpleNamespace(connector_module="kvbm.trtllm_integration.connector")
    },
    "LoRA, which each request names": {"enable_lora": True, "lora_config": SimpleNamespace(max_lora_rank=8)},
    "tokenizer": {"tokenizer": "elsewhere", "skip_tokenizer_init": True},
    "a revision of the same weights": {"revision": "abc"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_bytes_changes_the_key(model: Path, change: str) -> None:
    assert root_of(llm_args(model, **CHANGES[change])) != root_of(llm_args(model))


def test_all_changes_differ_from_each_other(model: Path) -> None:
    roots = [root_of(llm_args(model, **change)) for change in CHANGES.values()]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_does_not_change_bytes_does_not_change_the_key(model: Path, change: str) -> None:
    assert root_of(llm_args(model, **NO_CHANGES[change])) == root_of(llm_args(model))


def test_layout_and_block_size_are_in_the_key(model: Path) -> None:
    plain = root_of(llm_args(model))
    assert root_of(llm_args(model), layout="1" * 32) != plain
    assert root_of(llm_args(model), block_tokens=64) != plain
    roots = named_roots(llm_args(model))
    first, second = of(roots, PLAIN, "1" * 32), of(roots, PLAIN)
    assert of(roots, PLAIN, "1" * 32) == first != second, "a root that was kept is of its layout"


def test_models_by_name_path_and_weights(model: Path, tmp_path: Path, rng: random.Random) -> None:
    other = make_model(tmp_path / "other", rng)
    plain = root_of(llm_args(model))
    assert root_of(llm_args(other)) != plain
    weights = model / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    assert root_of(llm_args(model)) != plain, "trained on"


# ---------------------------------------------------------------- requests


def request(**fields: Any) -> Any:
    """A request as C++ hands it over: what is not bound there is not there."""
    return SimpleNamespace(request_id=1, **fields)


@pytest.mark.parametrize(
    ("fields", "identity"),
    [
        ({}, PLAIN),
        ({"lora_task_id": None, "cache_salt": None, "cache_salt_id": None}, PLAIN),
        ({"lora_task_id": 0}, Identity("0", None, None, False)),
        ({"lora_task_id": 7}, Identity("7", None, None, False)),
        ({"multimodal_hashes": [[1, 2]]}, Identity("", None, "multimodal", False)),
        ({"prompt_embedding_table": object()}, Identity("", None, "multimodal", False)),
        ({"mrope_rotary_cos_sin": object()}, Identity("", None, "multimodal", False)),
        ({"position_ids": [0, 2]}, Identity("", None, "multimodal", False)),
        ({"is_dummy_request": True}, Identity("", None, None, True)),
    ],
)
def test_what_a_request_says_of_itself(fields: dict[str, Any], identity: Identity) -> None:
    assert identity_of(request(**fields)) == identity


def test_salts_of_every_kind_are_kept_apart() -> None:
    requests = [
        request(),
        request(cache_salt=""),
        request(cache_salt="5"),
        request(cache_salt="n5"),
        request(cache_salt="s5"),
        request(cache_salt_id=0),
        request(cache_salt_id=5),
    ]
    salts = [salt_of(found) for found in requests]
    assert salts[0] is None
    assert len(set(salts)) == len(salts)
    assert salt_of(request(cache_salt="5", cache_salt_id=9)) == salt_of(request(cache_salt="5"))


def test_adapters_and_salts_are_kept_apart(model: Path) -> None:
    roots = named_roots(llm_args(model))
    which = [(adapter, salt) for adapter in ("", "0", "1", "11") for salt in (None, "s", "s1", "n1", "s0")]
    found = [of(roots, Identity(adapter, salt, None, False)) for adapter, salt in which]
    assert len(set(found)) == len(which)
    again = [of(roots, Identity(adapter, salt, None, False)) for adapter, salt in which]
    assert again == found


def test_many_salts_take_little_memory_and_stay_right(model: Path) -> None:
    roots = named_roots(llm_args(model))
    first = of(roots, Identity("", "s0", None, False))
    for number in range(2 * MAX_KNOWN_ROOTS):
        of(roots, Identity("", f"s{number}", None, False))
    assert len(roots._known) <= MAX_KNOWN_ROOTS
    assert of(roots, Identity("", "s0", None, False)) == first


def test_an_adapter_is_known_to_this_process_alone(model: Path) -> None:
    roots = named_roots(llm_args(model))
    assert of(roots, PLAIN).is_lasting
    assert not of(roots, Identity("7", None, None, False)).is_lasting


def hashes_of(model: Path | str) -> dict[str, dict[str, str]]:
    """Roots as this process has them: by the way of loading, by the adapter."""
    found = {}
    for load_format in ("auto", "dummy"):
        args = llm_args(model, load_format=load_format)
        roots = roots_of(args, weights_of(args))
        names = {name: Identity(name, "s", None, False) for name in ("", "7")}
        found[load_format] = {name: of(roots, identity, "0").hash.hex() for name, identity in names.items()}
    return found


PROGRAM = """
import json, sys
from tests.unit.test_trtllm_keys import hashes_of

print(json.dumps(hashes_of(sys.argv[1])))
"""


def test_another_process_finds_blocks_unless_their_weights_may_be_others(model: Path) -> None:
    while time.time_ns() - model.stat().st_ctime_ns < 5 * CLOCK_TICK_NS:
        pass  # the engine's process begins after that, by the files' clock
    command = [sys.executable, "-c", PROGRAM, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    first, second = json.loads(done.stdout), hashes_of(model)
    assert first["auto"][""] == second["auto"][""]
    assert first["auto"]["7"] != second["auto"]["7"], "a LoRA is known by its number alone"
    assert first["dummy"][""] != second["dummy"][""], "weights that were made up"


def test_a_model_of_the_hub_that_was_not_downloaded_is_known_to_this_engine_alone() -> None:
    args = llm_args("no-such-organisation/no-such-model")
    weights = weights_of(args)
    first = of(roots_of(args, weights), PLAIN)
    assert of(roots_of(args, weights), PLAIN) == first and not first.is_lasting
    assert root_of(args) != first.hash, "another engine"
