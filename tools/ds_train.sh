#!/usr/bin/env bash
# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Train with ZeRO on the nodes of a hostfile (`HOST slots=GPUS`, one a line),
# started by DeepSpeed over ssh. Without a hostfile: on the GPUs of this node.
set -euo pipefail

usage() {
    cat >&2 <<END
usage: [HOSTFILE=FILE] [MASTER_ADDR=HOST] [PORT=29500] [DS_ARGS='...'] \\
       $0 CONFIG [ARGUMENT OF tools/train.py ...]
END
    exit 2
}

[[ $# -ge 1 && $1 != -* ]] || usage
config=$1
shift

nodes=()
if [[ -n ${HOSTFILE:-} ]]; then
    if [[ ! -r $HOSTFILE ]]; then
        echo "$0: $HOSTFILE: no such hostfile" >&2
        exit 2
    fi
    nodes+=(--hostfile "$HOSTFILE")
fi
if [[ -n ${MASTER_ADDR:-} ]]; then
    nodes+=(--master_addr "$MASTER_ADDR")
fi
# One word each; none with spaces.
read -r -a extra <<<"${DS_ARGS:-}"

# Its launcher sets RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does.
exec deepspeed ${nodes[@]+"${nodes[@]}"} \
    --master_port "${PORT:-29500}" \
    ${extra[@]+"${extra[@]}"} \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
