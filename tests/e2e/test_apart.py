"""One vLLM whose two ranks are on two hosts, with etcd between them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.fleet.keys import new_keys
from tests.engines.etcd_server import EtcdServer
from tests.engines.hosts import Host, two_hosts, why_not
from tests.engines.ports import free_port
from tests.engines.vllm_server import CONNECTOR_MODULE

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(900)]

PROMPT_TOKENS = 640
HIT_TOKENS = 608  # all full blocks but the last, of which vLLM computes one token
KVBM = {"kv_connector": "DynamoConnector", "kv_connector_module_path": CONNECTOR_MODULE}
EMPTY = {"kv_connector": "EmptyConnector", "kv_connector_module_path": "tests.engines.empty_connector"}


def serve(
    folder: Path, model: Path, connector: dict[str, str], prompts: list[list[int]], hosts: tuple[Host, Host]
) -> list[Any]:
    """Tokens, and how many came from a cache, of each prompt's answer."""
    one, two = hosts
    folder.mkdir()
    keys = {host: new_keys(folder / "keys", host.address)[1] for host in hosts}
    with EtcdServer(folder, host=one.address, prefix=one.prefix) as etcd:
        shared = {
            "DYN_KVBM_CPU_CACHE_GB": "0.1",
            "ETCD_ENDPOINTS": etcd.url,
            "KVBM_FLEET_INSECURE": "1",
            "KVBM_CURVE_ALLOWED": str(folder / "keys"),
            "KVBM_START_WAIT_S": "60",
        }
        job = {
            "model": str(model),
            "prefix_1": list(two.prefix),
            "kv": {**connector, "kv_role": "kv_both"},
            "port": free_port(),
            "prompts": prompts,
            "env": shared,
            "log_1": str(folder / "node-1.log"),
        }
        for number, host in enumerate(hosts):
            job[f"address_{number}"], job[f"device_{number}"] = host.address, host.device
            job[f"env_{number}"] = {"KVBM_CURVE_KEY_FILE": str(keys[host])}
        (folder / "job.json").write_text(json.dumps(job))
        result = folder / "result.json"
        command = [sys.executable, "-m", "tests.e2e.apart_engine", str(folder / "job.json"), str(result)]
        variables = set(KvbmSettings.env_names().values())
        environment = {name: text for name, text in os.environ.items() if name not in variables}
        with (folder / "node-0.log").open("wb") as log:
            done = subprocess.run(
                [*one.prefix, *command], stdout=log, stderr=log, timeout=400, env=environment
            )
        log_text = (folder / "node-0.log").read_text(errors="replace")
        assert done.returncode == 0, log_text[-4000:]
        answers: list[Any] = json.loads(result.read_text())
        return answers


@pytest.mark.nightly("two real engines of two nodes: two minutes")
def test_two_nodes_of_one_engine_answer_as_without_a_cache(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    if reason := why_not():
        pytest.skip(f"NOT RUN: {reason}")
    first = [[rng.randint(36, 129) for _ in range(PROMPT_TOKENS)] for _ in range(4)]
    prompts = [*first, *first]  # the device holds three: each comes back from the host
    with two_hosts() as hosts:
        ours = serve(tmp_path / "kvbm", tiny_model, KVBM, prompts, hosts)
        theirs = serve(tmp_path / "empty", tiny_model, EMPTY, prompts, hosts)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert [cached for _, cached in ours] == [0] * 4 + [HIT_TOKENS] * 4
    assert [cached for _, cached in theirs] == [0] * 8
