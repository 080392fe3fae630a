#!/usr/bin/env bash
# One TensorRT-LLM with kvbm on http://127.0.0.1:8000, as the KVBM guide's: a host tier of 20 GB.
#   deploy/launch/trtllm_kvbm.sh [MODEL] [further arguments of trtllm-serve]
# Environment: DYN_KVBM_* as in docs/trtllm.md; HOST and PORT of the API.
set -euo pipefail
model=${1:-Qwen/Qwen3-0.6B}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
export DYN_KVBM_METRICS=${DYN_KVBM_METRICS:-true}
exec trtllm-serve "$model" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" --backend pytorch \
    --extra_llm_api_options "$(dirname "$(realpath "$0")")/trtllm_kvbm.yaml" \
    "${@:2}"
