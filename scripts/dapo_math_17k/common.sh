# What the run scripts share. They set RECIPE, MODEL, HARDWARE, TUNING, the two batch sizes and ROLLOUT, and source this.
# The data is made once by scripts/dapo_math_17k/prepare_data.sh.
#   MODEL     qwen2_5_math_7b | qwen3_4b_base | r1_distill_qwen_1_5b; MODEL_PATH names a local copy
#   HARDWARE  gpu_1x8 | gpu_4x8 | gpu_1x1
#   TUNING    full | lora
PYTHON=${PYTHON:-python3}
DATA_DIR=${VERL_EXT_DATA:-$HOME/data/verl_ext}
STEPS=${STEPS:-500}
SEED=${SEED:-1}

DATA=(
    data.train_files="$DATA_DIR/dapo_math_17k.parquet"
    data.val_files="[$DATA_DIR/aime_2024.parquet,$DATA_DIR/aime_2025.parquet,$DATA_DIR/amc.parquet]"
    data.seed="$SEED"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
)

MODEL_ARGS=(
    model="$MODEL"
    tuning="$TUNING"
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
)
if [[ -n "${MODEL_PATH:-}" ]]; then
    MODEL_ARGS+=(actor_rollout_ref.model.path="$MODEL_PATH")
fi

TRAINER=(
    hardware="$HARDWARE"
    trainer.experiment_name="${EXPERIMENT:-$RECIPE-$MODEL-$TUNING-seed$SEED}"
    trainer.total_training_steps="$STEPS"
    trainer.logger="${LOGGER:-[console,file,wandb]}"
)

exec "$PYTHON" -m verl_ext.main_ppo recipe="dapo_math_17k/$RECIPE" \
    "${DATA[@]}" "${MODEL_ARGS[@]}" "${ROLLOUT[@]}" allocation.seed="$SEED" "${TRAINER[@]}" "$@"
