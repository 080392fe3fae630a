"""What ``python -m dynamo.trtllm`` asks about the KV event consolidator when kvbm is installed.

There is none. A launcher that gets False here reads the device's events from TensorRT-LLM itself; what kvbm
keeps in host memory and on disk is not announced.
"""

from __future__ import annotations

__all__ = ["get_consolidator_endpoints", "should_enable_consolidator"]


def should_enable_consolidator(arg_map: object) -> bool:
    """False, whatever the engine's arguments: events leave through TensorRT-LLM's own interface."""
    del arg_map
    return False


def get_consolidator_endpoints() -> tuple[str, str, str] | None:
    """None instead of (engine endpoint, bind endpoint, connect endpoint): nobody listens there."""
    return None
