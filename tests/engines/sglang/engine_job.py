"""One SGLang engine in a process of its own: prompts, flushes and waits, as a job says. Runs in SGLang's
environment.

    python -m tests.engines.sglang.engine_job JOB.json RESULT.json

A job: {"engine": arguments of sglang.Engine, "only_new_rows": see tests.engines.sglang.attention, "prompts":
[[token, ...], ...], "answer_tokens": n, "disk": folder, "steps": [...]}. Steps: "ask" (all prompts, one after
the other), {"ask": [their numbers]}, "together" (all at the same time), "flush" (all tiers of SGLang's own),
"new_weights" (the same ones, loaded again), "write" (others to the tensors, by nobody's order, then "flush"),
{"stored": n} (wait for n records of kvbm's), {"files": n} (for n files of SGLang's own backends), {"shared":
n} (for n pages that kvbm has put into a store that machines share, by its metrics), "clear" (kvbm's disk, by
SGLang's own order). A result: {"answers": of each step that asks, "metrics": kvbm's, if it serves them}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbm_core.storage.disk.inspect import Kind, find_files, identify, scan
from tests.engines.client import parse_metrics
from tests.engines.ports import HOST

TIMEOUT_S = 240.0
WRITE = "KVBM_TEST_WRITE"
"""The variable that names a file: while it is there, a flush is for weights that were written."""


def main(job_file: str, result_file: str) -> None:
    """Runs the job."""
    job = json.loads(Path(job_file).read_text())
    engine = _engine(job)
    prompts, answer_tokens = job["prompts"], job["answer_tokens"]
    answers: list[Any] = []
    metrics: dict[str, float] = {}
    try:
        for step in job["steps"]:
            if step == "flush":
                _flush(engine)
            elif step == "new_weights":
                _flush(engine)  # or the engine may not be idle yet, and refuse to flush after the update
                done, message = engine.update_weights_from_disk(model_path=job["engine"]["model_path"])[:2]
                if not done:
                    raise RuntimeError(message)
            elif step == "write":
                Path(os.environ[WRITE]).touch()
                _flush(engine)
            elif step == "clear":
                _clear(engine)
            elif step == "together":
                answers.append(_ask(engine, prompts, answer_tokens))
            elif step == "ask" or "ask" in step:
                chosen = range(len(prompts)) if step == "ask" else step["ask"]
                answers.append([_ask(engine, [prompts[number]], answer_tokens)[0] for number in chosen])
            else:
                _wait(Path(job["disk"]), **step)
        metrics = _metrics()
    finally:
        engine.shutdown()
    Path(result_file).write_text(json.dumps({"answers": answers, "metrics": metrics}))


def _engine(job: dict[str, Any]) -> Any:
    """Its processes are forked. SGLang would spawn them, and each would import it again, for ten seconds."""
    from sglang.srt.entrypoints import engine

    kind = engine.Engine
    if job["only_new_rows"]:
        from tests.engines.sglang.attention import run_scheduler

        kind = type("Engine", (kind,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
    if "write" in job["steps"]:
        from tests.engines.sglang import trainer

        kind = type("Engine", (kind,), {"run_scheduler_process_func": staticmethod(trainer.run_scheduler)})
    multiprocessing.set_start_method("fork", force=True)
    with patch.object(engine.mp, "set_start_method"):
        return kind(**job["engine"])


def _flush(engine: Any) -> None:
    """An answer is there before the engine is idle; until then it refuses."""
    ends_at_s = time.monotonic() + TIMEOUT_S
    while not engine.flush_cache().success:
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"the engine was not idle in {TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def _clear(engine: Any) -> None:
    if not engine.loop.run_until_complete(engine.tokenizer_manager.clear_hicache_storage()).success:
        raise RuntimeError("SGLang has not cleared its storage")


def _ask(engine: Any, prompts: list[list[int]], answer_tokens: int) -> list[dict[str, Any]]:
    from fastapi import HTTPException

    sampling = {"temperature": 0, "max_new_tokens": answer_tokens}
    started_s = time.perf_counter()
    try:
        results = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    except HTTPException as error:  # how SGLang tells that it has given up one of them
        return [{"error": error.detail} for _ in prompts]
    seconds = time.perf_counter() - started_s
    return [{**_answer(result["meta_info"]), "seconds": seconds} for result in results]


def _answer(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": [token for _, token, _ in meta["output_token_logprobs"]],
        "logprobs": [logprob for logprob, _, _ in meta["output_token_logprobs"]],
        "cached": meta["cached_tokens"],
        "from": meta.get("cached_tokens_details"),
    }


def _wait(folder: Path, stored: int = 0, files: int = 0, shared: int = 0) -> None:
    """Until so much is on the disk; SGLang backs pages up behind its answers."""
    ends_at_s = time.monotonic() + TIMEOUT_S
    while (
        _stored(folder) < stored
        or sum(path.is_file() for path in folder.rglob("*")) < files
        or (shared and _metrics()["kvbm_offload_blocks_d2o"] < shared)
    ):
        if time.monotonic() > ends_at_s:
            raise TimeoutError(
                f"{_stored(folder)} pages were stored in {TIMEOUT_S:.0f} s, not {stored or files or shared}"
            )
        time.sleep(0.05)


def _metrics() -> dict[str, float]:
    """Of the first rank; nothing if it serves none."""
    port = os.environ.get("DYN_KVBM_METRICS_PORT")
    if port is None:
        return {}
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=TIMEOUT_S) as answer:
        return parse_metrics(answer.read().decode())


def _stored(folder: Path) -> int:
    found = [identify(path) for path in find_files(folder, lambda error: None)]
    return sum(
        scan(file, now_ns=time.time_ns(), on_slots=lambda done: None).used
        for file in found
        if file.kind is Kind.BLOCKS
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
