#!/usr/bin/env bash
# One vLLM with kvbm on http://127.0.0.1:8000, as the KVBM guides' agg_kvbm.sh: a host tier of 20 GB.
#   deploy/launch/agg_kvbm.sh [MODEL] [further arguments of vllm serve]
# Environment: DYN_KVBM_* as in docs/configuration.md; HOST and PORT of the API.
set -euo pipefail
model=${1:-Qwen/Qwen3-0.6B}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
export DYN_KVBM_METRICS=${DYN_KVBM_METRICS:-true}
exec vllm serve "$model" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
    --kv-transfer-config '{"kv_connector":"DynamoConnector","kv_role":"kv_both","kv_connector_module_path":"kvbm.vllm_integration.connector"}' \
    "${@:2}"
