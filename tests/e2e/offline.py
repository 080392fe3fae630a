"""One real vLLM engine in a process of its own, for all rounds of a job, or for as many as it is asked for.

The first as a program: python -m tests.e2e.offline JOB.json RESULT.json. JOB: {"model", "llm": keyword
arguments of vllm.LLM, "connector": bool, "plugins": ["module:function", ...], called before the engine is
made, "rounds": [{"prompts": [[token, ...], ...], "max_tokens", "together": bool, "margins": bool}]}. A round
"after" an earlier one (its number) is the next turn: its prompts come behind what was asked and answered
there. "resets": the device's cache is emptied first; "loses_states": states come back as zeros; "swaps":
blocks of the host tier get each other's bytes; "audited": the audit's counters are wanted. RESULT: for each
round the answers, cached tokens and TTFT of each prompt, and by how many nats each token beat the second
best if "margins" are asked for; the leader's counters and what is still open when all is done. With "dies"
the process then kills itself, as SIGKILL would.

The second in a process of tests.engines.worker: ``start`` a job without rounds, then ``serve``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbm_core.runtime.audit import AuditSampler

CONNECTOR = {"kv_connector": "CheckingConnector", "kv_role": "kv_both"}
CONNECTOR_MODULE = "tests.e2e.checking_connector"
SETTLE_S = 120.0
"""Guards against hanging, and nothing else."""
POLL_S = 0.02
COUNTERS = {
    "preemptions": "num_preemptions",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
"""vLLM's own."""

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
        asked: list[list[list[int]]] = []
        answers: list[list[dict[str, Any]]] = []
        audited: list[dict[str, float]] = []
        for spec in rounds:
            self._prepare(spec)
            asked.append(spec["prompts"])
            if "after" in spec:
                earlier = spec["after"]
                told = zip(asked[earlier], answers[earlier], spec["prompts"], strict=True)
                asked[-1] = [prompt + answer["tokens"] + question for prompt, answer, question in told]
            answers.append(_serve(self.llm, {**spec, "prompts": asked[-1]}, settles=self._shows_leader))
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
        self._reset(with_connector=self._has_connector)

    def _reset(self, *, with_connector: bool) -> None:
        if self._shows_leader:
            settle(self.llm)
        deadline_s = time.monotonic() + SETTLE_S
        while not self.llm.reset_prefix_cache(reset_connector=with_connector):
            assert time.monotonic() < deadline_s, "blocks are still in use"
            if self._shows_leader:
                self.llm.llm_engine.step()  # it tells vLLM that a last copy is over
            time.sleep(POLL_S)  # copies on other ranks

    def _prepare(self, spec: dict[str, Any]) -> None:
        if spec.get("swaps"):
            _swap_blocks()
        if spec.get("resets"):
            self._reset(with_connector=False)
        if "loses_states" in spec:
            _connector().lose_states(spec["loses_states"])

    def _counters(self) -> dict[str, float]:
        found = dict(_leader_state(self.llm)["metrics"]) if self._shows_leader else {}
        counters = {metric.name: int(getattr(metric, "value", 0)) for metric in self.llm.get_metrics()}
        return found | {name: counters.get(f"vllm:{metric}", 0) for name, metric in COUNTERS.items()}


_started: list[Engine] = []


def start(job: dict[str, Any]) -> None:
    """In a worker: its one engine."""
    set_variables(job)
    _started.append(Engine(job))


def serve(
    rounds: Rounds, fail_every: int = 0, *, forgets: bool = True, audits: bool = False
) -> dict[str, Any]:
    """In a worker: the rounds, on empty caches if it ``forgets`` first; each ``fail_every``-th onboard fails,
    and leaves garbage. ``audits``: all hits from now on, as with KVBM_AUDIT_RATE=1.
    """
    (engine,) = _started
    if forgets:
        engine.forget()
    if audits:
        settle(engine.llm)._sampler = AuditSampler(1.0)
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


def _serve(llm: Any, spec: dict[str, Any], *, settles: bool) -> list[dict[str, Any]]:
    """The answers to a round. ``settles``: what a prompt has left to store is stored before the next asks,
    as a small host tier has no room for a hit while its slots are being read.
    """
    from vllm import SamplingParams

    logprobs = 2 if spec.get("margins") else None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=spec["max_tokens"], ignore_eos=True, logprobs=logprobs
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in spec["prompts"]]
    if spec.get("together"):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    else:
        outputs = []
        for prompt in prompts:
            outputs += llm.generate(prompt, sampling, use_tqdm=False)
            if settles:
                settle(llm)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens,
            "margins": [_margin(best) for best in output.outputs[0].logprobs or ()],
            "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        }
        for output in outputs
    ]


def _margin(best: dict[int, Any]) -> float:
    first, second = sorted((found.logprob for found in best.values()), reverse=True)[:2]
    return float(first - second)


def _connector() -> Any:
    """The worker's, which is in this process with one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _swap_blocks() -> None:
    """Each slot of the host tier gets the bytes of the one before it: right KV, under another one's name."""
    slab = _connector().worker_side.worker._memory.slab
    rows = slab.array.reshape(slab.num_slots, slab.slot_bytes)
    rows[:] = rows[[-1, *range(slab.num_slots - 1)]]


def settle(llm: Any) -> Any:
    """Steps until nothing is under way, or SETTLE_S have passed; the leader.

    The scheduler lives in this process (no engine-core process): its leader can be looked at.
    """
    leader = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side.hooks.leader
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        with leader.lock:  # its other thread may be between an end and what follows from it
            leader.poll()
            is_moving = leader.pending_jobs or leader.chain.storing_blocks
        if not leader.open_requests and not is_moving:
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
    for plugin in job.get("plugins", ()):
        module, _, function = plugin.partition(":")
        getattr(importlib.import_module(module), function)()


def main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads the job, runs it, writes the result."""
    job = json.loads(Path(sys.argv[1]).read_text())
    set_variables(job)
    Path(sys.argv[2]).write_text(json.dumps(run(job)))
    if job.get("dies"):
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(lambda job: Engine(job).serve(job["rounds"]))
