# Sourced by the scripts here: Dynamo's frontend and its vLLM workers, on one machine. They talk over
# loopback; KV events, vLLM's and Dynamo's, can be read from outside.
# Environment: DYN_KVBM_* as in docs/configuration.md (below DYN_KVBM_DISK_CACHE_DIR each worker has a
# folder); HOST and PORT of the API; CUDA_VISIBLE_DEVICES: a GPU for each worker; ETCD_ENDPOINTS: workers are
# found through etcd, and without it through files below DYN_FILE_KV; DYN_VLLM_KV_EVENT_PORT,
# DYN_SYSTEM_PORT, VLLM_NIXL_SIDE_CHANNEL_PORT and DYN_KVBM_METRICS_PORT: the first of each, the next ones
# follow; ROUTER_MODE: kv (default) or another of dynamo.frontend's; NIXL_FIELDS as in ../disagg_kvbm.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model=${1:-Qwen/Qwen3-0.6B}
event_port=${DYN_VLLM_KV_EVENT_PORT:-20081} system_port=${DYN_SYSTEM_PORT:-9090}
export VLLM_NIXL_SIDE_CHANNEL_HOST=${VLLM_NIXL_SIDE_CHANNEL_HOST:-127.0.0.1}
export DYN_KVBM_METRICS=${DYN_KVBM_METRICS:-true}
export DYN_FILE_KV=${DYN_FILE_KV:-${TMPDIR:-/tmp}/dynamo_store_kv}
if [[ -n ${ETCD_ENDPOINTS:-} ]]; then backend=etcd; else backend=file; fi
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-$backend}
for name in SYSTEM EVENT_PLANE TCP_RESPONSE_STREAM TCP_RPC HTTP_RPC; do
    name=DYN_${name}_HOST
    export "$name=${!name:-127.0.0.1}"
done

frontend() {
    unset DYN_SYSTEM_PORT
    exec python3 -m dynamo.frontend --http-host "${HOST:-127.0.0.1}" --http-port "${PORT:-8000}" \
        --router-mode "${ROUTER_MODE:-kv}"
}

# worker NUMBER CONFIG [further arguments of dynamo.vllm]
worker() {
    use_own "$1"
    export DYN_SYSTEM_PORT=$((system_port + $1))
    local endpoint="tcp://*:$((event_port + $1))"
    exec python3 -m dynamo.vllm --model "$model" --kv-transfer-config "$2" --kv-events-config \
        '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"'"$endpoint"'"}' "${@:3}"
}
