"""The examples of docs/extending.md, as they are: each keeps the contract, and the page shows it whole."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.policy.base import NOT_HERE, EvictionPolicy
from kvbm_core.policy.recency import as_slots
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import ObjectEngine
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_engine, open_store
from kvbm_core.testing.engine_contract import EngineContract
from kvbm_core.testing.extent_contract import ExtentStoreContract
from kvbm_core.testing.memory_engine import MemoryEngine, MemoryObjects
from kvbm_core.testing.policy_contract import EvictionPolicyContract, ListPolicy, sample_keys
from kvbm_core.testing.store_contract import BlockStoreContract
from kvbm_core.tokens.runs import BlockRun, run_of
from tests.outside import sqlite_store
from tests.unit.doctor_bench import look

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


POLICY = load("eviction_policy")
USE = re.compile(r"```python\n(import numpy.*?open_cache.*?)```", re.DOTALL)
"""As the page uses the store: two caches, one after the other."""


class TestDeepFirst(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        made: EvictionPolicy = POLICY.DeepFirst()
        return made


def test_the_adapter_runs_as_it_is() -> None:
    command = [sys.executable, EXAMPLES / "engine_adapter.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "4 of 100 tokens computed: True\n"


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


def test_what_lies_deep_in_a_prompt_goes_first() -> None:
    keys, made = sample_keys(0, 4), POLICY.DeepFirst(head_blocks=2)
    policy = ListPolicy(made)
    policy.insert([0, 1, 2, 3])
    policy.insert([4, 5, 6, 7])
    made.tell(run_of(keys), as_slots([4, 5, 6, 7]))
    made.tell(BlockRun(keys, 1, 4), as_slots([1, 2, NOT_HERE]))
    assert policy.evict(8) == [7, 6, 2, 3, 1, 0, 5, 4]


class Installed:
    """What is opened by the URL of the installed package's store."""

    payload_bytes: int

    @contextmanager
    def url(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kvbm-sqlite-") as folder, sqlite_store(Path(folder)):
            yield f"sqlite://{folder}/objects.db"

    @contextmanager
    def stores(self) -> Iterator[RecordStore]:
        with self.url() as url:
            yield cast(RecordStore, open_store(StoreSpec(url, self.payload_bytes, "test", "0of1", "a/model")))


class TestSqliteEngine(Installed, EngineContract):
    @contextmanager
    def store(self) -> Iterator[Callable[[], ObjectEngine]]:
        with self.url() as url:
            yield lambda: open_engine(url, StoreOptions())


class TestBlocksInSqlite(Installed, BlockStoreContract):
    def test_more_blocks_than_fit_cost_old_ones_and_never_bytes(self) -> None:
        """It has no bound of its own."""


class TestExtentsInSqlite(Installed, ExtentStoreContract):
    pass


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://tmp/blocks.db"])
def test_the_store_says_how_its_url_is_written(url: str, tmp_path: Path) -> None:
    with sqlite_store(tmp_path), pytest.raises(ConfigError, match="write three slashes") as caught:
        open_engine(url, StoreOptions())
    assert str(caught.value).startswith(f"kvbm: KVBM_REMOTE_URL={url}: ")


class MarksNothing(MemoryEngine):
    """Its renew takes an object for as old as can be."""

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        found = super().renew(names, deadline_s=deadline_s)
        for name in names:
            if name in self.objects.objects:
                self.objects.objects[name] = self.objects.objects[name]._replace(changed_s=0.0)
        return found


class EndsAtZ(MemoryEngine):
    """Its scan ends too early."""

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        found = super().scan(prefix, deadline_s=deadline_s)
        return (info for info in found if info.name < f"{prefix}z")


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (MarksNothing, "test_what_is_renewed_is_as_it_was"),
        (EndsAtZ, "test_a_scan_finds_what_begins_with_the_prefix"),
    ],
)
def test_the_contract_catches_a_broken_engine(broken: type[MemoryEngine], test: str) -> None:
    class Suite(EngineContract):
        @contextmanager
        def store(self) -> Iterator[Callable[[], ObjectEngine]]:
            objects = MemoryObjects()
            yield lambda: broken(objects=objects)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


def test_everything_knows_the_store_of_an_installed_package(tmp_path: Path) -> None:
    """The commands and the library, each in a process of its own, and the doctor."""
    url = f"sqlite://{tmp_path}/objects.db"
    others = {name: os.environ[name] for name in os.environ.keys() - {*KvbmSettings.env_names().values()}}
    path = os.pathsep.join([str(tmp_path / "site"), others.get("PYTHONPATH", "")])
    environment = {**others, "PYTHONPATH": path, "KVBM_REMOTE_URL": url}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    with sqlite_store(tmp_path / "site"):
        (program,) = USE.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
        assert run("-c", program.replace("sqlite:///tmp/blocks.db", url)) == "0 4\n4 4\n"
        (finding,) = look("stores", cpu_cache_gb=1, remote_url=url)
        assert finding.seen == f"{url} takes, gives and removes objects"
        listed = json.loads(run("-m", "kvbm_core", "remote", "ls", url, "--json"))
        ((model, found),) = listed["namespaces"].items()
        assert found["blocks"] == 4
        assert "records are good" in run("-m", "kvbm_core", "remote", "verify", url)
        assert f"{model}: " in run("-m", "kvbm_core", "remote", "rm", url, model, "--yes")
        assert "no blocks below" in run("-m", "kvbm_core", "remote", "ls", url)
