"""A stand-in for vLLM's NixlConnector between engines of one process: the same words in
``kv_transfer_params``, blocks copied at once, and loads that fail when a test says so.

The real one runs in tests/e2e/test_disaggregated.py; it cannot be made to fail at a given request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.v1.request import RequestStatus

from tests.engines.empty_connector import EmptyConnector

KV_CACHES: dict[str, dict[str, torch.Tensor]] = {}
"""Of each engine."""


@dataclass
class Pulls(KVConnectorMetadata):
    """Request -> engine, its blocks and ours."""

    wanted: dict[str, tuple[str, list[int], list[int]]] = field(default_factory=dict)


class NixlConnector(EmptyConnector):
    """Its load is asynchronous, as the real one's: it is reported in a later step."""

    is_broken = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._block_tokens = vllm_config.cache_config.block_size
        self._pulls = Pulls()
        self._ended: list[str] = []
        self.brought_tokens: dict[str, int] = {}

    # ---------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The whole prompt, if another engine has computed it."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        tokens = len(request.prompt_token_ids) - num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Where they go."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        if num_external_tokens:
            first = (len(request.prompt_token_ids) - num_external_tokens) // self._block_tokens
            ours = blocks.get_block_ids()[0][first:]
            theirs = params["remote_block_ids"][first:]
            self._pulls.wanted[request.request_id] = (params["remote_engine_id"], theirs, ours)
            self.brought_tokens[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What came up in this step."""
        pulls, self._pulls = self._pulls, Pulls()
        return pulls

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """What the other engine needs to know. The blocks stay as they are until somebody computes again."""
        is_done = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if not (request.kv_transfer_params or {}).get("do_remote_decode") or not is_done:
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": list(block_ids[0]),
        }

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Other engines may read them from now on."""
        KV_CACHES[self._engine_id] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Pulls)
        for request_id, (engine_id, theirs, ours) in metadata.wanted.items():
            self._ended.append(request_id)
            for name, tensor in KV_CACHES[self._engine_id].items() if not self.is_broken else ():
                tensor[ours] = KV_CACHES[engine_id][name][theirs[: len(ours)]]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """All that were asked for since the last call."""
        ended, self._ended = set(self._ended), []
        failed = ended if self.is_broken else set()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)
