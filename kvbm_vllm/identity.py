"""What the bytes of a block depend on besides its tokens, under vLLM: configuration, environment, versions.

``TABLES`` classifies every field of every supported version; docs/identity-fields.md is made from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvbm_core.identity import environment
from kvbm_core.identity.effective import file_digest
from kvbm_core.identity.fields import Description, describe
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_vllm.config_tables import (
    CONTENTS,
    ENVIRONMENT,
    ENVIRONMENT_WORDS,
    IRRELEVANT_ENVIRONMENT,
    PROCESS_ONLY_ENVIRONMENT,
    TABLES,
    VLLM,
)
from kvbm_vllm.versions import installed_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "ENVIRONMENT_WORDS",
    "HOW_MANY_REPLICAS",
    "IRRELEVANT_ENVIRONMENT",
    "PROCESS_ONLY_ENVIRONMENT",
    "TABLES",
    "WHERE_HEADS_LIE",
    "describe_engine",
    "namespace_of",
]

WHERE_HEADS_LIE = frozenset(
    {"cache_config.kv_cache_layout", "parallel_config.tensor_parallel_size", "VLLM_KV_CACHE_LAYOUT"}
)
"""What says on which rank a head is, and where in its memory: nothing that counts in blocks kept by heads."""
HOW_MANY_REPLICAS = frozenset({"parallel_config.tensor_parallel_size"})
"""What says how many ranks have the same KV: nothing that counts in blocks that one of them stores for
all.
"""
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")


def describe_engine(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> Description:
    """All that is the same for every request of this engine, but for weights and layout. Raises nothing."""
    parts = (
        describe(vllm_config, VLLM),
        describe_environment(environ),
        _describe_software(),
        _describe_code(vllm_config),
    )
    return Description.joined(parts)


def describe_environment(environ: Mapping[str, str]) -> Description:
    """Variables of vLLM and its libraries that are set and not known to be irrelevant."""
    return environment.describe_environment(
        environ, ENVIRONMENT, IRRELEVANT_ENVIRONMENT, PROCESS_ONLY_ENVIRONMENT, CONTENTS
    )


def _describe_software() -> Description:
    """Versions and the platform: models' code, formats of quantized numbers and image processing change with
    them.
    """
    found = environment.describe_software(
        ("vllm", installed_version()),
        platform=_platform,
        plugins=_plugins,
        transformers=_transformers,
        packages=environment.packages,
        code=lambda: environment.changed_code("vllm", "transformers"),
    )
    editable = tuple(f"plugin {name}: it is installed editable" for name in _editable_plugins())
    return found._replace(process_only=editable)


def _describe_code(vllm_config: VllmConfig) -> Description:
    """Which class the model's architecture is, and for each class that is neither vLLM's nor transformers'
    the digest of its module's file.
    """
    pairs: list[tuple[str, str]] = []
    unknown: list[str] = []
    for role, read in (("model class", _model_class), ("named classes", _named_classes)):
        try:
            for module, name in read(vllm_config):
                pairs.append((f"{role} {module}.{name}", _code_of(module)))
        except Exception:  # a registry of another form, a module without a file: in doubt, this process alone
            unknown.append(role)
    return Description(tuple(pairs), tuple(unknown), ())


def _model_class(vllm_config: VllmConfig) -> list[tuple[str, str]]:
    """Module and name of the class that is registered for the architecture. It is not imported for that."""
    # Not ModelConfig.registry, which registers overrides (see _named_classes).
    registry: Any = getattr(import_module("vllm.model_executor.models"), "ModelRegistry")  # noqa: B009
    model = vllm_config.model_config
    name = model.architecture
    if name in (getattr(model, "model_class_overrides", None) or {}):
        return []
    if name not in registry.models:
        name = registry._normalize_arch(name, model)
    entry = registry.models[name]
    if hasattr(entry, "model_cls"):
        return [(entry.model_cls.__module__, entry.model_cls.__qualname__)]
    return [(entry.module_name, entry.class_name)]


def _named_classes(vllm_config: VllmConfig) -> list[tuple[str, str]]:
    """Module and name of the classes that settings name."""
    parallel = vllm_config.parallel_config
    overrides = getattr(vllm_config.model_config, "model_class_overrides", None) or {}
    found: list[tuple[str, str]] = []
    for value in (parallel.worker_cls, parallel.worker_extension_cls, *overrides.values()):
        if isinstance(value, type):
            found.append((value.__module__, value.__qualname__))
        elif value and value != "auto":
            module, _, name = str(value).replace(":", ".").rpartition(".")
            found.append((module, name))
    return sorted(set(found))


def _code_of(module: str) -> str:
    """sha256 of the module's file; "" for vLLM and transformers, whose versions count, and their code if it
    is not that of the version. LookupError if it has none.
    """
    if module.partition(".")[0] in {"vllm", "transformers"}:
        return ""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        spec = find_spec(module)
        path = None if spec is None or not spec.has_location else spec.origin
    digest = file_digest(path)
    if digest is None:
        raise LookupError(f"{module} has no file")
    return digest


def _platform() -> str:
    try:
        from vllm.platforms import current_platform
    except ImportError:  # a vLLM that keeps it elsewhere
        raise LookupError("vllm.platforms has no current_platform") from None
    # Of the same cache_dtype "fp8", AMD's older devices store other numbers (e4m3fnuz) than all others.
    # A device's capability chooses kernels, some of which compute in other formats.
    capability = current_platform.get_device_capability()
    parts = [current_platform.device_name, current_platform.fp8_dtype(), capability and tuple(capability)]
    if current_platform.is_cpu():
        parts.append(environment.processor())
    return " ".join(map(str, parts))


def _plugins() -> str:
    return environment.plugins(*PLUGIN_GROUPS)


@cache
def _editable_plugins() -> tuple[str, ...]:
    """Those whose code may change without their version."""
    points = [point for group in PLUGIN_GROUPS for point in metadata.entry_points(group=group)]
    return tuple(
        sorted(
            point.name
            for point in points
            if point.dist and environment.is_editable(point.dist.read_text("direct_url.json"))
        )
    )


def _transformers() -> str:
    return metadata.version("transformers")


# ---------------------------------------------------------------- the namespace


def namespace_of(description: Description, block_size_tokens: int) -> KeyNamespace:
    """What all requests of one engine share; the layout is added when it is known."""
    extra = (("configuration", description.digest),)
    return KeyNamespace("vllm", block_size_tokens=block_size_tokens, extra=extra)
