"""One request as the executor keeps it, and the two views of it that connectors get.

``BoundRequest`` is what a V1 cache passes to ``get_num_new_matched_tokens``: a C++ object of which only the
bound attributes are readable, another object at every call. ``make_views`` makes the Python ``LlmRequest``
that comes in every other callback. Both write through to the same request.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.trtllm.double.model import Sequence


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    CONTEXT = "context"
    LOADING = "loading"
    GENERATION = "generation"
    COMPLETE = "complete"


class LlmRequestState(enum.Enum):
    """TensorRT-LLM's names of them."""

    GENERATION_INIT = "waiting"
    CONTEXT_INIT = "context"
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "loading"
    GENERATION_IN_PROGRESS = "generation"
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "saving"
    GENERATION_COMPLETE = "complete"


@dataclass(eq=False)
class Core:
    """The executor's own record of a request."""

    request_id: int
    tokens: list[int]
    prompt_len: int
    """Grows when a preempted request is replayed: what it generated counts as prompt then."""
    submitted_len: int
    max_new_tokens: int
    sequence: Sequence
    stop_after: int | None = None
    lora_task_id: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_data: dict[str, Any] | None = None
    """What the PyTorch backend knows of images, with and without hashes."""
    is_dummy: bool = False
    is_generation_only: bool = False
    state: State = State.WAITING
    position: int = 0
    chunk_tokens: int = 0
    computed: int = 0
    """Positions that forward passes were launched for; ahead of ``position`` only while decoding."""
    launched: int = 0
    """Tokens sampled on the device; with overlap the host's ``tokens`` lag behind."""
    generated: int = 0
    matched: int = 0
    is_allocated: bool = False
    """Whether this allocation was reported to the connector."""
    finish_reason: str | None = None
    slots: list[list[int]] = field(default_factory=list)
    """Per layer group, the slot of each block."""
    num_committed: int = 0
    was_reported_finished: bool = False
    final_slots: list[list[int]] = field(default_factory=list)
    python: Any = None

    @property
    def remaining(self) -> int:
        """Prompt tokens not computed."""
        return self.prompt_len - self.position

    def num_blocks(self, tokens_per_block: int) -> int:
        """Blocks of the request at its end; the last token's KV is never written."""
        return -(-(self.submitted_len + self.max_new_tokens - 1) // tokens_per_block)


class BoundRequest:
    """What nanobind binds of the C++ request."""

    __slots__ = ("_core", "py_num_connector_matched_tokens")  # the latter: nanobind lets it be set

    def __init__(self, core: Core) -> None:
        self._core = core

    def get_tokens(self, beam: int) -> list[int]:
        """All tokens that the host knows, a copy."""
        if beam:
            raise IndexError(beam)
        return list(self._core.tokens)

    request_id = property(lambda self: self._core.request_id)
    prompt_len = property(lambda self: self._core.prompt_len)
    lora_task_id = property(lambda self: self._core.lora_task_id)
    multimodal_hashes = property(lambda self: self._core.multimodal_hashes)
    multimodal_positions = property(lambda self: [0] if self._core.multimodal_hashes else None)
    is_dummy_request = property(lambda self: self._core.is_dummy)
    is_generation_only_request: Any = property(lambda self: self._core.is_generation_only)
    num_connector_matched_tokens = property(lambda self: self._core.matched)
    is_finished = property(lambda self: self._core.finish_reason is not None)

    @property
    def kv_cache_retention_config(self) -> Any:
        """None unless the request has a priority."""
        priority = self._core.priority
        return None if priority is None else SimpleNamespace(decode_retention_priority=priority)

    context_remaining_length = property(lambda self: self._core.remaining)
    context_chunk_size = property(lambda self: self._core.chunk_tokens)

    @property
    def state(self) -> LlmRequestState:
        """Where the request is in its life."""
        return LlmRequestState(self._core.state.value)

    @state.setter
    def state(self, state: LlmRequestState) -> None:
        core = self._core
        if state is LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS or core.state is State.COMPLETE:
            return  # the double ends a request when it ends; what is being saved is pinned
        core.state = State(state.value)
        if core.state is State.CONTEXT:
            core.computed = core.position

    @property
    def context_current_position(self) -> int:
        """The prompt is computed or loaded up to here."""
        return self._core.position

    @context_current_position.setter
    def context_current_position(self, position: int) -> None:
        self._core.position = position


class ReleasedBoundRequest(BoundRequest):
    """R knows a salt as a number."""

    __slots__ = ()

    @property
    def cache_salt_id(self) -> int | None:
        salt = self._core.cache_salt
        return (
            None
            if salt is None
            else int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "big")
        )


class NewestBoundRequest(BoundRequest):
    """N knows a salt as text."""

    __slots__ = ()
    cache_salt = property(lambda self: self._core.cache_salt)


class PythonPart:
    """What the Python subclass adds to the bound class."""

    _core: Core

    py_request_id = property(lambda self: self._core.request_id)
    py_prompt_len = property(lambda self: self._core.prompt_len)
    py_multimodal_data = property(lambda self: self._core.multimodal_data)

    @property
    def py_num_connector_matched_tokens(self) -> int:
        return self._core.matched

    @py_num_connector_matched_tokens.setter
    def py_num_connector_matched_tokens(self, num_tokens: int) -> None:
        self._core.matched = num_tokens

    def is_generation_only_request(self) -> bool:
        """A method here, a property there; as in TensorRT-LLM."""
        return self._core.is_generation_only


class ReleasedRequest(PythonPart, ReleasedBoundRequest):
    """R's Python request."""


class NewestRequest(PythonPart, NewestBoundRequest):
    """N's Python request."""
