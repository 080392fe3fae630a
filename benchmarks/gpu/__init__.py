"""What needs a GPU: checks, copies, pinned memory, real vLLM. One command: ``python -m benchmarks.gpu``."""
