"""Scripts of deploy/launch for vLLM: what they start, how it ends, whether the installed vLLM takes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvbm_vllm.connector import DynamoConnector, PdConnector
from tests.engines.disaggregated import CACHE
from tests.engines.launched import LAUNCH
from tests.engines.stand_ins import PATIENCE_S, Started, session_of, started_by, wait_until

cli_args = pytest.importorskip(
    "vllm.entrypoints.launchers.cli_args",
    reason="NOT RUN: the parser of this vLLM's command line is not there",
)
EXTRA = ("tiny", "--enforce-eager", "--max-model-len", "4096")
PROXY = "pd_proxy.py"


def served(started: list[Started]) -> list[Started]:
    """The vLLM servers, by port."""
    servers = [each for each in started if each.argv[:2] == ("vllm", "serve")]
    return sorted(servers, key=lambda each: int(each.option("--port")))


def proxy_of(started: list[Started]) -> Started:
    """The proxy."""
    (proxy,) = (each for each in started if each.argv[0] == "python3")
    assert proxy.argv[1].endswith(PROXY)
    return proxy


def config_of(server: Started) -> KVTransferConfig:
    """What vLLM's own parser makes of the command line; it must know every argument."""
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(list(server.argv[2:]))
    assert options.model_tag == "tiny" and options.enforce_eager and options.max_model_len == 4096
    config = options.kv_transfer_config
    return config if isinstance(config, KVTransferConfig) else KVTransferConfig(**config)


def children_of(config: KVTransferConfig) -> list[tuple[str, str]]:
    """Name and role of each, which vLLM can load."""
    each = [KVTransferConfig(**child) for child in config.kv_connector_extra_config["connectors"]]
    assert all(map(KVConnectorFactory.get_connector_class, each))
    return [(str(child.kv_connector), str(child.kv_role)) for child in each]


def test_aggregated(tmp_path: Path) -> None:
    with started_by("agg_kvbm.sh", *EXTRA, count=1, folder=tmp_path) as (_, started):
        (server,) = served(started)
        config = config_of(server)
        assert json.loads(server.option("--kv-transfer-config")) == CACHE
        assert KVConnectorFactory.get_connector_class(config) is DynamoConnector
        assert (server.option("--host"), server.option("--port")) == ("127.0.0.1", "8000")
        assert server.env["DYN_KVBM_CPU_CACHE_GB"] == "20"


def test_one_of_each(tmp_path: Path) -> None:
    with started_by("disagg_kvbm.sh", *EXTRA, count=3, folder=tmp_path) as (_, started):
        prefill, decode = served(started)
        config = config_of(prefill)
        assert KVConnectorFactory.get_connector_class(config) is PdConnector
        assert children_of(config) == [("DynamoConnector", "kv_both"), ("NixlConnector", "kv_producer")]
        alone = config_of(decode)
        assert KVConnectorFactory.get_connector_class(alone)
        assert alone.kv_connector == "NixlConnector"
        assert (alone.kv_role, alone.kv_load_failure_policy) == ("kv_consumer", "recompute")
        assert prefill.env["DYN_KVBM_CPU_CACHE_GB"] == "20"
        assert (decode.env["CUDA_VISIBLE_DEVICES"], prefill.env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
        proxy = proxy_of(started)
        assert proxy.option("--prefill") == f"http://127.0.0.1:{prefill.option('--port')}"
        assert proxy.option("--decode") == f"http://127.0.0.1:{decode.option('--port')}"
        assert (proxy.option("--host"), proxy.option("--port")) == ("127.0.0.1", "8000")


def test_two_of_each_with_kvbm_everywhere(tmp_path: Path) -> None:
    env = {
        "DECODE_CPU_CACHE_GB": "3",
        "DYN_KVBM_CPU_CACHE_GB": "5",
        "CUDA_VISIBLE_DEVICES": "7,6,5,4",
        "NIXL_FIELDS": '"kv_buffer_device":"cpu"',
        "DYN_KVBM_DISK_CACHE_DIR": "/disk",
    }
    with started_by("disagg_kvbm_2p2d.sh", *EXTRA, count=5, folder=tmp_path, env=env) as (_, started):
        servers = served(started)
        roles = [children_of(config_of(server))[1][1] for server in servers]
        assert roles == ["kv_producer", "kv_producer", "kv_consumer", "kv_consumer"]
        assert [server.env["DYN_KVBM_CPU_CACHE_GB"] for server in servers] == ["5", "5", "3", "3"]
        assert [server.env["CUDA_VISIBLE_DEVICES"] for server in servers] == ["5", "4", "7", "6"]
        for name in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "DYN_KVBM_METRICS_PORT", "DYN_KVBM_DISK_CACHE_DIR"):
            assert len({server.env[name] for server in servers}) == 4, "two servers would want the same"
        nixl = config_of(servers[0]).kv_connector_extra_config["connectors"][1]
        assert nixl["kv_buffer_device"] == "cpu"
        assert sum(argument == "--decode" for argument in proxy_of(started).argv) == 2


ENDS = {
    "told to": (signal.SIGTERM, 143),
    "Ctrl-C": (signal.SIGINT, 130),
    "the terminal is gone": (signal.SIGHUP, 129),
    "a server ends": (None, 143),
}


@pytest.mark.parametrize("how", ENDS)
def test_all_end_together(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said, status = ENDS[how]
    env = {"LEAVES_A_CHILD": "1"}
    with started_by("disagg_kvbm.sh", *EXTRA, count=3, folder=tmp_path, env=env) as (script, started):
        wait_until(lambda: len(session_of(script.pid)) == 1 + 2 * 3)  # a shell makes more for a moment
        if said is None:
            first = served(started)[0].pid
            os.kill(first, signal.SIGTERM)
        else:
            os.kill(script.pid, said)
        assert script.wait(PATIENCE_S) == status
        wait_until(lambda: not session_of(script.pid))  # killed, but perhaps not gone
    said_of_it = f"process {first} has ended with status 143: ending all" if said is None else ""
    assert said_of_it in capfd.readouterr().err


def test_who_does_not_end_is_killed(tmp_path: Path) -> None:
    env = {"IS_STUBBORN": "1", "LEAVES_A_CHILD": "1", "STOP_TIMEOUT_S": "1"}
    with started_by("disagg_kvbm.sh", *EXTRA, count=3, folder=tmp_path, env=env) as (script, _):
        os.kill(script.pid, signal.SIGTERM)
        assert script.wait(PATIENCE_S) == 143
        wait_until(lambda: not session_of(script.pid))  # killed, but perhaps not gone


@pytest.mark.parametrize("count", [0, 1])
def test_ctrl_c_while_it_starts(count: int, tmp_path: Path) -> None:
    with started_by("disagg_kvbm_2p2d.sh", *EXTRA, count=count, folder=tmp_path) as (script, _):
        os.kill(script.pid, signal.SIGINT)
        script.wait(PATIENCE_S)
        wait_until(lambda: not session_of(script.pid))  # what a shell without its traps yet was waiting for


def test_from_any_folder_by_any_path(tmp_path: Path) -> None:
    launch = tmp_path / "with space & more" / "launch"
    shutil.copytree(LAUNCH, launch)
    link = tmp_path / "a link"
    link.symlink_to(launch / "disagg_kvbm_2p2d.sh")
    env = {"DYN_KVBM_DISK_CACHE_DIR": "/a disk"}
    arguments = ("/a model", *EXTRA[1:])
    with started_by(link, *arguments, count=5, folder=tmp_path, env=env, cwd=Path("/")) as (_, started):
        assert [server.argv[2] for server in served(started)] == ["/a model"] * 4
        assert served(started)[0].env["DYN_KVBM_DISK_CACHE_DIR"] == "/a disk/worker0"
        assert proxy_of(started).argv[1] == str(launch / PROXY)


def test_too_few_gpus_are_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "3"}
    with started_by("disagg_kvbm.sh", *EXTRA, count=0, folder=tmp_path, env=env) as (script, _):
        assert script.wait(PATIENCE_S) == 1
    assert "GPU number 1 is not there: CUDA_VISIBLE_DEVICES names too few" in capfd.readouterr().err
