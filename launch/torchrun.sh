#!/usr/bin/env bash
# Trains on this node's devices, or on several nodes when the same line runs on each of them.
#
#   launch/torchrun.sh configs/pythia-410m-ponderlm.yaml --run runs/first --data.train data/pile
#
# Environment: NPROC (processes on this node; default: its GPUs, else 1); for several nodes NNODES, NODE_RANK and
# MASTER_ADDR (MASTER_PORT defaults to 29500).
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: [NPROC=8] launch/torchrun.sh CONFIG.yaml [--section.field value ...]" >&2
  exit 2
fi

gpus() { nvidia-smi --list-gpus 2>/dev/null | wc -l; }
nproc_per_node=${NPROC:-$(gpus)}
[ "$nproc_per_node" -gt 0 ] || nproc_per_node=1

# One queue per device keeps the order of kernels in which tensor and sequence parallelism overlap with communication.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ "${NNODES:-1}" -gt 1 ]; then
  rendezvous=(
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:?NODE_RANK must be set when NNODES is above 1}"
    --master-addr "${MASTER_ADDR:?MASTER_ADDR must be set when NNODES is above 1}"
    --master-port "${MASTER_PORT:-29500}"
  )
else
  rendezvous=(--standalone)
fi

# Without the --, torchrun under Python 3.11 and older takes our --run for an abbreviation of an option of its own.
exec torchrun "${rendezvous[@]}" --nproc-per-node "$nproc_per_node" -m -- megaponder train "$@"
