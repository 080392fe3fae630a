"""Which requests run in an iteration, and the blocks and the connector's offer that they start with."""

from __future__ import annotations

from tests.trtllm.double.blocks import BlockManager
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import Contract
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.manager import Batch, ConnectorManager
from tests.trtllm.double.model import Model, Work
from tests.trtllm.double.requests import Core, State


class Scheduler:
    """V1 admits a request when it can run to its end (GUARANTEED_NO_EVICT); V2 evicts and replays."""

    def __init__(
        self,
        config: ExecutorConfig,
        blocks: BlockManager,
        model: Model,
        manager: ConnectorManager | None,
        contract: Contract,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._model = model
        self._manager = manager
        self._contract = contract
        self._is_v2 = config.manager == "v2"
        self._size = config.tokens_per_block
        self.to_preempt: set[int] = set()

    def schedule(self, active: list[Core]) -> tuple[Batch, list[Core]]:
        """The batch, and the requests that lost their blocks (V2); oldest requests first."""
        budget = self._config.chunk_tokens or 1 << 60
        decoding = sum(
            core.state is State.GENERATION and core.launched < core.max_new_tokens for core in active
        )
        budget -= decoding
        batch, paused = Batch([], []), []
        paused += [core for core in active if core.request_id in self.to_preempt and self._can_preempt(core)]
        self.to_preempt.clear()
        for core in paused:
            self._preempt(core)
        promised, is_full = self._promised_blocks(active), False
        for core in active:
            if (
                core in paused
                or core.finish_reason is not None
                or len(batch.all) >= self._config.max_batch_size
            ):
                continue
            if core.state is State.GENERATION and core.launched < core.max_new_tokens:
                if not self._is_v2 or self._grow_or_preempt(
                    core, core.computed + 1, core.computed, active, paused
                ):
                    batch.generation.append(core)
            elif core.state is State.CONTEXT and not is_full:
                room = self._start_context(core, budget, promised, active, paused)
                is_full = room is None
                promised += room or 0
                if core.chunk_tokens and not is_full:
                    budget -= core.chunk_tokens
                    batch.context.append(core)
        return batch, paused

    def _promised_blocks(self, active: list[Core]) -> int:
        """V1: blocks that the running requests will still take."""
        if self._is_v2:
            return 0
        return sum(core.num_blocks(self._size) - len(core.slots[0]) for core in active if core.slots)

    def _start_context(
        self, core: Core, budget: int, promised: int, active: list[Core], paused: list[Core]
    ) -> int | None:
        """Sets the chunk; returns the blocks promised to the request, None if there is no room for it."""
        if not self._is_v2:
            needed = 0 if core.slots else core.num_blocks(self._size)
            if promised + needed > self._blocks.num_free and needed:
                return None
            core.chunk_tokens = self._chunk(core, budget)
            return needed
        is_first = not core.slots
        if is_first:
            core.position = core.computed = self._blocks.begin(core)
        core.chunk_tokens = core.remaining if core.is_generation_only else self._chunk(core, budget)
        end = core.position + core.chunk_tokens
        if core.chunk_tokens and not self._grow_or_preempt(core, end, core.position, active, paused):
            core.chunk_tokens = 0
        if not core.chunk_tokens and is_first:
            self._blocks.free(core)
            core.position = core.computed = 0
        return 0

    def _chunk(self, core: Core, budget: int) -> int:
        """Tokens to compute now; all chunks but the last end at a block boundary."""
        if core.remaining <= budget:
            return core.remaining
        return max(0, (core.position + budget) // self._size * self._size - core.position)

    # V2: eviction

    def _grow_or_preempt(
        self, core: Core, num_tokens: int, history: int, active: list[Core], paused: list[Core]
    ) -> bool:
        """Room for ``num_tokens``, if need be at the cost of the youngest request behind this one."""
        while not self._blocks.grow(core, num_tokens, history):
            younger = active[active.index(core) + 1 :]
            victim = next((other for other in reversed(younger) if self._can_preempt(other)), None)
            if victim is None or victim in paused:
                return False
            self._preempt(victim)
            paused.append(victim)
        return True

    def _can_preempt(self, core: Core) -> bool:
        running = core.state in {State.CONTEXT, State.GENERATION} and core.finish_reason is None
        return (
            bool(core.slots)
            and running
            and (core.state is State.CONTEXT or core.launched < core.max_new_tokens)
        )

    def _preempt(self, core: Core) -> None:
        self._blocks.commit(core, min(core.computed, len(core.tokens)))
        self._blocks.free(core)
        if self._manager is not None:
            self._manager.forget(core)

    # Resources and the connector's offer

    def prepare(self, batch: Batch) -> None:
        """Blocks for the batch; the connector is asked about requests that start, and told their blocks."""
        new = [core for core in batch.context if not core.is_allocated and self._should_add(core)]
        if self._contract.queries_first or self._is_v2:
            for core in new:
                self._ask(core)
            for core in new:
                self._tell(core)
        else:
            for core in new:
                self._ask(core)
                self._tell(core)
        for core in [core for core in new if core.is_generation_only]:
            self._receive(core, batch)
        for core in batch.generation:
            if not self._blocks.grow(core, core.computed + 1, core.computed):
                raise DoubleFailure("no block for a generation request; this is the double's own mistake")

    def _should_add(self, core: Core) -> bool:
        return self._manager is None or self._manager.should_add(core)

    def _ask(self, core: Core) -> None:
        if not self._is_v2:
            core.position = core.computed = self._blocks.begin(core)
            if not self._blocks.grow(core, core.prompt_len, core.position):
                raise DoubleFailure("no blocks for an admitted prompt; this is the double's own mistake")
        offer, is_async, num_device = 0, False, core.position
        is_asked = not (self._is_v2 and core.is_generation_only) and not self._skips_dummy(core)
        if self._manager is not None and is_asked:
            if self._config.enable_block_reuse or self._is_v2:
                offer, is_async = self._manager.query(core, num_device)
            honoured = self._honour(core, offer) if self._is_v2 else offer
            if not self._is_v2 and num_device + honoured >= core.prompt_len:
                raise DoubleFailure(
                    f"prepopulatedPromptLen {num_device} + {honoured} >= promptLen {core.prompt_len}: "
                    "V1 aborts"
                )
            self._manager.commit(core, honoured, is_async)
            offer = honoured
        if not self._is_v2:
            self._prepopulate(core, num_device + offer)

    def _skips_dummy(self, core: Core) -> bool:
        return core.is_dummy and not self._contract.queries_dummies

    def _tell(self, core: Core) -> None:
        core.is_allocated = True
        if self._manager is not None:
            self._manager.update_after_alloc(core)

    def _prepopulate(self, core: Core, position: int) -> None:
        """V1: the prompt starts at ``position``; the chunk moves along and ends at a block boundary."""
        chunk = core.chunk_tokens
        if position and position + chunk < core.prompt_len:
            chunk = (position + chunk) // self._size * self._size - position
        core.position = position
        core.chunk_tokens = min(chunk, core.remaining)

    def _honour(self, core: Core, offer: int) -> int:
        """V2: takes of the offer what leaves a token to compute and has pages; returns how much."""
        start, end = core.position, core.position + core.chunk_tokens
        target = start + min(offer, core.prompt_len - 1 - start)
        if target >= end:
            new_end = min(target + core.chunk_tokens, core.prompt_len)
            if new_end < core.prompt_len:
                new_end = new_end // self._size * self._size
            if not self._config.refuse_growth and self._blocks.grow(core, new_end, target):
                end = new_end
            else:
                target = max(start, (end - 1) // self._size * self._size)
        core.position, core.chunk_tokens = target, end - target
        self._blocks.retire(core, target)
        return target - start

    def _receive(self, core: Core, batch: Batch) -> None:
        """A generation-only request: its prompt's KV and first token come from another instance."""
        work = Work(core.request_id, core.sequence, core.slots, 0, core.prompt_len)
        for layer in range(self._config.num_layers):
            self._model.write_layer([work], layer)
        core.position = core.computed = core.prompt_len
        core.tokens.append(core.sequence.next_token())
        core.sequence.extend(core.tokens[-1:])
        core.launched = core.generated = 1
        core.state = State.GENERATION
        batch.context.remove(core)
        batch.generation.append(core)
