#!/bin/bash
# A training on several nodes under SLURM: sbatch --nodes 4 examples/slurm.sh
#SBATCH --job-name=thinwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${RANKS_PER_NODE:-1}" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head:29500" \
  --max-restarts 3 \
  examples/elastic.py --checkpoint "${CHECKPOINT:-$SLURM_SUBMIT_DIR/elastic.pt}"
