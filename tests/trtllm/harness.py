"""An executor double with kvbm in it: its insides in reach, copies that can be held or made to fail, a leak
check.

What is here runs on every rank alike; a scenario decides by what all ranks know.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.runtime import rank_watch
from kvbm_core.testing import toy_store
from kvbm_core.testing.gate import Gate
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.jobs import Job
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.transfer.executor import Executor as TransferExecutor
from kvbm_core.types import Direction
from tests.began import begins_now
from tests.trtllm.double import EARLY, MID, NEWEST, RELEASED, Executor, ExecutorConfig, comm
from tests.trtllm.double.failure import PATIENCE_S
from tests.trtllm.double.memory import Memory

T = TypeVar("T")
BLOCK = 4
PER_ITERATION = {"_sync_onboards", "_plans"}
"""Of a worker's side: they are of the last iteration that had metadata, and hold nothing."""


@dataclass(frozen=True)
class Kind:
    """On what a scenario runs. Every one is a cache of its own kind in a version, with or without overlap.

    ``attention_dp``: the ranks are engines of their own as far as KV goes.
    """

    version: str
    manager: str
    overlap: bool
    ranks: int = 1
    attention_dp: bool = False

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "plain"
        return f"{self.version}-{self.manager}-{loop}-{self.ranks}{'dp' if self.attention_dp else ''}"

    @property
    def shards(self) -> int:
        """Ranks that hold a part of every block."""
        return 1 if self.attention_dp else self.ranks

    @property
    def is_v2(self) -> bool:
        """Whether this is KVCacheManagerV2."""
        return self.manager == "v2"


def kinds(ranks: int = 1, *, in_all_versions: bool = False) -> list[Kind]:
    """All kinds of this many ranks; ``in_all_versions``: of those too that are between or before the main
    ones.
    """
    caches = [(RELEASED, "v1"), (NEWEST, "v1"), (NEWEST, "v2")]
    if in_all_versions:
        caches += [(EARLY, "v1"), (MID, "v1")]
    return [
        Kind(version, manager, overlap, ranks) for version, manager in caches for overlap in (False, True)
    ]


class KeepingExecutor(Executor):
    """Keeps the blocks of requests that failed, or were cancelled in their load, for reuse, as TensorRT-LLM
    does.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        terminate = self._ends.terminate

        def keep(core: Any, *, is_valid: bool = True) -> None:
            core.computed = max(core.computed, core.position)
            terminate(core, is_valid=True)

        self._ends.terminate = keep  # type: ignore[method-assign]


class Serving:
    """One rank of an executor with kvbm. Answers are compared with those of a run without connector at the
    end.
    """

    def __init__(
        self,
        rank: int,
        kind: Kind,
        executor_class: type[Executor],
        config: ExecutorConfig,
        *,
        is_ready: bool,
        spoils_late: bool,
    ) -> None:
        self.rank = rank
        self.kind = kind
        self.config = config
        self.may_fail = False
        """Whether failures of transfers are part of the scenario."""
        self.has_windows = any(config.attention_windows)
        self.gates: list[Gate] = []
        self.may_begin = threading.Event()
        """Until then no rank has a host tier."""
        if is_ready:
            self.may_begin.set()
        self._to_poison: list[tuple[int, list[int]]] = []
        self.executor = executor_class(*self._classes(), config)
        if (
            spoils_late and not config.enable_partial_reuse
        ):  # there the double copies into blocks as it hands them out
            self.executor.memory.poison = self._poison_later  # type: ignore[method-assign]
        self._asked: dict[int, tuple[tuple[int, ...], int, tuple[tuple[str, Any], ...]]] = {}
        self.clock = ManualClock(time.monotonic())
        if self.executor.leader is not None:
            self.side._clock = self.clock

    def _poison_later(self, group: int, slots: list[int]) -> None:
        """The double spoils blocks when it hands them out, TensorRT-LLM when it computes: a connector may
        read them
        until it has heard of it, which is before loads and forward pass begin."""
        self._to_poison.append((group, list(slots)))

    def _poison_now(self) -> None:
        for group, slots in self._to_poison:
            Memory.poison(self.executor.memory, group, slots)
        self._to_poison.clear()

    def wait_ready(self) -> None:
        """Until every rank can be given copies, and the leader knows that, and knows the weights or does not
        need to; no iteration passes.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert time.monotonic() < deadline_s, "the host tier did not come"
            time.sleep(0)
        comm.mpi_allgather(None)

    def _is_ready(self) -> bool:
        if not self.executor.worker.side.worker.is_ready:
            return False
        if not self.is_leading:
            return True
        return self.executor.leader.part._weights.wait(0) and self.look(lambda: bool(self.leader.is_ready))

    def _classes(self) -> tuple[type, type]:
        from kvbm.trtllm_integration.connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker

        gates, may_begin, poison_now = self.gates, self.may_begin, self._poison_now

        class GatedWorker(DynamoKVBMConnectorWorker):
            def __init__(self, llm_args: Any) -> None:
                super().__init__(llm_args)
                worker = self.side.worker

                def wrap(inner: TransferExecutor) -> TransferExecutor:
                    may_begin.wait(PATIENCE_S)
                    gates.append(Gate(inner, worker._finished))
                    gates[-1].before_load = poison_now
                    return gates[-1]

                worker.wrap_executor(wrap)

            def start_load_kv(self, stream: Any) -> None:
                super().start_load_kv(stream)
                poison_now()

        return DynamoKVBMConnectorLeader, GatedWorker

    # ------------------------------------------------------------------ parts

    @property
    def gate(self) -> Gate:
        """This rank's copies."""
        return self.gates[-1]

    @property
    def side(self) -> Any:
        """The leader's callbacks; rank 0."""
        return self.executor.leader.part.callbacks

    @property
    def leader(self) -> Any:
        """The core's leader; rank 0."""
        return self.side.leader

    @property
    def is_leading(self) -> bool:
        """Whether the leader lives here."""
        return self.executor.leader is not None

    def look(self, look: Callable[[], T]) -> T:
        """What this rank's leader sees when the channel's thread is not taking anything in."""
        with self.leader.lock:
            return look()

    def from_leader(self, look: Callable[[], Any]) -> Any:
        """``look`` of rank 0, on all ranks; with attention DP, of this rank."""
        seen = self.look(look) if self.is_leading else None
        return seen if self.kind.attention_dp else comm.mpi_broadcast(seen)

    def metric(self, name: str) -> float:
        """A series of the leader's metrics, on all ranks, when no copy is under way any more."""
        self.settle()
        value: float = self.from_leader(lambda: self.leader.metrics.snapshot().get(name, 0.0))
        return value

    # ------------------------------------------------------------------ doing

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 8, **options: Any) -> int:
        """See Executor.submit."""
        request = self.executor.submit(prompt, max_new_tokens, **options)
        hashable = {name: tuple(map(tuple, v)) if name == "multimodal" else v for name, v in options.items()}
        self._asked[request] = (tuple(prompt), max_new_tokens, tuple(sorted(hashable.items())))
        return request

    def ask(self, prompt: Sequence[int], max_new_tokens: int = 8, **options: Any) -> int:
        """A request, run to its end."""
        request = self.submit(prompt, max_new_tokens, **options)
        self.executor.run_until_idle()
        return request

    def step_until(self, condition: Callable[[], Any]) -> None:
        """Steps until ``condition``, which is the same on all ranks, holds; with attention DP, on each
        rank.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while self.executor.lockstep.any(not condition()):
            assert time.monotonic() < deadline_s, f"what was waited for did not come: {self.describe()}"
            if not self.executor.step():
                time.sleep(0)  # lets the connector's threads run

    def describe(self) -> str:
        """Where everything stands: for whoever waits in vain."""
        worker = self.executor.worker.side.worker
        said = [f"rank {self.rank}: {self.executor.describe()}", f"ready: {worker.is_ready}"]
        if self.gates:
            said.append(f"gate: {self.gate.describe()}")
        if self.is_leading:
            leader = self.leader
            waits = {job.job_id: sorted(job.waiting_ranks) for job in leader._jobs.jobs(Job)}
            said += [
                f"leader: ready {leader.is_ready}, away {sorted(leader._ranks.away)}, jobs {waits}",
                f"host: {leader.chain.host.pending_blocks} pending, {leader.chain.host.live_leases} leases",
                f"callbacks: {dict(self.side._requests)}",
                f"last answers: {self.executor.calls.named('get_num_new_matched_tokens')[-3:]}",
            ]
        return "; ".join(said)

    def run_to(self, request: int, state: str) -> None:
        """Steps until a request is in this state."""
        self.step_until(lambda: self.executor.state_of(request) == state)

    def wake_until_nothing_is_open(self) -> None:
        """What next requests would bring about, if they did nothing: saves that have ended are taken up."""
        manager, deadline_s = self.executor.manager, time.monotonic() + PATIENCE_S
        while self.executor.lockstep.any(manager is not None and manager.has_transfers):
            self.executor.wake()
            self.executor.step()
            assert time.monotonic() < deadline_s, "saves that nobody reports"

    @property
    def disk(self) -> SlottedTier:
        """The leader's disk tier; AssertionError if it has none."""
        tier = self.leader.chain.named("disk")
        assert isinstance(tier, SlottedTier)
        return tier

    def settle(self) -> None:
        """Waits until no copy is under way any more, in the leader's eyes too: the executor's loop may sleep
        meanwhile.
        """

        def is_quiet() -> bool:
            chain = self.leader.chain
            is_moving = chain.storing_blocks or chain.fetching_blocks
            return not self.leader.pending_jobs and not is_moving

        def is_quiet_here() -> bool:
            toy_store.land_all()
            return bool(self.from_leader(is_quiet))

        self.step_until(is_quiet_here)

    def settle_without_steps(self) -> None:
        """As ``settle``, and no request gets a token meanwhile."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.is_leading and self.look(lambda: bool(self.leader.pending_jobs)):
            assert time.monotonic() < deadline_s, "copies that do not end"
            time.sleep(0)  # lets the connector's threads run
        comm.mpi_allgather(None)

    def forget_device(self) -> None:
        """Empties the device's own cache; what comes back after this came from kvbm."""
        self.executor.run_until_idle()
        self.settle()
        self.executor.drop_device_cache()

    def update_weights(self, weights: str, *, writes: bool = False) -> None:
        """``writes``: to the tensors, which nobody is told; then caches are reset."""
        self.check_answers()  # those of the weights before
        self._asked.clear()
        if writes:
            self.executor.model.weights = weights
            self.executor.reset_prefix_cache()
        else:
            self.executor.update_weights(weights)

    def fails_here(self, direction: Direction, outcome: Outcome = Outcome.IO_ERROR, times: int = 1) -> None:
        """The next jobs of this direction fail on the last rank that has a part of these blocks, and on no
        other.
        """
        self.may_fail = True
        if self.kind.attention_dp or self.rank == self.kind.ranks - 1:
            self.gate.fail_next(direction, outcome, times)

    # ------------------------------------------------------------------ looking

    def expect_match(self, request: int, *answers: tuple[int, bool]) -> None:
        """What kvbm answered to each query for this request."""
        if self.is_leading:
            calls = self.executor.calls.named("get_num_new_matched_tokens")
            assert [call.result for call in calls if call.values["request_id"] == request] == list(answers)

    def device_hit(self, request: int) -> int:
        """What the device had of this request at its last query, on all ranks."""

        def look() -> int:
            calls = self.executor.calls.named("get_num_new_matched_tokens")
            mine = [call.values for call in calls if call.values["request_id"] == request]
            return int(mine[-1]["num_computed_tokens"])

        return int(self.from_leader(look))

    def reason(self, request: int) -> str:
        """How the request ended."""
        return self.executor.finish_reasons[request]

    def output(self, request: int) -> list[int]:
        """The answer."""
        return self.executor.outputs[request]

    # ------------------------------------------------------------------ the end

    def sweep(self) -> None:
        """As if nothing had been heard for long."""
        if self.is_leading:
            self.look(self.side._sweep)
            self.clock.advance(1000.0)
            self.look(self.side._sweep)

    @judges
    def check_answers(self) -> None:
        """Compares with a run without connector; of requests that were not finished, the beginning."""
        ended = {request: asked for request, asked in self._asked.items() if request in self.executor.outputs}
        plain = Executor(
            None, None, replace(self.config, record=False, num_blocks=max(1000, self.config.num_blocks))
        )
        plain.model.weights = self.executor.model.weights
        twin = {}
        for asked in dict.fromkeys(ended.values()):
            prompt, max_new_tokens, options = asked
            as_given = {n: list(map(list, v)) if n == "multimodal" else v for n, v in options}
            twin[asked] = plain.submit(prompt, max_new_tokens, **as_given)
        plain.run_until_idle()
        for request, asked in ended.items():
            answer, wanted = self.output(request), plain.outputs[twin[asked]]
            if self.reason(request) in {"length", "eos"}:
                assert answer == wanted, f"request {request}"
            else:
                assert answer == wanted[: len(answer)], f"request {request}"

    @judges
    def assert_clean(self) -> None:
        """Answers are right, and nothing is left of any request on either side."""
        self.executor.run_until_idle()
        self.settle()
        self.wake_until_nothing_is_open()
        assert self.executor.blocks_in_use == self.executor.blocks_lost
        self.check_answers()
        self.sweep()
        left: dict[str, int] = {}
        for name, value in vars(self.executor.worker.side).items():
            if isinstance(value, dict | list | set) and name not in PER_ITERATION:
                left[f"worker{name}"] = len(value)
        left["finished requests on the worker"] = len(self.executor.worker.side._offloads.kept)
        left["held copies"] = self.gate.held if self.gates else 0
        left["jobs of the worker"] = len(self.executor.worker.side.worker._in_flight)
        states = [self.executor.worker.side.guard_state]
        if self.is_leading:
            left |= self.look(self._left_in_leader)
            states.append(self.side.guard_state)
        series = [item for state in states for item in state.metrics.snapshot().items()]
        trouble = (
            ["guarded"] if self.may_fail else ["guarded", "kvbm_failures_total", "kvbm_dropped_blocks_total"]
        )
        # Blocks that leave a window are the engine's again at once: a copy may not have begun by then.
        fair = 'kvbm_dropped_blocks_total{reason="preempted"}' if self.has_windows else ""
        left |= {
            name: int(value)
            for name, value in series
            if any(word in name for word in trouble) and name != fair
        }
        found = {name: count for name, count in left.items() if count}
        assert not found, f"{found}"  # said in words, as other ranks are processes without pytest

    def _left_in_leader(self) -> dict[str, int]:
        leader, follower = self.leader, self.side._follower
        with leader.lock:  # the channel's thread may be taking in the last answer
            leader.check_integrity()
        return {
            "open requests": leader.open_requests,
            "jobs": leader.pending_jobs,
            "leases": leader.chain.host.live_leases,
            "pending slots": leader.chain.host.pending_blocks,
            "blocks being loaded": leader.loading_blocks,
            "leases on blocks of lower tiers": leader.chain.live_leases,
            "followed requests": len(self.side._requests),
            "finishing requests": len(self.side._finishing),
            "planned jobs": len(self.side._planned),
            "awaited loads": len(self.side._awaited),
            "tokens": len(follower._tokens),
            "calendar": len(follower._due),
            "requests of this step": len(follower._now),
        }

    def close(self) -> None:
        """Ends threads and sockets."""
        leader, worker = self.executor.leader, self.executor.worker
        self.executor.close()
        worker._close()
        if leader is not None:
            leader._close()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These variables in this process, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def serve(
    rank: int,
    kind: Kind,
    *,
    host_blocks: int | None = 256,
    env: dict[str, str] | None = None,
    executor_class: type[Executor] = Executor,
    is_ready: bool = True,
    spoils_late: bool = True,
    **config: Any,
) -> Iterator[Serving]:
    """An executor of this kind with kvbm, whose leaks and answers are checked at the end unless something
    failed.
    """
    size = {} if host_blocks is None else {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(host_blocks)}
    wait = {} if is_ready else {"KVBM_START_WAIT_S": "0"}  # for memory that is not there before the start
    settings = {**size, **wait, **(env or {})}
    # No scenario ends a rank and goes on: one that is silent is busy.
    with environment(settings), patch.object(rank_watch, "ANSWER_WITHIN_S", PATIENCE_S):
        shape = ExecutorConfig(
            manager=kind.manager, overlap=kind.overlap, attention_dp=kind.attention_dp, sleeps=True, **config
        )
        with begins_now("kvbm_trtllm.identity"):
            serving = Serving(rank, kind, executor_class, shape, is_ready=is_ready, spoils_late=spoils_late)
        try:
            if is_ready:
                serving.wait_ready()
            yield serving
            serving.assert_clean()
        finally:
            serving.close()
