#!/usr/bin/env bash
# 1P1D on http://127.0.0.1:8000, as the KVBM guides' disagg_kvbm.sh: one vLLM computes prompts, with a host
# tier of 20 GB, and hands their KV to a second one, which answers. NIXL moves it; a proxy stands before
# both.
#   deploy/launch/disagg_kvbm.sh [MODEL] [further arguments of vllm serve, for both]
# Environment: DYN_KVBM_* as in docs/configuration.md (below DYN_KVBM_DISK_CACHE_DIR each worker has a
# folder); HOST and PORT of the API; PREFILLS and DECODES, how many of each; DECODE_CPU_CACHE_GB: a host tier
# for each that answers too; CUDA_VISIBLE_DEVICES: a GPU for each that answers, then one for each that
# computes prompts; PREFILL_PORT, DECODE_PORT, VLLM_NIXL_SIDE_CHANNEL_PORT and DYN_KVBM_METRICS_PORT: the
# first of each, the next ones follow; NIXL_FIELDS: more of NixlConnector's configuration,
# '"kv_buffer_device":"cpu"' for example.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
model=${1:-Qwen/Qwen3-0.6B}
host=${HOST:-127.0.0.1} prefills=${PREFILLS:-1} decodes=${DECODES:-1}
prefill_port=${PREFILL_PORT:-8100} decode_port=${DECODE_PORT:-8200}
export VLLM_NIXL_SIDE_CHANNEL_HOST=${VLLM_NIXL_SIDE_CHANNEL_HOST:-127.0.0.1}
export DYN_KVBM_METRICS=${DYN_KVBM_METRICS:-true}

# worker NUMBER PORT CONFIG [further arguments]
worker() {
    use_own "$1"
    exec vllm serve "$model" --host 127.0.0.1 --port "$2" --kv-transfer-config "$3" "${@:4}"
}

prefill() {
    use_gpu $((decodes + $1))
    export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
    worker "$1" $((prefill_port + $1)) "$(kvbm_and_nixl kv_producer)" "${@:2}"
}

decode() {
    use_gpu "$1"
    local config
    config=$(nixl kv_consumer)
    if [[ -n ${DECODE_CPU_CACHE_GB:-} ]]; then
        export DYN_KVBM_CPU_CACHE_GB=$DECODE_CPU_CACHE_GB
        config=$(kvbm_and_nixl kv_consumer)
    fi
    worker $((prefills + $1)) $((decode_port + $1)) "$config" "${@:2}"
}

proxy=(--host "$host" --port "${PORT:-8000}")
for ((i = 0; i < prefills; i++)); do
    start prefill "$i" "${@:2}"
    proxy+=(--prefill "http://127.0.0.1:$((prefill_port + i))")
done
for ((i = 0; i < decodes; i++)); do
    start decode "$i" "${@:2}"
    proxy+=(--decode "http://127.0.0.1:$((decode_port + i))")
done
start python3 "$here/pd_proxy.py" "${proxy[@]}"
until_one_ends
