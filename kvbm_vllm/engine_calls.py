"""What vLLM's engine core orders of its workers: every change of weights and adapters passes there.

``Executor.collective_rpc`` runs in the engine core's process, on its thread, before the workers hear of the
order; steps that were sent earlier are computed earlier. So what is noted here is noted in time.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvbm_core.identity.weights import Beginning, files_of_sources, process_began_ns
from kvbm_vllm.weights import weight_sources

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("kvbm")

# Orders that leave weights and adapters as they are. Any other, and any function, may change them.
HARMLESS = frozenset(
    (
        "adjust_rank",
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_device",
        "init_weight_transfer_engine",
        "init_worker",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_environment_variables",
        "update_max_model_len",
        "wake_up",
    )
)
ADAPTER_ORDERS = frozenset(("add_lora", "remove_lora"))
SLEEP = "sleep"
DISCARD = "discard"
_MARK = "_kvbm_watched"
_T = TypeVar("_T")


class Follower(Protocol):
    """Who wants to know. Called on the thread that gives the order; must not raise."""

    def weights_change(self, why: str) -> None:
        """The weights are others when this order has been carried out, or half of it."""

    def adapter_changes(self, number: int, path: str | None) -> None:
        """The adapter of this number is loaded from ``path`` now; None: it is removed."""

    def model_loads(self) -> None:
        """Weights go to the model object itself, in this process; perhaps one tensor after the other."""

    def memory_goes(self) -> None:
        """Weights' memory is about to be unmapped."""


_followers: dict[str, weakref.WeakSet[Any]] = {}
_began: dict[str, tuple[int, Beginning | None]] = {}
_executors: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_NAME = "_kvbm_engine"
_questions: set[Callable[..., Any]] = set()
"""Orders of kvbm's own, which change nothing."""


def watch() -> bool:
    """Sees to it that orders are noticed, also of executors made later. False if this vLLM has no such
    place: then adapters and weights may change unseen.
    """
    try:
        from vllm.v1.executor.abstract import Executor
    except ImportError:
        return False
    _wrap(Executor, "__init__", _note_begin)
    kinds: list[type] = [Executor]
    is_seen = False
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if "collective_rpc" in kind.__dict__ and not getattr(
            kind.__dict__["collective_rpc"], "__isabstractmethod__", False
        ):
            _wrap(kind, "collective_rpc", _note_order)
            is_seen = True
    return is_seen


def follow(vllm_config: VllmConfig, follower: Follower) -> None:
    """``follower`` hears of this engine's orders for as long as it lives."""
    _followers.setdefault(_engine_of(vllm_config), weakref.WeakSet()).add(follower)


def model_loads(vllm_config: VllmConfig) -> None:
    """The model object of this engine is given weights, in this process."""
    for follower in list(_followers.get(_engine_of(vllm_config), ())):
        follower.model_loads()


def executes(executor: object, vllm_config: VllmConfig) -> None:
    """``executor`` is whom this engine gives its orders to, for as long as it lives."""
    _executors[_engine_of(vllm_config)] = executor


def find_executor(vllm_config: VllmConfig) -> None:
    """Notes whom the engine core further up, which makes the connector, gives its orders to: in a process of
    its own it was made before anything of kvbm's was loaded.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        executor = getattr(frame.f_locals.get("self"), "__dict__", {}).get("model_executor")
        if executor is not None:
            executes(executor, vllm_config)
            return
        frame = frame.f_back


def ask(vllm_config: VllmConfig, question: Callable[..., _T], *args: object) -> list[_T]:
    """What ``question(worker, *args)``, a function of a module, answers on each rank of this engine; in the
    order in which steps run, so that it waits for the one that is under way. Empty if nobody can be asked.
    """
    executor = _executors.get(_engine_of(vllm_config))
    if executor is None:
        return []
    _questions.add(question)
    try:
        answers: list[_T] = executor.collective_rpc(question, args=args)
    except Exception:
        log.debug("kvbm: the workers do not answer %s", _name_of(question), exc_info=True)
        return []
    return answers


def loading_began(vllm_config: VllmConfig) -> tuple[int, Beginning | None]:
    """Unix time before which this engine has read no weights, and what lay there then, if it was noted."""
    return _began.get(_engine_of(vllm_config)) or (process_began_ns(), None)


def begin(vllm_config: VllmConfig) -> None:
    """This engine begins to load its weights, in this process. Raises nothing."""
    began_ns = time.time_ns()
    try:
        beginning = files_of_sources(weight_sources(vllm_config))
    except Exception:  # an engine of another kind, which may have no use for kvbm
        log.debug("kvbm: nobody can tell where this engine reads weights", exc_info=True)
        beginning = None
    _began[_engine_of(vllm_config)] = began_ns, beginning


def _engine_of(vllm_config: object) -> str:
    """Its name in this process: the id that its configuration had first. vLLM makes another once a core has
    started. The model's configuration is that of all copies.
    """
    name = str(getattr(vllm_config, "instance_id", ""))
    model = getattr(vllm_config, "model_config", None)
    if model is None:
        return name
    known: str = model.__dict__.setdefault(_NAME, name)
    return known


def _wrap(kind: type, name: str, note: Callable[..., None]) -> None:
    original = kind.__dict__[name]
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(watched, _MARK, True)
    setattr(kind, name, watched)


def _note_begin(executor: object, *args: Any, **kwargs: Any) -> None:
    config = args[0] if args else kwargs.get("vllm_config")
    if config is not None:
        begin(config)
        executes(executor, config)


def _note_order(
    executor: Any,
    method: Any,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    if method in _questions:
        return
    followers = list(_followers.get(_engine_of(getattr(executor, "vllm_config", None)), ()))
    for follower in followers if method in {SLEEP, DISCARD} else ():
        follower.memory_goes()
    for follower in followers if method not in HARMLESS else ():
        if method in ADAPTER_ORDERS:
            _tell_of_adapter(follower, method, args, kwargs or {})
        elif not _leaves_weights(method, args, kwargs or {}):
            follower.weights_change(f"vLLM's workers were told to {_name_of(method)}")


def _leaves_weights(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if method == SLEEP:  # level 1 brings the same weights back
        return _first(args, kwargs, "level", 1) == 1
    tags = _first(args, kwargs, "tags", None)
    return method == DISCARD and isinstance(tags, tuple | list) and "weights" not in tags


def _tell_of_adapter(follower: Follower, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    what = args[0] if args else next(iter(kwargs.values()), None)
    number = getattr(what, "lora_int_id", what)
    if not isinstance(number, int):
        follower.weights_change(f"vLLM's workers were told to {method}, in a way that says not of what")
        return
    path = str(getattr(what, "lora_path", "")) if method == "add_lora" else None
    follower.adapter_changes(number, path)


def _first(args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: object) -> object:
    return kwargs.get(name, args[0] if args else default)


def _name_of(method: object) -> str:
    return method if isinstance(method, str) else f"run {getattr(method, '__qualname__', type(method))}"
