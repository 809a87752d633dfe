"""MATH, DeepMath-103K and Polaris-53K for training in verl.

    python -m verl_ext.data.training_sets [--sets math_train ...] [--input NAME=FILE ...] [--output FOLDER]

Read as `verl_ext.data.validation_sets` reads its own, copies folded into one prompt; copies with different answers are
dropped and listed.
"""

from verl_ext.data.validation_sets import PublishedSet, main

SETS = {
    # MATH without the 500 problems of MATH-500.
    "math_train": PublishedSet("nlile/hendrycks-MATH-benchmark", ("data/train-*.parquet",), None),
    "deepmath": PublishedSet("zwhe99/DeepMath-103K", ("data/train-*.parquet",), None),
    "polaris": PublishedSet("POLARIS-Project/Polaris-Dataset-53K", ("*.parquet",), None),
}

if __name__ == "__main__":
    main(sets=SETS, kind="training")
