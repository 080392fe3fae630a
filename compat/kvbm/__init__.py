"""kvbm as a library (``open_cache``), and the module names of the KVBM guides.

All code is in kvbm_core and the adapters. Importing this loads none of it: names are looked up when they are
first used, as engines import what lies below this package and want nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvbm_core import __version__

if TYPE_CHECKING:
    from kvbm_core.errors import ConfigError, KvbmError
    from kvbm_core.library.cache import BlockCache
    from kvbm_core.library.opening import open_cache
    from kvbm_core.library.spec import BlockSpec

__all__ = ["BlockCache", "BlockSpec", "ConfigError", "KvbmError", "__version__", "open_cache"]

_PLACES = {
    "BlockCache": "kvbm_core.library.cache",
    "BlockSpec": "kvbm_core.library.spec",
    "ConfigError": "kvbm_core.errors",
    "KvbmError": "kvbm_core.errors",
    "open_cache": "kvbm_core.library.opening",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'kvbm' has no attribute {name!r}")
    value: object = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
