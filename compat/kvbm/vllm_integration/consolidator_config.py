"""The name under which ``python -m dynamo.vllm`` looks for it; see kvbm_vllm.consolidator_config."""

from kvbm_vllm.consolidator_config import get_consolidator_endpoints, should_enable_consolidator

__all__ = ["get_consolidator_endpoints", "should_enable_consolidator"]
