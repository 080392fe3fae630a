"""A language model small enough for any CPU, built on the spot from a seed: nothing is downloaded.

    python -m tests.engines.tiny_model OUT [--kind qwen3|gemma3|deepseek]

The weights are random, so the answers are gibberish; but they depend on the whole prompt, which is what a
cache must preserve. The tokenizer knows bytes and no merges, and the model can only choose printable ASCII:
an answer that is sent back as text in the next turn of a conversation gives exactly the tokens that were
generated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["qwen3", "gemma3", "deepseek"]
KINDS: tuple[Kind, ...] = ("qwen3", "gemma3", "deepseek")

SEED = 20261120
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, START_ID, END_ID = range(3)
SLIDING_WINDOW_TOKENS = 256
MAX_MODEL_LEN_TOKENS = 32768
ATTENTION_GAIN = 4.0
EMBEDDING_SCALE = 1 / 16
RECIPE = "kvbm_tiny_model.json"  # written last; says what a folder was built from

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN_TOKENS,
    "pad_token_id": PAD_ID,
    "bos_token_id": START_ID,
    "eos_token_id": END_ID,
}
"""What the config of any model says of the tokenizer."""


def recipe_of(kind: str, source: Path = Path(__file__)) -> dict[str, Any]:
    """What a model of this kind is built from; ``source`` is the file that builds it."""
    return {"kind": kind, "seed": SEED, "source": hashlib.sha256(source.read_bytes()).hexdigest()}


def is_built(out: Path, recipe: dict[str, Any]) -> bool:
    """Whether this very recipe has built what is in ``out``."""
    noted = out / RECIPE
    return noted.is_file() and json.loads(noted.read_text()) == recipe


def note_recipe(out: Path, recipe: dict[str, Any]) -> None:
    """The last that is written to ``out``."""
    (out / RECIPE).write_text(json.dumps(recipe) + "\n")


def ensure_model(out: Path, kind: Kind = "qwen3") -> Path:
    """Build the model in ``out`` unless the same recipe has already built it there."""
    return out if is_built(out, recipe_of(kind)) else build_model(out, kind)


def build_model(out: Path, kind: Kind = "qwen3") -> Path:
    """Write config, tokenizer and seeded bf16 weights (about 5 MB) to the folder ``out``."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    alphabet = write_tokenizer(out)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(_config(kind))
    _depend_on_the_prompt(model, kind)
    if kind != "gemma3":
        only_printable(model.get_output_embeddings().weight, alphabet)
    model.to(torch.bfloat16).save_pretrained(out)
    note_recipe(out, recipe_of(kind))
    return out


def build(folder: str, kind: Kind) -> None:
    """``build_model``, in a process of tests.engines.worker."""
    build_model(Path(folder), kind)


def write_tokenizer(out: Path) -> dict[str, int]:
    """Write a byte tokenizer without merges; returns its vocabulary (a printable stand-in per byte)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[START_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return vocab


def _config(kind: Kind) -> Any:
    """The shape of the model: 4 layers, 2 KB (qwen3) of bf16 KV per token."""
    from transformers import Gemma3TextConfig, Qwen3Config

    shape: dict[str, Any] = {
        **TOKENS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.2,  # large enough for attention to be sharp: answers depend on far tokens
    }
    if kind == "qwen3":
        return Qwen3Config(**shape, tie_word_embeddings=False)
    if kind == "gemma3":
        layer_types = ["sliding_attention", "full_attention"] * 2
        return Gemma3TextConfig(**shape, layer_types=layer_types, sliding_window=SLIDING_WINDOW_TOKENS)
    if (
        kind == "deepseek"
    ):  # multi-head latent attention: one vector per token and layer, of the size that vLLM's CPU kernel has
        from transformers import DeepseekV2Config

        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 64}
        heads = {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "first_k_dense_replace": 4,
            "moe_layer_freq": 1,
        }
        yarn = {"type": "yarn", "rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1}
        yarn |= {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
        values = {**shape, **latent, **heads, "rope_scaling": yarn}
        return DeepseekV2Config(**values, tie_word_embeddings=False)
    raise ValueError(f"unknown kind of tiny model {kind!r}; known: {', '.join(KINDS)}")


def _depend_on_the_prompt(model: Any, kind: Kind) -> None:
    """Sharpen attention, so that the answer to a long prompt changes with any block of it.

    Left as drawn, attention averages over thousands of tokens, and Gemma, whose embeddings are also its
    output, repeats the last token for ever: wrong bytes from a cache would not be seen.
    """
    import torch

    if kind == "deepseek":  # has no norm of its queries
        return
    with torch.no_grad():
        for layer in model.model.layers:
            unit = 1.0 if kind == "qwen3" else 0.0  # Gemma's norms multiply by 1 + weight
            layer.self_attn.q_norm.weight.fill_(unit + ATTENTION_GAIN - 1.0)
        if kind == "gemma3":
            model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)


def only_printable(head: torch.Tensor, vocab: dict[str, int]) -> None:
    """Give all but printable ASCII a logit of zero, which the largest of many random logits always beats."""
    import torch

    printable = [vocab[chr(code)] for code in range(ord("!"), ord("~") + 1)]
    mask = torch.zeros(head.shape[0], 1)
    mask[printable] = 1.0
    with torch.no_grad():
        head.mul_(mask)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build a tiny random-weights model for a real engine.")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--kind", choices=KINDS, default="qwen3", help="gemma3 is a hybrid, deepseek has MLA")
    arguments = parser.parse_args()
    print(build_model(arguments.out, arguments.kind))


if __name__ == "__main__":
    main()
