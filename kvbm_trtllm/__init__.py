"""kvbm under TensorRT-LLM's PyTorch backend: the leader and worker of a KV cache connector."""
