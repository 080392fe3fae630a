"""Device blocks that stay out of vLLM's free pool while an offload reads them.

Needed for groups with states, whose block may be handed out again in the next step, and for those with a
window: vLLM takes back a block that left the window at the next step, and as such a block has no prefix-cache
entry it is the first to be handed out again, so the copy of nearly every prefill would come too late. Other
blocks need no pin: they are freed by preemption or at the end of a request, which is handled by fences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm_core.runtime.request import StateOnDevice
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.tiers.groups import GroupSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class DevicePins:
    """One more reference on each block that a job reads. The scheduler's thread only."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self._groups = {group.index for group in groups if not group.needs_all}
        self._pool: BlockPool | None = None
        self._held: dict[int, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held_blocks(self) -> set[int]:
        """Their numbers."""
        return {block.block_id for blocks in self._held.values() for block in blocks}

    def bind(self, pool: BlockPool) -> None:
        """vLLM's pool, once it exists."""
        self._pool = pool

    def is_state_of(self, request: Request, state: StateOnDevice) -> bool:
        """Whether the block still is what the device's prefix cache has under these tokens of ``request``.

        vLLM hands some states off before it plans the step in which we hear of them, and may give the block
        to somebody else in that plan. Without the pool nothing can be pinned, and so nothing is read.
        """
        if self._pool is None:
            return False
        last = state.end_tokens // self._pool.hash_block_size - 1
        if last >= len(request.block_hashes):
            return False
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        name = make_block_hash_with_group_id(request.block_hashes[last], state.position)
        return bool(self._pool.blocks[state.device_block].block_hash == name)

    def hold(self, part: JobPart) -> None:
        """Until ``release_ended``. Call it while the request still holds the blocks."""
        if not self._groups:
            return
        numbers = [
            number for move in part.moves if move.group in self._groups for number in move.device_blocks
        ]
        if self._pool is not None and numbers:
            blocks = [self._pool.blocks[number] for number in numbers]
            self._pool.touch(blocks)
            self._held.setdefault(part.job_id, []).extend(blocks)

    def release_ended(self, is_pending: Callable[[int], bool]) -> None:
        """Gives back the blocks of jobs that are over."""
        for job_id in [job_id for job_id in self._held if not is_pending(job_id)]:
            if self._pool is not None:
                # The tail of a sequence is handed out before its head.
                self._pool.free_blocks(reversed(self._held.pop(job_id)))
