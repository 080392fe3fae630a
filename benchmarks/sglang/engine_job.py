"""One SGLang engine in a process of its own: prompts, flushes and waits, as a job says. Runs in SGLang's environment.

    python -m tests.sglang.offline JOB.json RESULT.json

A job: {"engine": arguments of sglang.Engine, "prompts": [[token, ...], ...], "disk": folder, "steps": [...]}; steps are
"ask" (all prompts, one after the other), "flush" (both of SGLang's own tiers) and {"stored": n} (wait for n records).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from kvbm_core.storage.disk.inspect import Kind, find_files, identify, scan

ANSWER_TOKENS = 8
TIMEOUT_S = 60.0


def main(job_file: str, result_file: str) -> None:
    """Runs the job."""
    import sglang

    job = json.loads(Path(job_file).read_text())
    engine = sglang.Engine(**job["engine"])
    answers: list[Any] = []
    try:
        for step in job["steps"]:
            if step == "ask":
                answers.append([_ask(engine, prompt) for prompt in job["prompts"]])
            elif step == "flush":
                engine.flush_cache()
            else:
                _wait_stored(Path(job["disk"]), step["stored"])
    finally:
        engine.shutdown()
    Path(result_file).write_text(json.dumps({"answers": answers}))


def _ask(engine: Any, prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}
    meta = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)["meta_info"]
    tokens = meta["output_token_logprobs"]
    return {
        "tokens": [token for _, token, _ in tokens],
        "logprobs": [logprob for logprob, _, _ in tokens],
        "cached": meta["cached_tokens"],
        "from": meta.get("cached_tokens_details"),
    }


def _wait_stored(folder: Path, num_records: int) -> None:
    """Until the files hold so many records; SGLang backs pages up behind its answers."""
    ends_at_s = time.monotonic() + TIMEOUT_S
    while (stored := _stored(folder)) < num_records:
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"{stored} of {num_records} pages were stored in {TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _stored(folder: Path) -> int:
    found = [identify(path) for path in find_files(folder, lambda error: None)]
    return sum(
        scan(file, now_ns=time.time_ns(), on_slots=lambda done: None).used for file in found if file.kind is Kind.BLOCKS
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
