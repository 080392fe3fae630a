"""One vLLM engine whose prompts come back from a shared store: python -m benchmarks.fp8.child JOB RESULT.

JOB: {"model", "dtype", "codec", "prompts": [[token, ...], ...], "answer_tokens"}. Each prompt is answered
greedily, and computed. Then device and host forget everything, and the same prompts come from the store,
which is memory of this process. RESULT: {"cached_tokens": of each prompt, "again": the answers now, "tokens":
[[token, its log-probability, the likeliest token now, the token's log-probability now], ...] of each answer}.
The last two are of a model that has been told the first answer's tokens up to there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from kvbm_core.testing import memory_engine

BLOCK_TOKENS = 32
SETTLE_S = 60.0
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
}
VARIABLES = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "DYN_KVBM_CPU_CACHE_GB": "1",
    "KVBM_REMOTE_URL": "memory://answers",
    "KVBM_REMOTE_CACHE_GB": "0",
    "KVBM_REMOTE_LOAD": "always",
    "KVBM_REMOTE_WAIT_S": "30",
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The job's result. AssertionError if a prompt was not forgotten."""
    os.environ.update(VARIABLES, KVBM_REMOTE_CODEC=job["codec"])
    memory_engine.register()
    from vllm import LLM, SamplingParams

    prompts, count = job["prompts"], job["answer_tokens"]
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        seed=0,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=2 * BLOCK_TOKENS + max(map(len, prompts)) + count,
        kv_transfer_config=CONNECTOR,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    first = _generate(llm, prompts, [greedy] * len(prompts))
    _forget(llm)
    again = _generate(llm, prompts, [greedy] * len(prompts))
    told: list[list[tuple[int, float, int, float]]] = [[] for _ in prompts]
    for step in range(count):
        right = [one.outputs[0].token_ids[step] for one in first]
        texts = [
            [*prompt, *one.outputs[0].token_ids[:step]] for prompt, one in zip(prompts, first, strict=True)
        ]
        # Which token it is does not change the log-probabilities: they are those before the choice.
        only = [
            SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=1, allowed_token_ids=[token], ignore_eos=True
            )
            for token in right
        ]
        for row, token, one, now in zip(told, right, first, _generate(llm, texts, only), strict=True):
            before, found = one.outputs[0].logprobs[step], now.outputs[0].logprobs[0]
            likeliest = min(found, key=lambda each: found[each].rank)
            row.append((token, before[token].logprob, likeliest, found[token].logprob))
    return {
        "cached_tokens": [one.num_cached_tokens for one in again],
        "again": [list(one.outputs[0].token_ids) for one in again],
        "tokens": told,
    }


def _generate(llm: Any, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    return list(llm.generate(asked, sampling, use_tqdm=False))


def _forget(llm: Any) -> None:
    """All but the store, once everything is there."""
    leader = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side.hooks.leader
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        with leader.lock:  # its other thread may be between an end and what follows from it
            leader.poll()
            if not (leader.pending_jobs or leader.open_requests or leader.chain.storing_blocks):
                break
        if time.monotonic() > deadline_s:
            raise AssertionError("the store does not take all blocks")
        llm.llm_engine.step()
    if not llm.reset_prefix_cache(reset_connector=True):
        raise AssertionError("the engine does not forget")


def main() -> None:
    """See above."""
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
