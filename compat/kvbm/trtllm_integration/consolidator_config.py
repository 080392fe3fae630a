"""The name under which ``python -m dynamo.trtllm`` looks for it; see kvbm_trtllm.consolidator_config."""

from kvbm_trtllm.consolidator_config import get_consolidator_endpoints, should_enable_consolidator

__all__ = ["get_consolidator_endpoints", "should_enable_consolidator"]
