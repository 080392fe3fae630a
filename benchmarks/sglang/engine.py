"""Starts tests.sglang.offline in a fresh process of SGLang's environment and reads back what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

from tests.sglang.environment import PYTHON, ROOT, variables

TIMEOUT_S = 240
PAGE_TOKENS = 16
PROMPT_TOKENS = 520
WHOLE_PAGES = PROMPT_TOKENS // PAGE_TOKENS

# As on any machine without a GPU; the caches are small, and what they hold is written through to the disk.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "page_size": PAGE_TOKENS,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
    "random_seed": 0,
    "log_level": "info",
}
HICACHE: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4,
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_backend_extra_config": json.dumps(
        {
            "backend_name": "kvbm",
            "module_path": "kvbm_sglang.hicache",
            "class_name": "KvbmHiCache",
            "interface_v1": 1,
        }
    ),
}
_number = count()


def prompts_of(seed: int, how_many: int = 3) -> list[list[int]]:
    """Different prompts of PROMPT_TOKENS tokens, the same for the same seed."""
    step = 7919 + 2 * (seed % 1000)
    return [[(start + 1 + place * step) % 250 + 3 for place in range(PROMPT_TOKENS)] for start in range(how_many)]


def run_engine(folder: Path, steps: list[Any], *, prompts: list[list[int]], **engine: Any) -> dict[str, Any]:
    """The result of one engine; "log" is what it wrote. Fails with its last lines if it failed."""
    number = next(_number)
    job_file, result_file, log_file = (folder / f"{name}-{number}" for name in ("job.json", "result.json", "log.txt"))
    disk = folder / "disk"
    job = {"engine": {**ENGINE, **engine}, "prompts": prompts, "disk": str(disk), "steps": steps}
    job_file.write_text(json.dumps(job))
    ranks = engine.get("tp_size", 1) * engine.get("pp_size", 1)
    more = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}
    env = variables(DYN_KVBM_DISK_CACHE_DIR=str(disk), DYN_KVBM_DISK_CACHE_GB="0.2", **more)
    command = [str(PYTHON), "-m", "tests.sglang.offline", str(job_file), str(result_file)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    log_text = log_file.read_text(errors="replace")
    assert result_file.is_file(), f"the engine ended with {process.returncode}:\n{log_text[-4000:]}"
    result: dict[str, Any] = json.loads(result_file.read_text())
    result["log"] = log_text
    return result


def same_answers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal tokens, and log-probabilities equal to the last bit."""
    return all(
        (mine["tokens"], mine["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
        for mine, theirs in zip(one, other, strict=True)
    )


def cached(answers: list[dict[str, Any]]) -> list[int]:
    """Prompt tokens that were not computed."""
    return [answer["cached"] for answer in answers]
