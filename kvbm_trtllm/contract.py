"""What TensorRT-LLM hands to a connector, read by name: its fields change their order, and come and go, with
versions.

Interface: ``KvCacheConnectorScheduler`` and ``KvCacheConnectorWorker`` of TensorRT-LLM 1.1.0rc5 to 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kvbm_core.errors import UnsupportedError

# Newest first: the module moved in 2026.
MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
BAD_PAGE = -1
"""Stands in a block list where a block has no page (KVCacheManagerV2)."""


def connector_module() -> Any:
    """TensorRT-LLM's module of the connector's base classes. UnsupportedError if there is none."""
    for name in MODULES:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # something else is missing
    raise UnsupportedError(
        "kvbm: this TensorRT-LLM has no KV cache connector (tried "
        + ", ".join(MODULES)
        + "): install tensorrt-llm 1.1.0rc5 or newer"
    )


def frees_one_save(module: Any) -> bool:
    """Whether this TensorRT-LLM lets go only the first of the requests whose saves end in the same iteration.

    Its pull request 8750 mended that, at about the time when it began to say how many tokens an iteration
    computes.
    """
    return "num_scheduled_tokens" not in getattr(module.RequestData, "__dataclass_fields__", {})


class OneByOne:
    """Finished saves are passed on one per iteration, in the same order on all ranks. One thread."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._ended: set[int] = set()

    def pass_on(self, asked: Sequence[int], ended: Sequence[int]) -> list[int]:
        """What to report now. ``asked``: requests that wait from now on; ``ended``: whose saves are over."""
        self._waiting += sorted({*asked}.difference(self._waiting))
        self._ended |= {*ended}.intersection(self._waiting)
        if not self._waiting or self._waiting[0] not in self._ended:
            return []
        self._ended.discard(self._waiting[0])
        return [self._waiting.pop(0)]


class Identity(NamedTuple):
    """What a request's blocks depend on besides tokens. ``refusal``: why they must not be cached; None if
    they may.

    ``is_dummy``: TensorRT-LLM made it up to warm up or to fill a batch.
    """

    adapter: str
    salt: str | None
    refusal: str | None
    is_dummy: bool


# Inputs that change what a model computes for the same tokens.
_OTHER_INPUTS = (
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_embedding",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "position_ids",
    # The PyTorch backend's own, with and without hashes of what is in it; C++ does not show it.
    "py_multimodal_data",
)


def identity_of(request: Any) -> Identity:
    """Of the request as C++ hands it over: only what is bound there can be read.

    A LoRA is known by its number alone, whose weights may be others after a restart: see identity.py.
    """
    adapter = getattr(request, "lora_task_id", None)
    return Identity(
        "" if adapter is None else str(adapter),
        salt_of(request),
        "multimodal" if has_other_inputs(request) else None,
        bool(getattr(request, "is_dummy_request", False)),
    )


def has_other_inputs(request: Any) -> bool:
    """Whether its blocks depend on more than tokens. The V1 manager's query shows less than later calls."""
    return any(_is_given(getattr(request, name, None)) for name in _OTHER_INPUTS)


def _is_given(value: Any) -> bool:
    return value is not None and value != {}  # an empty py_multimodal_data is of a text prompt


def salt_of(holder: Any) -> str | None:
    """The cache salt of a request or of a RequestData, whatever this version calls it."""
    salt = getattr(holder, "cache_salt", None)
    if salt is not None:
        return f"s{salt}"
    number = getattr(holder, "cache_salt_id", None)
    return None if number is None else f"n{number}"


def new_tables(data: Any) -> list[Sequence[int]]:
    """The block ids that a RequestData brings, by layer group; one group where they are a flat list."""
    by_group = getattr(data, "new_block_ids_by_layer_group", None)
    return list(by_group) if by_group and len(by_group) > 1 else [data.new_block_ids]


def may_run_dummy(output: Any) -> bool:
    """Whether a request that TensorRT-LLM made up may run in this iteration, in blocks that it tells nobody.

    With attention data parallelism it does for a rank that has nothing to compute while others have.
    """
    has_nothing = not (output.new_requests or output.cached_requests)
    return has_nothing and getattr(output, "attention_dp_rank", None) is not None


def priorities_of(data: Any) -> Sequence[int] | None:
    """Retention priorities of the new blocks of a RequestData; None where the request has none."""
    return getattr(data, "priorities", None)
