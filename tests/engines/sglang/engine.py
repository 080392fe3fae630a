"""Runs tests.engines.sglang.engine_job in a process of its own, of SGLang's environment."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.forks import Forks
from tests.engines.job import run_job
from tests.engines.ports import HOST, free_port
from tests.engines.sglang.environment import PYTHON, variables

IMPORTED = tuple(
    f"sglang.srt.{name}"
    for name in ("entrypoints.engine", "managers.scheduler", "managers.detokenizer_manager")
)
# One thread computes: on few cores several wait for each other by spinning.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TIMEOUT_S = 600
PAGE_TOKENS = 16
PROMPT_TOKENS = 520
WHOLE_PAGES = PROMPT_TOKENS // PAGE_TOKENS
NUM_PROMPTS = 3
HIT = [WHOLE_PAGES * PAGE_TOKENS] * NUM_PROMPTS
"""What ``cached`` says of them when all of their whole pages came back; NOTHING when none did."""
NOTHING = [0] * NUM_PROMPTS

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
    "dtype": "float32",  # in bfloat16 two tokens are as likely as each other too often
}
TOLERANCE = 1e-3
"""Of log-probabilities in float32. 7e-6 was seen between whole and cut prompts."""
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
            "hicache_storage_pass_prefix_keys": True,
        }
    ),
}
# Its cleaner would delete pages that were just written, on a file system that is more than 80 % full.
NIXL: dict[str, Any] = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}
LINKER: dict[str, Any] = {
    "enable_unified_cache_external_linker": True,
    "unified_cache_external_linker_backend": "dynamic",
    "unified_cache_external_linker_config": {
        "linker": "KvbmLinker",
        "linker_module_path": "kvbm_sglang.linker",
        "linker_extra_config": {},
    },
}


@cache
def forks() -> Forks:
    """Where engines are forked, with SGLang imported."""
    started = Forks(PYTHON, IMPORTED, variables(**ONE_THREAD))
    atexit.register(started.close)
    return started


def prompts_of(seed: int, how_many: int = NUM_PROMPTS, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Different prompts, the same for the same seed."""
    step = 7919 + 2 * (seed % 1000)
    return [
        [(start + 1 + place * step) % 250 + 3 for place in range(num_tokens)] for start in range(how_many)
    ]


def served_metrics() -> dict[str, str]:
    """Settings by which the result has kvbm's metrics."""
    port = {"DYN_KVBM_METRICS_PORT": str(free_port())}
    return {"DYN_KVBM_METRICS": "true", "KVBM_METRICS_HOST": HOST, **port}


def run_engine(
    folder: Path,
    steps: list[Any],
    *,
    prompts: list[list[int]],
    answer_tokens: int = 8,
    environment: dict[str, str] | None = None,
    only_new_rows: bool = False,
    timeout_s: float = TIMEOUT_S,
    **engine: Any,
) -> dict[str, Any]:
    """The result of one engine; "log" is what it wrote. Its files are in ``folder``, its blocks in
    ``folder/disk``.

    ``only_new_rows``: see tests.engines.sglang.attention; answers from a cache may differ in the last bits
    then.
    """
    disk = folder / "disk"
    job = {"engine": {**ENGINE, **engine}, "prompts": prompts, "answer_tokens": answer_tokens}
    job |= {"disk": str(disk), "only_new_rows": only_new_rows, "steps": steps}
    ranks = engine.get("tp_size", 1) * engine.get("pp_size", 1)
    more = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}
    own = {"DYN_KVBM_DISK_CACHE_DIR": str(disk), "DYN_KVBM_DISK_CACHE_GB": "0.2"}
    peers = {
        "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(disk),
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(disk),
    }
    env = variables(**{**own, **peers, **more, **ONE_THREAD, **(environment or {})})
    module = "tests.engines.sglang.engine_job"
    return run_job(forks().start, module, job, folder, environment=env, timeout_s=timeout_s)


def same_answers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal tokens, and log-probabilities equal to the last bit: of answers that were computed in the same
    way, behind a prefix of the same length.
    """
    return all(
        (mine["tokens"], mine["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
        for mine, theirs in zip(one, other, strict=True)
    )


def same_tokens(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal tokens: of answers that were computed beside others in a batch, or not."""
    return [answer["tokens"] for answer in one] == [answer["tokens"] for answer in other]


def near_answers(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> bool:
    """Equal tokens, and log-probabilities within TOLERANCE: a prompt that is computed whole is cut otherwise
    than one behind a cached prefix, and on some processors the last bits differ then, without kvbm too.
    """
    logprobs = [[logprob for answer in answers for logprob in answer["logprobs"]] for answers in (cold, warm)]
    return same_tokens(cold, warm) and all(
        abs(mine - theirs) < TOLERANCE for mine, theirs in zip(*logprobs, strict=True)
    )


def cached(answers: list[dict[str, Any]]) -> list[int]:
    """Prompt tokens that were not computed."""
    return [answer["cached"] for answer in answers]
