"""Which fields of a configuration are in the key, and texts of values that are the same in every process."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import InitVar, dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.identity.effective import effective_config
from kvbm_core.identity.fields import (
    ConfigTable,
    InKey,
    Irrelevant,
    Nested,
    ThisProcessOnly,
    UnstableValueError,
    canonical,
    describe,
    field_names,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Load:
    load_format: str = "auto"
    threads: int = 4


@dataclass
class Model:
    rope_theta: float = 1e4
    seed: int = 0
    load: Load | None = field(default_factory=Load)
    newest: object = None


LOAD = ConfigTable("Load", {"load_format": InKey(), "threads": Irrelevant("how files are read")})
MODEL = ConfigTable(
    "Model",
    {
        "rope_theta": InKey(),
        "seed": ThisProcessOnly("a test's", applies=lambda seed: seed > 0),
        "load": Nested((LOAD,)),
        "newest": Irrelevant("a test's"),
    },
)


def test_what_is_in_the_key_changes_it_and_what_is_irrelevant_does_not() -> None:
    plain = describe(Model(), MODEL)
    assert plain.is_lasting
    assert describe(Model(rope_theta=5e5), MODEL).pairs != plain.pairs
    assert describe(Model(load=Load("dummy")), MODEL).pairs != plain.pairs
    assert describe(Model(load=None), MODEL).pairs != plain.pairs
    assert describe(Model(load=Load(threads=9), newest=object()), MODEL) == plain


def test_a_field_that_nobody_has_classified_does_not_last() -> None:
    without = ConfigTable("Model", {name: rule for name, rule in MODEL.rules.items() if name != "newest"})
    described = describe(Model(), without)
    assert described.unknown == ("newest",)
    assert not described.is_lasting


def test_another_class_of_a_nested_configuration_is_unknown() -> None:
    described = describe(Model(load=SimpleNamespace(load_format="auto")), MODEL)  # type: ignore[arg-type]
    assert described.unknown == ("load (SimpleNamespace)",)


def test_what_holds_for_this_process_alone_says_why() -> None:
    assert describe(Model(seed=1), MODEL).process_only == ("seed: a test's",)


def test_a_value_without_a_stable_text_and_a_field_that_raises_are_unknown() -> None:
    class Raises:
        __struct_fields__ = ("broken",)

        @property
        def broken(self) -> int:
            raise RuntimeError

    assert describe(Raises(), ConfigTable("Raises", {"broken": InKey()})).unknown == ("broken",)
    assert describe(Model(rope_theta=object()), MODEL).unknown == ("rope_theta",)  # type: ignore[arg-type]
    with pytest.raises(UnstableValueError):
        canonical(lambda: None)


class Color(Enum):
    RED = 1


class Name(str):
    def __repr__(self) -> str:
        return "always the same"


def test_different_values_have_different_texts() -> None:
    values: list[Any] = [
        None, True, 1, 1.0, "1", b"1", "None", [1], [[1]], {"a": 1}, {"a": "1"}, {1, 2}, [1, 2], {"a": [1]},
        Color.RED, "Color.RED", Path("a"), "a", Load(), Load(threads=5), {"a": 1, "b": 2}, ["a", "b"],
        ["a,b"], Name("x"), Name("y"), int, canonical,
    ]  # fmt: skip
    texts = [canonical(value) for value in values]
    assert len(set(texts)) == len(texts)
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({3, 1, 2}) == canonical({2, 3, 1})


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def typed(value: object) -> object:
    """``value`` in which 1, 1.0 and True are not equal, nor 0.0 and -0.0."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_texts_are_equal_only_where_values_are(one: object, other: object) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


def test_fields_of_a_pydantic_object_count() -> None:
    class Arguments(pydantic.BaseModel):
        num_bits: int = 8
        inner: object = None

    texts = {
        canonical(Arguments(num_bits=bits, inner=Arguments(num_bits=of))) for bits in (4, 8) for of in (4, 8)
    }
    assert len(texts) == 4
    with pytest.raises(UnstableValueError):
        canonical(Arguments(inner=object()))


def test_a_fraction_and_a_pattern_have_texts() -> None:
    values = [Fraction(1, 2), Fraction(1, 3), re.compile("a"), re.compile("b"), re.compile("a", re.I)]
    assert len({canonical(value) for value in values}) == len(values)


def test_which_weights_a_configuration_inside_another_reads_counts() -> None:
    def text(name: str, inner: str) -> str:
        return canonical(effective_config({"_name_or_path": name, "encoder": {"_name_or_path": inner}}))

    assert text("here", "a") == text("there", "a") != text("here", "b")


class Forgetful:
    """A model's own configuration, whose ``to_dict`` leaves out what an override has set."""

    def __init__(self, theta: float, inner: object = None) -> None:
        self.theta, self.inner, self._private = theta, inner, object()

    def to_dict(self) -> dict[str, object]:
        return {"model_type": "mine"}


def test_what_a_configurations_own_text_leaves_out_counts() -> None:
    configs = [Forgetful(1.0), Forgetful(2.0), Forgetful(1.0, Forgetful(3.0)), Forgetful(1.0, Forgetful(4.0))]
    assert len({canonical(effective_config(config)) for config in configs}) == len(configs)
    assert canonical(effective_config(Forgetful(1.0))) == canonical(effective_config(Forgetful(1.0)))
    assert effective_config(None) is None


def test_texts_are_the_same_in_another_process() -> None:
    program = (
        "from kvbm_core.identity.fields import canonical\n"
        "print(canonical({'a': {'x', 'y', 'z'}, 'b': [1.5, None], 'c': frozenset('qrs')}))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


@dataclass
class Cache:
    limit: ClassVar[int] = 3
    given: InitVar[int] = 0
    dtype: str = "auto"
    scales: str | None = None


def test_what_an_object_does_not_store_is_no_field() -> None:
    assert field_names(Cache(given=5)) == ["dtype", "scales"]


def test_a_rule_may_look_at_the_whole_configuration() -> None:
    table = ConfigTable(
        "Cache",
        {
            "dtype": ThisProcessOnly(
                "scales come from what was seen",
                applies=lambda cache: cache.dtype == "fp8" and cache.scales is None,
                otherwise=InKey(),
                whole=True,
            ),
            "scales": InKey(lambda cache: cache.scales if cache.dtype == "fp8" else None, whole=True),
        },
    )
    plain = describe(Cache(), table)
    assert plain.is_lasting and ("dtype", "str:'auto'") in plain.pairs
    assert describe(Cache(scales="file"), table) == plain, "scales do not count without fp8"
    dynamic = describe(Cache(dtype="fp8"), table)
    assert dynamic.process_only == ("dtype: scales come from what was seen",)
    known = describe(Cache(dtype="fp8", scales="file"), table)
    assert known.is_lasting and known.pairs != plain.pairs
    assert describe(Cache(dtype="fp8", scales="other"), table).pairs != known.pairs


def test_what_cannot_be_read_is_unknown() -> None:
    table = ConfigTable("Cache", {"dtype": InKey(lambda value: 1 // 0), "scales": InKey()})
    assert describe(Cache(), table).unknown == ("dtype",)
