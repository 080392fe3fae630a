"""A model whose KV bytes are a pure function of the prefix, and the rank that runs it in vLLM's step order.

Every forward pass checks that the bytes a real model would read are those that it wrote once for the same
prefix, so a block that was lost, mixed up or loaded too late fails at the step that would have used it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from tests.vllm.engine_config import EngineSpec

POISON = 0xEE
"""What a block holds from the moment the engine hands it out until someone writes it."""

Bytes = npt.NDArray[np.uint8]


def identity_of(request: Request, adapters: dict[int, bytes]) -> str:
    """Everything besides tokens and weights that the model's KV of this request depends on. ``adapters``:
    what is in memory, by number; one that is not is loaded, as vLLM's workers do.
    """
    lora = request.lora_request
    if lora is None:
        return f"|{request.cache_salt!r}"
    if lora.lora_int_id not in adapters:
        adapters[lora.lora_int_id] = load_adapter(lora)
    return f"{adapters[lora.lora_int_id]!r}|{request.cache_salt!r}"


def load_adapter(lora: LoRARequest) -> bytes:
    """What an adapter's file holds now; of one without a file, its name."""
    path = Path(lora.lora_path) / "adapter_model.safetensors"
    return path.read_bytes() if path.is_file() else lora.lora_name.encode()


def media_of(request: Request) -> dict[int, str]:
    """Position -> what is seen there instead of the placeholder token."""
    seen = {}
    for feature in request.mm_features or ():
        place = feature.mm_position
        seen.update({place.offset + i: f"{feature.identifier}@{i}" for i in range(place.length)})
    return seen


@dataclass
class Sequence:
    """What the model has seen of one request: its tokens and one seed per position."""

    identity: str
    media: dict[int, str]
    tokens: list[int]
    weights: str = ""
    _digests: list[bytes] = field(default_factory=list)

    def seeds(self, count: int) -> npt.NDArray[np.uint64]:
        """Seeds of the first ``count`` positions; each depends on the whole prefix, and on the weights with
        which it was computed.
        """
        while len(self._digests) < count:
            position = len(self._digests)
            seen = self.media.get(position, str(self.tokens[position]))
            start = self._digests[-1] if self._digests else self.identity.encode()
            text = f"|{seen}|{self.weights}".encode()
            self._digests.append(hashlib.blake2b(start + text, digest_size=16).digest())
        return np.array(
            [int.from_bytes(digest[:8], "little") for digest in self._digests[:count]], dtype=np.uint64
        )

    def change_weights(self, weights: str, computed: int) -> None:
        """From position ``computed`` on."""
        self.weights = weights
        del self._digests[computed:]

    def next_token(self) -> int:
        """The answer of the model to all tokens so far."""
        return int(self.seeds(len(self.tokens))[-1] % 500) + 3


def kv_bytes(seeds: npt.NDArray[np.uint64], layer: int, heads: range, head_bytes: int) -> Bytes:
    """[positions, heads, head_bytes]: the KV of some heads of one layer, numbered as in the whole model."""
    first = np.array(heads, dtype=np.uint64)[:, None] * np.uint64(104729) + np.uint64(1 + 7919 * layer)
    words = first + np.arange(head_bytes // 8, dtype=np.uint64)
    mixed = seeds[:, None, None] ^ (words * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return np.ascontiguousarray(mixed).view(np.uint8)


@dataclass
class RunnerRequest:
    """What a model runner keeps of a scheduled request."""

    sequence: Sequence
    block_ids: list[list[int]]
    num_computed_tokens: int


class FakeRank:
    """One worker: real CPU KV tensors, the worker side of the connector, and the model above."""

    def __init__(
        self,
        rank: int,
        spec: EngineSpec,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        prepare: Callable[[int, KVConnectorBase_V1], None],
    ) -> None:
        self.rank = rank
        self._heads = spec.heads_of(rank)
        self._spec = spec
        self._config = config
        self._groups = kv_cache_config.kv_cache_groups
        self._requests: dict[str, RunnerRequest] = {}
        self.weights = ""
        self.adapters: dict[int, bytes] = {}
        layout = KVCacheLayout[spec.layout]
        self.kv_caches: dict[str, torch.Tensor] = allocate_kv_cache(
            kv_cache_config, torch.device("cpu"), layout
        )
        self._bytes = {name: tensor.view(torch.uint8).numpy() for name, tensor in self.kv_caches.items()}
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        prepare(rank, self.connector)
        with set_current_vllm_config(config):
            self.connector.register_kv_caches(self.kv_caches)

    def change_weights(self, weights: str) -> None:
        """In place: what has been computed stays as it is."""
        self.weights = weights
        for runner in self._requests.values():
            runner.sequence.change_weights(weights, runner.num_computed_tokens)

    # ------------------------------------------------------------------ one step

    def step(
        self, output: SchedulerOutput, fresh_blocks: list[int], requests: dict[str, Request]
    ) -> ModelRunnerOutput:
        """What GPUModelRunner.execute_model does with the connector, in its order."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            self.connector.handle_preemptions(output.kv_connector_metadata)
            self._poison(fresh_blocks)
            self._update_states(output, requests)
            if output.total_num_scheduled_tokens == 0:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
            mixin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)
            with set_forward_context(None, self._config), mixin as connector_output:
                sampled = {
                    name: self._forward(name, count) for name, count in output.num_scheduled_tokens.items()
                }
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
        )

    def _poison(self, blocks: list[int]) -> None:
        for array in self._bytes.values():
            array[blocks] = POISON

    def _update_states(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            request = requests[new.req_id]
            identity, tokens = identity_of(request, self.adapters), list(new.prompt_token_ids or ())
            sequence = Sequence(identity, media_of(request), tokens, self.weights)
            blocks = [list(ids) for ids in new.block_ids]
            self._requests[new.req_id] = RunnerRequest(sequence, blocks, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            runner = self._requests[name]
            runner.num_computed_tokens = cached.num_computed_tokens[index]
            if name in cached.all_token_ids:
                old = runner.sequence
                tokens = list(cached.all_token_ids[name])
                runner.sequence = Sequence(old.identity, old.media, tokens, self.weights)
            new_ids = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                runner.block_ids = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for own, ids in zip(runner.block_ids, new_ids, strict=True):
                    own.extend(ids)

    # ------------------------------------------------------------------ the model

    def _forward(self, name: str, count: int) -> list[int]:
        runner = self._requests[name]
        start, stop = runner.num_computed_tokens, runner.num_computed_tokens + count
        sequence = runner.sequence
        assert stop <= len(sequence.tokens), f"{name}: {stop} tokens scheduled, {len(sequence.tokens)} known"
        for group_index, group in enumerate(self._groups):
            table = runner.block_ids[group_index]
            for layer_name in group.layer_names:
                self._check(name, layer_name, table, sequence, start)
                self._write(layer_name, table, sequence, start, stop)
        runner.num_computed_tokens = stop
        if stop < len(sequence.tokens):
            return []
        sequence.tokens.append(sequence.next_token())
        return sequence.tokens[-1:]

    def _check(self, name: str, layer_name: str, table: list[int], sequence: Sequence, start: int) -> None:
        window = self._window(layer_name)
        first = 0 if window is None else max(0, start - window + 1)
        if first >= start:
            return
        array = self._bytes[layer_name]
        positions = np.arange(first, start)
        blocks = np.array(table)[positions // self._spec.block_size_tokens]
        assert (blocks != 0).all(), f"{name}: {layer_name}: null block inside tokens {first}..{start}"
        seen = array[blocks, :, positions % self._spec.block_size_tokens, :]
        right = kv_bytes(sequence.seeds(start)[first:], self._layer(layer_name), self._heads, array.shape[3])
        wrong = np.flatnonzero((seen != right).any(axis=(1, 2)))
        if wrong.size:
            kind = "never written" if (seen[wrong[0]] == POISON).all() else "bytes of something else"
            raise AssertionError(
                f"{name}: rank {self.rank}: {layer_name}: wrong KV at {wrong.size} of "
                f"{len(positions)} positions, "
                f"first {first + wrong[0]} (block {blocks[wrong[0]]}, {kind}); computed tokens {start}"
            )

    def _write(self, layer_name: str, table: list[int], sequence: Sequence, start: int, stop: int) -> None:
        array = self._bytes[layer_name]
        positions = np.arange(start, stop)
        blocks = np.array(table)[positions // self._spec.block_size_tokens]
        kept = blocks != 0
        fresh = kv_bytes(sequence.seeds(stop)[start:], self._layer(layer_name), self._heads, array.shape[3])
        array[blocks[kept], :, (positions % self._spec.block_size_tokens)[kept], :] = fresh[kept]

    def _layer(self, layer_name: str) -> int:
        return self._spec.layer_names.index(layer_name)

    def _window(self, layer_name: str) -> int | None:
        return self._spec.windows[self._layer(layer_name)]
