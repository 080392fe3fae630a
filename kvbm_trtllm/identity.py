"""What the bytes of a block depend on besides its tokens: TensorRT-LLM's configuration, weights, LoRA."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kvbm_core.identity.fields import Description, describe
from kvbm_core.identity.roots import NO_ADAPTER, Stamp, process_stamp
from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.tokens.weights import folder_of, weights_stamp
from kvbm_trtllm.config_tables import QUANTIZATION, TABLES, TORCH_LLM_ARGS

__all__ = ["TABLES", "adapter_of", "describe_engine", "namespace_of", "tell", "weights_of"]

log = logging.getLogger("kvbm")


def describe_engine(llm_args: Any) -> Description:
    """All that is the same for every request of this engine, but for weights and layout. Raises nothing.

    ``quant_config`` is no field of the arguments, but a property: what the checkpoint or the user has chosen.
    """
    parts = [describe(llm_args, TORCH_LLM_ARGS)]
    quantization = getattr(llm_args, "quant_config", None)
    if quantization is not None:
        parts.append(describe(quantization, QUANTIZATION, "quant_config."))
    return Description(
        tuple(sorted((*(pair for part in parts for pair in part.pairs), ("version", _version())))),
        tuple(sorted(name for part in parts for name in part.unknown)),
        tuple(sorted(name for part in parts for name in part.process_only)),
    )


def _version() -> str:
    return str(getattr(sys.modules.get("tensorrt_llm"), "__version__", ""))


def namespace_of(description: Description, block_size_tokens: int) -> KeyNamespace:
    """What all requests of one engine share; the layout is added when it is known."""
    pairs = encode_fields(*(text for pair in description.pairs for text in pair))
    digest = hashlib.sha256(pairs).hexdigest()
    return KeyNamespace(
        "tensorrt-llm", block_size_tokens=block_size_tokens, extra=(("configuration", digest),)
    )


def tell(description: Description) -> None:
    """One line if blocks keep to this process: which field, and what to do."""
    if description.process_only:
        log.warning(
            "kvbm: nothing is kept on disk, because it would mean nothing after a restart: %s. The host tier "
            "works as always",
            "; ".join(description.process_only),
        )
    if description.unknown:
        log.warning(
            "kvbm: nothing is kept on disk, because this version does not know whether these settings of "
            "TensorRT-LLM change what K and V are: %s. The host tier works as always. Install a kvbm that "
            "knows this TensorRT-LLM",
            ", ".join(description.unknown),
        )


def weights_of(llm_args: Any) -> Callable[[], Stamp]:
    """What tells these weights from others; the draft's too: its layers may have blocks as well."""
    stamps = [_stamp_of(str(getattr(llm_args, "model", "")), str(getattr(llm_args, "revision", None) or ""))]
    draft = getattr(getattr(llm_args, "speculative_config", None), "speculative_model", None)
    if draft:
        stamps.append(_stamp_of(str(draft), ""))
    stamp = Stamp("\0".join(stamp.text for stamp in stamps), all(stamp.is_lasting for stamp in stamps))
    return lambda: stamp


@lru_cache(maxsize=1024)
def _stamp_of(name: str, revision: str) -> Stamp:
    folder = folder_of(name, revision)
    text = "" if folder is None else weights_stamp(folder)
    if not text:
        log.info(
            "kvbm: the weights of %s cannot be looked at: nothing of it is kept on disk, as it would not be "
            "found after a restart",
            name,
        )
    return Stamp(text, is_lasting=True) if text else process_stamp(f"the weights of {name}")


def adapter_of(number: str) -> Stamp:
    """A LoRA is known by its number alone: another process may give the same number to other weights."""
    return process_stamp(f"lora {number}") if number else NO_ADAPTER
