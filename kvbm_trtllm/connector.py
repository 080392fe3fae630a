"""The connector's two classes: TensorRT-LLM's entry. No logic here; callbacks go to the leader's or worker's
side.

Interface: the KV cache connector of TensorRT-LLM's PyTorch backend, 1.1.0rc5 to 1.3 (see contract.py). The
class names, and the alias under which they are loaded, are those of the KVBM guides. TensorRT-LLM ends
nothing: what is open is closed with the object, or at the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvbm_core.ending import close_with
from kvbm_trtllm.assembly import LeaderPart, build_worker_side
from kvbm_trtllm.contract import OneByOne, connector_module, frees_one_save

if TYPE_CHECKING:
    import torch

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]

_interface = connector_module()
_Scheduler: Any = _interface.KvCacheConnectorScheduler
_Worker: Any = _interface.KvCacheConnectorWorker


class DynamoKVBMConnectorLeader(_Scheduler):
    """Decides what moves; on rank 0, or on each rank under attention data parallelism."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        """ConfigError or UnsupportedError, one line, when kvbm cannot serve as configured; later nothing is
        raised.
        """
        super().__init__(llm_args)
        self.part = LeaderPart(llm_args, has_attention_dp=hasattr(_Scheduler, "supports_attention_dp"))
        self._close = close_with(self, self.part.close)

    def wait_for_initialization(self) -> None:
        """Called last at start: waits for the first slots, so that the first request is cached too."""
        self.part.wait()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.part.callbacks.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.part.callbacks.update_state_after_alloc(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: Sequence[list[int]]
    ) -> None:
        self.part.callbacks.update_state_after_alloc(request, block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: Any) -> bytes:
        return self.part.callbacks.build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.part.callbacks.request_finished(request, [cache_block_ids])

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: Sequence[list[int]]
    ) -> bool:
        return self.part.callbacks.request_finished(request, cache_block_ids_by_layer_group)

    def request_reset(self, request: Any) -> None:
        """Of a development branch: the next query of the request starts anew in any case."""


class DynamoKVBMConnectorWorker(_Worker):
    """Moves the bytes of its rank's shard."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        """ConfigError or UnsupportedError, one line, when kvbm cannot serve as configured.

        Later only one error is raised, inside a forward pass: worker.LoadFailedError.
        """
        super().__init__(llm_args)
        can_wait_later = hasattr(_Scheduler, "wait_for_initialization")
        self.side = build_worker_side(llm_args, waits_at_register=not can_wait_later)
        self._saves = OneByOne() if frees_one_save(_interface) else None
        self._close = close_with(self, self.side.shutdown)

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """At the end of each forward pass, in its stream: offloads start behind it, with CUDA graphs too."""
        return self.side.end_of_forward

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self.side.register_pool(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        self.side.register_layout(layout)

    def bind_connector_meta(self, metadata: object) -> None:
        self.side.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        self.side.start_load()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing to wait for: a request runs when its whole load is over. What must not run ends here."""
        self.side.before_layer()

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing per layer: whole blocks are read after the forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        self.side.send_offloads()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        saved, loaded = self.side.get_finished(finished_gen_req_ids, started_loading_req_ids)
        return (saved if self._saves is None else self._saves.pass_on(finished_gen_req_ids, saved)), loaded
