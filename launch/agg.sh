#!/usr/bin/env bash
# A frontend and one aggregated worker: both stages in one process.
# Extra arguments go to the worker, for example --multimodal-embedding-cache-capacity-gb 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

AGG_ENGINE_ARGS=${AGG_ENGINE_ARGS:-${ENGINE_ARGS:-$ENGINE_CONFIGS/agg.yaml}}
AGG_CUDA_VISIBLE_DEVICES=${AGG_CUDA_VISIBLE_DEVICES:-}

set_up 1
start_frontends 1 0
start_worker agg 0 "$AGG_CUDA_VISIBLE_DEVICES" "$AGG_ENGINE_ARGS" "$@"
wait_ready 1 0
supervise
