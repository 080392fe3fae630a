"""Names of the KVBM guide for TensorRT-LLM; the code is in kvbm_trtllm."""
