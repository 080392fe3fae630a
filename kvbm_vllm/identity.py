"""What the bytes of a block depend on besides its tokens, under vLLM: configuration, environment, versions.

``TABLES`` classifies every field of every supported version; docs/identity.md is made from it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from kvbm_core.identity.effective import is_of_kubernetes
from kvbm_core.identity.fields import Description, describe
from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_vllm.config_tables import (
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
    "IRRELEVANT_ENVIRONMENT",
    "PROCESS_ONLY_ENVIRONMENT",
    "TABLES",
    "describe_engine",
    "namespace_of",
    "tell",
]

log = logging.getLogger("kvbm")

PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")


def describe_engine(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> Description:
    """All that is the same for every request of this engine, but for weights and layout. Raises nothing."""
    parts = (describe(vllm_config, VLLM), describe_environment(environ), _describe_software())
    return Description(
        tuple(sorted(pair for part in parts for pair in part.pairs)),
        tuple(sorted(name for part in parts for name in part.unknown)),
        tuple(sorted(name for part in parts for name in part.process_only)),
    )


def describe_environment(environ: Mapping[str, str]) -> Description:
    """Variables of vLLM that are set and not known to be irrelevant."""
    names = sorted(name for name in environ if ENVIRONMENT.fullmatch(name) and not is_of_kubernetes(name))
    pairs = tuple((name, _digest(environ[name])) for name in names if name not in IRRELEVANT_ENVIRONMENT)
    process_only = tuple(
        f"{name}: {PROCESS_ONLY_ENVIRONMENT[name]}"
        for name in names
        if name in PROCESS_ONLY_ENVIRONMENT and environ[name] not in {"", "0"}
    )
    return Description(pairs, (), process_only)


def _digest(text: str) -> str:
    """Pairs are logged, and what an unknown variable holds may be a secret."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _describe_software() -> Description:
    """Versions and the platform: models' code, formats of quantized numbers and image processing change with
    them.
    """
    pairs = [("vllm", installed_version())]
    unknown: list[str] = []
    for name, read in (("platform", _platform), ("plugins", _plugins), ("transformers", _transformers)):
        try:
            pairs.append((name, read()))
        except Exception:  # a driver or a package that answers otherwise: in doubt, this process alone
            unknown.append(name)
    return Description(tuple(pairs), tuple(unknown), ())


def _platform() -> str:
    try:
        from vllm.platforms import current_platform
    except ImportError:  # a vLLM that keeps it elsewhere
        raise LookupError("vllm.platforms has no current_platform") from None
    # Of the same cache_dtype "fp8", AMD's older devices store other numbers (e4m3fnuz) than all others.
    return f"{current_platform.device_name} {current_platform.fp8_dtype()}"


@cache
def _plugins() -> str:
    """Packages that may replace models or layers, with their versions."""
    points = [point for group in PLUGIN_GROUPS for point in metadata.entry_points(group=group)]
    found = {
        f"{point.name}={point.value}=={'' if point.dist is None else point.dist.version}" for point in points
    }
    return " ".join(sorted(found))


def _transformers() -> str:
    return metadata.version("transformers")


# ---------------------------------------------------------------- the namespace


def namespace_of(description: Description, block_size_tokens: int) -> KeyNamespace:
    """What all requests of one engine share; the layout is added when it is known."""
    pairs = encode_fields(*(text for pair in description.pairs for text in pair))
    digest = hashlib.sha256(pairs).hexdigest()
    return KeyNamespace("vllm", block_size_tokens=block_size_tokens, extra=(("configuration", digest),))


def tell(description: Description) -> None:
    """One line if blocks keep to this process: which field, and what to do. What is in the key, for who wants
    to know why two engines do not share blocks.
    """
    for name, text in description.pairs:
        log.debug("kvbm: in the name of a block: %s = %s", name, text)
    if description.process_only:
        log.warning(
            "kvbm: nothing is kept on disk, because it would mean nothing after a restart: %s. The host tier "
            "works as always",
            "; ".join(description.process_only),
        )
    if description.unknown:
        log.warning(
            "kvbm: nothing is kept on disk, because this version does not know whether these settings of "
            "vLLM change what K and V are: %s. The host tier works as always. Install a kvbm that knows "
            "this vLLM, or a vLLM that docs/identity.md lists",
            ", ".join(description.unknown),
        )
