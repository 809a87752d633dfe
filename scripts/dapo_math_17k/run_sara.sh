#!/usr/bin/env bash
# SARA: probes of 4, mixed groups topped up to 8, until 256 are effective.
# The data is made once by scripts/dapo_math_17k/prepare_data.sh. Values can be set from the environment, and any key of
# verl's and verl_ext's on the command line: bash scripts/dapo_math_17k/run_sara.sh trainer.total_training_steps=100
set -xeuo pipefail

PYTHON=${PYTHON:-python3}
# qwen2_5_math_7b | qwen3_4b_base | r1_distill_qwen_1_5b; MODEL_PATH names a local copy.
MODEL=${MODEL:-r1_distill_qwen_1_5b}
MODEL_PATH=${MODEL_PATH:-}
# gpu_1x8 | gpu_4x8 | gpu_1x1
HARDWARE=${HARDWARE:-gpu_1x8}
# full | lora
TUNING=${TUNING:-full}
DATA_DIR=${VERL_EXT_DATA:-$HOME/data/verl_ext}
STEPS=${STEPS:-500}
SEED=${SEED:-1}

DATA=(
    data.train_files="$DATA_DIR/dapo_math_17k.parquet"
    data.val_files="[$DATA_DIR/aime_2024.parquet,$DATA_DIR/aime_2025.parquet,$DATA_DIR/amc.parquet]"
    data.seed="$SEED"
    data.train_batch_size="${TRAIN_BATCH_SIZE:-256}"
)

MODEL_ARGS=(
    model="$MODEL"
    tuning="$TUNING"
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH_SIZE:-128}"
)
if [[ -n "$MODEL_PATH" ]]; then
    MODEL_ARGS+=(actor_rollout_ref.model.path="$MODEL_PATH")
fi

ROLLOUT=(
    actor_rollout_ref.rollout.n="${ROLLOUT_N:-8}"
    allocation.stop.rollouts="${STEP_ROLLOUTS:-12288}"
    allocation.seed="$SEED"
    allocation.allocator.probe="${PROBE:-4}"
)

TRAINER=(
    hardware="$HARDWARE"
    trainer.experiment_name="${EXPERIMENT:-sara-$MODEL-$TUNING-seed$SEED}"
    trainer.total_training_steps="$STEPS"
    trainer.logger="${LOGGER:-[console,file,wandb]}"
)

"$PYTHON" -m verl_ext.main_ppo recipe=dapo_math_17k/sara \
    "${DATA[@]}" "${MODEL_ARGS[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
