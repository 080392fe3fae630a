# Sourced by the scripts here and in dynamo/: connectors as --kv-transfer-config, and several processes as
# one. Environment: STOP_TIMEOUT_S.
module=kvbm.vllm_integration.connector
kvbm='{"kv_connector":"DynamoConnector","kv_role":"kv_both","kv_connector_module_path":"'$module'"}'

# nixl ROLE: NixlConnector, with the caller's fields. A worker whose peer is gone computes the prompt.
nixl() {
    printf '{"kv_connector":"NixlConnector","kv_role":"%s","kv_load_failure_policy":"recompute"%s}' \
        "$1" "${NIXL_FIELDS:+,$NIXL_FIELDS}"
}

# kvbm_and_nixl ROLE: both, with NIXL in that role.
kvbm_and_nixl() {
    printf '{"kv_connector":"PdConnector","kv_role":"kv_both","kv_connector_module_path":"%s",' "$module"
    printf '"kv_connector_extra_config":{"connectors":[%s,%s]}}' "$kvbm" "$(nixl "$1")"
}

# use_own NUMBER: ports and a folder of its own for one of several workers on a machine.
use_own() {
    export VLLM_NIXL_SIDE_CHANNEL_PORT=$((${VLLM_NIXL_SIDE_CHANNEL_PORT:-20097} + $1))
    export DYN_KVBM_METRICS_PORT=$((${DYN_KVBM_METRICS_PORT:-6880} + $1))
    if [[ -n ${DYN_KVBM_DISK_CACHE_DIR:-} ]]; then
        export DYN_KVBM_DISK_CACHE_DIR=$DYN_KVBM_DISK_CACHE_DIR/worker$1
    fi
}

# use_gpu NUMBER: the process gets that one of the GPUs in CUDA_VISIBLE_DEVICES, or of the machine's.
use_gpu() {
    local gpus
    IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"
    export CUDA_VISIBLE_DEVICES=${gpus[$1]:?"GPU number $1 is not there: CUDA_VISIBLE_DEVICES names too few"}
}

# start COMMAND ...: in the background, with all that it starts as one group.
start() {
    "$@" </dev/null {never}>&- &
    groups+=("$!")
}

# until_one_ends: waits; when one of the started ends, or we are told to, all do. (wait -n does not see one
# that has ended before it is called.)
until_one_ends() {
    local group status=0
    while true; do
        for group in "${groups[@]}"; do
            if ! kill -0 "$group" 2>/dev/null; then
                wait "$group" || status=$?
                echo "${0##*/}: process $group has ended with status $status: ending all" >&2
                exit "$status"
            fi
        done
        read -rt 0.2 -u "$never" || true
    done
}

# Whoever is still there after STOP_TIMEOUT_S seconds is killed; so is what the others have left behind.
end_all() {
    local group left=$((${STOP_TIMEOUT_S:-30} * 10))
    trap '' TERM INT HUP
    exec 2>/dev/null  # bash would tell of each
    for group in "${groups[@]}"; do kill "$group" || true; done
    while [[ -n $(jobs -pr) ]] && ((left-- > 0)); do read -rt 0.1 -u "$never" || true; done
    for group in "${groups[@]}"; do kill -KILL -- "-$group" || true; done
    wait
}

groups=()
exec {never}<> <(:)  # nothing can be read there
set -m
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP
trap end_all EXIT
