# SPDX-License-Identifier: Apache-2.0
"""Run folders that several rooms' tests read."""

import pytest

from tests.unit.runs.run_folders import write_compared_run, write_run


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "verl_ext" / "synthetic"
    write_run(folder)
    return folder


@pytest.fixture
def root(tmp_path):
    """Three recipes, three seeds: one like the baseline, one faster."""
    root = tmp_path / "outputs" / "comparison"
    for seed in range(3):
        write_compared_run(root / f"cpu-grpo-seed{seed}", seed=seed, recipe="cpu/grpo")
        write_compared_run(root / f"cpu-dapo-seed{seed}", seed=seed, recipe="cpu/dapo", per_step=128)
        write_compared_run(root / f"cpu-sara-seed{seed}", seed=seed, recipe="cpu/sara", speed=2.0, selector="mixed")
    return root
