#!/usr/bin/env bash
# CERO: 256,000 rollouts over 500 rounds, in groups of 8.
# Every value can be set from the environment (the others are in common.sh), and any key of verl's and verl_ext's on the
# command line: bash scripts/dapo_math_17k/run_cero.sh trainer.total_training_steps=100
set -xeuo pipefail

RECIPE=cero
MODEL=${MODEL:-qwen3_4b_base}
HARDWARE=${HARDWARE:-gpu_1x8}
TUNING=${TUNING:-full}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-64}
ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-8}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-1024}"
    allocation.selector.budget="${BUDGET:-256000}"
)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
