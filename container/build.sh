#!/usr/bin/env bash
# Builds an image of an engine with kvbm.
#   container/build.sh --framework vllm|sglang|trtllm [options]
# --enable-kvbm        for the guides' sake: kvbm is always in
# --tag NAME           of the image; by default kvbm-FRAMEWORK:latest
# --base-image NAME    the engine's image; by default the one in container/Dockerfile.FRAMEWORK
# --extras LIST        of kvbm, such as s3,nixl; by default those in the Dockerfile
# --platform NAME      such as linux/arm64
# --no-cache           build every layer anew
# --dry-run            print the docker command
set -euo pipefail
here=$(dirname "$(realpath "$0")")
# shellcheck source=container/common.sh
source "$here/common.sh"

framework='' tag='' dry_run=false
options=()
while (($#)); do
    case $1 in
        --framework) need "$@"; framework=$(framework_of "$2"); shift ;;
        --tag) need "$@"; tag=$2; shift ;;
        --base-image) need "$@"; options+=(--build-arg "BASE_IMAGE=$2"); shift ;;
        --extras) need "$@"; options+=(--build-arg "EXTRAS=$2"); shift ;;
        --platform) need "$@"; options+=(--platform "$2"); shift ;;
        --no-cache) options+=(--no-cache) ;;
        --enable-kvbm) ;;
        --dry-run) dry_run=true ;;
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        *) fail "unknown option $1; $name --help lists all options" ;;
    esac
    shift
done
[[ -n $framework ]] || fail "--framework is missing: vllm, sglang or trtllm"
run_or_show docker build --file "$here/Dockerfile.$framework" --tag "${tag:-kvbm-$framework:latest}" \
    "${options[@]}" "$(dirname "$here")"
