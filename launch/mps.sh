# Sourced by e_p.sh: NVIDIA's Multi-Process Service for workers that share a card.
# shellcheck shell=bash

# Without it a card gives its processes turns and never runs kernels of two at once.
#   CUDA_MPS  auto: where a card has several workers and the service is installed; or on, off
CUDA_MPS=${CUDA_MPS:-auto}

# start_mps WORKERS LIST...: WORKERS processes on the cards of the LISTs; an empty list is every card.
start_mps() {
    local workers=$1 cards lists
    shift
    lists=$*
    case $CUDA_MPS in
        off) return ;;
        on) ;;
        auto)
            command -v nvidia-cuda-mps-control >/dev/null && [[ -e /dev/nvidiactl ]] || return 0
            # CUDA_VISIBLE_DEVICES= hides every card.
            [[ -n ${CUDA_VISIBLE_DEVICES-all}${lists// /} ]] || return 0
            cards=$(distinct_cards "$@")
            ((workers > cards)) || return 0
            ;;
        *)
            fail "CUDA_MPS=$CUDA_MPS: is none of auto, on, off"
            ;;
    esac
    # A service that runs already is used as it is.
    if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then return; fi
    MPS_FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/tessera-mps.XXXXXX")
    export CUDA_MPS_PIPE_DIRECTORY=$MPS_FOLDER CUDA_MPS_LOG_DIRECTORY=$MPS_FOLDER
    # In the foreground it is a child like the others, and ends with them.
    deaf_to_the_terminal nvidia-cuda-mps-control -f >"$MPS_FOLDER/out" 2>&1 &
    say "workers share a card: started NVIDIA's Multi-Process Service (CUDA_MPS=off turns this off)"
}

# Worker N takes entry N of its list, and without a list the first card of all.
distinct_cards() {
    local list card
    for list in "$@"; do
        IFS=, read -ra cards <<<"${list:-0}"
        printf '%s\n' "${cards[@]}"
    done | sort -u | wc -l
}
