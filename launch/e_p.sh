#!/usr/bin/env bash
# FRONTENDS frontends, ENCODE_WORKERS encode workers and EMBED_WORKERS embed workers, each a process of its own.
# Any of the numbers may be 0: the rest then runs on other hosts, and EXPECT_ENCODE_WORKERS and
# EXPECT_EMBED_WORKERS tell the frontends how many there are in all.
# Extra arguments go to the embed workers, for example --multimodal-embedding-cache-capacity-gb 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/mps.sh"

ENCODE_WORKERS=${ENCODE_WORKERS:-1}
EMBED_WORKERS=${EMBED_WORKERS:-1}
ENCODE_ENGINE_ARGS=${ENCODE_ENGINE_ARGS:-$ENGINE_CONFIGS/encode.yaml}
EMBED_ENGINE_ARGS=${EMBED_ENGINE_ARGS:-$ENGINE_CONFIGS/embed.yaml}
# Lists of GPUs, one for each worker in turn: ENCODE_CUDA_VISIBLE_DEVICES=0,1
ENCODE_CUDA_VISIBLE_DEVICES=${ENCODE_CUDA_VISIBLE_DEVICES:-}
EMBED_CUDA_VISIBLE_DEVICES=${EMBED_CUDA_VISIBLE_DEVICES:-}
ENCODE_ENDPOINT=${ENCODE_ENDPOINT:-dyn://$DYN_NAMESPACE.encode.generate}

set_up "$((ENCODE_WORKERS + EMBED_WORKERS))"
start_mps "$((ENCODE_WORKERS + EMBED_WORKERS))" "$ENCODE_CUDA_VISIBLE_DEVICES" "$EMBED_CUDA_VISIBLE_DEVICES"
start_frontends "$EMBED_WORKERS" "$ENCODE_WORKERS"
for ((worker = 0; worker < ENCODE_WORKERS; worker++)); do
    start_worker encode "$worker" "$ENCODE_CUDA_VISIBLE_DEVICES" "$ENCODE_ENGINE_ARGS"
done
for ((worker = 0; worker < EMBED_WORKERS; worker++)); do
    start_worker embed "$worker" "$EMBED_CUDA_VISIBLE_DEVICES" "$EMBED_ENGINE_ARGS" \
        --encode-endpoint "$ENCODE_ENDPOINT" "$@"
done
wait_ready "$EMBED_WORKERS" "$ENCODE_WORKERS"
supervise
