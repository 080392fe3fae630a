"""What vLLM lacks on a CPU and tests need; each is called in the engine's process, before the engine is made.

They change what vLLM computes, or imports, and nothing that kvbm relies on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# As much of torchvision as transformers imports for processors of images that nobody sends.
STAND_IN = '''"""In place of torchvision's."""


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Anything(metaclass=_Names):
    """Any class or function."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''
FILLER = 36  # any token
MODULES = ("io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")


def whole_prefill_states() -> None:
    """Mamba2: a prefill is cut at the ends of blocks, and none of its states is taken out of the middle.

    vLLM takes out the state at the last of them (``MambaMixer2.get_kv_cache_spec``), and its scan for a CPU
    does not give it: any prompt over one block ends in an IndexError.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def torchvision_stand_in() -> None:
    """Qwen3.5's text model imports the processor of its images, and that imports torchvision. Put into the
    folder that KVBM_TEST_STAND_INS names.
    """
    folder = Path(os.environ["KVBM_TEST_STAND_INS"])
    for name in ("", *MODULES):
        module = folder / "torchvision" / name
        module.mkdir(parents=True, exist_ok=True)
        (module / "__init__.py").write_text(STAND_IN + ('\n__version__ = "0.0"\n' if not name else ""))
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def drafts_over_states() -> None:
    """Drafts for models with states: vLLM moves these between blocks by Triton kernels, for which it has no
    substitute on a CPU. Here they are moved by plain copies, by the rules of these kernels. And its kernel
    for steps without a draft wants block numbers that are contiguous, which vLLM does not always give it.
    """
    import torch
    from vllm import _custom_ops
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Context

    populate, update = Context._populate_metadata, _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu

    def update_contiguous(*, initial_state_indices: Any, **more: Any) -> Any:
        packed = initial_state_indices.clone(memory_format=torch.contiguous_format)
        return update(initial_state_indices=packed, **more)

    def remember(self: Any, config: Any, layers: dict[str, Any], *more: Any) -> None:
        populate(self, config, layers, *more)
        rows = self.num_accepted_tokens_out.numel()
        tables = more[1]
        self.kvbm_tables = [table.as_strided((rows, table.size(1)), table.stride()) for table in tables]
        groups = [config.kv_cache_groups[number] for number in self.mamba_group_ids]
        named = [(place, name) for place, group in enumerate(groups) for name in group.layer_names]
        self.kvbm_states = [(place, *layers[name].kv_cache) for place, name in named]

    def before_forward(
        self: Any, *, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, **_: Any
    ) -> None:
        for row in range(num_reqs):
            source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
            if source >= 0 and source != target:
                _move_state(self, row, source, target, int(token_bias_gpu[row]))

    def after_forward(
        self: Any,
        *,
        num_reqs: int,
        num_accepted_tokens_gpu: Any,
        mamba_state_idx_gpu: Any,
        num_scheduled_tokens_gpu: Any,
        num_computed_tokens_gpu: Any,
        num_draft_tokens_gpu: Any,
    ) -> None:
        self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
        running = num_computed_tokens_gpu + num_scheduled_tokens_gpu - num_draft_tokens_gpu
        for row in range(num_reqs):
            first = int(running[row])  # the end of what needed no draft
            end = (first + int(num_accepted_tokens_gpu[row]) - 1) // self.block_size * self.block_size
            source, target = int(mamba_state_idx_gpu[row]), end // self.block_size - 1
            if end >= first:
                if source == target:
                    self.num_accepted_tokens_out[row] = 1
                _move_state(self, row, source, target, end - first)

    _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = update_contiguous
    Context._populate_metadata = remember
    Context.run_fused_precopy = before_forward
    Context.run_fused_postprocess = after_forward


def _move_state(context: Any, row: int, source: int, target: int, accepted: int) -> None:
    """The state after ``accepted`` drafts: of the convolution that is a later part of the window, of the rest
    it is another block.
    """
    for place, window, state in context.kvbm_states:
        table = context.kvbm_tables[place][row].tolist()
        shifted = window[table[source], accepted:].clone()
        window[table[target], : len(shifted)] = shifted
        state[table[target]] = state[table[source + accepted]]


def known_drafts() -> None:
    """Drafts are what the file that KVBM_TEST_DRAFTS names has behind a request's tokens: sequences of
    tokens. One step in six or so drafts something else, which is rejected; so does every step without that
    file.
    """
    from vllm.platforms.cpu import CpuPlatform

    path = os.environ.get("KVBM_TEST_DRAFTS")
    known: list[list[int]] = json.loads(Path(path).read_text()) if path else []

    def propose(
        self: Any, count: int, sampled: list[list[int]], lengths: Any, token_ids: Any, **_: Any
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for row, tokens in enumerate(sampled):
            so_far = token_ids[row, : lengths[row]].tolist()
            draft = _behind(so_far, known, count) if len(so_far) % 7 else []
            drafts.append([*draft, *[FILLER] * count][:count] if tokens else [])
        return drafts

    rebind = CpuPlatform.register_triton_kernel_overrides

    def rebind_first() -> None:
        rebind()  # it cannot look at what the proposer imports
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        NgramProposer.propose = propose

    CpuPlatform.register_triton_kernel_overrides = staticmethod(rebind_first)


def _behind(so_far: list[int], known: list[list[int]], count: int) -> list[int]:
    end = len(so_far)
    return next((tokens[end : end + count] for tokens in known if tokens[:end] == so_far), [])
