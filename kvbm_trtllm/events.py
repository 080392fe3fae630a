"""KV events under TensorRT-LLM: what kvbm's blocks are called, and what they hold.

TensorRT-LLM tells connectors the hashes that it publishes in its newest versions only, so blocks have 64 bits
of kvbm's own. Routers take a hash for a name, and find blocks by their tokens. Of requests with a salt or an
adapter, whose name is not known here, hashes alone are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvbm_core.events.log import Names
from kvbm_core.events.wire import BlockHash
from kvbm_core.runtime.block_names import BlockNames
from kvbm_core.tokens.runs import BlockRun

if TYPE_CHECKING:
    from kvbm_trtllm.requests import Followed


def own_hash(key: bytes) -> BlockHash:
    """64 bits of a block's key."""
    return int.from_bytes(key[:8], "big")


class EventFeed(BlockNames):
    """Blocks have their keys for names."""

    def follow(self, followed: Followed) -> None:
        """What it stores from now on is told."""
        if self.log is not None and followed.state is not None:
            followed.state.names_of = partial(_names, tokens=None if followed.is_private else followed.tokens)


def _names(run: BlockRun, tokens: Sequence[int] | None) -> Names:
    first, end, size = run.first, run.end, run.block_tokens
    keys = run.keys[first:end]
    parent = run.keys[first - 1] if first else None
    told = None if tokens is None else tokens[first * size : end * size]
    return Names(keys, keys, parent, size, told)
