"""Where vLLM reads its weights: the model's, its draft model's, and code that comes with them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvbm_core.identity.weights import Beginning, Source, WeightsIdentity, code_repositories
from kvbm_vllm.config_tables import READING_SETTINGS, SEEN_LOAD_FORMATS, load_format_of

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

# Of ``model_loader_extra_config``: how to read, or which of the folder's files.
_READING_KEYS = READING_SETTINGS | {"pattern"}


def weights_identity(
    vllm_config: VllmConfig, began_ns: int, beginning: Beginning | None = None
) -> WeightsIdentity:
    """Of this engine, which began to load then (engine_calls.loading_began); not started."""
    return WeightsIdentity(weight_sources(vllm_config), began_ns, beginning=beginning)


def weight_sources(vllm_config: VllmConfig) -> dict[str, Source]:
    """By what each is to the engine."""
    model = vllm_config.model_config
    sources = {"model": _source(model, vllm_config.load_config)}
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        sources["draft"] = _source(draft, load)
    config = getattr(model, "hf_config", None)
    for part in ("text_model_id", "audio_model_id"):  # models that are made of two others
        name = getattr(config, part, None)
        if name:
            sources[part] = Source(str(name), cache_dir=str(vllm_config.load_config.download_dir or ""))
    for prefix, of in (("", model), ("draft ", draft)):
        if of is not None and getattr(of, "trust_remote_code", False):
            auto_map = getattr(getattr(of, "hf_config", None), "auto_map", None)
            for repository in sorted(code_repositories(auto_map)):
                code = Source(repository, str(of.code_revision or ""), is_code=True)
                sources[f"{prefix}code {repository}"] = code
            place = getattr(of, "hf_config_path", None)
            if place:  # the class of the configuration may be defined there
                sources[f"{prefix}configuration"] = Source(str(place), str(of.revision or ""), is_code=True)
    return sources


def _source(model: ModelConfig, load: LoadConfig) -> Source:
    name = str(getattr(model, "model_weights", "") or model.model)
    return Source(
        name,
        str(model.revision or ""),
        str(load.download_dir or ""),
        unknown=_why_unknown(name, load),
        load_format=load_format_of(load),
        runs_code=bool(model.trust_remote_code),
    )


def _why_unknown(name: str, load: LoadConfig) -> str:
    load_format = load_format_of(load)
    if load_format == "dummy":
        return f"the weights of {name} are made up (load format dummy)"
    if load_format not in SEEN_LOAD_FORMATS:
        return f"the load format {load_format} does not say what it reads"
    extra = load.model_loader_extra_config
    if extra and not (isinstance(extra, dict) and set(extra) <= _READING_KEYS):
        return "model_loader_extra_config may name other weights"
    if "://" in name:
        return f"{name} is not on this machine"
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"} and not os.path.exists(name):
        return f"{name} is of ModelScope, whose cache names no file by its content"
    return ""
