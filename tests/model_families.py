"""Model families: what their layers keep in each engine, and the tests that show that kvbm serves it.

Whether a family is served is not written here: ``of_vllm``, ``of_linker`` and ``of_trtllm`` ask the code
that refuses. What a family's layers keep was read in the engines' sources; ``sources`` says where in vLLM's
(tests/contract/test_model_families.py looks there), and tests/vllm/test_model_families.py makes the same
groups of vLLM's own classes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbm_core.errors import UnsupportedError
from kvbm_sglang.device_pool import HYBRID_POOL, SERVED_POOLS
from kvbm_sglang.side_pools import STATES as STATE_POOL
from kvbm_sglang.side_pools import why_not_kept
from kvbm_trtllm.config import check_supported, index_cache_of
from kvbm_vllm.config import group_specs
from kvbm_vllm.versions import Capabilities

Layer = tuple[str, Mapping[str, Any]]
"""The class of vLLM's spec, and what matters of it here."""
FULL: Layer = ("FullAttentionSpec", {})
WINDOW: Layer = ("SlidingWindowSpec", {"sliding_window": 32})
LATENTS: Layer = ("MLAAttentionSpec", {})
COMPRESSED: tuple[Layer, ...] = (("MLAAttentionSpec", {"tokens_per_state": 4}),)
STATE: Layer = ("MambaSpec", {"mamba_cache_mode": "align"})

MODELS, NEW_MODELS = "model_executor/models", "models"
SCHEDULER = "tests/vllm/test_scheduler_scenarios.py"
WINDOWS_COME_BACK = f"{SCHEDULER}::test_hybrid_models_come_back_and_windows_are_not_loaded_whole"
KINDS = "tests/vllm/test_cache_kinds.py"
COMPRESSING = "tests/vllm/test_compressed.py"
SOAK = "tests/vllm/test_scheduler_soak.py::test_soak"
STATES_COME_BACK = "tests/vllm/test_states.py::test_the_answer_is_part_of_the_next_turn"
MAIN_JOB = "tests/e2e/test_main_job.py"
POOLS = "tests/sglang/test_pools.py"
SIDE_POOLS = f"{POOLS}::test_side_pools_follow_sglangs_policies"
REFUSED_BY_NAME = f"{KINDS}::test_a_kind_that_is_not_served_is_refused_by_name"

KV, SWA, INDEXER, DRAFT, COMPRESSED_PAGES = "kv", "swa", "indexer", "draft", "deepseek_v4_c4"
HICACHE: dict[str, tuple[str, ...]] = {
    KV: (f"{POOLS}::test_pages_come_back_also_after_a_restart",),
    SWA: (SIDE_POOLS,),
    STATE_POOL: ("tests/sglang/test_hybrid.py::test_states_come_back_with_their_kv_also_after_a_restart",),
    INDEXER: (f"{POOLS}::test_ranks_read_an_indexer_and_a_draft_as_they_read_latents",),
    DRAFT: ("tests/sglang/test_hybrid.py::test_a_drafts_kv_comes_back_with_the_models",),
    COMPRESSED_PAGES: (
        "tests/sglang/test_pools.py::test_with_a_pool_that_is_not_known_nothing_is_cached_and_said",
    ),
}
"""By SGLang's names of host pools: the tests that show that their pages come back."""
LINKER = "tests/sglang/test_linker.py::test_prompts_come_back_to_two_ranks"
LINKER_STATES = (
    "tests/sglang/test_hybrid.py::test_the_linker_brings_states_with_their_kv_also_after_a_restart"
)
E2E = "tests/e2e/test_hybrid.py"
OTHER_FAMILIES, DRAFTED = f"{E2E}::test_states_of_other_families", f"{E2E}::test_what_is_drafted_comes_back"
PLUGIN = "A test plugin lets its prefill end at blocks, as vLLM's kernel for a CPU cannot do otherwise."
ENGINES_HERE = ("tests/e2e/",)
"""Tests below these run a real engine."""


@dataclass(frozen=True)
class Family:
    """``groups``: vLLM's, each with its layers. ``vllm_tests``: what shows that they come back, or are
    refused. ``sources``: words that stand in vLLM's files, by file. ``pool``: SGLang's device pool, "" if
    nobody has looked; ``pools``: its host pools; ``sglang_tests``: of its engine. ``config``: what matters to
    TensorRT-LLM of the model's config.json, None if nobody has looked.
    """

    name: str
    architecture: str
    groups: tuple[tuple[Layer, ...], ...]
    vllm_tests: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]
    pool: str = "MHATokenToKVPool"
    pools: tuple[str, ...] = (KV,)
    sglang_tests: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    note: str = ""


ATTENTION = (
    Family(
        "Llama, Qwen, Mistral, Phi: full attention",
        "LlamaForCausalLM",
        ((FULL,),),
        (f"{MAIN_JOB}::test_prompts_come_back",),
        {f"{MODELS}/llama.py": ("Attention",)},
        sglang_tests=(
            "tests/sglang/test_engine.py::test_prompts_come_back",
            "tests/sglang/test_linker.py::test_prompts_come_back_to_two_ranks",
        ),
        config={},
    ),
    Family(
        "Gemma 2, Gemma 3: windows",
        "Gemma3ForCausalLM",
        ((FULL,), (WINDOW,)),
        (
            f"{MAIN_JOB}::test_hybrid_model",
            WINDOWS_COME_BACK,
        ),
        {f"{MODELS}/gemma3.py": ("per_layer_sliding_window",)},
        config={"sliding_window": 1024, "sliding_window_pattern": 6},
    ),
    Family(
        "Gemma 3n: layers that share KV",
        "Gemma3nForCausalLM",
        ((FULL,), (WINDOW,)),
        (f"{KINDS}::test_layers_that_share_a_cache_are_stored_once", WINDOWS_COME_BACK),
        {f"{MODELS}/gemma3n.py": ("kv_sharing_target_layer_name", "per_layer_sliding_window")},
    ),
    Family(
        "Gemma 4: layers that share KV, windows",
        "Gemma4ForCausalLM",
        ((FULL,), (WINDOW,)),
        (f"{KINDS}::test_layers_that_share_a_cache_are_stored_once", WINDOWS_COME_BACK),
        {f"{MODELS}/gemma4.py": ("kv_sharing_target_layer_name", "per_layer_sliding_window")},
        pool="SWAKVPool",
        pools=(KV, SWA),
    ),
    Family(
        "GPT-OSS: windows, sinks in the weights",
        "GptOssForCausalLM",
        ((FULL,), (WINDOW,)),
        (WINDOWS_COME_BACK,),
        {f"{MODELS}/gpt_oss.py": ("per_layer_sliding_window", "sinks")},
        pool="SWAKVPool",
        pools=(KV, SWA),
        config={"sliding_window": 128},
    ),
    Family(
        "Llama 4: chunks",
        "Llama4ForConditionalGeneration",
        ((("FullAttentionSpec", {"attention_chunk_size": 8192}),),),
        (f"{SCHEDULER}::test_a_prompt_comes_back_from_the_host",),
        {
            f"{MODELS}/llama4.py": ("ChunkedLocalAttention",),
            "config/vllm.py": ("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",),
        },
        pool="SWAKVPool",
        pools=(KV, SWA),
        config={"attention_chunk_size": 8192},
    ),
    Family(
        "Llama 4, chunks thrown away",
        "Llama4ForCausalLM",
        ((FULL,), (("ChunkedLocalAttentionSpec", {"attention_chunk_size": 8192}),)),
        (REFUSED_BY_NAME,),
        {"model_executor/layers/attention/chunked_local_attention.py": ("ChunkedLocalAttentionSpec",)},
        pool="",
    ),
    Family(
        "MiniMax M2",
        "MiniMaxM2ForCausalLM",
        ((FULL,),),
        (f"{SCHEDULER}::test_a_prompt_comes_back_from_the_host",),
        {f"{MODELS}/minimax_m2.py": ("Attention",)},
    ),
    Family(
        "MiniMax M3: an indexer beside heads",
        "MiniMaxM3SparseForCausalLM",
        ((FULL, LATENTS),),
        (f"{KINDS}::test_layers_that_keep_different_things_come_back",),
        {f"{NEW_MODELS}/minimax_m3/common/indexer.py": ("MLAAttentionSpec",)},
        pool="",
    ),
    Family(
        "Qwen-VL, LLaVA: images as tokens",
        "Qwen2_5_VLForConditionalGeneration",
        ((FULL,),),
        (f"{SCHEDULER}::test_what_differs_besides_the_tokens_is_kept_apart",),
        {f"{MODELS}/qwen2_5_vl.py": ("MultiModal",)},
        pool="",
        note="What an encoder made of an image, vLLM keeps itself.",
    ),
)
LATENT = (
    Family(
        "DeepSeek V2, V3, Kimi K2: MLA",
        "DeepseekV3ForCausalLM",
        ((LATENTS,),),
        ("tests/e2e/test_mla.py::test_latents_are_stored_once_and_come_back_to_both_ranks",),
        {f"{MODELS}/deepseek_v2.py": ("MultiHeadLatentAttentionWrapper",)},
        pool="MLATokenToKVPool",
        sglang_tests=(
            "tests/sglang/test_engine.py::test_prompts_of_an_mla_model_come_back",
            "tests/sglang/test_linker.py::test_prompts_of_an_mla_model_come_back",
        ),
        config={"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ),
    Family(
        "DeepSeek V3.2 (DSA): an indexer",
        "DeepseekV32ForCausalLM",
        ((LATENTS, LATENTS),),
        (f"{KINDS}::test_layers_that_keep_different_things_come_back",),
        {f"{MODELS}/deepseek_v2.py": ("DeepseekV32IndexerCache", "MLAAttentionSpec")},
        pool="DSATokenToKVPool",
        pools=(KV, INDEXER),
        config={"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128},
    ),
    Family(
        "DeepSeek V4: compressed tokens and windows",
        "DeepseekV4ForCausalLM",
        (COMPRESSED, (("SlidingWindowMLASpec", {"sliding_window": 32}),)),
        (f"{COMPRESSING}::test_prompts_and_second_turns_come_back",),
        {
            f"{NEW_MODELS}/deepseek_v4/compressor.py": ("SlidingWindowMLASpec",),
            f"{NEW_MODELS}/deepseek_v4/attention.py": ("MLAAttentionSpec", "tokens_per_state"),
        },
        pool="DeepSeekV4TokenToKVPool",
        pools=(KV, COMPRESSED_PAGES),
    ),
    Family(
        "DeepSeek V4.1: windows that are replayed",
        "DeepseekV41ForCausalLM",
        (COMPRESSED, (("SlidingWindowMLASpec", {"sliding_window": 32, "bounded_replay": True}),)),
        (f"{KINDS}::test_windows_that_are_computed_anew_are_refused",),
        {f"{NEW_MODELS}/deepseek_v41/attention.py": ("bounded_replay",)},
        pool="",
    ),
)
STATES = (
    Family(
        "Qwen3-Next: gated delta net",
        "Qwen3NextForCausalLM",
        ((STATE,), (FULL,)),
        (f"{E2E}::test_states_come_back", STATES_COME_BACK),
        {f"{MODELS}/qwen3_next.py": ("QwenGatedDeltaNetAttention", "Attention")},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"linear_num_value_heads": 32, "full_attention_interval": 4, "num_hidden_layers": 48},
    ),
    Family(
        "Qwen3.5: gated delta net",
        "Qwen3_5ForConditionalGeneration",
        ((STATE,), (FULL,)),
        (OTHER_FAMILIES, STATES_COME_BACK),
        {f"{MODELS}/qwen3_5.py": ("QwenGatedDeltaNetAttention",)},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    ),
    Family(
        "Nemotron-H: Mamba2",
        "NemotronHForCausalLM",
        ((STATE,), (FULL,)),
        (OTHER_FAMILIES, STATES_COME_BACK),
        {f"{MODELS}/nemotron_h.py": ("MambaMixer2", "Attention")},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
        note=PLUGIN,
    ),
    Family(
        "Granite 4 H: Mamba2",
        "GraniteMoeHybridForCausalLM",
        ((STATE,), (FULL,)),
        (OTHER_FAMILIES, STATES_COME_BACK),
        {f"{MODELS}/granitemoehybrid.py": ("MambaMixer2", "Attention")},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
        note=PLUGIN,
    ),
    Family(
        "Falcon-H1: Mamba2 in each layer",
        "FalconH1ForCausalLM",
        ((STATE,), (FULL,)),
        (OTHER_FAMILIES, STATES_COME_BACK),
        {f"{MODELS}/falcon_h1.py": ("MambaMixer2", "Attention")},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"model_type": "falcon_h1", "num_hidden_layers": 36},
        note=PLUGIN,
    ),
    Family(
        "Kimi-Linear: KDA, MLA",
        "KimiLinearForCausalLM",
        ((STATE,), (LATENTS,)),
        (STATES_COME_BACK,),
        {
            f"{NEW_MODELS}/kimi_k3/nvidia/kda.py": ("MambaSpec",),
            f"{NEW_MODELS}/kimi_k3/nvidia/mla.py": ("MLAAttentionSpec",),
        },
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"linear_attn_config": {"kda_layers": [1, 2, 3]}, "num_hidden_layers": 4},
    ),
    Family(
        "Jamba: Mamba1",
        "JambaForCausalLM",
        ((STATE,), (FULL,)),
        (STATES_COME_BACK,),
        {f"{MODELS}/jamba.py": ("MambaMixer", "Attention")},
        pool="",
        config={"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 32},
    ),
    Family(
        "LFM2: short convolutions",
        "Lfm2ForCausalLM",
        ((STATE,), (FULL,)),
        (STATES_COME_BACK,),
        {f"{MODELS}/lfm2.py": ("ShortConv", "Attention")},
        pool=HYBRID_POOL,
        pools=(KV, STATE_POOL),
        config={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    ),
    Family(
        "GLM-5-Next, Qwen4: rings",
        "Glm5NextForCausalLM",
        ((STATE,), (LATENTS, LATENTS), (("CircularBufferSpec", {}),)),
        (REFUSED_BY_NAME,),
        {
            f"{NEW_MODELS}/glm5next/common/attention.py": ("CircularBufferSpec",),
            f"{NEW_MODELS}/qwen4_exp/common/qsa_cache.py": ("CircularBufferSpec",),
        },
        pool="",
    ),
)
DRAFTS = (
    Family(
        "Drafts by n-grams",
        "",
        ((FULL,), (STATE,)),
        (DRAFTED, STATES_COME_BACK, SOAK),
        {"v1/spec_decode/ngram_proposer.py": ("class NgramProposer",)},
        pool="",
        note="They keep nothing. With states known continuations stand in for them in the engine.",
    ),
    Family(
        "Drafts by heads or models (MTP, EAGLE)",
        "EagleLlamaForCausalLM",
        ((FULL,), (STATE,)),
        (DRAFTED, STATES_COME_BACK, SOAK),
        {f"{MODELS}/llama_eagle.py": ("LlamaDecoderLayer",)},
        pools=(KV, DRAFT),
        note="Their KV is in groups like any other.",
    ),
)
OTHERS = (
    Family(
        "Whisper: encoder and decoder",
        "WhisperForConditionalGeneration",
        ((FULL,), (("CrossAttentionSpec", {}),)),
        (REFUSED_BY_NAME,),
        {f"{MODELS}/whisper.py": ("CrossAttention",)},
        pool="",
    ),
    Family(
        "BERT: encoder alone",
        "BertModel",
        (),
        (f"{KINDS}::test_a_model_without_a_cache_starts_and_is_told_once",),
        {f"{MODELS}/bert.py": ("EncoderOnlyAttention",)},
        pool="",
    ),
    Family(
        "HRM-Text: prefix LM",
        "HrmTextForCausalLM",
        ((("FullAttentionSpec", {"non_causal": True}),),),
        (f"{KINDS}::test_full_attention_that_cannot_be_restored_is_refused",),
        {f"{MODELS}/hrm_text.py": ("PrefillPrefixLMAttention",)},
        pool="",
    ),
    Family(
        "Unlimited-OCR: windows of answers",
        "UnlimitedOCRForCausalLM",
        ((("RSWASpec", {}),),),
        (REFUSED_BY_NAME,),
        {f"{MODELS}/deepseek_v2.py": ("RSWAAttention",)},
        pool="",
    ),
    Family(
        "openPangu: sinks in blocks",
        "PanguProMoEV2ForCausalLM",
        ((("SinkFullAttentionSpec", {}),),),
        (REFUSED_BY_NAME,),
        {f"{MODELS}/openpangu.py": ("StaticSinkAttention",)},
        pool="",
    ),
)
FAMILIES = (*ATTENTION, *LATENT, *STATES, *DRAFTS, *OTHERS)

# ---------------------------------------------------------------- verdicts

SERVED, NOT_RUN, REFUSED, NOT_TRIED, NONE = "served", "served ¹", "refused", "not tried", ""
NEWEST = Capabilities(
    transfer_results=True,
    wait_for_save_always=False,
    stored_event_fields=frozenset(),
    removed_event_fields=frozenset(),
    hands_off_states=True,
    limits_hits_to_rows=True,
    tells_of_sleep=True,
)


def shown_by(tests: Sequence[str]) -> str:
    """What is to be said of something that is not refused."""
    if not tests:
        return NOT_TRIED
    return SERVED if any(test.startswith(ENGINES_HERE) for test in tests) else NOT_RUN


def stand_in(layer: Layer) -> Any:
    """What vLLM's code would have made, as far as ``group_specs`` looks at it."""
    kind, values = layer
    return type(kind, (), {"block_size": 16, **values})()


def groups_of(family: Family) -> Any:
    """The groups of a KVCacheConfig, of stand-ins."""
    groups = []
    for layers in family.groups:
        specs = {f"layer {number}": stand_in(layer) for number, layer in enumerate(layers)}
        many = SimpleNamespace(block_size=16, kv_cache_specs=specs)
        groups.append(SimpleNamespace(kv_cache_spec=many if len(specs) > 1 else specs["layer 0"]))
    return SimpleNamespace(kv_cache_groups=groups)


def of_vllm(family: Family) -> tuple[str, str]:
    """The verdict, and the line of a refusal, as an engine would print it behind the model."""
    if not family.groups:
        return NONE, ""
    config = SimpleNamespace(model_config=SimpleNamespace(model="MODEL", architecture=family.architecture))
    try:
        group_specs(config, groups_of(family), NEWEST)  # type: ignore[arg-type]
    except UnsupportedError as error:
        return REFUSED, str(error)
    return shown_by(family.vllm_tests), ""


def sglang_tests(family: Family) -> tuple[str, ...]:
    """What shows that its pages come back; () if nothing shows it of one of its pools."""
    found = [HICACHE[pool] for pool in family.pools]
    if not family.pool or not all(found):
        return ()
    return family.sglang_tests or (*(test for tests in found for test in tests), *linker_tests(family))


def of_hicache(family: Family) -> tuple[str, str]:
    """Of SGLang with kvbm below HiCache: the verdict, and the reason of a refusal."""
    if not family.pool:
        return NONE, ""
    for pool in family.pools:
        reason = why_not_kept(pool, None, None, is_mla_model=False, tp_size=1)
        if reason:
            return REFUSED, reason
    tests = sglang_tests(family)
    return ((SERVED if family.sglang_tests else NOT_RUN) if tests else NOT_TRIED), ""


def linker_tests(family: Family) -> tuple[str, ...]:
    """What shows that the linker brings such pages; () for pools that it refuses."""
    if DRAFT in family.pools or family.pool not in {*SERVED_POOLS, HYBRID_POOL}:
        return ()
    return (LINKER_STATES,) if family.pool == HYBRID_POOL else (LINKER,)


def of_linker(family: Family) -> str:
    """Of SGLang's direct linker."""
    if not family.pool:
        return NONE
    if not linker_tests(family):
        return REFUSED
    return SERVED if any("test_linker" in test for test in family.sglang_tests) else NOT_RUN


def of_trtllm(family: Family) -> tuple[str, str]:
    """The verdict, and the line of a refusal. Nothing of TensorRT-LLM was run."""
    if family.config is None:
        return NONE, ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(family.config), encoding="utf-8")
        args = SimpleNamespace(model=folder, kv_cache_config=SimpleNamespace())
        try:
            check_supported(args, has_attention_dp=True)
        except UnsupportedError as error:
            return REFUSED, str(error).replace(folder, "MODEL")
        is_latent = "kv_lora_rank" in family.config
        has_keys_elsewhere = index_cache_of(args, is_latent=is_latent) is not None
    is_windowed = "sliding_window" in family.config or "attention_chunk_size" in family.config
    return ("served ²" if has_keys_elsewhere or is_windowed else NOT_RUN), ""


# ---------------------------------------------------------------- the page


def rows() -> Iterator[str]:
    """Of the table."""
    yield "| | vLLM | HiCache | linker | TensorRT-LLM |"
    yield "| --- | --- | --- | --- | --- |"
    for family in FAMILIES:
        verdicts = (of_vllm(family)[0], of_hicache(family)[0], of_linker(family), of_trtllm(family)[0])
        yield f"| {family.name} | {' | '.join(verdicts)} |"


def details() -> Iterator[str]:
    """Of each family: what it keeps, which tests show it, and what kvbm says where it is refused."""
    for family in FAMILIES:
        kinds = ["+".join(dict.fromkeys(kind for kind, _ in layers)) for layers in family.groups]
        line = of_vllm(family)[1]
        vllm = [f"`{test}`" for test in family.vllm_tests]
        if line:
            vllm.append(f"it says `{line}`")
        sglang = [f"`{test}`" for test in sglang_tests(family)]
        if reason := of_hicache(family)[1]:
            sglang.append(f"HiCache: `{reason}`")
        of = f"`{family.architecture}`, " if family.architecture else ""
        said = [f"**{family.name}**: {of}{' beside '.join(kinds) or 'no KV cache'}."]
        said += [f"vLLM: {', '.join(vllm)}."] if vllm else []
        said += [f"SGLang: {', '.join(sglang)}."] if sglang else []
        yield " ".join([*said, family.note] if family.note else said)
