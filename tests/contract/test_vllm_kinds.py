"""Every kind of KV cache of every supported vLLM is one that kvbm serves or refuses, and so is every field
and every quantization of those that it serves: a new one has to be looked at before it is cached.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvbm_vllm import kinds
from tests.contract.source_reading import class_of, fields_of, parse
from tests.contract.test_vllm_versions import SOURCES, each_version

INTERFACE = "v1/kv_cache_interface.py"
ROOT = "KVCacheSpec"
NO_KIND = {ROOT, "AttentionSpec", "UniformTypeKVCacheSpecs"}
"""No layer has these: they are what others are derived from, or several kinds in one group."""
SPEC_CLASS = re.compile(rb"^class +(\w+)\(.*Spec\b", re.MULTILINE)
PLACES = ("v1", "models", "model_executor")
NOT_OF_LAYERS = {"GPULoadStoreSpec", "CPULoadStoreSpec", "TieringOffloadingSpec", "CPUOffloadingSpec"}

SHAPE = {
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
    "indexes_kv_by_block_stride",
    "block_stride_alignment",
    "alignment",
    "max_tp_shards",
    "shapes",
    "dtypes",
    "mamba_type",
    "num_heads",
    "tp_replicated",
}
"""What a page looks like: the tensors say it, or ``layout.py`` reads it."""
TOKENS = {"block_size", "tokens_per_state", "compress_ratio", "storage_block_size"}
"""How many tokens a page is of. Blocks of compressed tokens are whole ones, as vLLM's own hits end there."""
WINDOWS = {"sliding_window", "extra_retained_tokens"}
SAME_TOKENS = {"attention_chunk_size"}
"""Of full attention: layers that look at less than the group keeps."""
READ = {"non_causal", "bounded_replay", "kv_quant_mode", "mamba_cache_mode", "cache_dtype_str"}
"""kvbm decides by these."""
NOT_OURS = {
    "dcp_sharded",  # several ranks for the tokens of a block are refused by themselves
    "is_draft",
    "topk_buffer_width",  # of what sparse attention computes anew in each step
    "model_version",  # which kernel reads it
    "cache_role",
    "is_index_group_leader",
    "non_causal_multi_token_decode",  # of drafts
    "num_speculative_blocks",  # vLLM says where a state is
    "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
}
KNOWN_FIELDS = SHAPE | TOKENS | WINDOWS | SAME_TOKENS | READ | NOT_OURS


def spec_classes(vllm: Path) -> dict[str, list[str]]:
    """Of the interface: name -> names of its bases, for all that are derived from KVCacheSpec."""
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for node in parse(vllm / INTERFACE).body
        if isinstance(node, ast.ClassDef)
    }
    found = {ROOT: bases[ROOT]}
    while more := {name: of for name, of in bases.items() if name not in found and found.keys() & set(of)}:
        found |= more
    return found


def fields_with_bases(vllm: Path, name: str) -> set[str]:
    """Fields of a class, and of those that it is derived from."""
    own = {field for field in fields_of(vllm / INTERFACE, name) if not field.startswith("_")}
    return own.union(
        *(
            fields_with_bases(vllm, base)
            for base in spec_classes(vllm).get(name, [])
            if base in spec_classes(vllm)
        )
    )


@each_version
def test_every_kind_is_served_or_refused(vllm: Path) -> None:
    found = spec_classes(vllm).keys() - NO_KIND
    assert len(found) > 8
    assert not found - kinds.SERVED - kinds.REFUSED.keys()


def test_no_kind_is_both_and_none_is_gone_from_all_versions() -> None:
    assert not kinds.SERVED & kinds.REFUSED.keys()
    if SOURCES:
        found = set().union(*(spec_classes(vllm) for vllm in SOURCES.values()))
        assert found >= kinds.SERVED
        if len(SOURCES) > 7:
            assert found >= kinds.REFUSED.keys()


@each_version
def test_no_model_brings_a_kind_of_its_own(vllm: Path) -> None:
    found = {
        name.decode(): str(path)
        for place in PLACES
        for path in (vllm / place).rglob("*.py")
        for name in SPEC_CLASS.findall(path.read_bytes())
        if path != vllm / INTERFACE
    }
    others = {name: path for name, path in found.items() if name not in NOT_OF_LAYERS}
    assert not {name for name in others if name in kinds.SERVED}
    assert not {name: path for name, path in others.items() if "KVCache" in name or "Attention" in name}


@each_version
def test_fields_of_what_is_served_were_looked_at(vllm: Path) -> None:
    new = {
        name: fields - KNOWN_FIELDS
        for name in sorted(kinds.SERVED)
        if (fields := fields_with_bases(vllm, name)) - KNOWN_FIELDS
    }
    assert not new


@each_version
def test_fields_of_a_group_were_looked_at(vllm: Path) -> None:
    known = {"layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "enable_kv_transfer", "role"}
    assert not fields_of(vllm / INTERFACE, "KVCacheGroupSpec").keys() - known


@each_version
def test_every_quantization_is_served_or_refused(vllm: Path) -> None:
    body = class_of(vllm / INTERFACE, "KVQuantMode").body
    names = {ast.unparse(item.targets[0]) for item in body if isinstance(item, ast.Assign)}
    assert names >= {"NONE", "FP8_PER_TENSOR"}
    assert not names - kinds.QUANT_SERVED - kinds.QUANT_REFUSED.keys()


@each_version
def test_scales_are_still_reset_by_the_first_pass(vllm: Path) -> None:
    """Once they are not, these quantizations can be served."""
    backend = (vllm / "v1/attention/backends/triton_attn.py").read_text(encoding="utf-8")
    start = backend.index("def _ensure_scale_caches")
    assert "_k_scale_cache.fill_(1.0)" in backend[start : start + 4000]


@pytest.mark.parametrize("name", sorted(kinds.REFUSED))
def test_a_refusal_says_what_to_do(name: str) -> None:
    why, remedy = kinds.REFUSED[name]
    assert "kvbm" in remedy or "use " in remedy
    assert why[0].islower() and not why.endswith((".", ":")) and len(why) + len(remedy) < 180
