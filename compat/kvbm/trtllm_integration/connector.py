"""``connector_module`` of the KVBM guide for TensorRT-LLM: the classes of kvbm_trtllm under their known
names.
"""

from __future__ import annotations

from kvbm_trtllm.connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]
