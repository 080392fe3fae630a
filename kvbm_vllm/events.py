"""KV events under vLLM: what kvbm's blocks are called there, and vLLM's own publisher as one that takes them.

Block hashes are those that vLLM publishes for its device cache (64 bits, or all bytes with
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0), so that a router sees one block in several media. A block whose hash
vLLM does not compute (prefix caching off) is published under kvbm's own SequenceHash.

vLLM makes the salt of a request a part of the first block's hash, and so of all that follow. Beyond these
hashes nothing is told of a request with a salt: no tokens, no extra keys (the salt is one of them).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbm_core.events.log import Attention, Change, Cleared, EventLog, Names, removals
from kvbm_core.events.wire import BlockHash, BlockStored
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.block_names import BlockNames
from kvbm_core.runtime.leader import Leader
from kvbm_core.runtime.request import RequestState
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey
from kvbm_vllm.versions import Capabilities, known_fields

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("kvbm")

MAX_WAITING_EVENTS = 65536


class EventFeed(BlockNames):
    """``outlet``: takes events for vLLM's own publisher, if that is wanted."""

    def __init__(
        self,
        event_log: EventLog | None,
        *,
        hash_block_tokens: int,
        outlet: EngineOutlet | None = None,
    ) -> None:
        super().__init__(event_log)
        self._hash_block_tokens = hash_block_tokens
        self._outlet = outlet
        self._named_adapters: set[int] = set()

    def follow(self, request: Request, state: RequestState) -> None:
        """What it stores from now on is called as vLLM calls it."""
        if self.log is not None:
            state.names_of = partial(self._names, request)
            if request.lora_request is not None:
                self._named_adapters.add(request.lora_request.adapter_id)

    def adapters_changed(self, leader: Leader, numbers: Collection[int]) -> None:
        """As ``renamed``, of what was computed with these adapters; their open requests are retired."""
        if self.log is not None and not self._named_adapters.isdisjoint(numbers):
            self._named_adapters.difference_update(numbers)
            leader.forget_names(of_open=False)  # of others that have ended too: a match names theirs
            self.log.renamed(numbers)

    def _names(self, request: Request, run: BlockRun) -> Names:
        first, end, size = run.first, run.end, run.block_tokens
        step = size // self._hash_block_tokens
        keys: Sequence[BlockKey] = run.keys[first:end]
        hashes: list[bytes] = request.block_hashes[(first + 1) * step - 1 : end * step : step]
        if len(hashes) < len(keys):
            hashes = [*hashes, *(key[:SEQUENCE_HASH_BYTES] for key in keys[len(hashes) :])]
        parent = None
        if first:
            place = first * step - 1
            known = place < len(request.block_hashes)
            parent = request.block_hashes[place] if known else run.keys[first - 1][:SEQUENCE_HASH_BYTES]
        lora, tokens, extra_keys = request.lora_request, None, None
        if not request.cache_salt:
            tokens = request.all_token_ids[first * size : end * size]
            if request.mm_features or lora is not None:
                extra_keys = _extra_keys(request, first, end, size)
        return Names(
            keys,
            hashes,
            parent,
            size,
            tokens,
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            extra_keys,
        )

    def take(self) -> Iterable[KVCacheEvent]:
        """For vLLM: everything since the last call, oldest first."""
        if self.log is None or self._outlet is None:
            return ()
        self.log.try_fold()
        return self._outlet.take()


def _extra_keys(request: Request, first: int, end: int, size: int) -> list[tuple[object, ...] | None]:
    """As vLLM publishes them for its own blocks."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys  # vLLM 0.32
    except ImportError:
        to_event_extra_keys = list
    found: list[Any] = []
    next_item = 0
    for block in range(first, end):
        keys, next_item = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, next_item)
        found.append(keys)
    return to_event_extra_keys(found) or found


class EngineOutlet:
    """Takes changes for vLLM's own publisher. Bounded: over the limit stores are dropped and counted,
    removals are not. Filled where the log is folded, emptied on the scheduler's thread.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self.dropped_total = 0
        self._capabilities = capabilities
        self._changes: deque[Change] = deque()
        self._log = RateLimitedLogger(log)

    def put(self, change: Change) -> None:
        """See Outlet."""
        if isinstance(change, BlockStored) and len(self._changes) >= MAX_WAITING_EVENTS:
            self.dropped_total += len(change.block_hashes)
            line = "kvbm: more than %d KV events wait; stores are dropped"
            self._log.warning("events", line, MAX_WAITING_EVENTS)
            return
        self._changes.append(change)

    def take(self) -> list[KVCacheEvent]:
        """Everything since the last call, as vLLM's own."""
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        return [event for change in changes for event in self._events_of(change)]

    def _events_of(self, change: Change) -> Iterator[KVCacheEvent]:
        from vllm.distributed.kv_events import BlockRemoved as Removed
        from vllm.distributed.kv_events import BlockStored as Stored

        if isinstance(change, BlockStored):
            fields: dict[str, Any] = {
                "block_hashes": change.block_hashes,
                "parent_block_hash": change.parent_block_hash,
                "token_ids": change.token_ids,
                "block_size": change.block_size,
                "lora_id": change.lora_id,
                "medium": change.medium,
                "lora_name": change.lora_name,
                "extra_keys": change.extra_keys,
                "group_idx": change.group_idx,
                "kv_cache_spec_kind": change.kv_cache_spec_kind,
                "kv_cache_spec_sliding_window": change.kv_cache_spec_sliding_window,
            }
            yield Stored(**known_fields(fields, self._capabilities.stored_event_fields))
            return
        # vLLM's word for "everything is gone" is about its device too.
        for gone in removals(change.medium, change.hashes) if isinstance(change, Cleared) else [change]:
            fields = {"block_hashes": gone.block_hashes, "medium": gone.medium, "group_idx": gone.group_idx}
            yield Removed(**known_fields(fields, self._capabilities.removed_event_fields))


def hash_maker() -> Callable[[bytes], BlockHash]:
    """Makes of vLLM's hashes what it publishes, without asking the environment about each of them."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    if isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int):
        return lambda block_hash: int.from_bytes(block_hash[-8:], "big")
    return bytes


def attention_of(kv_cache_config: KVCacheConfig) -> tuple[Attention, ...]:
    """What vLLM says of its groups in its own events."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(
        Attention(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
        for spec in specs
    )
