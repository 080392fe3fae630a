"""Blocks written to a local disk and read back, beside fio and vLLM's fs tier; lookups; what checksums
cost.
"""
