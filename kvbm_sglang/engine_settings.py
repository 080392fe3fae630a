"""What the running engine says of itself: its arguments as they are in effect, and its model's configuration.

``TABLES`` (config_tables.py) say what of it is in a page's key.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from kvbm_core.identity import environment
from kvbm_core.identity.fields import Description, describe, field_names
from kvbm_core.identity.weights import code_repositories
from kvbm_sglang.config_tables import (
    CONTENTS,
    ENVIRONMENT,
    HICACHE,
    IRRELEVANT_ENVIRONMENT,
    MODEL,
    PROCESS_ONLY_ENVIRONMENT,
    SERVER_ARGS,
)

log = logging.getLogger("kvbm")

# Where SGLang has them: 0.5.15 and newer, and up to 0.5.19.
_PLACES = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)
PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_MISSING = object()


def find_server_args() -> Any:
    """The engine's arguments; None outside an engine, and where this SGLang has them elsewhere."""
    for place, getter in _PLACES:
        try:
            found = getattr(importlib.import_module(place), getter)()
        except (ImportError, AttributeError, ValueError, RuntimeError):
            continue
        if found is not None:
            return found
    return None


def effective(server_args: Any) -> Any:
    """The arguments as they are in effect: since 0.5.16 the object itself may hold what the user typed.
    None for None.
    """
    if server_args is None:
        return None
    names = field_names(server_args)
    return SimpleNamespace(**{name: _value_in_effect(server_args, name) for name in names})


def _value_in_effect(server_args: Any, name: str) -> Any:
    published = _published(server_args, name)
    if published is not _MISSING:
        return published
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:  # before there was such a thing
        return getattr(server_args, name, None)
    return resolution_result(server_args, name, getattr(server_args, name, None))


def _published(server_args: Any, name: str) -> Any:
    """What SGLang's layers read: arguments that were settled after they were resolved, as well."""
    try:
        from sglang.srt import runtime_context
        from sglang.srt.arg_groups.arg_utils import namespace_of

        if runtime_context.get_server_args() is not server_args:
            return _MISSING
        path = namespace_of(type(server_args))[name]
        top, *below = path.split(".")
        found = getattr(runtime_context, f"get_{top}")()
        for part in (*below, name):
            found = getattr(found, part)
    except (ImportError, AttributeError, KeyError, ValueError, RuntimeError):
        return _MISSING
    return found


def model_config_of(server_args: Any) -> Any:
    """SGLang's configuration of the model, after all overrides. Raises what SGLang raises."""
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of as of
    except ImportError:
        return server_args.get_model_config()
    return of(server_args)


def code_of(server_args: Any) -> frozenset[str]:
    """Repositories other than the model's own that its code comes from."""
    if not getattr(server_args, "trust_remote_code", False):
        return frozenset()
    try:
        config = model_config_of(server_args).hf_config
    except Exception:  # then nothing lasts, see describe_engine
        return frozenset()
    return frozenset(code_repositories(getattr(config, "auto_map", None)))


# ---------------------------------------------------------------- what is in the key


def describe_engine(
    server_args: Any, storage_config: Any = None, environ: Mapping[str, str] = os.environ
) -> Description:
    """All that is the same for every page of this engine, but for weights and layout. Raises nothing.

    ``server_args``: None where they are not known. ``storage_config``: of HiCache.
    """
    if server_args is None:
        return Description((), ("the arguments, which are not where this kvbm looks for them",), ())
    parts = [
        _describe_arguments(server_args),
        _describe_model(server_args),
        describe_environment(environ),
        _describe_software(),
    ]
    if storage_config is not None:
        parts.append(describe(storage_config, HICACHE, "hicache."))
    return Description.joined(parts)


def _describe_arguments(server_args: Any) -> Description:
    try:
        return describe(effective(server_args), SERVER_ARGS)
    except Exception:  # an SGLang that keeps them otherwise
        log.debug("kvbm: arguments", exc_info=True)
        return Description((), ("the arguments in effect",), ())


def _describe_model(server_args: Any) -> Description:
    try:
        config = model_config_of(server_args)
        counted = SimpleNamespace(**{name: getattr(config, name) for name in MODEL.rules})
    except Exception:  # a model's own code, or an SGLang that has it elsewhere
        log.debug("kvbm: the model's configuration", exc_info=True)
        return Description((), ("the model's configuration",), ())
    return describe(counted, MODEL, "model_config.")


def describe_environment(environ: Mapping[str, str]) -> Description:
    """Variables of SGLang and its libraries that are set and not known to be irrelevant."""
    return environment.describe_environment(
        environ, ENVIRONMENT, IRRELEVANT_ENVIRONMENT, PROCESS_ONLY_ENVIRONMENT, CONTENTS
    )


def _describe_software() -> Description:
    """Versions and the platform: models' code and formats of quantized numbers change with them."""
    version = str(getattr(sys.modules.get("sglang"), "__version__", ""))
    return environment.describe_software(
        ("sglang", version),
        platform=_platform,
        plugins=_plugins,
        transformers=_transformers,
        packages=environment.packages,
        code=lambda: environment.changed_code("sglang", "transformers"),
    )


def _platform() -> str:
    import torch

    # Of the same "fp8", AMD's older devices store other numbers (e4m3fnuz) than all others. A device's
    # capability chooses kernels, some of which compute in other formats.
    if not torch.cuda.is_available():
        return f"no GPU {environment.processor()}"
    if torch.version.hip is not None:
        return f"hip {torch.cuda.get_device_properties(0).gcnArchName}"
    return f"cuda {torch.cuda.get_device_capability()}"


def _plugins() -> str:
    return environment.plugins(*PLUGIN_GROUPS)


def _transformers() -> str:
    return metadata.version("transformers")
