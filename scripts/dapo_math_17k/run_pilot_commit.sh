#!/usr/bin/env bash
# Pilot-Commit: pilots of 16 for 384 prompts, 48 more for 128 of middling success. Published on 4 x 8 GPUs.
# Every value can be set from the environment (the others are in common.sh), and any key of verl's and verl_ext's on the
# command line: bash scripts/dapo_math_17k/run_pilot_commit.sh trainer.total_training_steps=100
set -xeuo pipefail

RECIPE=pilot_commit
MODEL=${MODEL:-qwen3_4b_base}
HARDWARE=${HARDWARE:-gpu_4x8}
TUNING=${TUNING:-full}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-32}
ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-64}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-67584}"
    allocation.allocator.n_pilot="${N_PILOT:-16}"
)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
