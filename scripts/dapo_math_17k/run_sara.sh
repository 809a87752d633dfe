#!/usr/bin/env bash
# SARA: probes of 4, mixed groups topped up to 8, until 256 are effective.
# Every value can be set from the environment (the others are in common.sh), and any key of verl's and verl_ext's on the
# command line: bash scripts/dapo_math_17k/run_sara.sh trainer.total_training_steps=100
set -xeuo pipefail

RECIPE=sara
MODEL=${MODEL:-r1_distill_qwen_1_5b}
HARDWARE=${HARDWARE:-gpu_1x8}
TUNING=${TUNING:-full}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-128}
ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-8}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-12288}"
    allocation.allocator.probe="${PROBE:-4}"
)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
