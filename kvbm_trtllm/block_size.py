"""How many tokens a block of the V1 manager holds, seen from the block tables that it hands out.

TensorRT-LLM does not always use ``tokens_per_block`` of its arguments: for MLA models on Hopper (FlashMLA) it
takes 64, and for attn_backend VANILLA the largest batch, in a variable of its own. Only KVCacheManagerV2 says
what it uses (``KvCacheLayout.tokens_per_block``).
"""

from __future__ import annotations

from collections.abc import Callable


class BlockSizeCheck:
    """Compares tables with the size that is expected. One thread.

    Nothing may be stored before ``is_known``: until a request has more than one block, larger blocks than
    expected look the same. ``spare_tokens``: room that a table may have beyond its tokens (draft tokens).
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        is_told: bool,
        spare_tokens: int = 0,
        on_mismatch: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.block_tokens = block_tokens
        self.is_known = is_told
        self._is_told = is_told
        self._spare_tokens = spare_tokens
        self._on_mismatch = on_mismatch

    def see(self, num_tokens: int, num_blocks: int, *, lag_tokens: int = 0) -> None:
        """A table of ``num_blocks`` was made for ``num_tokens``, and at most ``lag_tokens`` more.

        ``on_mismatch`` gets a line that says what is wrong if blocks hold another number of tokens.
        """
        if self._is_told or not num_blocks:
            return
        spare = self._spare_tokens + lag_tokens
        if not _fits(self.block_tokens, num_tokens, num_blocks, spare):
            self._on_mismatch(self._problem(num_tokens, num_blocks, spare))
        elif not self.is_known:
            others = (self.block_tokens * 2, self.block_tokens // 2)
            self.is_known = not any(_fits(size, num_tokens, num_blocks, spare) for size in others if size)

    def _problem(self, num_tokens: int, num_blocks: int, spare: int) -> str:
        sizes = [2**power for power in range(3, 17)]
        fitting = [size for size in sizes if _fits(size, num_tokens, num_blocks, spare)]
        remedy = (
            f"set kv_cache_config.tokens_per_block={fitting[0]}"
            if len(fitting) == 1
            else "set kv_cache_config.tokens_per_block to what it uses"
        )
        return (
            f"TensorRT-LLM has put {num_tokens} tokens into {num_blocks} blocks, which are not the "
            f"kv_cache_config.tokens_per_block={self.block_tokens} of its arguments (FlashMLA on Hopper "
            f"takes 64): {remedy}, or run without kv_connector_config"
        )


def _fits(size: int, num_tokens: int, num_blocks: int, spare: int) -> bool:
    return -(-num_tokens // size) <= num_blocks <= -(-(num_tokens + spare) // size)
