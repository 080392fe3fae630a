"""Two nodes of one vLLM, each on a host of its own: this is node 0's process, started on its host.

python -m tests.e2e.apart_engine JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ARGUMENTS = {
    "block_size": 32,
    "num_gpu_blocks_override": 60,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "seed": 0,
    "dtype": "float32",
}


def node_1(job: dict[str, Any]) -> list[str]:
    """Its command line."""
    command = [*job["prefix_1"], str(Path(sys.executable).with_name("vllm")), "serve", job["model"]]
    for name, value in ARGUMENTS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--enforce-eager", "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"]
    command += ["--master-addr", job["address_0"], "--master-port", str(job["port"]), "--headless"]
    return [*command, "--distributed-executor-backend", "mp", "--kv-transfer-config", json.dumps(job["kv"])]


def environment(job: dict[str, Any], node: int) -> dict[str, str]:
    """Of one node."""
    given = {**os.environ, **job["env"], **job[f"env_{node}"]}
    return given | {
        "VLLM_HOST_IP": job[f"address_{node}"],
        "GLOO_SOCKET_IFNAME": job[f"device_{node}"],
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(node),
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(environment(job, 0))
    with open(job["log_1"], "wb") as log:
        other = subprocess.Popen(node_1(job), env=environment(job, 1), stdout=log, stderr=log)
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(
            job["model"],
            tensor_parallel_size=2,
            nnodes=2,
            node_rank=0,
            master_addr=job["address_0"],
            master_port=job["port"],
            distributed_executor_backend="mp",
            enforce_eager=True,
            kv_transfer_config=job["kv"],
            **ARGUMENTS,
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        answers = []
        for prompt in job["prompts"]:
            output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
            answers.append([list(output.outputs[0].token_ids), output.num_cached_tokens])
        Path(sys.argv[2]).write_text(json.dumps(answers))
    finally:
        other.terminate()
        other.wait(30)


if __name__ == "__main__":
    main()
