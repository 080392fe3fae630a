#!/usr/bin/env bash
# 2P2D on http://127.0.0.1:8000, as the KVBM guides' disagg_kvbm_2p2d.sh: disagg_kvbm.sh, which has the
# words, with two workers of each kind. Four GPUs.
set -euo pipefail
export PREFILLS=${PREFILLS:-2} DECODES=${DECODES:-2}
exec "$(dirname "$(realpath "$0")")/disagg_kvbm.sh" "$@"
