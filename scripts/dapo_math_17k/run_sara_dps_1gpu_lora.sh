#!/usr/bin/env bash
# SARA + DPS with LoRA on one GPU: an eighth of the batch, 32 prompts and 256 rollouts a step.
# Every value can be set from the environment (the others are in common.sh), and any key of verl's and verl_ext's on the
# command line: bash scripts/dapo_math_17k/run_sara_dps_1gpu_lora.sh trainer.total_training_steps=100
set -xeuo pipefail

RECIPE=sara_dps
MODEL=${MODEL:-r1_distill_qwen_1_5b}
HARDWARE=${HARDWARE:-gpu_1x1}
TUNING=${TUNING:-lora}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-16}
EXPERIMENT=${EXPERIMENT:-sara_dps_1gpu_lora-$MODEL-$TUNING-seed${SEED:-1}}
ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-8}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-256}"
    allocation.allocator.probe="${PROBE:-4}"
    allocation.selector.forget="${FORGET:-0.7}"
)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
