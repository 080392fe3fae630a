"""A model whose KV bytes are a pure function of the prefix, and the rank that runs it in vLLM's step order.

Every forward pass checks that the bytes a real model would read are those that it wrote once for the same
prefix, so a block that was lost, mixed up or loaded too late fails at the step that would have used it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Tokens
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

from kvbm_core.testing.verdicts import Wrong
from tests.vllm.engine_config import EngineSpec
from tests.vllm.state_model import Running, StateLayers, Step

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

    def with_drafts(self, drafts: Tokens[int]) -> Sequence:
        """The same, as if ``drafts`` came next."""
        if not drafts:
            return self
        self.seeds(len(self.tokens))
        tokens = [*self.tokens, *drafts]
        return Sequence(self.identity, self.media, tokens, self.weights, list(self._digests))

    def draft(self, most: int, *, always: bool) -> list[int]:
        """What may come next: as many as the last token says, the first of them right. ``always``: ``most``
        of them, as draft heads give; else fewer, as a search in the text does.
        """
        luck = int(self.seeds(len(self.tokens))[-1] >> np.uint64(20))
        count, num_right = (most if always else luck % (most + 1)), luck // 16 % (most + 1)
        trial = self.with_drafts((0,))
        trial.tokens.pop()
        for place in range(count):
            token = trial.next_token()
            trial.tokens.append(token if place < num_right else token + 1)
        return trial.tokens[len(self.tokens) :]


NEXT_SEEDS: dict[int, set[int]] = {}
"""Seed of the last token of a block -> seeds of what came next, in requests whose draft head wrote it."""

SIGNIFICANT = {"any bits": 0xFFFFFFFF, "float32": 0x83FFFFFF, "float8": 0x83F00000}
"""Bits of a float32 that KV depends on: with these, and 0x40000000, it is between 2 and 512."""
ROUNDING = 1 / 16


def kv_bytes(
    seeds: npt.NDArray[np.uint64], layer: int, heads: range, head_bytes: int, numbers: str = "any bits"
) -> Bytes:
    """[positions, heads, head_bytes]: the KV of some heads of one layer, numbered as in the whole model."""
    first = np.array(heads, dtype=np.uint64)[:, None] * np.uint64(104729) + np.uint64(1 + 7919 * layer)
    words = first + np.arange(head_bytes // 8, dtype=np.uint64)
    mixed = seeds[:, None, None] ^ (words * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    if numbers != "any bits":
        mixed &= np.uint64(SIGNIFICANT[numbers] * 0x1_0000_0001)
        mixed |= np.uint64(0x4000_0000_4000_0000)
    return np.ascontiguousarray(mixed).view(np.uint8)


@dataclass
class RunnerRequest:
    """What a model runner keeps of a scheduled request."""

    sequence: Sequence
    block_ids: list[list[int]]
    num_computed_tokens: int
    running: Running = field(default_factory=Running)
    drafts: list[int] = field(default_factory=list)


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
        self.tensor = torch.zeros(32, dtype=torch.uint8)
        self.adapters: dict[int, bytes] = {}
        self.rounded_positions = 0
        layout = KVCacheLayout[spec.layout]
        self.kv_caches: dict[str, torch.Tensor] = allocate_kv_cache(
            kv_cache_config, torch.device("cpu"), layout
        )
        self._bytes = {name: tensor.view(torch.uint8).numpy() for name, tensor in self.kv_caches.items()}
        self._states = StateLayers(kv_cache_config, self._bytes, drop_eagle_block=spec.has_draft_layer)
        self._state_layers = self._states.layer_names
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        prepare(rank, self.connector)
        with set_current_vllm_config(config):
            self.connector.register_kv_caches(self.kv_caches)

    def change_weights(self, weights: str, *, shows: bool = True) -> None:
        """In place: what has been computed stays as it is. ``shows``: in the model's tensors."""
        self.weights = weights
        if shows:
            digest = hashlib.sha256(weights.encode()).digest() if weights else bytes(32)
            self.tensor.numpy()[:] = np.frombuffer(digest, np.uint8)
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
            self._copy_blocks(output)
            self._update_states(output, requests)
            if output.total_num_scheduled_tokens == 0:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
            steps = {name: self._step_of(name, output) for name in output.num_scheduled_tokens}
            if self._states:
                for name, step in steps.items():
                    runner = self._requests[name]
                    self._states.before(runner.running, runner.block_ids, step)
            does_draft = self._spec.draft_tokens > 0
            mixin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, does_draft)
            with set_forward_context(None, self._config), mixin as connector_output:
                for name, step in steps.items():
                    self._forward(name, step)
            sampled = {name: self._sample(name, step) for name, step in steps.items()}
            if does_draft:
                KVConnectorModelRunnerMixin.finalize_kv_connector()
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

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        for source, target in getattr(output, "kv_cache_block_copies", None) or ():
            for array in self._bytes.values():
                array[target] = array[source]

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
            is_resumed = name in cached.resumed_req_ids
            if is_resumed or not (self._spec.draft_tokens and self._spec.async_scheduling):
                runner.num_computed_tokens = cached.num_computed_tokens[index]
            # Else the scheduler does not know yet which drafts were kept.
            if is_resumed:
                runner.running = Running()
            if name in cached.all_token_ids:
                old = runner.sequence
                tokens = list(cached.all_token_ids[name])
                runner.sequence = Sequence(old.identity, old.media, tokens, self.weights)
            new_ids = cached.new_block_ids[index]
            if is_resumed:
                runner.block_ids = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for own, ids in zip(runner.block_ids, new_ids, strict=True):
                    own.extend(ids)

    # ------------------------------------------------------------------ the model

    def _step_of(self, name: str, output: SchedulerOutput) -> Step:
        runner, count = self._requests[name], output.num_scheduled_tokens[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        if -1 not in drafts:  # else the scheduler is ahead: it does not know them yet
            runner.drafts = list(drafts)
        runner.drafts += [0] * (len(drafts) - len(runner.drafts))
        del runner.drafts[len(drafts) :]
        return Step(runner.num_computed_tokens, runner.num_computed_tokens + count, len(drafts))

    def _forward(self, name: str, step: Step) -> None:
        runner = self._requests[name]
        num_known = len(runner.sequence.tokens)
        assert step.stop <= num_known + step.num_drafts, f"{name}: {step}, {num_known} tokens known"
        sequence = runner.sequence.with_drafts(runner.drafts)
        for group_index, group in enumerate(self._groups):
            table = runner.block_ids[group_index]
            for layer_name in group.layer_names:
                if layer_name in self._state_layers or self._is_draft(layer_name):
                    continue
                self._check(name, layer_name, table, sequence, step.start)
                self._write(layer_name, table, sequence.seeds(step.stop), step)
        if self._states:
            self._states.run(
                name,
                runner.running,
                runner.block_ids,
                step,
                lambda count, layer: self._state(sequence.seeds(count)[-1:], layer),
            )

    def _sample(self, name: str, step: Step) -> list[int]:
        """The tokens that are kept, and what follows them: the states' last copies, and the drafts."""
        runner, sequence = self._requests[name], self._requests[name].sequence
        sampled: list[int] = []
        if step.stop >= len(sequence.tokens):
            for draft in [*runner.drafts, None]:
                sampled.append(sequence.next_token())
                sequence.tokens.append(sampled[-1])
                if sampled[-1] != draft:
                    break
        accepted = max(1, len(sampled))
        runner.num_computed_tokens = step.stop - step.num_drafts + accepted - 1
        does_draft = self._spec.draft_tokens > 0
        if self._states:
            self._states.after(runner.running, runner.block_ids, step, accepted, drafts=does_draft)
        if self._spec.has_draft_layer:
            self._run_draft_layer(name, runner, step)
        runner.drafts = []
        if does_draft and sampled:
            runner.drafts = sequence.draft(self._spec.draft_tokens, always=self._spec.has_draft_layer)
        return sampled

    def drafts_of(self, names: Tokens[str]) -> dict[str, list[int]]:
        """What the drafter has found in the last step."""
        return {name: self._requests[name].drafts for name in names if name in self._requests}

    def _is_draft(self, layer_name: str) -> bool:
        return self._spec.has_draft_layer and layer_name == self._spec.layer_names[-1]

    def _run_draft_layer(self, name: str, runner: RunnerRequest, step: Step) -> None:
        """The draft head's KV at a position depends on the token behind it too. At the end of a block it is
        that of who stored the block: with a token behind it that a request had, and no rejected draft.
        """
        layer_name, size = self._spec.layer_names[-1], self._spec.block_size_tokens
        group = next(i for i, group in enumerate(self._groups) if layer_name in group.layer_names)
        table, end = runner.block_ids[group], runner.num_computed_tokens
        seeds = runner.sequence.seeds(end + 1)
        shifted = seeds[1:]
        for last in range(size - 1, end, size):
            NEXT_SEEDS.setdefault(int(seeds[last]), set()).add(int(shifted[last]))
        self._check(name, layer_name, table, runner.sequence, step.start, shifted=shifted)
        self._write(layer_name, table, shifted, Step(step.start, end, 0))
        for position in range(end, step.stop):
            self._bytes[layer_name][table[position // size], :, position % size, :] = POISON

    def _check(
        self,
        name: str,
        layer_name: str,
        table: list[int],
        sequence: Sequence,
        start: int,
        *,
        shifted: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        window = self._window(layer_name)
        first = 0 if window is None else max(0, start - window + 1)
        if first >= start:
            return
        array = self._bytes[layer_name]
        positions = np.arange(first, start)
        blocks = np.array(table)[positions // self._spec.block_size_tokens]
        assert (blocks != 0).all(), f"{name}: {layer_name}: null block inside tokens {first}..{start}"
        seen = array[blocks, :, positions % self._spec.block_size_tokens, :]
        right = self._kv((sequence.seeds(start) if shifted is None else shifted)[first:start], layer_name)
        is_wrong = self._are_wrong(seen, right)
        if shifted is not None:
            for index in np.flatnonzero(is_wrong):
                is_wrong[index] = not self._is_of_another(seen[index], sequence, first + index, layer_name)
        wrong = np.flatnonzero(is_wrong)
        if wrong.size:
            kind = "never written" if (seen[wrong[0]] == POISON).all() else "bytes of something else"
            raise Wrong(
                f"{name}: rank {self.rank}: {layer_name}: wrong KV at {wrong.size} of "
                f"{len(positions)} positions, "
                f"first {first + wrong[0]} (block {blocks[wrong[0]]}, {kind}); computed tokens {start}"
            )

    def _are_wrong(self, seen: Bytes, right: Bytes) -> npt.NDArray[np.bool_]:
        """Positions with other KV, but for rounding."""
        is_wrong: npt.NDArray[np.bool_] = (seen != right).any(axis=(1, 2))
        if self._spec.kv_numbers == "float32":
            num_other, is_wrong = is_wrong.sum(), _are_far(seen, right)
            self.rounded_positions += int(num_other - is_wrong.sum())
        return is_wrong

    def _is_of_another(self, seen: Bytes, sequence: Sequence, position: int, layer_name: str) -> bool:
        """Whether a draft head's KV is that of another request that had the same tokens up to there."""
        if (position + 1) % self._spec.block_size_tokens:
            return False
        others = NEXT_SEEDS.get(int(sequence.seeds(position + 1)[position]), set())
        kv = self._kv(np.array(sorted(others), dtype=np.uint64), layer_name)
        return any(not self._are_wrong(seen[None], each[None]).any() for each in kv)

    def _write(self, layer_name: str, table: list[int], seeds: npt.NDArray[np.uint64], step: Step) -> None:
        array = self._bytes[layer_name]
        positions = np.arange(step.start, step.stop)
        blocks = np.array(table)[positions // self._spec.block_size_tokens]
        kept = blocks != 0
        fresh = self._kv(seeds[step.start : step.stop], layer_name)
        array[blocks[kept], :, (positions % self._spec.block_size_tokens)[kept], :] = fresh[kept]

    def _kv(self, seeds: npt.NDArray[np.uint64], layer_name: str) -> Bytes:
        head_bytes = self._bytes[layer_name].shape[3]
        return kv_bytes(seeds, self._layer(layer_name), self._heads, head_bytes, self._spec.kv_numbers)

    def _state(self, seed: npt.NDArray[np.uint64], layer_name: str) -> Bytes:
        shape = self._bytes[layer_name].shape[1:]
        heads = range(self.rank, self.rank + 1) if self._spec.is_mla else self._heads
        head_bytes = int(np.prod(shape)) // len(heads)
        return kv_bytes(seed, self._layer(layer_name), heads, head_bytes).reshape(shape)

    def _layer(self, layer_name: str) -> int:
        return self._spec.layer_names.index(layer_name)

    def _window(self, layer_name: str) -> int | None:
        window = self._spec.windows[self._layer(layer_name)]
        assert window != "state"
        return window


def _are_far(seen: Bytes, right: Bytes) -> npt.NDArray[np.bool_]:
    """Positions whose numbers differ by more than rounding does."""
    one, other = (np.ascontiguousarray(each).view(np.float32) for each in (seen, right))
    is_near: npt.NDArray[np.bool_] = np.abs(one - other) <= ROUNDING * np.abs(other)
    return ~is_near.all(axis=(1, 2))


class FakeModel(torch.nn.Module):
    """The model object: a tensor for each rank."""

    def __init__(self, ranks: Tokens[FakeRank]) -> None:
        super().__init__()
        self._ranks = ranks
        for rank in ranks:
            self.register_buffer(f"rank{rank.rank}", rank.tensor)

    def load_weights(self, weights: str) -> None:
        """What trainers call that have the model in their process."""
        for rank in self._ranks:
            rank.change_weights(weights)
