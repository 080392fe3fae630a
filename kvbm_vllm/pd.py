"""PdConnector: kvbm, and beside it a second connector that moves KV between prefill and decode workers.

As in the KVBM guides: exactly two connectors, ``kv_connector_extra_config.connectors``, the first a cache
(DynamoConnector), the second NixlConnector. A hit comes from the cache, except for a prompt that another
worker has computed: NIXL brings all of it, and the cache would bring a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_FIRST = ("DynamoConnector", "LMCacheConnectorV1", "FlexKVConnectorV1")
_SECOND = ("NixlConnector",)


class PdConnector(MultiConnector):
    """MultiConnector with the two children that the guides' prefill worker has; a decode worker may have them
    too. ConfigError for any others.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        _check_children(vllm_config)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        join_transport = getattr(self._connectors[0], "join_transport", None)  # kvbm's own, not the others'
        if role == KVConnectorRole.SCHEDULER and join_transport is not None:
            join_transport(vllm_config)


def _check_children(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    children = extra.get("connectors") or []
    names = [str(child.get("kv_connector")) if isinstance(child, dict) else str(child) for child in children]
    if len(names) == 2 and names[0] in _FIRST and names[1] in _SECOND:
        return
    remedy = f"PdConnector takes exactly two: one of {', '.join(_FIRST)}, then {_SECOND[0]}"
    raise ConfigError("kv_connector_extra_config.connectors", names, remedy)
