#!/bin/bash
# Train on several hosts under SLURM, and go on in another job when the time is up: sbatch examples/slurm.sh
#
# Change: the number of hosts and GPUs, the time, the folder, and the options of `train`. The folder must be on a file
# system that all hosts see. A program of your own, with pc.data_parallel or pc.fully_sharded, takes the place of
# `-m purecompose train`; it needs `checkpoints` and resume="auto".
#SBATCH --job-name=purecompose
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --requeue

# SIGTERM comes 120 seconds before the end. The run is then saved, and its processes end with status 143.
set -u
folder=${RUN_FOLDER:-$PWD/runs/slurm}
begun=$(mktemp)
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_host:29500" \
    -m purecompose train --out "$folder" --resume --device cuda --shard

# A complete run has its result. Another one is put into the queue again, unless it has written no checkpoint this time.
if ! grep -qs '"checksum"' "$folder/result.json" && [ -n "$(find "$folder/checkpoints" -newer "$begun" -print -quit)" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
