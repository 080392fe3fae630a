# shellcheck shell=bash
# Sourced by build.sh and run.sh.
name=${0##*/}

# fail TEXT: one line, and the end.
fail() {
    echo "$name: $1" >&2
    exit 2
}

# need OPTION VALUE...: the option has its value.
need() {
    [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value; $name --help lists all options"
}

# framework_of NAME: in small letters, if there is such a one.
framework_of() {
    case ${1,,} in
        vllm | sglang | trtllm) printf '%s' "${1,,}" ;;
        *) fail "--framework $1: there are vllm, sglang and trtllm" ;;
    esac
}

# run_or_show COMMAND ...: runs it in place of this script, or with --dry-run prints it as one would type it.
run_or_show() {
    # shellcheck disable=SC2154  # who sources this sets it
    if [[ $dry_run == true ]]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
    else
        command -v "$1" >/dev/null || fail "there is no $1 here; install it, or see the command with --dry-run"
        exec "$@"
    fi
}
