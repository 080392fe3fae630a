"""An eviction policy: what lies deep in a prompt goes before what other prompts may begin with too."""

from __future__ import annotations

from kvbm_core.policy.base import NOT_HERE
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import Slots
from kvbm_core.tokens.runs import BlockRun

HEAD_BLOCKS = 64


class DeepFirst(LruPolicy):
    """EvictionPolicy and TakesRuns. Blocks behind the first ``head_blocks`` of their prompt go before all
    others; among these, and among the others, the least recently used go first.
    """

    def __init__(self, head_blocks: int = HEAD_BLOCKS) -> None:
        super().__init__()
        self._head_blocks = head_blocks

    def tell(self, run: BlockRun, slots: Slots) -> None:
        deep = slots[max(0, self._head_blocks - run.first) :]
        self.demote(deep[deep != NOT_HERE])
