"""Every field of every supported vLLM's configuration is classified, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Nested, Rule, ThisProcessOnly
from kvbm_vllm.config_tables import IRRELEVANT_ENVIRONMENT, PROCESS_ONLY_ENVIRONMENT, TABLES, VLLM
from tests.contract.source_reading import find_class, parse
from tests.contract.test_vllm_versions import MINORS, SOURCES, VARIABLE, each_version

WORDING = "say in kvbm_vllm/config_tables.py whether it shapes K and V"


def config_class(vllm: Path, name: str) -> ast.ClassDef:
    """The class of this name in ``vllm/config``."""
    found = [node for path in sorted((vllm / "config").glob("*.py")) if (node := find_class(path, name))]
    assert len(found) == 1, f"{name} is defined {len(found)} times"
    return found[0]


def stored_fields(node: ast.ClassDef) -> set[str]:
    """Fields of a dataclass that an object has: not ClassVar, not InitVar. Its bases have none."""
    assert not [base for base in node.bases if "Config" in ast.unparse(base)], (
        f"{node.name} has a base: read it"
    )
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {
        ast.unparse(item.target)
        for item in fields
        if not ast.unparse(item.annotation).startswith(("ClassVar", "InitVar"))
    }


@each_version
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.class_name)
def test_every_field_is_classified(vllm: Path, table: ConfigTable) -> None:
    missing = stored_fields(config_class(vllm, table.class_name)) - set(table.rules)
    assert not missing, f"{table.class_name}: {sorted(missing)}: {WORDING}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.class_name)
def test_no_rule_is_about_nothing(table: ConfigTable) -> None:
    if any(not any(version.startswith(f"0.{minor}.") for version in SOURCES) for minor in MINORS):
        pytest.skip(f"NOT RUN: whether rules are about fields of some vLLM: set {VARIABLE} (make test does)")
    known = set[str]().union(
        *(stored_fields(config_class(vllm, table.class_name)) for vllm in SOURCES.values())
    )
    assert not set(table.rules) - known


@each_version
def test_every_configuration_is_reached(vllm: Path) -> None:
    """What holds another configuration has a table for it, or a rule for it as a whole."""
    names = {table.class_name for table in TABLES}
    reached = {VLLM.class_name}
    for table in TABLES:
        for rule in table.rules.values():
            reached |= {below.class_name for below in rule.tables} if isinstance(rule, Nested) else set()
    assert reached == names
    annotated = {
        ast.unparse(item.target): ast.unparse(item.annotation)
        for item in config_class(vllm, "VllmConfig").body
        if isinstance(item, ast.AnnAssign)
    }
    for name, rule in VLLM.rules.items():
        if isinstance(rule, Nested) and name in annotated:
            assert any(below.class_name in annotated[name] for below in rule.tables), name


def test_a_new_field_would_be_seen(tmp_path: Path) -> None:
    """The reader itself: what is a field of an object, and what is not."""
    source = """
class CacheConfig:
    DEFAULT: ClassVar[int] = 16
    given: InitVar[int]
    block_size: int = 16
    of_tomorrow: "str | None" = field(default=None, init=False)

    def method(self) -> None:
        local: int = 3
"""
    path = tmp_path / "cache.py"
    path.write_text(source)
    node = find_class(path, "CacheConfig")
    assert node is not None
    assert stored_fields(node) == {"block_size", "of_tomorrow"}


def test_every_rule_gives_a_reason() -> None:
    rules: list[tuple[str, Rule]] = [
        (f"{table.class_name}.{name}", rule) for table in TABLES for name, rule in table.rules.items()
    ]
    assert len(rules) > 350
    for name, rule in rules:
        if isinstance(rule, Irrelevant | ThisProcessOnly):
            assert len(rule.reason) > 10, name
        elif isinstance(rule, InKey) and rule.read is not None:
            assert rule.note, f"{name}: say what is read of it"


# ---------------------------------------------------------------- the environment


def environment_names(vllm: Path) -> set[str]:
    """The variables that this version knows."""
    for node in parse(vllm / "envs.py").body:
        is_table = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
        if is_table and isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("envs.py has no environment_variables")


def test_variables_that_are_left_out_are_variables_of_vllm() -> None:
    """A name that is misspelled would be in the key after all."""
    if any(not any(version.startswith(f"0.{minor}.") for version in SOURCES) for minor in MINORS):
        pytest.skip(f"NOT RUN: whether each variable is one of some vLLM: set {VARIABLE} (make test does)")
    known = set[str]().union(*(environment_names(vllm) for vllm in SOURCES.values()))
    assert len(known) > 300
    set_at_start = {"VLLM_DIST_IDENT"}  # by the CPU worker itself, another one each time
    assert not {*IRRELEVANT_ENVIRONMENT, *PROCESS_ONLY_ENVIRONMENT} - known - set_at_start
    assert not set(IRRELEVANT_ENVIRONMENT) & set(PROCESS_ONLY_ENVIRONMENT)
