"""What the bytes of a block depend on besides its tokens: TensorRT-LLM's configuration, weights, LoRA."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from kvbm_core.identity import environment
from kvbm_core.identity.fields import Description, describe
from kvbm_core.identity.roots import NO_ADAPTER, Stamp, process_stamp
from kvbm_core.identity.weights import Source, WeightsIdentity, process_began_ns
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_trtllm.config_tables import (
    ENVIRONMENT,
    ENVIRONMENT_WORDS,
    IRRELEVANT_ENVIRONMENT,
    PROCESS_ONLY_ENVIRONMENT,
    QUANTIZATION,
    TABLES,
    TORCH_LLM_ARGS,
)

__all__ = [
    "ENVIRONMENT_WORDS",
    "IRRELEVANT_ENVIRONMENT",
    "PROCESS_ONLY_ENVIRONMENT",
    "TABLES",
    "adapter_of",
    "describe_engine",
    "namespace_of",
    "weights_identity",
]


def describe_engine(llm_args: Any, environ: Mapping[str, str] = os.environ) -> Description:
    """All that is the same for every request of this engine, but for weights and layout. Raises nothing.

    ``quant_config`` is no field of the arguments, but a property: what the checkpoint or the user has chosen.
    """
    parts = [describe(llm_args, TORCH_LLM_ARGS), describe_environment(environ), _describe_software()]
    quantization = getattr(llm_args, "quant_config", None)
    if quantization is not None:
        parts.append(describe(quantization, QUANTIZATION, "quant_config."))
    return Description.joined(parts)


def describe_environment(environ: Mapping[str, str]) -> Description:
    """Variables of TensorRT-LLM and its libraries that are set and not known to be irrelevant."""
    return environment.describe_environment(
        environ, ENVIRONMENT, IRRELEVANT_ENVIRONMENT, PROCESS_ONLY_ENVIRONMENT
    )


def _describe_software() -> Description:
    """Versions and the device: kernels, formats of numbers and models' configurations change with them."""
    version = str(getattr(sys.modules.get("tensorrt_llm"), "__version__", ""))
    return environment.describe_software(
        ("version", version),
        platform=_platform,
        transformers=_transformers,
        packages=environment.packages,
        code=lambda: environment.changed_code("tensorrt_llm", "transformers"),
    )


def _platform() -> str:
    import torch

    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "no GPU"


def _transformers() -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return "none"


def namespace_of(description: Description, block_size_tokens: int) -> KeyNamespace:
    """What all requests of one engine share; the layout is added when it is known."""
    extra = (("configuration", description.digest),)
    return KeyNamespace("tensorrt-llm", block_size_tokens=block_size_tokens, extra=extra)


def weights_identity(llm_args: Any, began_ns: int | None = None) -> WeightsIdentity:
    """Of the model's and the draft's weights; not started. ``began_ns``: Unix time at which the engine did;
    by default, when this process did.
    """
    model, speculative = str(getattr(llm_args, "model", "")), getattr(llm_args, "speculative_config", None)
    sources = {"model": _source(llm_args, model, str(getattr(llm_args, "revision", None) or ""))}
    # Up to 1.1, and since.
    draft = getattr(speculative, "speculative_model_dir", None) or getattr(
        speculative, "speculative_model", None
    )
    if draft:
        sources["draft"] = _source(llm_args, str(draft), "")
    return WeightsIdentity(sources, process_began_ns() if began_ns is None else began_ns)


def _source(llm_args: Any, name: str, revision: str) -> Source:
    load_format = str(getattr(llm_args, "load_format", "auto")).rpartition(".")[2].lower()
    is_known = load_format in {"auto", "0"}
    unknown = "" if is_known else f"the weights of {name} are made up (load format {load_format})"
    runs_code = bool(getattr(llm_args, "trust_remote_code", False))
    return Source(name, revision, unknown=unknown, runs_code=runs_code)


def adapter_of(number: str) -> Stamp:
    """A LoRA is known by its number alone: another process may give the same number to other weights."""
    return process_stamp(f"lora {number}") if number else NO_ADAPTER
