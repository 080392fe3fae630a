"""What installed packages of other people bring, by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from kvbm_core.errors import ConfigError

POLICIES = "kvbm.policies"
"""Entry points of eviction policies: each names what is called without arguments, for each tier."""
STORES = "kvbm.stores"
"""Entry points of stores: each is called as a scheme, and names an EngineMaker."""
BROKEN = (Exception, SystemExit)
"""What code of somebody else may raise."""


def package_of(entry: EntryPoint) -> str:
    """The name of the package that has it."""
    return entry.dist.name if entry.dist else entry.value


def said_by(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def made_by(entry: EntryPoint, setting: str, value: str, kind: type, *arguments: object) -> Any:
    """What the entry point makes, which is of this ``kind``. ConfigError, one line that names the package, if
    it cannot be had.
    """
    try:
        made = entry.load()(*arguments)
        if not isinstance(made, kind):
            raise TypeError(f"it makes no {kind.__name__}, but a {type(made).__name__}")
    except ConfigError:
        raise
    except BROKEN as error:
        what = f"{entry.value} of the package {package_of(entry)}"
        remedy = f"{what} cannot be used: {said_by(error)}; mend or reinstall that package"
        raise ConfigError(setting, value, remedy) from error
    return made
