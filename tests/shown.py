"""Which tests show what settings do: those marked ``shows("VARIABLE", "VARIABLE=value")``, read as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError

TESTS = Path(__file__).parent
SHOWS, NIGHTLY = "pytest.mark.shows", "pytest.mark.nightly"
WAYS = {"KVBM_EVENTS": ("zmq", "nats", "off"), "KVBM_CONTROL": ("socket", "http", "nats", "off")}
"""Settings that take several words at once."""


class Shown(NamedTuple):
    """One word of a mark, where it stands."""

    word: str
    where: str
    is_nightly: bool

    @property
    def env(self) -> str:
        """The variable."""
        return self.word.partition("=")[0]


def shown() -> list[Shown]:
    """All there are."""
    found: list[Shown] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if SHOWS in text:
            found += _in(ast.parse(text), path.relative_to(TESTS).as_posix())
    return found


def _in(tree: ast.Module, path: str) -> Iterator[Shown]:
    """``pytest.param(..., marks=)`` and ``pytestmark`` count for nothing: only what stands above a test."""
    all_nightly = any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and NIGHTLY in ast.unparse(node.value)
        for node in tree.body
    )
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
        is_nightly = all_nightly or any(ast.unparse(call.func) == NIGHTLY for call in calls)
        for call in calls:
            if ast.unparse(call.func) == SHOWS:
                where = f"{path}:{node.lineno} {node.name}"
                assert node.name.startswith("test_") and call.args and not call.keywords, where
                for argument in call.args:
                    yield Shown(ast.literal_eval(argument), where, is_nightly)


def promised() -> dict[str, set[str]]:
    """What the table promises of each variable: each value of those that take one of a few words, and what 0
    means where that is something of its own.
    """
    found: dict[str, set[str]] = {}
    for name, env in KvbmSettings.env_names().items():
        doc = KvbmSettings.model_fields[name].description or ""
        values = WAYS.get(env) or _choices(name)
        zero = ("0",) if re.search(r"\b0(:| =) ", doc) else ()
        found[env] = {f"{env}={value}" for value in (*values, *zero)}
    return found


def _choices(name: str) -> tuple[str, ...]:
    try:
        text = "\n".join(KvbmSettings.from_env({name: "!"}).warnings)
    except ConfigError as error:
        text = str(error)
    said = re.search(r"write one of ([a-z0-9, -]+)", text)
    return tuple(said[1].split(", ")) if said and name != "log_level" else ()
