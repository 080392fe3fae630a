#!/usr/bin/env bash
# Dynamo's frontend on http://127.0.0.1:8000 and 1P1D, as the KVBM guides' disagg_kvbm.sh: one vLLM computes
# prompts, with a host tier of 20 GB, and hands their KV over NIXL to a second one, which answers.
#   deploy/launch/dynamo/disagg_kvbm.sh [MODEL] [further arguments of dynamo.vllm, for both]
# Environment: as dynamo/common.sh says; PREFILLS and DECODES, how many of each; DECODE_CPU_CACHE_GB: a host
# tier for each that answers too. GPUs: those that answer come first.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
prefills=${PREFILLS:-1} decodes=${DECODES:-1}

prefill() {
    use_gpu $((decodes + $1))
    export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
    worker "$1" "$(kvbm_and_nixl kv_producer)" --disaggregation-mode prefill "${@:2}"
}

decode() {
    use_gpu "$1"
    local config
    config=$(nixl kv_consumer)
    if [[ -n ${DECODE_CPU_CACHE_GB:-} ]]; then
        export DYN_KVBM_CPU_CACHE_GB=$DECODE_CPU_CACHE_GB
        config=$(kvbm_and_nixl kv_consumer)
    fi
    worker $((prefills + $1)) "$config" --disaggregation-mode decode "${@:2}"
}

for ((i = 0; i < prefills; i++)); do start prefill "$i" "${@:2}"; done
for ((i = 0; i < decodes; i++)); do start decode "$i" "${@:2}"; done
start frontend
until_one_ends
