"""Layers with a state in the fake model, moved about between device blocks as vLLM's model runner does.

The state after n tokens is a pure function of those tokens. What is read before each step must be the state
of exactly the tokens that were computed: a block that was lost, mixed up, or stored when it held something
else fails at the step that reads it. The order of copies is that of vllm/v1/worker/mamba_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

from kvbm_core.testing.verdicts import Wrong

Bytes = npt.NDArray[np.uint8]
Expected = Callable[[int, str], Bytes]
"""The state of a layer after so many tokens of the request at hand."""


@dataclass
class Running:
    """Of one request: the column of its tables with its running state, and how many tokens of the step before
    are kept: the states after each drafted token lie in the columns behind it.
    """

    column: int | None = None
    accepted: int = 1


@dataclass(frozen=True)
class Step:
    """What a request gets in a step: tokens ``start`` to ``stop``, the last ``num_drafts`` of them drafts."""

    start: int
    stop: int
    num_drafts: int


class StateLayers:
    """All layers with a state of one rank."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, arrays: dict[str, Bytes], *, drop_eagle_block: bool
    ) -> None:
        self._arrays = arrays
        self._drop_eagle_block = drop_eagle_block
        self._groups = {
            index: group
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, MambaSpec)
        }
        specs = [group.kv_cache_spec for group in self._groups.values()]
        self._spec = specs[0] if specs else None
        self._hash_tokens = kv_cache_config.hash_block_size
        self._hit_tokens = kv_cache_config.cache_hit_alignment_tokens

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def layer_names(self) -> set[str]:
        """Of layers that keep a state."""
        return {name for group in self._groups.values() for name in group.layer_names}

    def before(self, running: Running, tables: Sequence[Sequence[int]], step: Step) -> None:
        """Brings the state to the column in which the step's last token is."""
        assert self._spec is not None
        size = self._spec.block_size
        column = -(-step.stop // size) - 1
        old = running.column if running.column is not None else (step.start - 1) // size
        running.column = column
        if old not in (-1, column):
            self._copy(tables, old + running.accepted - 1, column)
            running.accepted = 1

    def run(
        self, name: str, running: Running, tables: Sequence[Sequence[int]], step: Step, expected: Expected
    ) -> None:
        """Reads the state and writes those after each token that may be the last one kept."""
        assert running.column is not None
        for table, layer in self._layers(tables):
            array = self._arrays[layer]
            if step.start:
                block = table[running.column + running.accepted - 1]
                check(array, block, expected(step.start, layer), f"{name}: {layer}: tokens {step.start}")
            first = step.stop - step.num_drafts
            for place in range(step.num_drafts + 1):
                array[table[running.column + place]] = expected(first + place, layer)
            if not step.num_drafts:
                self._export_checkpoint(array, table, step, layer, expected)

    def _export_checkpoint(
        self, array: Bytes, table: Sequence[int], step: Step, layer: str, expected: Expected
    ) -> None:
        spec = self._spec
        assert spec is not None
        if not spec.num_prefill_checkpoint_blocks:
            return
        assert self._hash_tokens and self._hit_tokens
        position = get_mamba_prefill_checkpoint_position(step.stop, self._hit_tokens, self._drop_eagle_block)
        is_valid = is_mamba_prefill_checkpoint_valid(
            step.start,
            step.stop,
            position,
            self._hash_tokens,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
        )
        column = -(-step.stop // spec.block_size) - 2
        if is_valid and table[column]:
            array[table[column]] = expected(position, layer)

    def after(
        self, running: Running, tables: Sequence[Sequence[int]], step: Step, accepted: int, *, drafts: bool
    ) -> None:
        """Keeps the state at the last end of a block that the kept tokens went over. ``drafts``: the engine
        drafts; without, a step ends where its last token is.
        """
        assert self._spec is not None and running.column is not None
        running.accepted = accepted
        if not drafts:
            return
        size = self._spec.block_size
        first = step.stop - step.num_drafts
        boundary = (first + accepted - 1) // size * size
        if boundary < first:
            return
        source, target = running.column + boundary - first, boundary // size - 1
        if running.column == target:
            running.accepted = 1
        if source != target:
            self._copy(tables, source, target)

    def _copy(self, tables: Sequence[Sequence[int]], source: int, target: int) -> None:
        for table, layer in self._layers(tables):
            array = self._arrays[layer]
            array[table[target]] = array[table[source]]

    def _layers(self, tables: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], str]]:
        for index, group in self._groups.items():
            for layer in group.layer_names:
                yield tables[index], layer


def check(array: Bytes, block: int, right: Bytes, what: str) -> None:
    """That ``block`` holds ``right``."""
    assert block, f"{what}: the state is in the null block"
    seen = array[block]
    if (seen != right).any():
        kind = "never written" if len(set(seen.flat)) == 1 else "that of something else"
        raise Wrong(f"{what}: wrong state in block {block}: {kind}")
