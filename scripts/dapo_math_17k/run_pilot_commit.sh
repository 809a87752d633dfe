#!/usr/bin/env bash
# Pilot-Commit: pilots of 16 for 384 prompts, 48 more for 128 of middling success. Published on 4 x 8 GPUs.
# The data is made once by scripts/dapo_math_17k/prepare_data.sh. Values can be set from the environment, and any key of
# verl's and verl_ext's on the command line: bash scripts/dapo_math_17k/run_pilot_commit.sh trainer.total_training_steps=100
set -xeuo pipefail

PYTHON=${PYTHON:-python3}
# qwen2_5_math_7b | qwen3_4b_base | r1_distill_qwen_1_5b; MODEL_PATH names a local copy.
MODEL=${MODEL:-qwen3_4b_base}
MODEL_PATH=${MODEL_PATH:-}
# gpu_1x8 | gpu_4x8 | gpu_1x1
HARDWARE=${HARDWARE:-gpu_4x8}
# full | lora
TUNING=${TUNING:-full}
DATA_DIR=${VERL_EXT_DATA:-$HOME/data/verl_ext}
STEPS=${STEPS:-500}
SEED=${SEED:-1}

DATA=(
    data.train_files="$DATA_DIR/dapo_math_17k.parquet"
    data.val_files="[$DATA_DIR/aime_2024.parquet,$DATA_DIR/aime_2025.parquet,$DATA_DIR/amc.parquet]"
    data.seed="$SEED"
    data.train_batch_size="${TRAIN_BATCH_SIZE:-128}"
)

MODEL_ARGS=(
    model="$MODEL"
    tuning="$TUNING"
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH_SIZE:-32}"
)
if [[ -n "$MODEL_PATH" ]]; then
    MODEL_ARGS+=(actor_rollout_ref.model.path="$MODEL_PATH")
fi

ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-64}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-67584}"
    allocation.seed="$SEED"
    allocation.allocator.n_pilot="${N_PILOT:-16}"
)

TRAINER=(
    hardware="$HARDWARE"
    trainer.experiment_name="${EXPERIMENT:-pilot_commit-$MODEL-$TUNING-seed$SEED}"
    trainer.total_training_steps="$STEPS"
    trainer.logger="${LOGGER:-[console,file,wandb]}"
)

"$PYTHON" -m verl_ext.main_ppo recipe=dapo_math_17k/pilot_commit \
    "${DATA[@]}" "${MODEL_ARGS[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
