"""Every argument of every supported SGLang is classified, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, ThisProcessOnly
from kvbm_sglang.config_tables import HICACHE, SERVER_ARGS, TABLES
from tests.contract.sglang_reading import STORAGE
from tests.contract.source_reading import class_of, fields_of, parse
from tests.contract.test_sglang_versions import RELEASES, SOURCES, VARIABLE, each_version

WORDING = "say in kvbm_sglang/config_tables.py whether it shapes K and V"
ARGUMENTS = Path("srt/server_args.py")
FIELDS = Path("srt/arg_groups/fields")


def argument_names(sglang: Path) -> set[str]:
    """Fields of ServerArgs: its own, and since 0.5.21 those of the namespaces that it is made of."""
    own = _annotated(class_of(sglang / ARGUMENTS, "ServerArgs"))
    if "arg_groups.fields" not in (sglang / ARGUMENTS).read_text(encoding="utf-8"):
        return own
    files = sorted((sglang / FIELDS).glob("*.py"))
    assert files, f"{sglang} has no {FIELDS}: fetch the sources anew (make contract)"
    classes = [node for path in files for node in parse(path).body if isinstance(node, ast.ClassDef)]
    return own.union(*map(_annotated, classes))


def _annotated(node: ast.ClassDef) -> set[str]:
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {
        ast.unparse(item.target) for item in fields if not ast.unparse(item.annotation).startswith("ClassVar")
    }


@each_version
def test_every_argument_is_classified(sglang: Path) -> None:
    names = argument_names(sglang)
    assert len(names) > 300
    missing = names - set(SERVER_ARGS.rules)
    assert not missing, f"{sorted(missing)}: {WORDING}"


@each_version
def test_every_field_of_a_backends_configuration_is_classified(sglang: Path) -> None:
    missing = set(fields_of(sglang / STORAGE, "HiCacheStorageConfig")) - set(HICACHE.rules)
    assert not missing, f"{sorted(missing)}: {WORDING}"


def test_no_rule_is_about_nothing() -> None:
    if any(version not in SOURCES for version in RELEASES):
        pytest.skip(
            f"NOT RUN: whether rules are about fields of some SGLang: set {VARIABLE} (make test does)"
        )
    known = set[str]().union(*map(argument_names, SOURCES.values()))
    assert not set(SERVER_ARGS.rules) - known
    known = set[str]().union(
        *(fields_of(sglang / STORAGE, "HiCacheStorageConfig") for sglang in SOURCES.values())
    )
    assert not set(HICACHE.rules) - known


def test_a_new_field_would_be_seen(tmp_path: Path) -> None:
    """The reader itself, on the form of 0.5.21 and newer."""
    (tmp_path / FIELDS).mkdir(parents=True)
    (tmp_path / ARGUMENTS).write_text(
        "from sglang.srt.arg_groups.fields import collect\nclass ServerArgs:\n    def f(self): x: int = 1\n"
    )
    (tmp_path / FIELDS / "model.py").write_text(
        "class Model(msgspec.Struct):\n    _NS_PATH = 'model'\n    derived = Derived()\n"
        "    of_tomorrow: A[int, 'help'] = 3\n    other: ClassVar[int] = 1\n"
    )
    assert argument_names(tmp_path) == {"of_tomorrow"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.class_name)
def test_every_rule_gives_a_reason(table: ConfigTable) -> None:
    for name, rule in table.rules.items():
        if isinstance(rule, Irrelevant | ThisProcessOnly):
            assert len(rule.reason) > 10, name
        elif isinstance(rule, InKey) and rule.read is not None:
            assert rule.note, f"{name}: say what is read of it"
