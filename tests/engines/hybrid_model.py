"""Tiny models whose layers keep states in place of keys and values, and tiny drafts: see tiny_model.

    python -m tests.engines.hybrid_model OUT --kind qwen3_next [--drafts]

A state as drawn at random forgets within a token or two. Here it remembers hundreds of tokens, so that an
answer depends on states from far back, and a wrong one is seen.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.engines.tiny_model import (
    ATTENTION_GAIN,
    SEED,
    TOKENS,
    is_built,
    note_recipe,
    only_printable,
    recipe_of,
    write_tokenizer,
)

if TYPE_CHECKING:
    import torch

HybridKind = Literal["qwen3_next", "qwen3_5", "nemotron_h", "granite4", "falcon_h1", "mamba2"]
HYBRIDS: tuple[HybridKind, ...] = ("qwen3_next", "qwen3_5", "nemotron_h", "granite4", "falcon_h1", "mamba2")
DECAY = 0.004  # of a state per token, about
EMBEDDING_GAIN = 4.0
HEAD_DIM = 256
"""So large that the KV of 32 tokens is no smaller than a state: vLLM makes blocks larger until it is."""
STATE_DIM = 16  # of Mamba2


@dataclass(frozen=True)
class Size:
    """Of a model: wider than TINY where computing a prompt has to take its time."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    state_heads: int = 2


TINY = Size()


def ensure_hybrid(out: Path, kind: HybridKind, size: Size = TINY) -> Path:
    """Build the model in ``out`` unless the same recipe has already built it there."""
    return out if is_built(out, _recipe(kind, size)) else build_hybrid(out, kind, size)


def build_hybrid(out: Path, kind: HybridKind, size: Size = TINY, *, drafts: bool = False) -> Path:
    """Write config, tokenizer and seeded weights to the folder ``out``. ``drafts``: qwen3_next with a layer
    that drafts (MTP).
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    alphabet = write_tokenizer(out)
    torch.manual_seed(SEED)
    config = CONFIGS[kind](size)
    if drafts:
        config.num_nextn_predict_layers = 1
    model = AutoModelForCausalLM.from_config(config)
    _depend_on_the_prompt(model)
    only_printable(model.get_output_embeddings().weight, alphabet)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(EMBEDDING_GAIN)
    model.to(torch.bfloat16).save_pretrained(out)
    if drafts:
        _add_mtp(out, size)
    note_recipe(out, _recipe(kind, size))
    return out


def build_eagle(out: Path, hidden: int) -> Path:
    """An EAGLE head for a tiny model of this hidden size; it takes embeddings and output from that model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**TOKENS, **shape, hidden_size=hidden, intermediate_size=2 * hidden)
    weights = {
        name.removeprefix("model."): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in LlamaForCausalLM(config).state_dict().items()
        if name.startswith("model.layers.") and "layers.0.input_layernorm" not in name
    }
    weights["fc.weight"] = _drafts_from_embeddings(hidden)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    return out


def _recipe(kind: HybridKind, size: Size) -> dict[str, Any]:
    return recipe_of(kind, Path(__file__)) | {"size": list(vars(size).values())}


def _common(size: Size) -> dict[str, Any]:
    return {
        **TOKENS,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.2 * (256 / size.hidden) ** 0.5,
    }


def _delta_net(size: Size) -> dict[str, Any]:
    return {
        **_common(size),
        "num_hidden_layers": size.layers,
        "head_dim": HEAD_DIM,
        "layer_types": ["linear_attention", "full_attention"] * (size.layers // 2),
        "linear_num_value_heads": size.state_heads,
        "linear_num_key_heads": size.state_heads,
        "linear_key_head_dim": 64,  # as small as the kernel for a CPU has it
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }


def _qwen3_next(size: Size) -> Any:
    from transformers import Qwen3NextConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
    widths = {"moe_intermediate_size": size.hidden // 2, "shared_expert_intermediate_size": size.hidden // 2}
    return Qwen3NextConfig(**_delta_net(size), **experts, **widths)


def _qwen3_5(size: Size) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_delta_net(size))


def _mamba(size: Size) -> dict[str, Any]:
    """As Granite and Falcon call it; the width of all heads is twice the hidden size."""
    return {
        **_common(size),
        "mamba_n_heads": size.state_heads,
        "mamba_d_head": 2 * size.hidden // size.state_heads,
        "mamba_n_groups": 1,
        "mamba_d_state": STATE_DIM,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
    }


def _granite4(size: Size) -> Any:
    from transformers import GraniteMoeHybridConfig

    kinds = ["mamba", "attention"] * (size.layers // 2)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": size.hidden}
    more = {"num_hidden_layers": size.layers, "layer_types": kinds, "position_embedding_type": "rope"}
    return GraniteMoeHybridConfig(**_mamba(size), **experts, **more)


def _falcon_h1(size: Size) -> Any:
    from transformers import FalconH1Config

    layers = size.layers // 2  # each has both attention and a state
    return FalconH1Config(
        **_mamba(size), num_hidden_layers=layers, head_dim=HEAD_DIM, mamba_d_ssm=2 * size.hidden
    )


def _nemotron_h(size: Size) -> Any:
    from transformers import NemotronHConfig

    kinds = ["mamba", "mlp", "attention", "mlp"] * (size.layers // 2)
    heads = {"mamba_num_heads": size.state_heads, "mamba_head_dim": 2 * size.hidden // size.state_heads}
    state = {"n_groups": 1, "ssm_state_size": STATE_DIM, "conv_kernel": 4, "expand": 2, "chunk_size": 32}
    return NemotronHConfig(**_common(size), layers_block_type=kinds, head_dim=HEAD_DIM, **heads, **state)


def _mamba2(size: Size) -> Any:
    from transformers import Mamba2Config

    tokens = {name: value for name, value in TOKENS.items() if name != "max_position_embeddings"}
    heads = {"num_heads": size.state_heads, "head_dim": 2 * size.hidden // size.state_heads, "n_groups": 1}
    state = {"state_size": STATE_DIM, "conv_kernel": 4, "expand": 2, "chunk_size": 32}
    more = {"hidden_size": size.hidden, "num_hidden_layers": size.layers, "initializer_range": 0.2}
    return Mamba2Config(**tokens, **heads, **state, **more)


CONFIGS: dict[HybridKind, Callable[[Size], Any]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "nemotron_h": _nemotron_h,
    "granite4": _granite4,
    "falcon_h1": _falcon_h1,
    "mamba2": _mamba2,
}


def _depend_on_the_prompt(model: Any) -> None:
    """States decay by DECAY or so per token (A times a step that depends on the token), and attention is
    sharp.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".A_log"):
                weight.copy_(torch.linspace(0.5, 2.0, weight.numel()).mul_(DECAY).log_())
            elif name.endswith(".dt_bias"):
                weight.fill_(0.5)
            elif name.endswith(".q_norm.weight"):
                weight.fill_(ATTENTION_GAIN - 1.0)  # these norms multiply by 1 + weight


def _drafts_from_embeddings(hidden: int) -> torch.Tensor:
    """The layer before a draft: it takes the last token's embedding, and half of what the model thought."""
    import torch

    return torch.cat([torch.eye(hidden), 0.5 * torch.eye(hidden)], dim=1).to(torch.bfloat16)


def _add_mtp(out: Path, size: Size) -> None:
    """One layer of attention more, of the same shape, as the last weights of the model in ``out``."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    config = _qwen3_next(size)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        layer = load_file(Path(folder) / "model.safetensors")
    drafts = {
        name.replace("model.", "mtp.", 1): tensor
        for name, tensor in layer.items()
        if name.startswith(("model.layers.", "model.norm."))
    }
    drafts["mtp.fc.weight"] = _drafts_from_embeddings(size.hidden)
    for norm in ("pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        drafts[f"mtp.{norm}.weight"] = torch.zeros(size.hidden, dtype=torch.bfloat16)  # that is 1 + weight
    weights = load_file(out / "model.safetensors")
    save_file(weights | drafts, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build a tiny model with states, for a real engine.")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--kind", choices=HYBRIDS, default="qwen3_next")
    parser.add_argument("--drafts", action="store_true", help="with a layer that drafts")
    arguments = parser.parse_args()
    print(build_hybrid(arguments.out, arguments.kind, drafts=arguments.drafts))


if __name__ == "__main__":
    main()
