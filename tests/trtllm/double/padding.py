"""CUDA graphs: a batch that only decodes is filled up to a size for which there is a graph.

The request that stands in the places is made up, once, when it is first needed: it takes a free block, writes
into it in every padded forward pass, and nobody tells the connector.
"""

from __future__ import annotations

from tests.trtllm.double.blocks import BlockManager
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.lockstep import DUMMY_ID
from tests.trtllm.double.manager import Batch
from tests.trtllm.double.model import Model, Sequence, Work
from tests.trtllm.double.requests import Core


class Padding:
    """The made-up request. ``slots``: its blocks, by layer group."""

    def __init__(self, config: ExecutorConfig, blocks: BlockManager, model: Model) -> None:
        self._is_on = config.graph_padding
        self._blocks = blocks
        self._model = model
        self._core: Core | None = None

    @property
    def slots(self) -> list[list[int]]:
        """None taken: empty lists."""
        return self._core.slots if self._core is not None else [[] for _ in self._blocks.pools]

    def of(self, batch: Batch) -> list[Work]:
        """What is computed beside the batch."""
        size = len(batch.generation)
        if not self._is_on or batch.context or not size or size & (size - 1) == 0:
            return []
        if self._core is None:
            tokens = [1]
            sequence = Sequence(self._model, "padding", tokens, 2)
            core = Core(DUMMY_ID, tokens, 1, 1, 1, sequence, is_dummy=True)
            core.slots = [[] for _ in self._blocks.pools]
            if not self._blocks.grow(core, 1, 0):
                return []
            self._core = core
        return [Work(DUMMY_ID, self._core.sequence, self._core.slots, 0, 1)]
