"""Bytes of a token's KV for each kind of model, made-up loads, and which sizes are advised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.identity.layers import STATES
from kvbm_core.replay.machine import EVERYTHING, FILTER
from kvbm_core.replay.trace import Trace, request_of
from kvbm_core.sizing.advice import NEAR_POINTS, Advice, Adviser, Limits
from kvbm_core.sizing.hardware import GPUS, Hardware, gpu_of, with_overrides
from kvbm_core.sizing.load import Load
from kvbm_core.sizing.model import Model, SizingError, read_model

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {
    **LLAMA_8B,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA3 = {
    "text_config": {
        **LLAMA_8B,
        "num_hidden_layers": 12,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "model_type": "gemma3",
}


QWEN3_NEXT = {
    **LLAMA_8B,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
}
QWEN35_27B = {
    "text_config": {
        **QWEN3_NEXT,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    }
}
QWEN35_35B_A3B = {**QWEN3_NEXT, "num_hidden_layers": 40, "full_attention_interval": 4}
NEMOTRON_NANO_9B = {
    **LLAMA_8B,
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
GRANITE4_SMALL = {
    **LLAMA_8B,
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ssm_cache_dtype": "float32",
}
KIMI_LINEAR = {
    **DEEPSEEK_V3,
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 28) if layer % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
LFM2 = {**LLAMA_8B, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
NO_LIMITS = Limits()


def model_of(folder: Path, config: object) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(str(folder))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "ranks", "dtype", "expected"),
    [
        (LLAMA_8B, 1, "auto", 2 * 32 * 8 * 128 * 2),
        (LLAMA_8B, 8, "auto", 2 * 32 * 8 * 128 * 2),  # split over the ranks
        (LLAMA_8B, 16, "auto", 2 * 2 * 32 * 8 * 128 * 2),  # each head on two ranks
        (LLAMA_8B, 1, "fp8", 2 * 32 * 8 * 128),
        (LLAMA_8B, 1, "fp8_e4m3", 2 * 32 * 8 * 128),
        ({**LLAMA_8B, "torch_dtype": "float32"}, 1, "auto", 2 * 32 * 8 * 128 * 4),
        (without(LLAMA_8B, "num_key_value_heads"), 1, "auto", 2 * 32 * 32 * 128 * 2),  # MHA
        ({**without(LLAMA_8B, "num_key_value_heads"), "multi_query": True}, 1, "auto", 2 * 32 * 128 * 2),
        ({**LLAMA_8B, "head_dim": 64}, 1, "auto", 2 * 32 * 8 * 64 * 2),
        (DEEPSEEK_V3, 1, "auto", 61 * 576 * 2),
        (DEEPSEEK_V3, 8, "auto", 8 * 61 * 576 * 2),  # the same latents on each rank
        ({**DEEPSEEK_V3, "index_head_dim": 128}, 1, "auto", 61 * (576 * 2 + 132)),
        (GEMMA3, 1, "auto", 2 * 12 * 4 * 256 * 2),
        ({**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"] * 16}, 1, "auto", 16 * 4096),
        ({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 1, "auto", 2 * 12 * 768 * 2),
    ],
)
def test_bytes_of_a_token(
    config: dict[str, Any], ranks: int, dtype: str, expected: int, tmp_path: Path
) -> None:
    assert model_of(tmp_path, config).kv(ranks, dtype).stored_bytes == expected


@pytest.mark.parametrize(
    ("config", "layers", "state_mb", "token_kib"),
    [
        (QWEN3_NEXT, 36, 77.3, 24),
        (QWEN35_27B, 48, 154, 64),
        (NEMOTRON_NANO_9B, 27, 144, 16),
        (GRANITE4_SMALL, 36, 153, 16),
        ({**GRANITE4_SMALL, "mamba_ssm_cache_dtype": "bfloat16"}, 36, 77.3, 16),
        (KIMI_LINEAR, 21, 45.6, 6.75),
        (LFM2, 1, 0.0164, 4),
    ],
)
def test_states_are_sized_and_not_predicted(
    config: dict[str, Any], layers: int, state_mb: float, token_kib: float, tmp_path: Path
) -> None:
    model = model_of(tmp_path, config)
    assert model.state_bytes / 1e6 == pytest.approx(state_mb, rel=0.01)
    assert model.kv(1, "auto").stored_bytes == token_kib * 1024
    with pytest.raises(SizingError) as error:
        model.check_predictable()
    line = str(error.value)
    tokens = model.state_bytes // model.kv(1, "auto").stored_bytes
    assert "\n" not in line and f"{layers} of {len(model.kinds)} layers keep states" in line
    assert f"{state_mb:,.0f} MB, as much as {tokens:,} tokens" in line


def test_what_the_page_says_of_states(tmp_path: Path) -> None:
    """The figures of docs/hybrid.md, rounded as there."""
    configs = {
        "Qwen3-Next-80B-A3B": QWEN3_NEXT,
        "Qwen3.5, 27B": QWEN35_27B,
        "Qwen3.5, 35B-A3B": QWEN35_35B_A3B,
        "Nemotron Nano 9B v2": NEMOTRON_NANO_9B,
        "Granite 4 H Small": GRANITE4_SMALL,
    }
    page = (Path(__file__).resolve().parents[2] / "docs" / "hybrid.md").read_text(encoding="utf-8")
    pattern = r"^\| ([^|(]+) \((\d+)[^|]*\) \| (\d+) MB \| (\d+) KiB \| ([\d,]+) tokens \|$"
    found = re.findall(pattern, page, re.MULTILINE)
    rows = {name: (layers, mb, kib, tokens) for name, layers, mb, kib, tokens in found}
    assert rows.keys() == configs.keys()
    for name, config in configs.items():
        model = model_of(tmp_path / name, config)
        token_bytes, layers = model.kv(1, "auto").stored_bytes, sum(kind in STATES for kind in model.kinds)
        tokens = round(model.state_bytes / token_bytes, -2)
        said = (str(layers), f"{model.state_bytes / 1e6:.0f}", f"{token_bytes / 1024:.0f}", f"{tokens:,.0f}")
        assert said == rows[name], name


def test_states_whose_size_is_not_said(tmp_path: Path) -> None:
    model = model_of(tmp_path, {**LLAMA_8B, "layer_types": ["mamba", "attention"] * 16})
    assert model.state_bytes == 0
    with pytest.raises(SizingError, match="16 of 32 layers keep states, whose hits are not predicted: give"):
        model.check_predictable()
    model_of(tmp_path, LLAMA_8B).check_predictable()


def test_the_device_keeps_windows_alone(tmp_path: Path) -> None:
    model = model_of(tmp_path, GEMMA3)
    assert model.kinds.count("sliding_attention") == 10
    assert model.kv(1, "auto").device_bytes == 2 * 2 * 4 * 256 * 2
    assert any("window" in note for note in model.notes)
    whole = model_of(tmp_path, {**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False})
    assert set(whole.kinds) == {"full_attention"}


def test_sizes_of_weights(tmp_path: Path) -> None:
    assert model_of(tmp_path / "a", LLAMA_8B).weights_bytes == pytest.approx(16.06e9, rel=0.01)
    deepseek = model_of(tmp_path / "b", DEEPSEEK_V3)
    assert deepseek.weights_bytes == pytest.approx(680e9, rel=0.15)
    assert deepseek.active_parameters == pytest.approx(37e9, rel=0.3)
    (tmp_path / "a" / "model.safetensors").write_bytes(bytes(1000))
    model = model_of(tmp_path / "a", LLAMA_8B)
    assert model.weights_bytes == 1000 and not model.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no object"),
        ("{}", "no model that kvbm can size: 'it has no hidden_size'"),
        (json.dumps({**LLAMA_8B, "num_attention_heads": 0}), "no model that kvbm can size"),
        (json.dumps({**LLAMA_8B, "num_hidden_layers": 0}), "no model that kvbm can size"),
    ],
)
def test_what_is_no_config(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SizingError, match=said) as error:
        read_model(str(tmp_path))
    assert "\n" not in str(error.value)


def test_models_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SizingError, match=r"hf download some/model config.json"):
        read_model("some/model")
    with pytest.raises(SizingError, match="cannot be read: No such file"):
        read_model(str(tmp_path))


def test_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "models--some--model", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_model("some/model").kv(1, "auto").stored_bytes == 131072


def test_what_cannot_be_split_or_is_no_dtype(tmp_path: Path) -> None:
    model = model_of(tmp_path, LLAMA_8B)
    with pytest.raises(SizingError, match="--tp 3: the 8 KV heads"):
        model.kv(3, "auto")
    with pytest.raises(SizingError, match="--kv-dtype int3"):
        model.kv(1, "int3")


# ---------------------------------------------------------------- loads


def test_a_load_is_what_was_asked_for() -> None:
    load = Load(users=40, turns=4, system_tokens=640, prompt_tokens=300, answer_tokens=200, think_s=10)
    trace = load.trace(64)
    assert load.trace(64) == trace and Load(users=40, seed=2).trace() != Load(users=40, seed=3).trace()
    assert 0 < trace.seconds <= 3600
    firsts = [request for request in trace.requests if len(request.ids) and request.prompt_tokens < 1200]
    assert {tuple(request.ids[:10]) for request in firsts} == {tuple(range(10))}, (
        "the system prompt is shared"
    )
    # Each user asks every 10 s, and reads an answer for 200 / 30 s.
    assert len(trace.requests) == pytest.approx(40 * 3600 / (10 + 200 / 30), rel=0.1)
    new_tokens = sum(len(r.ids) * 64 - r.prompt_blocks * 64 for r in trace.requests) / len(trace.requests)
    assert new_tokens == pytest.approx(200, rel=0.1)  # the answers


def test_a_conversation_ends_where_the_model_does() -> None:
    trace = Load(users=2, turns=50, prompt_tokens=900, answer_tokens=900, max_tokens=4096).trace()
    assert max(request.prompt_tokens for request in trace.requests) <= 4096
    assert Load(users=1, system_tokens=9000, max_tokens=4096, seconds=60).trace().requests


# ---------------------------------------------------------------- advice


def advise(
    folder: Path, trace: Trace, limits: Limits = NO_LIMITS, hardware: Hardware | None = None
) -> Advice:
    model = model_of(folder, LLAMA_8B)
    hardware = hardware or Hardware(gpu_of("h100"))
    return Adviser(trace, model, model.kv(hardware.num_ranks, "auto"), hardware, limits).advise()


def busy_trace() -> Trace:
    return Load(users=80, turns=6, prompt_tokens=2000, think_s=60, seconds=1500).trace(256)


def test_the_smallest_that_finds_nearly_all_is_taken(tmp_path: Path) -> None:
    advice = advise(tmp_path, busy_trace(), hardware=Hardware(gpu_of("l4"), device_cache_gb=10))
    hosts = [choice for choice in advice.choices if choice.host_gb and not choice.disk_gb]
    best = max(choice.rate for choice in hosts)
    assert advice.taken is next(choice for choice in hosts if choice.rate >= best - NEAR_POINTS)
    assert advice.taken.rate > advice.choices[0].rate + 0.1
    assert [choice.host_gb for choice in hosts] == sorted({choice.host_gb for choice in hosts})
    for choice in advice.choices:
        assert choice.rates.worse <= choice.rate + 0.2 and choice.rates.better >= choice.rate - 0.2
        assert choice.start.p50_s.better < choice.start.p50_s.worse
        assert choice.start.p50_s.worse <= choice.start.p90_s.worse
    gb = advice.environment[0].removeprefix("export DYN_KVBM_CPU_CACHE_GB=")
    assert advice.taken.host_gb <= float(gb) <= advice.taken.host_gb + 1
    alone, taken = advice.choices[0], advice.taken
    assert taken.start.p90_s.worse < alone.start.p90_s.worse
    assert [rate for _, rate in advice.curve] == sorted(rate for _, rate in advice.curve)


def test_where_the_host_is_bounded_a_disk_is_advised(tmp_path: Path) -> None:
    small = Hardware(gpu_of("l4"), device_cache_gb=10)
    advice = advise(tmp_path, busy_trace(), Limits(host_gb=20, disk_gb=4000), small)
    assert advice.taken.disk_gb > advice.taken.host_gb == pytest.approx(20, rel=0.01)
    assert advice.taken.written_tb_per_day > 0
    assert "export DYN_KVBM_DISK_CACHE_GB=" in advice.environment[1]
    policies = {choice.policy for choice in advice.choices if choice.disk_gb}
    assert policies == {FILTER, EVERYTHING}
    worn = [choice for choice in advice.choices if choice.drive_writes_per_day > 1]
    assert advice.taken.policy is FILTER or advice.taken not in worn


def test_a_disk_that_bears_it_may_take_everything(tmp_path: Path) -> None:
    # Each document is asked about twice, long after the host and the filter have forgotten it.
    requests = [
        request_of(t * 1.0, 2561, tuple(range(10 * (t % 1200), 10 * (t % 1200) + 10)), 256)
        for t in range(2400)
    ]
    small = Hardware(gpu_of("l4"), device_cache_gb=1)
    limits = Limits(host_gb=4, disk_gb=1000, drive_writes_per_day=1000)
    advice = advise(tmp_path, Trace("t", 256, requests), limits, small)
    assert advice.taken.policy is EVERYTHING
    assert "export DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=true" in advice.environment
    limits = limits._replace(drive_writes_per_day=0.01)
    assert advise(tmp_path, Trace("t", 256, requests), limits, small).taken.policy is not EVERYTHING


def test_rules_are_warnings(tmp_path: Path) -> None:
    advice = advise(
        tmp_path, busy_trace(), Limits(host_gb=5, disk_gb=3), Hardware(gpu_of("l4"), device_cache_gb=10)
    )
    assert not advice.taken.host_gb
    assert "within these limits nothing finds more than the device alone" in " ".join(advice.warnings)
    lone = Trace("t", 256, [request_of(0, 600_000, range(2343), 256), request_of(9000, 10, [], 256)])
    (line, *_) = advise(tmp_path, lone).warnings
    assert "the device alone" in line
    assert any("prompts have up to 600,000 tokens" in line for line in advise(tmp_path, lone).warnings)


def test_a_load_that_is_too_much_for_one_engine_is_told(tmp_path: Path) -> None:
    slow = Hardware(gpu_of("l4"), device_cache_gb=10, prefill_tokens_s=100)
    assert any(
        "such engines or more" in line for line in advise(tmp_path, busy_trace(), hardware=slow).warnings
    )


def test_room_on_the_device() -> None:
    assert Hardware(gpu_of("H100")).device_gb(16e9) == pytest.approx(80 * 0.9 - 16 - 1.6)
    assert Hardware(gpu_of("h100"), 2, weights_gb=100).device_gb(1) == pytest.approx(160 * 0.9 - 100 - 3.2)
    with pytest.raises(SizingError, match="leave no room for KV"):
        Hardware(gpu_of("l4")).device_gb(140e9)
    with pytest.raises(SizingError, match="--gpu z80: not known; one of a10"):
        gpu_of("z80")
    assert with_overrides(GPUS["l4"], None, 300, None) == GPUS["l4"]._replace(tflops=300)
