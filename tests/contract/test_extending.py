"""The examples of docs/extending.md, as they are: each keeps the contract, and the page shows it whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.storage.remote.engine import ObjectEngine
from kvbm_core.testing.engine_contract import EngineContract
from kvbm_core.testing.policy_contract import EvictionPolicyContract, ListPolicy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "extending"


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"extending_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


POLICY, STORE = load("eviction_policy"), load("remote_store")


class TestUsedAgainLast(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        made: EvictionPolicy = POLICY.UsedAgainLast()
        return made


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("remote_store", "4 blocks written\n4 blocks read: True\n"),
        ("engine_adapter", "4 of 100 tokens computed: True\n"),
    ],
)
def test_the_examples_run_as_they_are(name: str, output: str) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == output


def test_the_page_shows_the_examples() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    paths = sorted(EXAMPLES.glob("*.py"))
    assert len(paths) == 3
    for path in paths:
        code = path.read_text(encoding="utf-8").partition('"""\n\n')[2]
        assert path.name in page
        assert f"```python\n{code}```" in page, path.name


def test_what_cannot_be_loaded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load("engine_adapter")
    engine = adapter.ToyEngine()
    try:
        prompt = list(range(70))
        first = engine.serve("a", prompt).copy()
        monkeypatch.setattr(engine.adapter._tiers, "claim", lambda owner, keys: None)
        engine.computed_tokens = 0
        assert (engine.serve("b", prompt) == first).all()
        assert engine.computed_tokens == len(prompt)
    finally:
        engine.adapter.close()


def test_what_was_used_again_goes_last() -> None:
    policy = ListPolicy(POLICY.UsedAgainLast())
    policy.insert([0, 1, 2])
    policy.touch([0, 1])
    policy.insert([3, 4])
    assert policy.evict(5) == [2, 4, 3, 1, 0]


class TestSqliteEngine(EngineContract):
    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        with tempfile.TemporaryDirectory(prefix="kvbm-sqlite-") as folder:
            yield lambda: STORE.SqliteEngine(f"{folder}/objects.db")
