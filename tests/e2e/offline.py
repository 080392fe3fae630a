"""One real vLLM engine in a process of its own, for all rounds of a job, or for as many as it is asked for.

The first as a program: python -m tests.e2e.offline JOB.json RESULT.json. JOB: {"model", "llm": keyword
arguments of vllm.LLM, "connector": bool, "rounds": [{"prompts": [[token, ...], ...], "max_tokens",
"together": bool}]}. RESULT: for each round the answers, cached tokens and TTFT of each prompt; the leader's
counters and what is still open when all is done. With "dies" the process then kills itself, as SIGKILL would.

The second in a process of tests.engines.worker: ``start`` a job without rounds, then ``serve``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONNECTOR = {"kv_connector": "CheckingConnector", "kv_role": "kv_both"}
CONNECTOR_MODULE = "tests.e2e.checking_connector"
SETTLE_S = 20.0

Rounds = list[dict[str, Any]]


class Engine:
    """An engine of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.llm = make_engine(job)
        self._has_connector = bool(job["connector"])
        self._shows_leader = self._has_connector and job["llm"].get("tensor_parallel_size", 1) == 1

    def serve(self, rounds: Rounds) -> dict[str, Any]:
        """One round after the other. Counters are of these rounds alone."""
        before = self._counters()
        answers: list[list[dict[str, Any]]] = []
        audited: list[dict[str, float]] = []
        for spec in rounds:
            if spec.get("swaps"):
                _swap_blocks(*spec["swaps"])
            answers.append(_serve(self.llm, spec))
            if spec.get("audited"):
                metrics = _leader_state(self.llm)["metrics"]
                audited.append({name: value for name, value in metrics.items() if "audited" in name})
        result: dict[str, Any] = {"rounds": answers, "audited": audited}
        if self._shows_leader:
            result.update(_leader_state(self.llm))
        counted = {name: value - before.get(name, 0) for name, value in self._counters().items()}
        return result | {"metrics": counted}

    def forget(self) -> None:
        """Empties the device's cache, and kvbm's."""
        if self._shows_leader:
            settle(self.llm)
        assert self.llm.reset_prefix_cache(reset_connector=self._has_connector)

    def _counters(self) -> dict[str, float]:
        found = dict(_leader_state(self.llm)["metrics"]) if self._shows_leader else {}
        return found | {"preemptions": _preemptions(self.llm)}


_started: list[Engine] = []


def start(job: dict[str, Any]) -> None:
    """In a worker: its one engine."""
    set_variables(job)
    _started.append(Engine(job))


def serve(rounds: Rounds, fail_every: int = 0) -> dict[str, Any]:
    """In a worker: the rounds, on empty caches; each ``fail_every``-th onboard fails, and leaves garbage."""
    (engine,) = _started
    engine.forget()
    if fail_every:
        _connector().fail_every(fail_every)
    try:
        return engine.serve(rounds)
    finally:
        if fail_every:
            _connector().fail_every(0)


def make_engine(job: dict[str, Any]) -> Any:
    """The job's vllm.LLM."""
    from vllm import LLM

    arguments = dict(job["llm"])
    if job["connector"]:
        arguments["kv_transfer_config"] = {**CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE}
    return LLM(job["model"], disable_log_stats=False, enforce_eager=True, seed=0, **arguments)


def _serve(llm: Any, spec: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens} for tokens in spec["prompts"]]
    if spec.get("together"):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    else:
        outputs = [llm.generate(prompt, sampling, use_tqdm=False)[0] for prompt in prompts]
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens,
            "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        }
        for output in outputs
    ]


def _connector() -> Any:
    """The worker's, which is in this process with one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _swap_blocks(one: int, other: int) -> None:
    """Two slots of the host tier change their bytes: right KV, under each other's name."""
    slab = _connector().worker_side.worker._memory.slab
    rows = slab.array.reshape(slab.num_slots, slab.slot_bytes)
    rows[[one, other]] = rows[[other, one]]


def _preemptions(llm: Any) -> int:
    counters = {metric.name: metric for metric in llm.get_metrics()}
    return int(getattr(counters.get("vllm:num_preemptions"), "value", 0))


def settle(llm: Any) -> Any:
    """Steps until nothing is under way, or SETTLE_S have passed; the leader.

    The scheduler lives in this process (no engine-core process): its leader can be looked at.
    """
    leader = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side.hooks.leader
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        leader.poll()
        is_storing = leader.chain.storing_blocks
        if not leader.pending_jobs and not leader.open_requests and not is_storing:
            break  # a last request's last blocks are sent with the next step, which a server makes itself
        llm.llm_engine.step()
    return leader


def _leader_state(llm: Any) -> dict[str, Any]:
    leader = settle(llm)
    leader.check_integrity()
    return {
        "metrics": leader.metrics.snapshot(),
        "open": {
            "jobs": leader.pending_jobs,
            "requests": leader.open_requests,
            "leases": leader.chain.host.live_leases,
            "pending_blocks": leader.chain.host.pending_blocks,
            "stores": leader.chain.storing_blocks,
        },
    }


def set_variables(job: dict[str, Any]) -> None:
    """Before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if job["llm"].get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"


def main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads the job, runs it, writes the result."""
    job = json.loads(Path(sys.argv[1]).read_text())
    set_variables(job)
    Path(sys.argv[2]).write_text(json.dumps(run(job)))
    if job.get("dies"):
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(lambda job: Engine(job).serve(job["rounds"]))
