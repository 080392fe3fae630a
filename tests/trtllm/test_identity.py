"""What shapes K and V is in the key, what does not is not, and what nobody has classified stays in memory."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: keys of TensorRT-LLM's blocks; torch is missing")

from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Nested, ThisProcessOnly
from kvbm_core.identity.roots import NO_ADAPTER, Roots
from kvbm_trtllm import identity
from kvbm_trtllm.config_tables import TABLES, TORCH_LLM_ARGS
from kvbm_trtllm.identity import adapter_of, describe_engine, namespace_of
from tests.trtllm.double.contract import EARLY, MID, NEWEST, RELEASED, installed
from tests.trtllm.double.llm_args import FIELDS, classes_of
from tests.trtllm.double.source import LLM_ARGS, VARIABLE
from tests.unit.test_trtllm_keys import weights_of

VERSIONS = (EARLY, RELEASED, MID, NEWEST)
SOURCE = os.environ.get(VARIABLE)
OTHER_VALUES: dict[str, object] = {
    "allreduce_strategy": "LOWPRECISION",
    "checkpoint_format": "mistral",
    "lora_config": SimpleNamespace(lora_dir=["somewhere"]),
}
BY_NAME = {table.class_name: table for table in TABLES}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_is_classified(version: str) -> None:
    for class_name, fields in FIELDS[version].items():
        missing = {*fields.split()} - {*BY_NAME[class_name].rules}
        assert not missing, f"{class_name} of {version}: say in kvbm_trtllm/config_tables.py: {missing}"


def test_no_rule_is_about_nothing() -> None:
    for table in TABLES:
        known = {name for fields in FIELDS.values() for name in fields.get(table.class_name, "").split()}
        assert not {*table.rules} - known, table.class_name


def fields_in(source: str) -> dict[str, set[str]]:
    """The public annotated names of each class, with those of its bases, by class."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}

    def of(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        own = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if "ClassVar" not in ast.unparse(item.annotation) and not item.target.id.startswith("_")
        }
        return own.union(*(of(ast.unparse(base)) for base in node.bases))

    return {name: of(name) for name in classes}


def test_every_field_of_the_sources_is_classified() -> None:
    if SOURCE is None:
        pytest.skip(f"NOT RUN: fields of TensorRT-LLM's own llm_args.py: set {VARIABLE} to its folder")
    path = Path(SOURCE) / LLM_ARGS
    if not path.exists():
        pytest.skip(f"NOT RUN: fields of TensorRT-LLM's own llm_args.py: there is no {path}")
    found = fields_in(path.read_text(encoding="utf-8"))
    for table in TABLES:
        assert not found.get(table.class_name, set()) - {*table.rules}, table.class_name
    assert len(found["TorchLlmArgs"]) > 80


def test_a_new_field_would_be_seen() -> None:
    found = fields_in(
        "class A(X):\n    a: int = 1\n    _p: int = 2\n    C: ClassVar[int] = 3\nclass B(A):\n    b: int"
    )
    assert found == {"A": {"a"}, "B": {"a", "b"}}


# ---------------------------------------------------------------- roots


@pytest.fixture(params=VERSIONS)
def classes(request: pytest.FixtureRequest) -> Any:
    with installed(request.param):
        yield classes_of(request.param)


def args_of(classes: Any, model: Path, **values: Any) -> Any:
    cache = classes["KvCacheConfig"](dtype="auto", tokens_per_block=32)
    return classes["TorchLlmArgs"](model=str(model), kv_cache_config=cache, load_format="auto", **values)


def root_of(llm_args: Any, adapter: str = "") -> Any:
    description = describe_engine(llm_args)
    weights = weights_of(llm_args)
    roots = Roots(namespace_of(description, 32), weights.stamp, is_lasting=description.is_lasting)
    weights.close()
    return roots.of(adapter_of(adapter) if adapter else NO_ADAPTER, None, "layout")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_one_field_after_the_other(classes: Any, model: Path) -> None:
    """In the key: another root. Irrelevant: the same. Of one process only: not lasting."""
    plain = root_of(args_of(classes, model))
    assert plain.is_lasting
    places: list[tuple[ConfigTable, Callable[[Any], Any]]] = [
        (TORCH_LLM_ARGS, lambda args: args),
        (BY_NAME["KvCacheConfig"], lambda args: args.kv_cache_config),
    ]
    for table, find in places:
        for name, rule in table.rules.items():
            if name not in type(find(args_of(classes, model))).model_fields or name in {"model", "revision"}:
                continue
            args = args_of(classes, model)
            setattr(find(args), name, OTHER_VALUES.get(name, "other"))
            if isinstance(rule, Nested):
                continue
            root = root_of(args)
            if isinstance(rule, InKey):
                assert root.is_lasting and root.hash != plain.hash, name
            elif isinstance(rule, Irrelevant):
                assert root == plain, name
            else:
                assert isinstance(rule, ThisProcessOnly)
                assert not root.is_lasting and root.hash != plain.hash, name


def test_quantization_is_read_though_it_is_no_field(classes: Any, model: Path) -> None:
    plain = root_of(args_of(classes, model))
    roots = {plain.hash}
    for values in ({"quant_algo": "FP8"}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}):
        root = root_of(args_of(classes, model, quant_config=classes["QuantConfig"](**values)))
        assert root.is_lasting
        roots.add(root.hash)
    assert len(roots) == 3


def test_what_nobody_has_classified_stays_in_this_process(classes: Any, model: Path) -> None:
    description = describe_engine(args_of(classes, model))
    assert description.is_lasting
    known = type(args_of(classes, model)).model_fields
    known["brand_new"] = None
    description = describe_engine(args_of(classes, model, brand_new=3))
    assert description.unknown == ("brand_new",) and not description.is_lasting


def test_configurations_of_a_class_that_nobody_knows(classes: Any, model: Path) -> None:
    args = args_of(classes, model)
    args.kv_cache_config = SimpleNamespace(dtype="auto")
    assert describe_engine(args).unknown == ("kv_cache_config (SimpleNamespace)",)


def test_variables_that_may_change_what_is_computed_count(classes: Any, model: Path) -> None:
    args = args_of(classes, model)
    plain = describe_engine(args, {})
    for name in ("TRTLLM_LOAD_KV_SCALES", "TLLM_OF_TOMORROW", "NVIDIA_TF32_OVERRIDE"):
        found = [describe_engine(args, {name: value}) for value in ("0", "1")]
        assert plain.pairs != found[0].pairs != found[1].pairs != plain.pairs, name
        assert found[0].is_lasting
    silent = ("TLLM_LOG_LEVEL", "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY", "TRTLLM_SERVICE_HOST", "PATH")
    assert describe_engine(args, dict.fromkeys(silent, "1")) == plain


@pytest.mark.parametrize("name", ["_platform", "_transformers"])
def test_the_device_and_transformers_count(
    classes: Any, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = args_of(classes, model)
    plain = describe_engine(args, {})
    monkeypatch.setattr(identity, name, lambda: "another")
    other = describe_engine(args, {})
    assert other.is_lasting and other.pairs != plain.pairs
    monkeypatch.setattr(identity, name, lambda: 1 // 0)
    assert describe_engine(args, {}).unknown == (name[1:],)


def test_drafts_of_the_users_own_and_other_loaders(classes: Any, model: Path) -> None:
    drafter = SimpleNamespace(decoding_type="User_Provided", drafter=object())
    assert not root_of(args_of(classes, model, speculative_config=drafter)).is_lasting
    assert not root_of(args_of(classes, model, checkpoint_format="MX")).is_lasting


def test_weights_and_loras(classes: Any, model: Path) -> None:
    plain = root_of(args_of(classes, model))
    lora = root_of(args_of(classes, model), adapter="1")
    assert not lora.is_lasting and lora.hash != root_of(args_of(classes, model), adapter="2").hash
    other = model / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"trained")
    assert root_of(args_of(classes, other)).hash != plain.hash
    assert not root_of(args_of(classes, model / "nowhere")).is_lasting
    draft = SimpleNamespace(speculative_model=str(other))
    with_draft = root_of(args_of(classes, model, speculative_config=draft))
    assert with_draft.is_lasting and with_draft.hash != plain.hash
