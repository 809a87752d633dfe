#!/usr/bin/env bash
# PODS: 64 prompts x 32 rollouts, 8 of each trained on.
# Every value can be set from the environment (the others are in common.sh), and any key of verl's and verl_ext's on the
# command line: bash scripts/dapo_math_17k/run_pods.sh trainer.total_training_steps=100
set -xeuo pipefail

RECIPE=pods
MODEL=${MODEL:-qwen2_5_math_7b}
HARDWARE=${HARDWARE:-gpu_1x8}
TUNING=${TUNING:-full}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-32}
ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-32}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-2048}"
    allocation.downsampler.keep="${KEEP:-8}"
)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
