"""Eviction policies by name: ours, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from kvbm_core.config.remote_url import package_of
from kvbm_core.errors import ConfigError
from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.lru import LruPolicy

SETTING = "KVBM_EVICTION_POLICY"
POLICIES = "kvbm.policies"
"""The group of entry points. What one names is called without arguments for each tier."""
LRU = "lru"

PolicyMaker = Callable[[], EvictionPolicy]


def make_policy(name: str = LRU) -> EvictionPolicy:
    """A new policy of this name. ConfigError, one line, if there is none, or two, or it cannot be had.
    Nothing is tried out: ``kvbm_core.testing.policy_contract`` does that.
    """
    if name == LRU:
        return LruPolicy()
    installed = entry_points(group=POLICIES)
    found = [entry for entry in installed if entry.name == name]
    if not found:
        known = ", ".join(sorted({LRU, *installed.names}))
        raise ConfigError(SETTING, name, f"no such policy is installed; there are: {known}")
    if len(found) > 1:
        packages = " and ".join(sorted(map(package_of, found)))
        raise ConfigError(SETTING, name, f"is a policy of {packages}; uninstall all but one")
    try:
        policy: object = found[0].load()()
    except Exception as error:  # whatever somebody else's package raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(SETTING, name, f"cannot be made: {said}") from error
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(SETTING, name, f"makes no EvictionPolicy, but a {type(policy).__name__}")
    return policy
