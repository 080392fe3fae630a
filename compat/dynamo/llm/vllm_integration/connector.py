"""``kv_connector_module_path`` of the 0.6.0 guide; the same classes as kvbm.vllm_integration.connector.

``dynamo`` and ``dynamo.llm`` have no ``__init__.py`` here, so that they merge with what ai-dynamo installs.
"""

from __future__ import annotations

from kvbm_vllm.connector import DynamoConnector, DynamoConnectorMetadata
from kvbm_vllm.pd import PdConnector

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector"]
