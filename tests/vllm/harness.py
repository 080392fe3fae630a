"""Drives vLLM's own scheduler, requests and connector hooks, with a model that checks every byte it reads.

``Engine`` does what vLLM's engine core does around the scheduler (add, step, abort, reset, shut down), in one
process and thread, so that a test can stop at any state. There is no clock in it: a step has work or polls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvbm_core.testing.verdicts import judges
from tests.engines import PATIENCE_S
from tests.vllm.engine_config import EngineSpec, make_kv_cache_configs, make_scheduler, make_vllm_config
from tests.vllm.fake_model import FakeRank, load_adapter


@dataclass(frozen=True)
class MatchCall:
    """One answer of get_num_new_matched_tokens."""

    request_id: str
    computed_tokens: int
    tokens: int | None
    is_async: bool


@dataclass
class Record:
    """Everything the connector and the engine said to each other that a test may want to look at."""

    matches: list[MatchCall] = field(default_factory=list)
    allocs: list[tuple[str, int]] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    stats: list[dict[str, Any]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    handed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """kv_transfer_params of answers."""
    preemptions: int = 0
    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model."""


def media(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """An image whose placeholder tokens stand at [offset, offset + length)."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def adapter(name: str, number: int) -> LoRARequest:
    """A LoRA adapter."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"/adapters/{name}")


class Workers:
    """What vLLM's executor calls in a worker, of all ranks at once."""

    def __init__(self, ranks: Sequence[FakeRank]) -> None:
        self._ranks = ranks

    def update_weights(self, update_info: str) -> None:
        """New weights, of that name."""
        for rank in self._ranks:
            rank.change_weights(update_info)

    def add_lora(self, lora: LoRARequest) -> bool:
        """Loads an adapter."""
        for rank in self._ranks:
            if lora.load_inplace or lora.lora_int_id not in rank.adapters:
                rank.adapters[lora.lora_int_id] = load_adapter(lora)
        return True

    def remove_lora(self, number: int) -> bool:
        """Forgets an adapter; also what making room for another one does."""
        return all([rank.adapters.pop(number, None) is not None for rank in self._ranks])

    def sleep(self, level: int = 1) -> None:
        """Level 2 forgets the weights."""
        if level > 1:
            self.update_weights("none")

    def discard(self, tags: tuple[str, ...] | str = ()) -> None:
        """Gives memory back without keeping what is in it."""
        if "weights" in tags:
            self.update_weights("none")

    def get_model_inspection(self) -> str:
        """An order that changes nothing."""
        return "a fake one"


class Engine:
    """One engine with all its ranks. Use as a context manager: leaving it shuts every connector down."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.spec = spec
        self.record = Record()
        self.config = make_vllm_config(spec, folder)
        rank_configs, scheduler_config = make_kv_cache_configs(spec, self.config)
        self.ranks = [
            FakeRank(i, spec, self._config_of(i), each, self.prepare_worker)
            for i, each in enumerate(rank_configs)
        ]
        # As in vLLM, the workers have registered their KV caches when the scheduler is made.
        self.scheduler, self._block_hasher = make_scheduler(self.config, scheduler_config)
        assert self.scheduler.connector is not None
        self.connector = self.scheduler.connector
        # vLLM's own, without what it starts: every order to the workers goes through it.
        self.executor = UniProcExecutor.__new__(UniProcExecutor)
        self.executor.vllm_config = self.config
        self.executor.driver_worker = Workers(self.ranks)  # type: ignore[assignment]
        self._aggregator = KVOutputAggregator.from_connector(self.connector, spec.ranks)
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._fresh_blocks: list[int] = []
        self._taken: list[Any] = []
        self._spy()

    def prepare_worker(self, rank: int, connector: KVConnectorBase_V1) -> None:
        """Called with each worker's connector before it is given the KV tensors; for subclasses."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    # ------------------------------------------------------------------ what a client does

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int = 1,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        images: Sequence[MultiModalFeatureSpec] = (),
        **sampling: Any,
    ) -> Request:
        """Queues a request; nothing runs before the next step."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **sampling
            ),
            pooling_params=None,
            cache_salt=salt,
            lora_request=lora,
            mm_features=list(images) or None,
            block_hasher=self._block_hasher,
        )
        if images:
            self._allow_images()
        self.scheduler.add_request(request)
        self.record.outputs[request_id] = []
        return request

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset_device(self, *, with_connector: bool = False, running: bool = False) -> bool:
        """What /reset_prefix_cache does."""
        return bool(
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=with_connector)
        )

    def take_blocks(self, *, leave: int) -> None:
        """Makes device memory scarce: all free blocks but ``leave`` are held by nobody until
        ``give_blocks``.
        """
        self._taken += self.scheduler.kv_cache_manager.block_pool.get_new_blocks(self.free_blocks - leave)

    def give_blocks(self) -> None:
        """Ends the scarcity."""
        taken, self._taken = self._taken, []
        self.scheduler.kv_cache_manager.block_pool.free_blocks(taken)

    def ask(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **how: Any) -> list[int]:
        """Adds a request, runs it to its end and returns its answer."""
        self.add(request_id, tokens, max_tokens, **how)
        self.run()
        return self.record.outputs[request_id]

    def ask_until_done(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1) -> list[int]:
        """As ``ask``, but stops when the answer is there, whatever else is waiting."""
        self.add(request_id, tokens, max_tokens)
        self.run(until=lambda: len(self.record.outputs[request_id]) == max_tokens)
        return self.record.outputs[request_id]

    # ------------------------------------------------------------------ what the engine core does

    def step(self) -> None:
        """One turn of the engine loop; with async scheduling a step's result is processed one step later."""
        self.execute(self.scheduler.schedule())

    def execute(self, scheduled: SchedulerOutput) -> None:
        """What follows ``scheduler.schedule()`` in a turn."""
        fresh, self._fresh_blocks = self._fresh_blocks, []
        # Copies, as if they had come from other processes: vLLM shares one object for all empty outputs.
        results = [copy(rank.step(scheduled, fresh, self.scheduler.requests)) for rank in self.ranks]
        result = self._aggregator.aggregate(results) if len(results) > 1 else results[0]
        assert result is not None
        self.record.steps += 1
        self.record.computed_tokens += scheduled.total_num_scheduled_tokens
        self._in_flight.append((scheduled, result))
        if self.spec.async_scheduling and len(self._in_flight) < 2 and scheduled.total_num_scheduled_tokens:
            return
        self._process(*self._in_flight.popleft())
        while self._in_flight and not scheduled.total_num_scheduled_tokens:
            self._process(*self._in_flight.popleft())

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until ``until`` holds, or until the engine would go to sleep."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not until() if until is not None else self.scheduler.has_requests() or self._in_flight:
            if time.monotonic() > deadline_s:
                states = {name: str(request.status) for name, request in self.scheduler.requests.items()}
                raise AssertionError(f"the engine hangs; requests: {states}")
            self.step()

    def status(self, request_id: str) -> RequestStatus | None:
        """None once the scheduler has forgotten the request."""
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    @property
    def free_blocks(self) -> int:
        """Device blocks nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def external_tokens(self, request_id: str) -> int:
        """Tokens the connector promised and vLLM took, over all admissions of the request."""
        return sum(tokens for name, tokens in self.record.allocs if name == request_id)

    @judges
    def assert_idle(self) -> None:
        """vLLM holds nothing any more: no request, no device block."""
        assert not self.scheduler.requests, list(self.scheduler.requests)
        assert (
            not self.scheduler.running
            and not self.scheduler.waiting
            and not self.scheduler.kv_holding_waiting
        )
        assert not self.scheduler.finished_recving_kv_req_ids and not self.scheduler.failed_recving_kv_req_ids
        assert self.free_blocks == self.spec.num_blocks - 1

    # ------------------------------------------------------------------ inside

    def _process(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self._update(scheduled, result)
        if self.spec.draft_tokens and not self.spec.async_scheduling and scheduled.num_scheduled_tokens:
            drafts = self.ranks[0].drafts_of(list(scheduled.num_scheduled_tokens))
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, result).values():
            for output in outputs.outputs:
                self.record.outputs[output.request_id].extend(output.new_token_ids)
                if output.kv_transfer_params is not None:
                    self.record.handed[output.request_id] = output.kv_transfer_params
                if output.finish_reason is not None:
                    self.record.reasons[output.request_id] = output.finish_reason
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.record.stats.append(stats.kv_connector_stats)

    def _config_of(self, rank: int) -> VllmConfig:
        if self.spec.ranks == 1:
            return self.config
        return replace(self.config, parallel_config=replace(self.config.parallel_config, rank=rank))

    def _allow_images(self) -> None:
        # The model is text-only, so vLLM planned no encoder cache; the scheduler's image path is under test.
        if self.scheduler.max_num_encoder_input_tokens == 0:
            self.scheduler.max_num_encoder_input_tokens = 1024
            self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1024)

    def _spy(self) -> None:
        connector, pool = self.connector, self.scheduler.kv_cache_manager.block_pool
        ask, alloc, take = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
            pool.get_new_blocks,
        )
        events, preempt = connector.take_events, self.scheduler._preempt_request

        def spy_ask(request: Request, computed_tokens: int) -> tuple[int | None, bool]:
            tokens, is_async = ask(request, computed_tokens)
            self.record.matches.append(MatchCall(request.request_id, computed_tokens, tokens, is_async))
            return tokens, is_async

        def spy_alloc(request: Request, blocks: Any, tokens: int) -> None:
            self.record.allocs.append((request.request_id, tokens))
            alloc(request, blocks, tokens)

        def spy_take(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            self._fresh_blocks.extend(block.block_id for block in blocks)
            return blocks

        def spy_events() -> Any:
            taken = list(events())
            self.record.events.extend(taken)
            return taken

        def spy_preempt(*args: Any, **kwargs: Any) -> Any:
            self.record.preemptions += 1
            return preempt(*args, **kwargs)

        connector.get_num_new_matched_tokens = spy_ask
        connector.update_state_after_alloc = spy_alloc
        connector.take_events = spy_events
        pool.get_new_blocks = spy_take
        self.scheduler._preempt_request = spy_preempt
