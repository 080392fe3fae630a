"""Names of settings: which keys and variables are ours, and what a misspelt one was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from kvbm_core.config.readers import shown
from kvbm_core.errors import ConfigError

_OF_A_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_OUR_PREFIXES = ("dyn_kvbm_", "kvbm_")
_NOT_IN_RELEASE = ("DYN_KVBM_OBJECT_", "DYN_KVBM_NIXL_BACKEND_", "DYN_REGISTRY_")
_MAX_WARNINGS = 20


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` most likely was meant to be."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.85)
    return by_lower[found[0]] if found else None


def overrides_by_env(overrides: Mapping[str, object], env_of_field: Mapping[str, str]) -> dict[str, object]:
    """
    The values of ``kv_connector_extra_config`` that are ours, by variable name. None counts as not given.

    Keys may be field names or variable names; other people's keys are ignored. ConfigError for a key that
    looks like ours and is not, and for one setting given twice with different values.
    """
    known = {**env_of_field, **{env: env for env in env_of_field.values()}}
    given: dict[str, object] = {}
    for key, value in overrides.items():
        env = known.get(key)
        if env is None:
            _refuse_misspelt(str(key), value, known)
        elif value is not None:
            if env in given and given[env] != value:
                first = shown(given[env])
                raise ConfigError(key, shown(value), f"{env} is also given as {first}; keep one")
            given[env] = value
    return given


def _refuse_misspelt(key: str, value: object, known: Mapping[str, str]) -> None:
    hint = closest(key, known)
    if hint is None and not key.lower().startswith(_OUR_PREFIXES):
        return
    remedy = f"did you mean {hint}?" if hint else "remove it; docs/configuration.md lists all settings"
    # The value is left out: an object store's secret may stand under a key that this release does not know.
    raise ConfigError(shown(key), "(given)", f"unknown setting, {remedy}")


def is_of_kubernetes(variable: str) -> bool:
    """Whether Kubernetes sets it in every pod for a Service of that name, also one that begins with ours or
    an engine's: where the Service listens.
    """
    return _OF_A_SERVICE.fullmatch(variable) is not None


def unknown_variable_warnings(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """One line, without the value, for each set variable that looks like ours and is not; at most 20."""
    known_names = frozenset(known)
    lines: list[str] = []
    for name in sorted(environ.keys() - known_names):
        if is_of_kubernetes(name):
            continue
        if name.startswith(_NOT_IN_RELEASE):
            lines.append(f"kvbm: {shown(name)} is set but ignored: not in this release; unset it")
        elif name.lower().startswith(_OUR_PREFIXES):
            hint = closest(name, known_names)
            if hint is not None:
                lines.append(f"kvbm: {shown(name)} is set but ignored: unknown; did you mean {hint}?")
            elif name.startswith("DYN_KVBM_"):
                lines.append(f"kvbm: {shown(name)} is set but ignored: unknown; check the name or unset it")
    return lines[:_MAX_WARNINGS]
