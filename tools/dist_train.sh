#!/usr/bin/env bash
# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Train on the processes of one or more nodes with torchrun. On CPUs it needs
# --zero-stage, or a config with a strategy.
set -euo pipefail

usage() {
    cat >&2 <<END
usage: [NNODES=1] [NODE_RANK=0] [MASTER_ADDR=127.0.0.1] [PORT=29500] \\
       $0 CONFIG PROCESSES_PER_NODE [ARGUMENT OF tools/train.py ...]
END
    exit 2
}

[[ $# -ge 2 && $2 =~ ^[1-9][0-9]*$ ]] || usage
config=$1
processes=$2
shift 2

nodes=${NNODES:-1}
rank=${NODE_RANK:-0}
address=${MASTER_ADDR:-127.0.0.1}
port=${PORT:-29500}

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="$nodes" \
    --node_rank="$rank" \
    --nproc_per_node="$processes" \
    --rdzv_id="${RDZV_ID:-infsa_seg}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$address:$port" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
