#!/usr/bin/env bash
# Starts a container of an image that build.sh has built, with what kvbm needs: locked memory, shared memory,
# the host's network, and the DYN_KVBM_* and KVBM_* variables of this shell.
#   container/run.sh --framework vllm|sglang|trtllm [options] [-- COMMAND ...]
# -it                  with a terminal; without a COMMAND a shell, else the image's own command
# --mount-workspace    this repository at /workspace
# --use-nixl-gds       what GPUDirect Storage needs of the host
# --image NAME         by default kvbm-FRAMEWORK:latest
# --gpus WHICH         as docker's; by default all; none: no GPU
# --disk DIR           a directory of the host for the disk tier, at /var/cache/kvbm
# --hf-cache DIR       the host's cache of models; by default ~/.cache/huggingface, if it is there
# --name NAME          of the container
# -e NAME[=VALUE], -v HOST:CONTAINER   as docker's, as often as you like
# --dry-run            print the docker command
set -euo pipefail
here=$(dirname "$(realpath "$0")")
# shellcheck source=container/common.sh
source "$here/common.sh"

framework='' image='' gpus=all disk='' hf_cache='' terminal=false dry_run=false
options=()
while (($#)); do
    case $1 in
        --framework) need "$@"; framework=$(framework_of "$2"); shift ;;
        --image) need "$@"; image=$2; shift ;;
        --gpus) need "$@"; gpus=$2; shift ;;
        --disk) need "$@"; disk=$2; shift ;;
        --hf-cache) need "$@"; hf_cache=$2; shift ;;
        --name) need "$@"; options+=(--name "$2"); shift ;;
        -e | -v) need "$@"; options+=("$1" "$2"); shift ;;
        -it | -ti) terminal=true ;;
        --mount-workspace) options+=(-v "$(dirname "$here"):/workspace" -w /workspace) ;;
        # The devices come with NVIDIA_GDS from the NVIDIA container toolkit; udev says which disks there are.
        --use-nixl-gds) options+=(-e NVIDIA_GDS=enabled -v /run/udev:/run/udev:ro) ;;
        --dry-run) dry_run=true ;;
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        --) shift && break ;;
        *) fail "unknown option $1; $name --help lists all options" ;;
    esac
    shift
done
[[ -n $framework ]] || fail "--framework is missing: vllm, sglang or trtllm"

# cudaHostAlloc locks the host tier; NCCL and the engines' processes share memory.
command=(docker run --rm --network host --ipc host --cap-add IPC_LOCK)
command+=(--ulimit memlock=-1 --ulimit nofile=65536:65536 --ulimit stack=67108864)
[[ $gpus == none ]] || command+=(--gpus "$gpus")
[[ $terminal == false ]] || command+=(-it)
if [[ -n $disk ]]; then
    [[ -d $disk ]] || fail "--disk $disk: is no directory of this machine; make it on a local disk"
    command+=(-v "$(realpath "$disk"):/var/cache/kvbm" -e DYN_KVBM_DISK_CACHE_DIR=/var/cache/kvbm)
fi
if [[ -z $hf_cache && -d ${HOME:-/nowhere}/.cache/huggingface ]]; then
    hf_cache=$HOME/.cache/huggingface
fi
[[ -z $hf_cache ]] || command+=(-v "$hf_cache:/var/cache/huggingface" -e HF_HOME=/var/cache/huggingface)
passed='^(DYN_KVBM_|KVBM_|ETCD_|NATS_|AWS_(ACCESS|SECRET|SESSION|REGION|ENDPOINT)|HF_TOKEN$)'
# By name alone: docker takes the values from this shell, so that no secret is on a command line.
for variable in $(compgen -e | grep -E "$passed" | LC_ALL=C sort); do
    [[ -n $disk && $variable == DYN_KVBM_DISK_CACHE_DIR ]] || command+=(-e "$variable")
done
if (($# == 0)) && [[ $terminal == true ]]; then
    set -- bash
fi
run_or_show "${command[@]}" "${options[@]}" "${image:-kvbm-$framework:latest}" "$@"
