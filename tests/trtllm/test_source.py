"""TensorRT-LLM's own files under the double: what loads them, and that they are what is played on."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's own connector manager; torch is missing")

import torch

from tests.trtllm.double import (
    EARLY,
    MID,
    NEWEST,
    RELEASED,
    Executor,
    ExecutorConfig,
    World,
    contract,
    host,
    lacking,
    own_manager,
    source,
)
from tests.trtllm.double.source import PYEXECUTOR, STAND_INS, VARIABLE, SourceError
from tests.trtllm.mocks import Script, make_classes, make_executor

MANAGER = "class KvCacheConnectorManager:\n" + "".join(
    f"    def {name}(self): ...\n" for name in sorted(source.CALLED)
)
FIRST = "class RequestData:\n    request_id: int\n"
COUNTED = f"{FIRST}    num_scheduled_tokens: int\n"
GROUPED = f"{COUNTED}    new_block_ids_by_layer_group: list\n"
OF_ITS_OWN = """
    import torch
    from tensorrt_llm.bindings.internal.batch_manager import KvCacheConnectorManager as Cpp
    from .scheduler import ScheduledRequests
    from tests.trtllm.double import api_released, own_manager

    KvCacheConnectorScheduler = api_released.KvCacheConnectorScheduler
    KvCacheConnectorWorker = api_released.KvCacheConnectorWorker
    SchedulerOutput = api_released.SchedulerOutput

    class RequestData(api_released.RequestData):
        num_scheduled_tokens: int

    class KvCacheConnectorManager(Cpp, own_manager.KvCacheConnectorManager):
        class api:
            RequestData, SchedulerOutput = RequestData, SchedulerOutput

        def layer_pre_hook(self, module):
            self.worker.wait_for_layer_load(module.layer_idx, torch.cuda.current_stream())

"""
"""A connector module of 1.2 in terms of the double's own; the methods are added."""


def write(folder: Path, name: str, text: str) -> Path:
    """A file of the folder."""
    path = folder / PYEXECUTOR / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the variable names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_scenarios_are_played_on_the_files_of_the_variable() -> None:
    found = source.find()
    if found is None:
        why = source.missing_in(source.folder()) if source.folder() else f"set {VARIABLE} to its folder"
        pytest.skip(f"NOT RUN: scenarios on TensorRT-LLM's own connector manager and layouts: {why}")
    with World(found.version):
        for manager in ("v1", "v2") if found.layout else ("v1",):
            executor = make_executor(Script(matches={1: (8, False)}), manager=manager)
            assert executor.manager is not None
            methods = type(executor.manager._manager)
            assert Path(methods.get_finished.__code__.co_filename) == found.connector
            leader = type(executor.leader).__mro__
            assert any(cls.__module__ == methods.__module__ for cls in leader)
            executor.submit(range(12), 4)
            executor.run_until_idle()
        if found.layout:
            builder = sys.modules[type(executor.worker.memory).__module__].build_kv_cache_layout_v2
            assert Path(builder.__code__.co_filename) == found.layout


def test_without_the_variable_or_without_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.find() is None
    missing = source.missing_in(folder)
    assert missing is not None
    for name in source.NAMES:
        assert str(folder / PYEXECUTOR / name) in missing
    monkeypatch.delenv(VARIABLE)
    assert source.find() is None


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("kv_cache_connector.py", FIRST, EARLY),
        ("kv_cache_connector.py", COUNTED, RELEASED),
        ("connectors/kv_cache_connector.py", COUNTED, MID),
        ("connectors/kv_cache_connector.py", GROUPED, NEWEST),
    ],
)
def test_the_version_is_known_by_its_fields(folder: Path, name: str, text: str, version: str) -> None:
    connector = write(folder, name, text + MANAGER)
    layout = write(folder, "connectors/kv_cache_layout.py", "") if version == NEWEST else None
    assert source.find() == source.Source(connector, layout, version)


def test_another_connector_is_named(folder: Path) -> None:
    path = write(folder, "kv_cache_connector.py", COUNTED + MANAGER.replace("handle_", "mark_"))
    with pytest.raises(SourceError, match=rf"{path}.*without KvCacheConnectorManager.handle_metadata"):
        source.find()


def test_a_missing_layout_is_named(folder: Path) -> None:
    write(folder, "connectors/kv_cache_connector.py", GROUPED + MANAGER)
    with pytest.raises(SourceError, match=r"there is no .*/connectors/kv_cache_layout.py"):
        source.find()


@pytest.mark.parametrize(
    "line", ["from tensorrt_llm._utils import mpi_barrier", "import tensorrt_llm.runtime"]
)
def test_what_has_no_stand_in_is_named(folder: Path, line: str) -> None:
    path = write(folder, "kv_cache_connector.py", f"{line}\n{COUNTED}{MANAGER}")
    name = line.rpartition(" ")[2]
    with pytest.raises(SourceError, match=rf"{path} needs what .*source.py has no stand-in for.*{name}"):
        World(RELEASED).__enter__()
    assert "tensorrt_llm" not in sys.modules


def test_what_is_lacking_is_said_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.NAMES[1] in (lacking.line() or "")
    unknown = """
        from typing import TYPE_CHECKING
        import tensorrt_llm.runtime
        from tensorrt_llm._utils import mpi_barrier, mpi_rank
        from ..llm_request import get_draft_token_length
        if TYPE_CHECKING:
            from .kv_cache_layout import KvCacheLayout
        def late():
            from ..kv_cache.kv_cache_manager_v2 import KVCacheManagerV2, Role
    """
    connector = write(folder, "connectors/kv_cache_connector.py", dedent(unknown) + GROUPED + MANAGER)
    assert (lacking.line() or "").endswith("kv_cache_layout.py, which belongs to " + str(connector))
    layout = (
        "def build(manager):\n    return manager.impl, manager.get_replicated_roles(), manager.brand_new\n"
    )
    write(folder, "connectors/kv_cache_layout.py", layout)
    manager = f"{contract.V2_MANAGER}.Role"
    told = [
        f"no stand-in for {name} (" for name in ("tensorrt_llm.runtime", "tensorrt_llm._utils.mpi_barrier")
    ]
    told += [f"no stand-in for {manager} (", "the double's V2 cache has no brand_new (", "there is no "]
    found = lacking.lacking(folder)
    assert len(found) == len(told)
    assert all(line.startswith(wanted) for line, wanted in zip(found, told, strict=True))
    line = lacking.line() or ""
    assert all(each in line for each in found) and "\n" not in line
    for path, text in (
        (connector, GROUPED + MANAGER),
        (connector.with_name("kv_cache_layout.py"), ""),
        (folder / source.LLM_ARGS, ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    source.find_in.cache_clear()
    assert (lacking.line() or "").endswith("nothing is missing")
    monkeypatch.delenv(VARIABLE)
    assert lacking.line() is None


def test_the_manager_of_the_file_is_the_one_that_runs(folder: Path) -> None:
    own = "from tests.trtllm.double.own_manager import KvCacheConnectorManager as Own\n"
    methods = "".join(
        f"    def {name}(self, *arguments):\n        CALLS.add({name!r})\n"
        f"        return Own.{name}(self, *arguments)\n"
        for name in sorted(source.CALLED)
    )
    path = write(folder, "kv_cache_connector.py", f"{own}CALLS = set()\n{dedent(OF_ITS_OWN)}{methods}")
    with World(RELEASED) as world:
        executor = Executor(*make_classes(Script(saves=True)), ExecutorConfig())
        executor.submit(range(12), 4)
        executor.run_until_idle()
        module = sys.modules["tensorrt_llm._torch.pyexecutor.kv_cache_connector"]
        assert module.__spec__ is not None and module.__spec__.origin == str(path)
        assert vars(module)["CALLS"] == source.CALLED
        plain = Executor(None, None)
        plain.submit(range(12), 4)
        assert executor.outputs == plain.run_until_idle()
        assert world.version == source.version()
    with World(NEWEST):  # another version than the folder's is the double's own
        manager = make_executor().manager
        assert manager is not None
        assert type(manager._manager).__mro__[1] is own_manager.KvCacheConnectorManager


def test_memory_at_an_address() -> None:
    names = STAND_INS["tensorrt_llm._utils"]
    memory = torch.arange(96, dtype=torch.uint8).view(4, 24)
    address = host.share(memory)
    wrapper = names["TensorWrapper"](address + 8, torch.int16, (4, 4), (12, 1))
    found = names["convert_to_torch_tensor"](wrapper)
    assert torch.equal(found, memory[:, 8:16].view(torch.int16))
    found[3, 3] = -1
    assert memory[3, 14:16].tolist() == [255, 255]
    with pytest.raises(ValueError, match="nobody has shared"):
        host.tensor_at(8, torch.uint8, (1,), (1,))
