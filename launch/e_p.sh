#!/usr/bin/env bash
# TESSERA_FRONTENDS frontends, TESSERA_ENCODE_WORKERS encode workers and TESSERA_EMBED_WORKERS embed workers, each a
# process of its own.
# Any of the numbers may be 0: the rest then runs on other hosts, and TESSERA_EXPECT_ENCODE_WORKERS and
# TESSERA_EXPECT_EMBED_WORKERS tell the frontends how many there are in all.
# Extra arguments go to the embed workers, for example --multimodal-embedding-cache-capacity-gb 10
# --help lists the variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch e_p "$@"
