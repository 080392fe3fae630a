"""KV events of the host tier, in vLLM's own words, for routers.

Block hashes are those that vLLM publishes for its device cache, so that a router sees one block in two media.
A block whose hash vLLM does not compute (prefix caching off) is published under kvbm's own SequenceHash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey, group_of
from kvbm_vllm.versions import Capabilities, known_fields

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

log = logging.getLogger("kvbm")

MAX_WAITING_EVENTS = 65536


class EventFeed:
    """Off unless vLLM publishes events. Bounded: over the limit stores are dropped and counted, removals are
    not.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        medium: str,
        capabilities: Capabilities,
        *,
        hash_block_tokens: int,
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        self.dropped_total = 0
        self._groups = groups
        self._medium = medium
        self._capabilities = capabilities
        self._hash_block_tokens = hash_block_tokens
        self._events: list[KVCacheEvent] = []
        self._request_of: dict[tuple[int, str], Request] = {}
        self._published: dict[BlockKey, bytes] = {}
        self._log = RateLimitedLogger(log)

    def note(self, job_id: int, request: Request) -> None:
        """Remembers a request whose blocks a job writes, until its part ends."""
        if self.enabled:
            self._request_of[job_id, request.request_id] = request

    def on_end(self, part: JobPart, committed: bool) -> None:
        """A part of an offload is over; blocks that became matchable are announced."""
        state = part.state
        request = self._request_of.pop((part.job_id, state.request_id), None)
        if request is None or not committed:
            return
        stored = set(part.keys)
        for position, group in enumerate(self._groups):
            for block, key in enumerate(state.keys(position)):
                if key in stored:
                    self._announce(request, group, block, state.keys(position))

    def _announce(self, request: Request, group: GroupSpec, block: int, keys: Sequence[BlockKey]) -> None:
        key = keys[block]
        if len(self._events) >= MAX_WAITING_EVENTS:
            self.dropped_total += 1
            self._log.warning(
                "events", "kvbm: more than %d KV events wait; stores are dropped", MAX_WAITING_EVENTS
            )
            return
        from vllm.distributed.kv_events import BlockStored

        size = group.block_size_tokens
        own = self._hash(request, group, block, key)
        parent = self._hash(request, group, block - 1, keys[block - 1]) if block else None
        self._published[key] = own
        lora = request.lora_request
        fields: dict[str, Any] = {
            "block_hashes": [own],
            "parent_block_hash": parent,
            "token_ids": list(request.all_token_ids[block * size : (block + 1) * size]),
            "block_size": size,
            "lora_id": lora.adapter_id if lora is not None else None,
            "lora_name": lora.name if lora is not None else None,
            "medium": self._medium,
            "group_idx": group.index,
        }
        self._events.append(BlockStored(**known_fields(fields, self._capabilities.stored_event_fields)))

    def _hash(self, request: Request, group: GroupSpec, block: int, key: BlockKey) -> bytes:
        index = (block + 1) * group.block_size_tokens // self._hash_block_tokens - 1
        hashes = request.block_hashes
        return bytes(hashes[index]) if index < len(hashes) else key[:SEQUENCE_HASH_BYTES]

    def on_evict(self, keys: Sequence[BlockKey]) -> None:
        """Blocks left the host tier."""
        if not self.enabled:
            return
        from vllm.distributed.kv_events import BlockRemoved

        for key in keys:
            published = self._published.pop(key, None)
            if published is not None:
                fields: dict[str, Any] = {
                    "block_hashes": [published],
                    "medium": self._medium,
                    "group_idx": group_of(key),
                }
                self._events.append(
                    BlockRemoved(**known_fields(fields, self._capabilities.removed_event_fields))
                )

    def take(self) -> Iterable[KVCacheEvent]:
        """Everything since the last call, oldest first."""
        events, self._events = self._events, []
        return events
