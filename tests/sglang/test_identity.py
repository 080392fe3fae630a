"""Which starts of SGLang share pages: its own ServerArgs and model configuration, not a double of them."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.effort import tries
from tests.engines.worker import Worker

Start = dict[str, Any]
NUM_PAIRS, NUM_SAME = tries(15, nightly=200), 50
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 1024,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}


def arguments(**values: Any) -> Start:
    return {"arguments": values}


def model(**values: Any) -> Start:
    return {"model": values}


def files(of: dict[str, str], **values: Any) -> Start:
    return {"files": of, "arguments": values}


SHAPING: dict[str, list[Start]] = {
    "rope": [model(rope_theta=theta) for theta in (1e4, 1e5)],
    "override": [
        arguments(json_model_override_args=json.dumps({"rope_scaling": {"rope_type": "linear", "factor": f}}))
        for f in (2.0, 4.0)
    ],
    "length with longrope": [
        {"arguments": {"context_length": length}, "model": {"rope_scaling": LONGROPE}}
        for length in (512, 2048)
    ],
    "window": [model(**{**WINDOWED, "sliding_window": tokens}) for tokens in (8, 16)],
    "experts": [model(**{**EXPERTS, "norm_topk_prob": value}) for value in (True, False)],
    "dtype": [arguments(dtype=name) for name in ("float32", "bfloat16")],
    "KV dtype": [arguments(kv_cache_dtype=name) for name in ("auto", "fp8_e5m2", "fp8_e4m3")],
    "attention": [arguments(attention_backend=name) for name in ("torch_native", "intel_amx")],
    "quantization": [arguments(), arguments(quantization="w8a8_int8")],
    "implementation": [arguments(model_impl=name) for name in ("auto", "transformers")],
    "weights": [files({"model.safetensors": text}) for text in ("a", "b")],
    "code": [files({"modeling.py": text}, trust_remote_code=True) for text in ("a", "b")],
    "data of code": [files({"table.txt": text}, trust_remote_code=True) for text in ("a", "b")],
    "pickled": [
        files({"a.pt": "a", "a.bin": "b"}, load_format=load_format) for load_format in ("pt", "npcache")
    ],
    "TF32": [{"environ": {"NVIDIA_TF32_OVERRIDE": value}} for value in ("0", "1")],
    "oneDNN": [{"environ": {"ONEDNN_DEFAULT_FPMATH_MODE": value}} for value in ("STRICT", "BF16")],
}
SHAPES_NOTHING: dict[str, Start] = {
    "port": arguments(port=3333),
    "log": arguments(log_level="debug"),
    "memory": arguments(mem_fraction_static=0.5),
    "requests": arguments(max_running_requests=5),
    "seed": arguments(random_seed=2),
    "name": arguments(served_model_name="another"),
    "chunks": arguments(chunked_prefill_size=64),
    "graphs": arguments(disable_cuda_graph=True),
    "eviction": arguments(radix_eviction_policy="lfu"),
    "overlap": arguments(disable_overlap_schedule=True),
    "metrics": arguments(enable_metrics=True),
    "format": arguments(load_format="safetensors"),
    "threads": arguments(model_loader_extra_config='{"enable_multithread_load": true, "num_threads": 8}'),
    "address": arguments(host="0.0.0.0"),
    "warm-up": arguments(skip_server_warmup=True),
    "key of the API": arguments(api_key="secret"),
    "watchdog": arguments(watchdog_timeout=77),
    "sleep": arguments(sleep_on_idle=True),
    "port of NCCL": arguments(nccl_port=4444),
    "own all-reduce": arguments(disable_custom_all_reduce=True),
    "waiting requests": arguments(max_queued_requests=9),
    "tokens in memory": arguments(max_total_tokens=4096),
    "tokens of a prefill": arguments(max_prefill_tokens=2048),
    "order": arguments(schedule_policy="lpm"),
    "how boldly": arguments(schedule_conservativeness=0.5),
    "steps": arguments(num_continuous_decode_steps=2),
    "streams": arguments(stream_interval=4),
    "reports": arguments(enable_cache_report=True),
    "samplers": arguments(sampling_defaults="openai"),
    "processors of logits": arguments(enable_custom_logit_processor=True),
    "hidden states": arguments(enable_return_hidden_states=True),
    "log of HTTP": arguments(log_level_http="error"),
    "requests in the log": arguments(log_requests=True),
    "folder of dumps": arguments(crash_dump_folder="elsewhere"),
    "times": arguments(show_time_cost=True),
    "intervals of the log": arguments(decode_log_interval=7),
    "traces": arguments(otlp_traces_endpoint="localhost:9"),
    "mmap": arguments(weight_loader_disable_mmap=True),
    "folder of downloads": arguments(download_dir="elsewhere"),
    "memory saver": arguments(enable_weights_cpu_backup=True),
    "template": arguments(hf_chat_template_name="another"),
    "workers of the tokenizer": arguments(detokenizer_worker_num=1, tokenizer_mode="slow"),
    "parsers": arguments(reasoning_parser="qwen3"),
    "grammars": arguments(disable_outlines_disk_cache=True),
    "collector": arguments(gc_threshold=[700, 10, 10]),
    "sessions": arguments(enable_streaming_session=True),
    "port of bootstrap": arguments(disaggregation_bootstrap_port=9999),
    "logged": {"environ": {"SGLANG_LOG_MS": "1"}},
    "tokenizer": files({"tokenizer.json": "{}"}),
    "results": files({"all_results.json": "{}"}),
}


def test_no_pair_that_differs_in_one_thing_that_shapes_k_and_v_shares_a_key(
    sglang: Worker, rng: random.Random
) -> None:
    pairs = []
    for _ in range(NUM_PAIRS):
        name = rng.choice(list(SHAPING))
        around = rng.sample(list(SHAPES_NOTHING.values()), 2)
        pairs.append((name, [joined([start, *around]) for start in rng.sample(SHAPING[name], 2)]))
    found = iter(
        sglang.run("tests.sglang.identities:keys", setups=[start for _, two in pairs for start in two])
    )
    for name, starts in pairs:
        assert next(found)[0] != next(found)[0], f"{name}: {starts}"


def joined(starts: list[Start]) -> Start:
    """All that these say; what the first says counts."""
    parts = {name for start in starts for name in start}
    return {
        part: {k: v for start in reversed(starts) for k, v in start.get(part, {}).items()} for part in parts
    }


def test_values_that_shape_k_and_v_have_keys_of_their_own(sglang: Worker) -> None:
    for name, starts in SHAPING.items():
        found = sglang.run("tests.sglang.identities:keys", setups=starts)
        assert len({key for key, _ in found}) == len(starts), name
        assert all(is_lasting for _, is_lasting in found), name


def test_what_shapes_nothing_changes_no_key(sglang: Worker) -> None:
    assert len(SHAPES_NOTHING) >= NUM_SAME
    plain, *found = sglang.run("tests.sglang.identities:keys", setups=[{}, *SHAPES_NOTHING.values()])
    assert plain[1]
    assert [name for name, key in zip(SHAPES_NOTHING, found, strict=True) if key != plain] == []


def test_what_means_nothing_in_another_process(sglang: Worker) -> None:
    starts = [arguments(load_format="dummy"), arguments(model_loader_extra_config='{"uri": "s3://a"}')]
    found = sglang.run("tests.sglang.identities:keys", setups=starts)
    assert not any(is_lasting for _, is_lasting in found)
