"""Attention data parallelism: executors with requests of their own, which run their forward passes together.

A rank that has nothing to run takes part with a dummy request: one block for one iteration, of which the
connector hears nothing.
"""

from __future__ import annotations

from tests.trtllm.double import comm
from tests.trtllm.double.blocks import BlockManager
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.manager import Batch
from tests.trtllm.double.model import Model, Sequence
from tests.trtllm.double.requests import Core, State

DUMMY_ID = 1 << 40


class LockStep:
    """This rank among the others. ``is_on``: false for an executor that runs alone."""

    def __init__(self, config: ExecutorConfig, blocks: BlockManager, model: Model, *, is_on: bool) -> None:
        self.is_on = is_on
        self._config = config
        self._blocks = blocks
        self._model = model

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return any(comm.mpi_allgather(flag)) if self.is_on else flag

    def can_run(self, batch: Batch) -> bool:
        """Whether every rank has something to run."""
        mine = bool(batch.all)
        return all(comm.mpi_allgather(mine)) if self.is_on else mine

    def pad(self, batch: Batch, *, is_free: bool) -> None:
        """A dummy request for an empty batch, if there is room for it. ``is_free``: this rank has no
        requests.
        """
        if not self.is_on or batch.all or not (is_free or self._config.dummies_fit):
            return
        tokens = [1]
        core = Core(DUMMY_ID, tokens, 1, 1, 1, Sequence(self._model, "dummy", tokens, 2), is_dummy=True)
        core.state = State.GENERATION
        core.slots = [[] for _ in self._blocks.pools]
        if self._blocks.grow(core, 1, 0):
            batch.padding = core

    def drop_padding(self, batch: Batch) -> None:
        """At the end of an iteration, whether it ran or not."""
        if batch.padding is not None:
            self._blocks.free(batch.padding)
            batch.padding = None

    def check_together(self, has_run: bool) -> None:
        """After a forward pass. Its layers end in collectives of all ranks: nobody has a token before all
        have computed, and a rank that left by an error has left the others there.
        """
        is_of_all = self.is_on or not self._config.attention_dp
        if is_of_all and len(set(comm.mpi_allgather(has_run))) > 1 and self.is_on:
            raise DoubleFailure("the forward pass failed on one rank: the others wait for it for ever")
