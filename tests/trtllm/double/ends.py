"""The end of requests: request_finished, blocks that a transfer still needs, and what came out."""

from __future__ import annotations

from tests.trtllm.double.blocks import BlockManager, Pin
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import Contract
from tests.trtllm.double.manager import ConnectorManager
from tests.trtllm.double.requests import Core, State


class Ends:
    """What becomes of requests and of their blocks."""

    def __init__(
        self,
        config: ExecutorConfig,
        blocks: BlockManager,
        manager: ConnectorManager | None,
        contract: Contract,
    ) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.leaked: list[Pin] = []
        self._config = config
        self._blocks = blocks
        self._manager = manager
        self._contract = contract
        self._pins: dict[int, Pin] = {}
        self._held: dict[int, Core] = {}

    def report_finished(self, core: Core) -> None:
        """request_finished, for a request that ended by itself; 1.1 says it of all. With overlap it may come
        here twice.
        """
        if self._manager is None or core.is_dummy:
            return
        is_again = core.was_reported_finished
        if is_again and not self._config.double_finish:
            return
        pin = self._pins.get(core.request_id)
        if is_again and pin is not None:
            core.slots = [list(slots) for slots in core.final_slots]
        if not core.slots and self._config.manager == "v1":
            return  # "Unable to get cache blocks": the blocks are gone, and the connector is not told
        core.was_reported_finished = True
        keeps = self._manager.request_finished(core)
        if keeps and pin is None and core.slots:
            self._pins[core.request_id] = self._blocks.pin(core)
        core.final_slots = [list(slots) for slots in core.slots]
        if is_again:
            core.slots = []

    def terminate(self, core: Core, *, is_valid: bool = True) -> None:
        """Takes the blocks of a request that left. ``is_valid``: what it computed may be found by others."""
        self.end(core, core.finish_reason or "error")
        if self._contract.reports_all_ends and not core.was_reported_finished and core.slots:
            self.report_finished(core)
        if is_valid and core.slots:
            self._blocks.commit(core, min(core.computed, max(core.prompt_len, len(core.tokens) - 1)))
        if self._contract.holds_loads and self._is_loading(core):
            self._held[core.request_id] = core
        else:
            self._blocks.free(core)

    def leak(self, core: Core) -> None:
        """Nobody will ever free its blocks."""
        self.leaked.append(self._blocks.pin(core))

    def free_leaked(self) -> None:
        """What nobody else does."""
        leaked, self.leaked = self.leaked, []
        for pin in leaked:
            self._blocks.unpin(pin)

    def end(self, core: Core, reason: str) -> None:
        """Notes the result."""
        core.finish_reason = reason
        core.state = State.COMPLETE
        self.outputs[core.request_id] = core.tokens[core.submitted_len :]
        self.reasons[core.request_id] = reason

    def poll(self) -> None:
        """get_finished, and what it lets go."""
        if self._manager is None:
            return
        saved = self._manager.poll()
        for core in saved[:1] if self._contract.frees_one_save else saved:
            pin = self._pins.pop(core.request_id, None)
            if pin is not None:
                self._blocks.unpin(pin)
        for request_id in [held for held in self._held if not self._manager.has_pending(held)]:
            self._blocks.free(self._held.pop(request_id))

    def describe(self) -> str:
        """For the message of a hang."""
        return f"saves {sorted(self._pins)}, cancelled while loading {sorted(self._held)}"

    def _is_loading(self, core: Core) -> bool:
        is_open = self._manager is not None and self._manager.has_pending(core.request_id)
        return is_open and core.request_id not in self._pins
