"""What ``python -m dynamo.vllm`` asks about the KV event consolidator when it finds our connector.

There is none: kvbm hands its events to vLLM (``take_events``), which publishes them on its own KV event
endpoint together with the device's. A launcher that gets None here subscribes to that endpoint directly, so
a router sees both tiers, for plain ``vllm serve`` too.
"""

from __future__ import annotations

__all__ = ["get_consolidator_endpoints", "should_enable_consolidator"]


def should_enable_consolidator(vllm_config: object) -> bool:
    """False: nothing has to be consolidated, events of both tiers leave through vLLM's own publisher."""
    del vllm_config
    return False


def get_consolidator_endpoints(vllm_config: object) -> tuple[str, str, str] | None:
    """None instead of (engine endpoint, bind endpoint, connect endpoint): read vLLM's publisher."""
    del vllm_config
    return None
