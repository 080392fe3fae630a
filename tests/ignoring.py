"""Whether tests that show a setting would notice that nobody heeds it: each is run once more for each setting
that it shows, with that one at its default for all that reads it, and has to fail.

``python -m pytest -n 0 -p tests.ignoring --ignoring FILE ...``; FILE: what was found, a line for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from _pytest.runner import runtestprotocol

from kvbm_core.config import KvbmSettings, SettingSource

NOTICED, UNNOTICED, BROKEN = "noticed", "unnoticed", "broken"
EXEMPT = {
    "KVBM_NATIVE": "read from the environment before there are settings",
    "DYN_KVBM_DISABLE_WRITE_COMBINED": "what it asks for is always so",
    "DYN_KVBM_ENABLE_NUMA": "what it asks for is always so",
}
"""Settings that cannot be ignored in this way, or make no difference."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the findings go."""
    parser.addoption("--ignoring", metavar="FILE", help="run what shows settings, each of them ignored")


@contextmanager
def ignored(env: str) -> Iterator[None]:
    """The setting of this variable has its default, whatever the user says."""
    (name,) = (name for name, alias in KvbmSettings.env_names().items() if alias == env)
    default, plain_source = KvbmSettings.model_fields[name].default, KvbmSettings.source

    def look(self: KvbmSettings, asked: str) -> Any:
        return default if asked == name else object.__getattribute__(self, asked)

    def source(self: KvbmSettings, asked: str) -> SettingSource:
        return SettingSource.DEFAULT if asked == name else plain_source(self, asked)

    with patch.object(KvbmSettings, "__getattribute__", look), patch.object(KvbmSettings, "source", source):
        yield


class Ignoring:
    """Runs tests so, and writes down what became of them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """In place of pytest's own."""
        words = [word for marker in item.iter_markers("shows") for word in marker.args]
        asked, passed = dict.fromkeys(word.partition("=")[0] for word in words), set[str]()
        wanted = [env for env in asked if env not in EXEMPT and self._found.get(env) != NOTICED]
        for env in wanted:
            with ignored(env):
                # The next one is said to be the module: what the test alone has is set up anew.
                if _passes(item, item.parent):
                    passed.add(env)
        is_well = _passes(item, nextitem)
        for env in wanted:
            found = (UNNOTICED if env in passed else NOTICED) if is_well else BROKEN
            self._found[env] = found if found == NOTICED else self._found.get(env, found)
        return True

    def pytest_sessionfinish(self) -> None:
        """The findings."""
        with open(self._path, "w", encoding="utf-8") as file:
            file.writelines(f"{env} {found}\n" for env, found in sorted(self._found.items()))


def _passes(item: pytest.Item, following: Any) -> bool:
    reports = runtestprotocol(item, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def pytest_configure(config: pytest.Config) -> None:
    """If it is asked for."""
    path = config.getoption("--ignoring")
    if path:
        config.pluginmanager.register(Ignoring(path))
