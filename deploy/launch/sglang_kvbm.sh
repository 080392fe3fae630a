#!/usr/bin/env bash
# One SGLang with kvbm under its HiCache on http://127.0.0.1:30000: pages on a local disk, found again after a restart.
#   deploy/launch/sglang_kvbm.sh [MODEL] [further arguments of sglang.launch_server]
# Environment: DYN_KVBM_* as in docs/sglang.md; HOST and PORT of the API.
set -euo pipefail
model=${1:-Qwen/Qwen3-0.6B}
export DYN_KVBM_DISK_CACHE_DIR=${DYN_KVBM_DISK_CACHE_DIR:-/tmp/kvbm}
export DYN_KVBM_DISK_CACHE_GB=${DYN_KVBM_DISK_CACHE_GB:-20}
export DYN_KVBM_METRICS=${DYN_KVBM_METRICS:-true}
exec python3 -m sglang.launch_server --model-path "$model" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}" --page-size 64 \
    --enable-hierarchical-cache --hicache-write-policy write_through \
    --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config "@$(dirname "$(realpath "$0")")/sglang_hicache.yaml" \
    "${@:2}"
