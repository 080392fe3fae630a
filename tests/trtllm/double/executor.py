"""The executor's loop, one iteration per ``step``. See the package's documentation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.trtllm.double import comm, contract, startup
from tests.trtllm.double.blocks import BlockManager
from tests.trtllm.double.calls import Call, Calls
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.ends import Ends
from tests.trtllm.double.failure import PATIENCE_S, DoubleFailure
from tests.trtllm.double.lockstep import DUMMY_ID, LockStep
from tests.trtllm.double.manager import Batch, ConnectorManager
from tests.trtllm.double.memory import Memory
from tests.trtllm.double.model import Model, Work
from tests.trtllm.double.model import Sequence as TokenSequence
from tests.trtllm.double.padding import Padding
from tests.trtllm.double.requests import Core, State
from tests.trtllm.double.scheduler import Scheduler

Sampled = list[tuple[Core, int | None]]


class ForwardError(RuntimeError):
    """What ``fail_next_forward`` raises inside the forward pass."""


class Executor:
    """One rank's executor. All ranks of a world make the same calls in the same order.

    With ``attention_dp`` each rank gets requests of its own, and all call ``step`` equally often. Without
    classes it runs alone and without a connector. Raises what the constructors raise. One thread.
    """

    def __init__(
        self,
        leader_class: Callable[[Any], Any] | None,
        worker_class: Callable[[Any], Any] | None,
        config: ExecutorConfig | None = None,
        kv_connector_config: Any = None,
    ) -> None:
        self.config = config or ExecutorConfig()
        self.contract = contract.current()
        if self.config.manager == "v2" and not self.contract.is_newest:
            raise ValueError("this contract has no V2 manager")
        if self.config.attention_dp and not self.contract.is_newest:
            raise ValueError("this contract has no connectors with attention DP")
        if self.config.cuda_graphs and not self.contract.has_callable:
            raise ValueError("CUDA graphs are not supported with KV connector hooks")
        self.calls = Calls(keeps_all=self.config.record)
        self.errors: list[Exception] = []
        """What was raised inside forward passes."""
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.memory = Memory(self.config)
        self.blocks = BlockManager(self.memory)
        # With attention DP every rank has whole heads.
        shard = 0 if self.config.attention_dp else comm.mpi_rank()
        self.model = Model(self.memory, shard, self.config.vocab_size)
        self.manager: ConnectorManager | None = None
        self._forward_callable: Callable[[], None] | None = None
        if leader_class is not None and worker_class is not None:
            args = self.config.llm_args(comm.mpi_rank(), comm.mpi_world_size(), kv_connector_config)
            self.manager, self._forward_callable = startup.start(
                (leader_class, worker_class), args, self.memory, calls=self.calls, config=self.config
            )
        self._scheduler = Scheduler(self.config, self.blocks, self.model, self.manager, self.contract)
        is_lockstep = self.config.attention_dp and self.manager is not None
        self.lockstep = LockStep(self.config, self.blocks, self.model, is_on=is_lockstep)
        self.padding = Padding(self.config, self.blocks, self.model)
        self._ends = Ends(self.config, self.blocks, self.manager, self.contract)
        self.outputs = self._ends.outputs
        self.finish_reasons = self._ends.reasons
        """Per request that ended: length, eos, cancelled or error."""
        self._next_id, self._id_stride = 1, 1
        if is_lockstep:
            self._next_id, self._id_stride = 1 + comm.mpi_rank(), comm.mpi_world_size()
        self._waiting: list[Core] = []
        self._active: list[Core] = []
        self._previous: Sampled | None = None
        self._cancelled: set[int] = set()
        self._fails_forward = False
        self._drops_batch = False
        self._is_woken = False

    @property
    def leader(self) -> Any:
        """The leader; None on other ranks than 0, and without a connector."""
        return self.manager.leader if self.manager else None

    @property
    def worker(self) -> Any:
        """This rank's worker; None without a connector."""
        return self.manager.worker if self.manager else None

    # What a test does

    def submit(
        self,
        prompt_tokens: Sequence[int],
        max_new_tokens: int,
        *,
        lora_task_id: int | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        multimodal: list[list[int]] | None = None,
        image: int | None = None,
        stop_after: int | None = None,
        dummy: bool = False,
        generation_only: bool = False,
    ) -> int:
        """Queues a request and returns its id. ``stop_after``: this many tokens in, the model says
        end-of-sequence. ``image``: one whose hashes could not be made, so that C++ knows nothing of it.
        """
        tokens = [int(token) for token in prompt_tokens]
        if not tokens or max_new_tokens < 1 + generation_only:
            raise ValueError("a request has a prompt and generates something")
        identity = (lora_task_id, cache_salt, multimodal, image, self.model.weights)
        sequence = TokenSequence(self.model, identity, tokens, len(tokens) + max_new_tokens)
        core = Core(
            self._next_id,
            tokens,
            len(tokens),
            len(tokens),
            max_new_tokens,
            sequence,
            stop_after=stop_after,
            lora_task_id=lora_task_id,
            cache_salt=cache_salt,
            priority=priority,
            multimodal_hashes=multimodal,
            multimodal_data=None if image is None else {"image": image},
            is_dummy=dummy,
            is_generation_only=generation_only,
        )
        if core.num_blocks(self.config.tokens_per_block) > self.config.num_blocks:
            raise ValueError("the request does not fit the cache")
        core.python = self.contract.python_request(core)
        self._next_id += self._id_stride
        self._waiting.append(core)
        return core.request_id

    def cancel(self, request_id: int) -> None:
        """The client left; takes effect in the next step. Unknown and finished ids are ignored."""
        self._cancelled.add(request_id)

    def wake(self) -> None:
        """Something that is no request comes to the queue: the next step polls, with no request too."""
        self._is_woken = True

    def preempt(self, request_id: int) -> None:
        """V2: the request loses its blocks in the next step, if it has any, and is replayed."""
        if self.config.manager != "v2":
            raise ValueError("V1 never evicts under a connector")
        self._scheduler.to_preempt.add(request_id)

    def fail_next_forward(self) -> None:
        """The next forward pass raises after its layers."""
        self._fails_forward = True

    def drop_next_batch(self) -> None:
        """From M on: the next metadata is bound, but its batch cannot run: no ``start_load_kv``, and it comes
        again.
        """
        if not self.contract.drops_batches:
            raise ValueError("this contract always calls start_load_kv after bind_connector_meta")
        self._drops_batch = True

    def drop_device_cache(self) -> None:
        """Forgets the device's own reuse, so that only the connector can bring blocks back."""
        self.blocks.drop_cache()

    def update_weights(self, weights: str) -> None:
        """As TensorRT-LLM's own extension of its workers does, on every rank, while no request runs."""
        loader = sys.modules[f"{contract.PYEXECUTOR}.model_loader"].ModelLoader()
        loader.reload(self.model, weights, allow_partial_loading=True)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """As trainers do when they have changed weights."""
        sys.modules[f"{contract.PYEXECUTOR}.py_executor"].PyExecutor(self).reset_prefix_cache()

    def state_of(self, request_id: int) -> str:
        """waiting, context, loading (parked), generation or complete."""
        for core in self._waiting + self._active:
            if core.request_id == request_id:
                return core.state.value
        return State.COMPLETE.value

    def slots_of(self, request_id: int) -> list[list[int]]:
        """The blocks of a request per layer group; empty when it has none."""
        return next(
            ([list(t) for t in core.slots] for core in self._active if core.request_id == request_id), []
        )

    def write_kv(self, request_id: int, start: int, end: int) -> None:
        """Does what a perfect connector does: the KV of positions ``start`` to ``end`` is in the request's
        blocks.
        """
        core = next(core for core in self._active if core.request_id == request_id)
        for layer in range(self.config.num_layers):
            self.model.write_layer([Work(request_id, core.sequence, core.slots, start, end)], layer)

    def free_lost(self) -> None:
        """Frees what this TensorRT-LLM never frees, or requests that find no room would wait for ever."""
        self._ends.free_leaked()

    @property
    def blocks_in_use(self) -> int:
        """Blocks, of all layer groups, that a request or a transfer holds."""
        return sum(sum(refs > 0 for refs in pool.refs) for pool in self.blocks.pools)

    @property
    def blocks_lost(self) -> int:
        """Blocks, of all layer groups, that nobody will free any more: leaked ones, and the padding's."""
        lost = [pin.slots for pin in self._ends.leaked] + [self.padding.slots]
        return sum(len({slot for slots in lost for slot in slots[group]}) for group in range(len(lost[-1])))

    @property
    def is_idle(self) -> bool:
        """Nothing to compute; and no transfer open, for a loop that does not sleep."""
        has_transfers = self.manager is not None and self.manager.has_transfers and not self.config.sleeps
        return not (self._waiting or self._active or self._previous or has_transfers)

    def run_until_idle(self) -> dict[int, list[int]]:
        """Steps until every rank is idle; returns ``outputs``."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.lockstep.any(not self.is_idle):
            if not self.step():
                time.sleep(0)  # only transfers: lets the connector's threads run
            if time.monotonic() > deadline_s:
                raise DoubleFailure(f"not idle after {PATIENCE_S:.0f} s: {self.describe()}")
        return self.outputs

    def close(self) -> None:
        """Lets go of the connector. Connectors have no shutdown call, so none is made."""
        self.manager = None
        self._forward_callable = None

    # The loop

    def step(self) -> bool:
        """One iteration; True if a forward pass was launched."""
        is_awake, self._is_woken = self._is_woken or bool(self._cancelled) or not self.is_idle, False
        if self.config.sleeps and not self.lockstep.any(is_awake):
            return False
        self.num_steps += 1
        if self.manager is not None:
            self.manager.step = self.num_steps
        while self._waiting and len(self._active) < self.config.max_batch_size:
            core = self._waiting.pop(0)
            if core.request_id in self._cancelled:
                self._ends.end(core, "cancelled")
            else:
                core.state = State.CONTEXT
                self._active.append(core)
        batch, paused = self._scheduler.schedule(self._active)
        self._check_ranks_agree(batch)
        if self.lockstep.any(bool(self._active)):
            self.lockstep.pad(batch, is_free=not self._active)
        can_run = self.lockstep.can_run(batch)
        if can_run:
            self._start_batch(batch)
            can_run = self.lockstep.can_run(batch)
        sampled = self._forward(batch) if can_run else None
        done = sampled
        if self.config.overlap:
            done, self._previous = self._previous, sampled
        self._process(done or [])
        for core in paused:
            self._pause(core)
        self._ends.poll()
        self.lockstep.drop_padding(batch)
        return sampled is not None

    def _start_batch(self, batch: Batch) -> None:
        self._scheduler.prepare(batch)
        if self.manager is None:
            return
        self.manager.build_output(batch)
        parked = self.manager.take_pending_loads(batch)
        self.lockstep.pad(batch, is_free=False)
        self.manager.bind()
        if self._drops_batch:
            self._drops_batch = False
            batch.context, batch.generation = [], []
            return
        self.manager.start_load()
        if self.lockstep.is_on and parked and not batch.all and not self.config.defers_when_full:
            self._wait_for_load(batch, parked)

    def _wait_for_load(self, batch: Batch, parked: list[Core]) -> None:
        """Attention DP: no room for a dummy request; the others wait until one of these has been loaded."""
        deadline_s = time.monotonic() + PATIENCE_S
        manager = self.manager
        while manager is not None and not batch.context:
            self._ends.poll()
            time.sleep(0)
            batch.context = [core for core in parked if core.state is State.CONTEXT]
            if time.monotonic() > deadline_s:
                raise DoubleFailure(f"no load ended in {PATIENCE_S:.0f} s: {self.describe()}")
        if manager is not None:
            manager.build_output(batch)
            manager.bind()
            manager.start_load()

    def _forward(self, batch: Batch) -> Sampled | None:
        """Runs the model; None if it failed, and then no request is left."""
        works = []
        for core in batch.all:
            start = core.position if core.state is State.CONTEXT else core.computed
            end = start + (min(core.chunk_tokens, core.remaining) if core.state is State.CONTEXT else 1)
            works.append(Work(core.request_id, core.sequence, core.slots, start, end))
        padding = self.padding.of(batch)
        try:
            self._run_layers(works + padding, has_hooks=bool(batch.context) or not self.config.cuda_graphs)
        except DoubleFailure:
            raise
        except Exception as error:
            self.errors.append(error)
            self._drop_everything()
            self.lockstep.check_together(False)
            return None
        self.lockstep.check_together(True)
        return self._sample(
            batch.context + batch.generation, [work for work in works if work.request_id != DUMMY_ID]
        )

    def _run_layers(self, works: list[Work], *, has_hooks: bool) -> None:
        hooks = self.manager if has_hooks else None
        for layer in range(self.config.num_layers):
            if hooks:
                hooks.before_layer(layer)
            self.model.check_layer(works, layer)
            self.model.write_layer(works, layer)
            if hooks:
                hooks.behind_layer(layer)
        self.num_computed_tokens += sum(
            work.end - work.start for work in works if work.request_id != DUMMY_ID
        )
        if self._fails_forward:
            self._fails_forward = False
            raise ForwardError("as the test wished")
        if self._forward_callable is not None:
            self.calls.add(Call(self.num_steps, "forward_pass_callable", {}))
            self._forward_callable()
        if self.manager is not None:
            self.manager.wait_for_save()

    def _sample(self, cores: list[Core], works: list[Work]) -> Sampled:
        """The device's side of the requests after a forward pass; the token is None after a chunk in the
        middle.
        """
        for core, work in zip(cores, works, strict=True):
            core.computed = work.end
            if core.state is State.CONTEXT:
                core.position = work.end
                if not core.remaining:
                    core.state = State.GENERATION
        complete = [core for core in cores if core.state is State.GENERATION]
        tokens = iter(self.model.sample([core.sequence for core in complete]))
        for core in complete:
            core.launched += 1
        return [(core, next(tokens) if core.state is State.GENERATION else None) for core in cores]

    def _process(self, done: Sampled) -> None:
        """The host's side: tokens, request_finished, cancellations, ends."""
        for core, token in done:
            if core.finish_reason is None and token is not None:
                core.tokens.append(token)
                core.generated += 1
                if core.generated == core.stop_after:
                    core.finish_reason = "eos"
                elif core.generated == core.max_new_tokens:
                    core.finish_reason = "length"
        for core, _ in done:
            if core.finish_reason in {"eos", "length"}:
                self._ends.report_finished(core)
        self._take_cancelled()
        for core in [core for core in self._active if core.finish_reason is not None]:
            self._active.remove(core)
            self._ends.terminate(core)
        for core, _ in done:
            if core.slots and core.finish_reason is None:
                if self.config.manager == "v2":
                    self.blocks.commit(core, core.computed)
                    self.blocks.retire(core, core.computed)
                elif core.remaining == 0:
                    self.blocks.commit(core, core.prompt_len)

    def _take_cancelled(self) -> None:
        if not self._cancelled:
            return
        for core in [core for core in self._waiting if core.request_id in self._cancelled]:
            self._waiting.remove(core)
            self._ends.end(core, "cancelled")
        kept = set()
        for core in self._active:
            if core.request_id in self._cancelled and core.finish_reason is None:
                if (
                    self.lockstep.is_on
                    and self.manager is not None
                    and self.manager.has_pending(core.request_id)
                ):
                    kept.add(core.request_id)  # with attention DP a cancel waits for the load
                else:
                    core.finish_reason = "cancelled"
        self._cancelled = kept

    def _drop_everything(self) -> None:
        """A forward error: all active requests end, and the connector hears nothing."""
        for core in self._active:
            core.finish_reason = "error"
            if self.contract.leaks_on_error and core.slots:
                self._ends.leak(core)
            self._ends.terminate(core, is_valid=False)
        self._active.clear()
        self._previous = None

    def _pause(self, core: Core) -> None:
        """V2: the tokens so far are the prompt of the replay."""
        if core.finish_reason is None:
            core.prompt_len = len(core.tokens)
            core.position = core.computed = 0
            core.is_allocated = False
            core.state = State.CONTEXT

    def _check_ranks_agree(self, batch: Batch) -> None:
        if comm.mpi_world_size() > 1 and not self.config.attention_dp:
            mine = [(core.request_id, core.state.value, core.position, core.computed) for core in batch.all]
            everybody = comm.mpi_allgather(mine)
            if any(theirs != mine for theirs in everybody):
                raise DoubleFailure(
                    f"the ranks do not run the same batch in step {self.num_steps}: {everybody}"
                )

    def describe(self) -> str:
        """What is under way, for whoever waits in vain."""
        states = {core.request_id: core.state.value for core in self._waiting + self._active}
        return f"requests {states}, {self._ends.describe()}"
