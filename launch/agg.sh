#!/usr/bin/env bash
# A frontend and one aggregated worker: both stages in one process.
# Extra arguments go to the worker, for example --multimodal-embedding-cache-capacity-gb 10
# --help lists the variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch agg "$@"
