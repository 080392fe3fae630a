"""Eviction policies by name: ours, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from kvbm_core.config.installed import POLICIES, made_by, package_of
from kvbm_core.errors import ConfigError
from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.guarded import GuardedPolicy
from kvbm_core.policy.lru import LruPolicy

SETTING = "KVBM_EVICTION_POLICY"
LRU = "lru"

PolicyMaker = Callable[[], EvictionPolicy]


def make_policy(name: str = LRU, setting: str = SETTING) -> EvictionPolicy:
    """A new policy of this name. ConfigError, one line, if there is none, or two, or it cannot be had.
    Nothing is tried out: ``kvbm_core.testing.policy_contract`` does that.
    """
    if name == LRU:
        return LruPolicy()
    installed = entry_points(group=POLICIES)
    found = [entry for entry in installed if entry.name == name]
    if not found:
        known = ", ".join(sorted({LRU, *installed.names}))
        raise ConfigError(setting, name, f"no such policy is installed; there are: {known}")
    if len(found) > 1:
        packages = " and ".join(sorted(map(package_of, found)))
        raise ConfigError(setting, name, f"is a policy of {packages}; uninstall all but one")
    policy = made_by(found[0], setting, name, EvictionPolicy)
    return GuardedPolicy(policy, f"the eviction policy {name} of the package {package_of(found[0])}")
