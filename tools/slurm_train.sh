#!/usr/bin/env bash
# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Train as a job of Slurm, one task a GPU.
set -euo pipefail

usage() {
    cat >&2 <<END
usage: [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [PORT=29500] \\
       [SRUN_ARGS='...'] \\
       $0 PARTITION JOB_NAME CONFIG [ARGUMENT OF tools/train.py ...]
END
    exit 2
}

[[ $# -ge 3 ]] || usage
partition=$1
job=$2
config=$3
shift 3

gpus=${GPUS:-8}
per_node=${GPUS_PER_NODE:-8}
if ((per_node > gpus)); then
    per_node=$gpus
fi
# One word each; none with spaces.
read -r -a extra <<<"${SRUN_ARGS:-}"

# The launcher of mmengine takes the port from there.
export MASTER_PORT=${PORT:-29500}
exec srun -p "$partition" \
    --job-name="$job" \
    --gres="gpu:$per_node" \
    --ntasks="$gpus" \
    --ntasks-per-node="$per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${extra[@]+"${extra[@]}"} \
    "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$config" \
    --launcher slurm "$@"
