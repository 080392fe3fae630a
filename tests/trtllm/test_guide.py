"""The KVBM guide's steps for TensorRT-LLM with our files: the configuration, its names, what a mistake looks
like.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")
yaml = pytest.importorskip(
    "yaml", reason="NOT RUN: the configuration files for TensorRT-LLM; PyYAML is missing"
)

from kvbm_core.errors import ConfigError, KvbmError, UnsupportedError  # noqa: E402
from kvbm_core.events import ports  # noqa: E402
from tests.engines.ports import free_port  # noqa: E402
from tests.trtllm.double import NEWEST, RELEASED, ExecutorConfig, installed  # noqa: E402
from tests.trtllm.harness import Kind, serve  # noqa: E402
from tests.trtllm.mocks import api  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "deploy" / "launch"
GUIDES_CONFIG: dict[str, Any] = {
    "backend": "pytorch",
    "cuda_graph_config": None,
    "kv_cache_config": {"enable_partial_reuse": False, "free_gpu_memory_fraction": 0.8},
    "kv_connector_config": {
        "connector_module": "kvbm.trtllm_integration.connector",
        "connector_scheduler_class": "DynamoKVBMConnectorLeader",
        "connector_worker_class": "DynamoKVBMConnectorWorker",
    },
}
GUIDES_BASELINE = {name: value for name, value in GUIDES_CONFIG.items() if name != "kv_connector_config"}
CONNECTOR = "kvbm_trtllm.connector"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("DYN_KVBM_", "KVBM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))


@pytest.fixture(params=[RELEASED, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each contract in turn, installed."""
    with installed(request.param):
        yield request.param


def config_of(name: str) -> Any:
    """A file of deploy/launch as TensorRT-LLM reads it."""
    return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


def resolve(connector_config: dict[str, str]) -> tuple[Any, Any]:
    """Leader and worker class, found as TensorRT-LLM finds them."""
    module = import_module(connector_config["connector_module"])
    return (
        getattr(module, connector_config["connector_scheduler_class"]),
        getattr(module, connector_config["connector_worker_class"]),
    )


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The words of an error, which are one line of bearable length."""
    text = str(error.value)
    assert text and len(text.splitlines()) == 1 and len(text) < 400
    return text


def test_the_files_are_the_guides() -> None:
    assert config_of("trtllm_kvbm.yaml") == GUIDES_CONFIG
    assert config_of("trtllm_baseline.yaml") == GUIDES_BASELINE


def test_the_page_shows_the_files() -> None:
    text = (ROOT / "docs" / "trtllm.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(found) for found in re.findall(r"<<'?EOF'?\n(.*?)^EOF$", text, re.M | re.S)]
    assert shown == [GUIDES_CONFIG, GUIDES_BASELINE]


def test_the_script_serves_the_file(tmp_path: Path) -> None:
    fake = tmp_path / "trtllm-serve"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$DYN_KVBM_CPU_CACHE_GB" "$DYN_KVBM_METRICS" "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": "8123"}
    command = [str(LAUNCH / "trtllm_kvbm.sh"), "org/model", "--tp_size", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    size, metrics, *arguments = run.stdout.splitlines()
    assert (size, metrics) == ("20", "true")
    assert arguments[:7] == ["org/model", "--host", "127.0.0.1", "--port", "8123", "--backend", "pytorch"]
    assert arguments[7:] == ["--extra_llm_api_options", str(LAUNCH / "trtllm_kvbm.yaml"), "--tp_size", "2"]


def test_the_names_lead_to_our_classes(version: str) -> None:
    leader, worker = resolve(GUIDES_CONFIG["kv_connector_config"])
    ours = import_module(CONNECTOR)
    assert (leader, worker) == (ours.DynamoKVBMConnectorLeader, ours.DynamoKVBMConnectorWorker)
    assert issubclass(leader, api().KvCacheConnectorScheduler)
    assert issubclass(worker, api().KvCacheConnectorWorker)


@pytest.mark.parametrize("key", ["connector_scheduler_class", "connector_worker_class"])
def test_a_wrong_class_name_is_said(version: str, key: str) -> None:
    wrong = {**GUIDES_CONFIG["kv_connector_config"], key: "KVBMConnector"}
    with pytest.raises(AttributeError) as caught:
        resolve(wrong)
    line = one_line(caught)
    assert "KVBMConnector" in line and wrong["connector_module"] in line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DYN_KVBM_CPU_CACHE_GB", "lots", "DYN_KVBM_CPU_CACHE_GB=lots"),
        ("DYN_KVBM_DISK_CACHE_GB", "-1", "DYN_KVBM_DISK_CACHE_GB=-1"),
        ("KVBM_SYNC_ONBOARD_BYTES", "some", "KVBM_SYNC_ONBOARD_BYTES=some"),
        ("DYN_KVBM_METRICS", "true", "no cache tier is configured"),
    ],
)
def test_a_setting_that_cannot_be_used_is_said(
    version: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    leader, _ = resolve(GUIDES_CONFIG["kv_connector_config"])
    with pytest.raises(ConfigError) as caught:
        leader(ExecutorConfig().llm_args(0, 1))
    assert words in one_line(caught)


def test_an_engine_that_cannot_be_served_is_said(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1")
    leader, _ = resolve(GUIDES_CONFIG["kv_connector_config"])
    args = ExecutorConfig().llm_args(0, 1)
    args.pipeline_parallel_size = 2
    with pytest.raises(KvbmError) as caught:
        leader(args)
    assert "pipeline_parallel_size=2" in one_line(caught)


def test_attention_dp_is_refused_where_connectors_have_one_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1")
    with installed(RELEASED):
        leader, _ = resolve(GUIDES_CONFIG["kv_connector_config"])
        args = ExecutorConfig().llm_args(0, 1)
        args.tensor_parallel_size, args.enable_attention_dp = 2, True
        made = None
        try:
            with pytest.raises(UnsupportedError, match="enable_attention_dp"):
                made = leader(args)
        finally:
            if made is not None:
                made.part.close()


def test_a_model_with_states_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer TensorRT-LLM refuses such a model with any connector; 1.1 and 1.2 say nothing."""
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1")
    (tmp_path / "config.json").write_text('{"hybrid_override_pattern": "M-M*", "num_hidden_layers": 4}')
    with installed(version):
        leader, _ = resolve(GUIDES_CONFIG["kv_connector_config"])
        with pytest.raises(UnsupportedError) as caught:
            leader(ExecutorConfig(model=str(tmp_path)).llm_args(0, 1))
    assert f"{tmp_path} has layers with states" in one_line(caught)
    assert "without kv_connector_config" in one_line(caught)


def test_metrics_are_served_by_the_leader(version: str) -> None:
    port = free_port()
    env = {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(port)}
    with serve(0, Kind(version, "v1", overlap=True), env=env) as serving:
        serving.ask(list(range(40)))
        serving.forget_device()
        serving.ask(list(range(40)))
        serving.settle()  # its load is counted when the leader has heard of it, which may be after its end
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#")
    guides = {
        "kvbm_matched_tokens": 36,
        "kvbm_offload_blocks_d2h": 11,
        "kvbm_offload_blocks_h2d": 0,
        "kvbm_offload_blocks_d2d": 0,
        "kvbm_onboard_blocks_d2d": 0,
        "kvbm_onboard_blocks_h2d": 9,
        "kvbm_host_cache_hit_rate": 0.5,
        "kvbm_disk_cache_hit_rate": 0,
    }
    assert {name: float(lines[name]) for name in guides} == guides


def test_at_start_too_one_thread_at_a_time_takes_in_what_workers_say(version: str) -> None:
    """The channel's thread does so by itself as long as the executor's loop does not call."""
    was_locked: list[bool] = []
    with serve(0, Kind(version, "v1", overlap=True)) as serving:
        leader, catch_up = serving.leader, serving.leader.catch_up

        def look_and_catch_up() -> None:
            was_locked.append(leader.lock._is_owned())
            catch_up()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader, "catch_up", look_and_catch_up)
            serving.executor.leader.wait_for_initialization()
    assert was_locked == [True]


@pytest.fixture
def kept_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free one; what is kept is kept for this test."""
    monkeypatch.setattr(ports, "KEPT", kept := ports.KeptPorts())
    yield free_port()
    kept.close()


def test_dynamo_is_told_of_no_consolidator_at_another_engines_port(
    monkeypatch: pytest.MonkeyPatch, kept_port: int
) -> None:
    """Else its router would take the other engine's blocks for this one's."""
    consolidator = import_module("kvbm.trtllm_integration.consolidator_config")
    monkeypatch.setenv("DYN_KVBM_TRTLLM_ZMQ_PORT", "20081")
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", str(kept_port - 1000))
    other = ports.KeptPorts()  # as in another process
    try:
        assert other.keep(kept_port) == kept_port
        assert consolidator.should_enable_consolidator(GUIDES_CONFIG) is False
    finally:
        other.close()


@pytest.mark.shows("DYN_KVBM_TRTLLM_ZMQ_PORT", "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR")
def test_dynamo_is_told_of_a_consolidator_if_a_port_says_so(
    monkeypatch: pytest.MonkeyPatch, kept_port: int
) -> None:
    consolidator = import_module("kvbm.trtllm_integration.consolidator_config")
    assert consolidator.should_enable_consolidator(GUIDES_CONFIG) is False, "no port is set"
    monkeypatch.setenv("DYN_KVBM_TRTLLM_ZMQ_PORT", "20081")
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", str(kept_port - 1000))
    assert consolidator.should_enable_consolidator(GUIDES_CONFIG) is True
    assert consolidator.should_enable_consolidator(GUIDES_CONFIG) is True, "asked again"
    published = f"tcp://127.0.0.1:{kept_port}"
    assert consolidator.get_consolidator_endpoints() == ("tcp://127.0.0.1:20081", published, published)
    assert consolidator.should_enable_consolidator({**GUIDES_CONFIG, "enable_attention_dp": True}) is False
    assert consolidator.should_enable_consolidator({"kv_connector_config": None}) is False
    assert consolidator.should_enable_consolidator(None) is False
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "off")
    assert consolidator.should_enable_consolidator(GUIDES_CONFIG) is False


def test_the_consolidators_answers_need_no_tensorrt_llm() -> None:
    program = (
        "import sys; sys.modules['tensorrt_llm'] = None\n"
        "from kvbm.trtllm_integration.consolidator_config import should_enable_consolidator\n"
        "assert should_enable_consolidator({}) is False\n"
        "assert 'torch' not in sys.modules and 'zmq' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "compat"), str(ROOT)])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


# ---------------------------------------------------------------- TensorRT-LLM is missing, old, or broken


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module of TensorRT-LLM, and none of ours that has seen one."""
    for name in list(sys.modules):
        if name.split(".")[0] in {"tensorrt_llm", "kvbm_trtllm"} or name.startswith(
            "kvbm.trtllm_integration"
        ):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_engine")
def test_without_tensorrt_llm_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(UnsupportedError) as caught:
        import_module(GUIDES_CONFIG["kv_connector_config"]["connector_module"])
    assert "has no KV cache connector" in one_line(caught)
    assert "1.1.0rc5 or newer" in one_line(caught)


@pytest.mark.usefixtures("without_engine")
def test_a_tensorrt_llm_without_connectors_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("tensorrt_llm")
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "tensorrt_llm", old)
    with pytest.raises(UnsupportedError) as caught:
        import_module(CONNECTOR)
    assert "1.1.0rc5 or newer" in one_line(caught)


@pytest.mark.parametrize(
    "path", ["_torch/pyexecutor/connectors/kv_cache_connector.py", "_torch/pyexecutor/kv_cache_connector.py"]
)
@pytest.mark.usefixtures("without_engine")
def test_something_else_that_is_missing_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    module = tmp_path / "site" / "tensorrt_llm" / path
    module.parent.mkdir(parents=True)
    module.write_text("import no_such_library\n")
    for folder in [module.parent, *module.parent.parents]:
        if folder == tmp_path / "site":
            break
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    try:
        with pytest.raises(ModuleNotFoundError, match="no_such_library"):
            import_module(CONNECTOR)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
