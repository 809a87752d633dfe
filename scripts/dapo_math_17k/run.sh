#!/usr/bin/env bash
# Trains a recipe for DAPO-Math-17K: run.sh RECIPE [overrides]
#   RECIPE     a file of recipes/dapo_math_17k: grpo, dapo, sara, sara_dps, ...
#   overrides  any key of verl's and verl_ext's: model=qwen3_4b_base hardware=gpu_4x8 tuning=lora trainer.test_freq=5
# From the environment: SEED (1), of data and rules; VERL_EXT_DATA (~/data/verl_ext), where prepare_data.sh put the data;
# PYTHON. Every recipe takes the same model by default, so that what is compared is the recipes.
set -euo pipefail

RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../recipes/dapo_math_17k" && ls ./*.yaml | sed -n 's#^\./\(.*\)\.yaml$#\1#p' | grep -vx base)
RECIPE=${1:-}
if ! grep -qxF -- "$RECIPE" <<<"$RECIPES"; then
    echo "run.sh: RECIPE='$RECIPE': accepted are $(echo $RECIPES)" >&2
    exit 2
fi
shift
SEED=${SEED:-1}

set -x
exec "${PYTHON:-python3}" -m verl_ext.main_ppo recipe="dapo_math_17k/$RECIPE" data.seed="$SEED" allocation.seed="$SEED" \
    trainer.experiment_name="$RECIPE-\${variant.model}-\${variant.tuning}-seed$SEED" "$@"
