"""What the scheduler's hook costs in a step, with vLLM's own request and scheduler output classes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.leader.trtllm_steps import TrtllmSteps
from benchmarks.suite import Options, expect
from benchmarks.timing import timed
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.identity.roots import Roots
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_core.observe.guard import GuardState
from kvbm_core.observe.metrics import Metrics
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.plan import JobResult
from kvbm_vllm.adapters import AdapterIdentities

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvbm_vllm.metadata import DynamoConnectorMetadata

BLOCK_TOKENS = 16
TRTLLM_BLOCK_TOKENS = 32
"""Each engine's own default."""
PROMPT_TOKENS = 131_072
VOCABULARY = 150_000
GROUPS = (GroupSpec(0, BLOCK_TOKENS),)
DECODE_PROMPT_TOKENS = 256
RUN_TOKENS = int(KvbmSettings.model_fields["decode_run_tokens"].default)
SLOTS = 32_768

DECODE = {
    256: Goal("metadata of a decode step, 256 requests", "ms", 0.05, "lower", LIMIT),
    1024: Goal("metadata of a decode step, 1,024 requests", "ms", 0.35, "lower", LIMIT),
}
PREFILL = Goal("metadata of a prefill of 131,072 tokens, all slots in use", "ms", 3.0, "lower", LIMIT)
TRTLLM = Goal("iteration of TensorRT-LLM's leader, 256 requests", "ms", 1.0, "lower", "kvbm under vLLM")
GOALS = (*DECODE.values(), PREFILL, TRTLLM)
ACKNOWLEDGING = "taking in acknowledgements"


def measure(options: Options) -> list[Figure]:
    """All figures; needs vLLM."""
    runs = options.choose(2, 9, 30)
    figures = [_decode(goal, count, runs, options.seed) for count, goal in DECODE.items()]
    return [*figures, _prefill(options.choose(5, 20, 60), options.seed), _trtllm(256, runs, options.seed)]


def _decode(goal: Goal, num_requests: int, runs: int, seed: int) -> Figure:
    """Requests of different lengths. A sample is the mean over as many steps as a request decodes between two
    stores.

    A median over steps would show the many in which little is due and hide the others.
    """
    engine = Steps(num_slots=max(SLOTS, 64 * num_requests), seed=seed)
    requests = [engine.request(DECODE_PROMPT_TOKENS + i % BLOCK_TOKENS) for i in range(num_requests)]
    engine.prefill(requests)
    built: list[float] = []
    acknowledged: list[float] = []
    offloaded_blocks = 0
    for _ in range(1 + runs):
        builds, acks = [], []
        for _ in range(RUN_TOKENS):
            output = engine.decode_output(requests)
            seconds, metadata = timed(partial(engine.hooks.build_connector_meta, output))
            builds.append(1e3 * seconds)
            offloaded_blocks += sum(plan.num_blocks for plan in metadata.offloads)
            acks.append(1e3 * engine.acknowledge(metadata))
        built.append(mean(builds))
        acknowledged.append(mean(acks))
    filled_blocks = num_requests * (1 + runs) * RUN_TOKENS // BLOCK_TOKENS
    late_blocks = filled_blocks - offloaded_blocks
    expect(
        0 <= late_blocks < num_requests * RUN_TOKENS // BLOCK_TOKENS, f"{late_blocks} blocks were not stored"
    )
    engine.check()
    # The first run is the one in which requests that began together find places of their own.
    return Figure(goal, tuple(built[1:]), {ACKNOWLEDGING: tuple(acknowledged[1:])})


def _trtllm(num_requests: int, runs: int, seed: int) -> Figure:
    """What a leader costs in an iteration, all callbacks together, under both engines in turns."""
    num_slots = max(SLOTS, 64 * num_requests)
    lengths = [DECODE_PROMPT_TOKENS + i % BLOCK_TOKENS for i in range(num_requests)]
    ours = TrtllmSteps(num_slots, TRTLLM_BLOCK_TOKENS, RUN_TOKENS, seed)
    ours.prefill(lengths, VOCABULARY)
    theirs = Steps(num_slots=num_slots, seed=seed)
    requests = [theirs.request(length) for length in lengths]
    theirs.prefill(requests)
    samples: list[tuple[float, float]] = []
    for _ in range(1 + runs):
        trtllm = [1e3 * ours.decode(VOCABULARY) for _ in range(RUN_TOKENS)]
        samples.append((mean(trtllm), mean(theirs.decode_ms(requests) for _ in range(RUN_TOKENS))))
    filled_blocks = num_requests * (1 + runs) * RUN_TOKENS // TRTLLM_BLOCK_TOKENS
    late_blocks = filled_blocks - ours.offloaded_blocks
    expect(
        0 <= late_blocks < num_requests * RUN_TOKENS // TRTLLM_BLOCK_TOKENS,
        f"{late_blocks} blocks were not stored",
    )
    ours.check()
    theirs.check()
    mine, other = zip(*samples[1:], strict=True)
    return Figure(TRTLLM, mine, {TRTLLM.against: other})


def _prefill(rounds: int, seed: int) -> Figure:
    """A prompt in one step, after it was matched in vain; its blocks take the places of earlier ones."""
    engine = Steps(num_slots=SLOTS, seed=seed)
    built: list[float] = []
    acknowledged: list[float] = []
    warm_up = SLOTS * BLOCK_TOKENS // PROMPT_TOKENS
    for number in range(warm_up + rounds):
        request = engine.request(PROMPT_TOKENS)
        output = engine.prefill_output([request])
        seconds, metadata = timed(partial(engine.hooks.build_connector_meta, output))
        num_blocks = sum(plan.num_blocks for plan in metadata.offloads)
        expect(
            num_blocks == PROMPT_TOKENS // BLOCK_TOKENS,
            f"{num_blocks} blocks of a long prompt were offloaded",
        )
        acknowledging_ms = 1e3 * engine.acknowledge(metadata)
        engine.finish(request)
        if number >= warm_up:
            built.append(1e3 * seconds)
            acknowledged.append(acknowledging_ms)
    engine.check()
    return Figure(PREFILL, tuple(built), {ACKNOWLEDGING: tuple(acknowledged)})


class Steps:
    """kvbm's scheduler side under steps that vLLM could have made: one group, no workers, no time passes."""

    def __init__(self, num_slots: int, seed: int) -> None:
        from kvbm_vllm.changes import EngineChanges
        from kvbm_vllm.events import EventFeed
        from kvbm_vllm.scheduler import SchedulerSide

        self._bench = LeaderBench(num_slots, groups=GROUPS)
        events = EventFeed(None, hash_block_tokens=BLOCK_TOKENS)
        self._guards = Metrics()
        weights = WeightsIdentity({}, 0)
        self.hooks = SchedulerSide(
            self._bench.leader,
            Roots(KeyNamespace("benchmark"), weights.stamp),
            events,
            changes=EngineChanges(weights, AdapterIdentities()),
            hold_back_tokens=0,
            decode_run_tokens=RUN_TOKENS,
            guard_state=GuardState(self._guards),
        )
        self._draw = random.Random(seed)
        self._next_device_block = 1
        self._num_requests = 0

    def request(self, num_tokens: int) -> Request:
        """A request that has arrived, and has been matched in vain."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._num_requests += 1
        tokens = [self._draw.randrange(VOCABULARY) for _ in range(num_tokens)]
        request = Request(f"request-{self._num_requests}", tokens, SamplingParams(max_tokens=4096), None)
        self.hooks.on_new_request(request)
        expect(self.hooks.get_num_new_matched_tokens(request, 0) == (0, False), "a new prompt was found")
        return request

    def prefill_output(self, requests: Sequence[Request]) -> Any:
        """A step that computes all of these requests' prompts."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        new = []
        for request in requests:
            table = self._device_blocks(-(-request.num_tokens // BLOCK_TOKENS))
            new.append(NewRequestData.from_request(request, (table,)))
        scheduled = {request.request_id: request.num_tokens for request in requests}
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        return output

    def prefill(self, requests: Sequence[Request]) -> None:
        """Their prompts are computed, and stored."""
        self.acknowledge(self.hooks.build_connector_meta(self.prefill_output(requests)))
        for request in requests:
            request.num_computed_tokens = request.num_tokens

    def decode_output(self, requests: Sequence[Request]) -> Any:
        """A step that computes one more token of each."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        computed = [request.num_computed_tokens for request in requests]
        for request in requests:
            request.append_output_token_ids(self._draw.randrange(VOCABULARY))
            request.num_computed_tokens += 1
        grown = [(self._device_blocks(1),) if tokens % BLOCK_TOKENS == 0 else None for tokens in computed]
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=grown,
            num_computed_tokens=computed,
            num_output_tokens=[len(request.output_token_ids) for request in requests],
        )
        output.num_scheduled_tokens = dict.fromkeys(output.scheduled_cached_reqs.req_ids, 1)
        output.total_num_scheduled_tokens = len(requests)
        return output

    def decode_ms(self, requests: Sequence[Request]) -> float:
        """What such a step costs, with the answer to it."""
        output = self.decode_output(requests)
        seconds, metadata = timed(lambda: self.hooks.build_connector_meta(output))
        return 1e3 * (seconds + self.acknowledge(metadata))

    def acknowledge(self, metadata: DynamoConnectorMetadata) -> float:
        """The one rank has done what it was told. Seconds that the hooks took to hear it."""
        from vllm.v1.outputs import KVConnectorOutput

        from kvbm_vllm.metadata import DynamoWorkerMetadata

        acks = [JobResult(plan.job_id, Outcome.OK, plan.num_blocks, 0.001, 0.0) for plan in metadata.offloads]
        said = KVConnectorOutput(kv_connector_worker_meta=DynamoWorkerMetadata({0: acks}))
        seconds, _ = timed(lambda: self.hooks.update_connector_output(said))
        return seconds

    def finish(self, request: Request) -> None:
        """The request is gone; its device blocks are free again."""
        from vllm.v1.request import RequestStatus

        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.FINISHED_STOPPED
        self.hooks.request_finished(request, ([],))
        self._next_device_block = 1

    def check(self) -> None:
        """Nothing went wrong behind a guard, and the leader's books agree."""
        errors = sum(value for name, value in self._guards.snapshot().items() if "guarded" in name)
        expect(errors == 0, f"{errors:.0f} exceptions were caught by a guard")
        self._bench.leader.check_integrity()

    def _device_blocks(self, count: int) -> list[int]:
        first = self._next_device_block
        self._next_device_block += count
        return list(range(first, first + count))
