#!/bin/bash
# A pool on the nodes of a Slurm job, and one program on it. The keys lie in a home that all nodes see.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
set -euo pipefail

KEYS=$HOME/.dtorch/keys
[ -d "$KEYS" ] || dtorch keys --dir "$KEYS"
HEAD=$(hostname)
PORT=$((20000 + SLURM_JOB_ID % 20000))

dtorch controller --listen "tcp://0.0.0.0:$PORT" --keys "$KEYS" &
# hostname -I: the first address of each node, in the cluster's own network
srun bash -c "dtorch worker --controller tcp://$HEAD:$PORT --keys $KEYS --devices cuda:0,1,2,3,4,5,6,7 \
    --data-address \$(hostname -I | cut -d' ' -f1) --file-roots /datasets" &

export DTORCH_ADDRESS=tcp://$HEAD:$PORT DTORCH_KEYS=$KEYS
DTORCH_TOKEN=$(dtorch token --keys "$KEYS" --expires 1d --name "job $SLURM_JOB_ID")
export DTORCH_TOKEN
until dtorch info --json | grep -q 'cuda:7'; do sleep 2; done
python "$@"
