#!/usr/bin/env bash
# DAPO-Math-17K and the validation sets for the recipes under recipe=dapo_math_17k, into $VERL_EXT_DATA (~/data/verl_ext).
# From the hub, or from copies under RAW_DIR: dapo-math-17k.parquet, aime-2024.parquet, aime-2025.jsonl, amc.parquet.
# What is there already is not made again.
set -xeuo pipefail

PYTHON=${PYTHON:-python3}
DATA_DIR=${VERL_EXT_DATA:-$HOME/data/verl_ext}
# dapo: the published instructions; boxed: answers in \boxed{}.
TEMPLATE=${TEMPLATE:-dapo}
RAW_DIR=${RAW_DIR:-}

TRAIN=(--output "$DATA_DIR/dapo_math_17k.parquet" --template "$TEMPLATE")
VALIDATION=(--output "$DATA_DIR" --template "$TEMPLATE" --sets aime_2024 aime_2025 amc)
if [[ -n "$RAW_DIR" ]]; then
    TRAIN+=(--input "$RAW_DIR/dapo-math-17k.parquet")
    VALIDATION+=(--input "aime_2024=$RAW_DIR/aime-2024.parquet" "aime_2025=$RAW_DIR/aime-2025.jsonl" "amc=$RAW_DIR/amc.parquet")
fi

"$PYTHON" -m verl_ext.data.dapo_math_17k "${TRAIN[@]}"
"$PYTHON" -m verl_ext.data.validation_sets "${VALIDATION[@]}" "$@"
