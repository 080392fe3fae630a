"""``kv_connector_module_path`` of the KVBM guides: the connectors of kvbm_vllm under their known names."""

from __future__ import annotations

from kvbm_vllm.connector import DynamoConnector, DynamoConnectorMetadata
from kvbm_vllm.pd import PdConnector

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector"]
