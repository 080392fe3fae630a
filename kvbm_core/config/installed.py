"""What installed packages of other people bring, by entry points."""

from __future__ import annotations

from collections.abc import Callable
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
    what = f"{entry.value} of the package {package_of(entry)}"
    remedy = "mend or reinstall that package"
    return made(lambda: entry.load()(*arguments), kind, (setting, value), what, remedy)


def made(make: Callable[[], object], kind: type, given: tuple[str, str], what: str, remedy: str) -> Any:
    """What ``make`` makes, which is of this ``kind``. ConfigError, one line of what was ``given`` (a setting
    and its value), if it cannot be had: ``what`` it is made by, and the ``remedy``.
    """
    try:
        found = make()
        if not isinstance(found, kind):
            raise TypeError(f"it makes no {kind.__name__}, but a {type(found).__name__}")
    except ConfigError:
        raise
    except BROKEN as error:
        raise ConfigError(*given, f"{what} cannot be used: {said_by(error)}; {remedy}") from error
    return found
