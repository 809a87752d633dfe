# SPDX-License-Identifier: Apache-2.0
"""Settings that were taken away (`~allocation.max_rounds`): an error with the name, never a traceback."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import Checks
from verl_ext.checks.local import check_inputs, check_settings
from verl_ext.configuration import compose_config


def names(node, prefix=""):
    """All settings, and the sections that they stand in."""
    for key in node:
        yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from names(child, f"{prefix}{key}.")


def problems_without(whole, name):
    config = whole.copy()
    parent, _, key = name.rpartition(".")
    OmegaConf.set_struct(config, False)
    (OmegaConf.select(config, parent) if parent else config).pop(key)
    OmegaConf.set_struct(config, True)
    checks = Checks()
    check_settings(config, checks)
    if not checks.problems:
        check_inputs(config, checks)
    return checks.problems


@pytest.fixture(scope="module")
def whole():
    return compose_config(["recipe=cpu/sara"])


OWN = [f"allocation.{name}" for name in (
    "max_rounds", "rounds", "seed", "stop.groups", "stop.rollouts", "stop.run_rollouts", "outcome.key",
    "outcome.threshold", "deadline_s", "val_deadline_s", "reward_deadline_s", "all_zero_steps", "record", "resume",
)]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", OWN)
def test_a_setting_of_ours_is_named(whole, name):
    assert problems_without(whole, name) == [f"{name} is missing: `~{name}` cannot take it away; give it a value"]


@pytest.mark.bad_input
@pytest.mark.parametrize("name, said", [
    ("data.train_files", "data.train_files is missing: give it a file"),
    ("data.val_files", "data.val_files is missing: give it a file"),
    ("trainer.logger", "trainer.logger is missing: it is read"),
    ("trainer.resume_mode", "trainer.resume_mode is missing: it is read"),
    ("trainer.experiment_name", "trainer.experiment_name is missing: trainer.default_local_dir refers to it"),
])  # fmt: skip
def test_a_setting_of_verls_that_is_read_is_named(whole, name, said):
    assert any(problem.startswith(said) for problem in problems_without(whole, name))


def test_no_setting_whatever_ends_a_check_without_a_name(whole):
    """Where one that is missing is a problem, its name, or that of the section above it, is in what is said."""
    some = [name for name in names(whole) if name.split(".")[0] in ("allocation", "data", "trainer", "tiny")]
    some = some[:: max(1, len(some) // 40)]
    for name in some:
        for problem in problems_without(whole, name):
            section = name.rpartition(".")[0] or name
            assert section in problem and "full_key" not in problem, (name, problem)
