#!/usr/bin/env bash
# Trains on this node's devices, or on several nodes when the same line runs on each of them.
#
#   launch/torchrun.sh configs/pythia-410m-ponderlm.yaml --run runs/first --data.train data/pile
#
# LAUNCHER names another launcher with its options, for example NVIDIA's, which kills a rank that is silent for ten
# minutes and restarts all ranks without a new job (pip install 'megaponder[resilience]'):
#
#   LAUNCHER="ft_launcher --max-restarts 3 --ft-rank-heartbeat-timeout 600" launch/torchrun.sh ...
#
# Environment: NPROC (processes on this node; default: its GPUs, else 1); for several nodes NNODES, NODE_RANK and
# MASTER_ADDR, the host of node rank 0 (MASTER_PORT defaults to 29500).
#
# Signals to this script: TERM and INT go to torchrun, which passes them to the ranks; USR1 and USR2, which would kill
# torchrun, become the file that the ranks look for.  The exit code is the lowest of the ranks' own (docs/faults.md), where
# torchrun says 1 for all of them.
set -euo pipefail
set -m # the child gets its own process group: bash would let a background child ignore Ctrl-C for ever

if [ $# -eq 0 ]; then
  echo "usage: [NPROC=8] launch/torchrun.sh CONFIG.yaml [--section.field value ...]" >&2
  exit 2
fi

refuse() {
  echo "error: $1" >&2
  exit 2
}
need_number() { # name, value, least
  [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ && $2 -ge $3 ]] || refuse "$1 = '$2': it must be an integer of at least $3."
}

devices() {
  local gpus
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
  echo $((gpus > 0 ? gpus : 1))
}
nproc_per_node=${NPROC:-$(devices)}
need_number NPROC "$nproc_per_node" 1
need_number NNODES "${NNODES:-1}" 1

# One queue per device keeps the order of kernels in which tensor and sequence parallelism overlap with communication.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A failed collective ends its process instead of leaving it in a kernel that never returns ...
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# ... after writing down the last collectives of each rank: who entered which, and who did not.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Where NCCL picks the wrong network, name it (they depend on the cluster, so there is no default):
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5

if [ "${NNODES:-1}" -gt 1 ]; then
  [ -n "${NODE_RANK:-}" ] || refuse "NODE_RANK must be set when NNODES is above 1."
  [ -n "${MASTER_ADDR:-}" ] || refuse "MASTER_ADDR must be set when NNODES is above 1: the host of node rank 0."
  need_number NODE_RANK "$NODE_RANK" 0
  need_number MASTER_PORT "${MASTER_PORT:-29500}" 1
  [ "${MASTER_PORT:-29500}" -le 65535 ] || refuse "MASTER_PORT = $MASTER_PORT: it must be at most 65535."
  [ "$NODE_RANK" -lt "$NNODES" ] || refuse "NODE_RANK = $NODE_RANK: it counts from 0, so it must be below NNODES = $NNODES."
  rendezvous=(
    --nnodes "$NNODES" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
else
  rendezvous=(--standalone)
fi

# Files of this launch; a batch script that starts several nodes names files that all of them see.
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
export MEGAPONDER_EXIT_FILE=${MEGAPONDER_EXIT_FILE:-$own/exit} MEGAPONDER_REQUEUE_FILE=${MEGAPONDER_REQUEUE_FILE:-$own/requeue}
export MEGAPONDER_BEGUN_FILE=$own/begun

read -r -a launcher <<<"${LAUNCHER:-torchrun}"
command -v "${launcher[0]}" >/dev/null || refuse "LAUNCHER = '${launcher[0]}': there is no such command here."

asked=0 # exit code for a signal that ends the ranks before they can write their own
due='' woken=''
pass_on() {
  if [ -n "$due" ] && [ -e "$own/heeds" ]; then # there is a child that a signal reaches; it may have ended
    kill "-$due" "$!" 2>/dev/null || true
    due=''
  fi
}
trap 'asked=143 due=TERM woken=1; pass_on' TERM
trap 'asked=130 due=INT woken=1; pass_on' INT
trap 'woken=1; touch "$MEGAPONDER_REQUEUE_FILE"' USR1 USR2

# Without the --, torchrun under Python 3.12 and older reads our --run as an abbreviation of one of its options.
(
  trap '' USR1 USR2 # Slurm may send them to every process of a step
  : >"$own/heeds" # until here it has this script's traps, and a signal to it is lost
  exec "${launcher[@]}" "${rendezvous[@]}" --nproc-per-node "$nproc_per_node" -m -- megaponder train "$@"
) &
child=$!
while [ ! -e "$own/heeds" ] && kill -0 "$child" 2>/dev/null; do sleep 0.02; done
pass_on # what came before

until
  woken='' code=0
  wait "$child" || code=$?
  # a trap has ended the wait, not the child, whose code is kept if it has ended meanwhile; or it was stopped
  [ -z "$woken" ] && ! kill -0 "$child" 2>/dev/null
do
  [ -n "$woken" ] || sleep 1
done
if [ -s "$MEGAPONDER_EXIT_FILE" ]; then
  code=$(sort -n "$MEGAPONDER_EXIT_FILE" | head -n 1)
elif [ "$code" -ne 0 ] && [ "$asked" -ne 0 ]; then
  code=$asked
elif [ "$code" -ne 0 ] && [ -e "$MEGAPONDER_BEGUN_FILE" ]; then
  code=69 # every error writes down a code: a rank was killed before it could, and took the others with it
  echo "error: A rank was killed before it could report its position; run the same command again." >&2
fi
exit "$code"
