#!/usr/bin/env bash
# Dynamo's frontend on http://127.0.0.1:8000 and one vLLM with kvbm, as the KVBM guides' agg_kvbm.sh: a host
# tier of 20 GB. With WORKERS=2 or more its router sends a request to the worker that has its prefix, on the
# GPU or in kvbm.
#   deploy/launch/dynamo/agg_kvbm.sh [MODEL] [further arguments of dynamo.vllm]
# Environment: as dynamo/common.sh says; WORKERS, how many.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
workers=${WORKERS:-1}

aggregated() {
    use_gpu "$1"
    worker "$1" "$kvbm" "${@:2}"
}

for ((i = 0; i < workers; i++)); do start aggregated "$i" "${@:2}"; done
start frontend
until_one_ends
