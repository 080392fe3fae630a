"""Copies between an engine's KV cache and the host slab, beside plain memcpy of the same bytes."""
