"""The laboratory beside verl: what is compared, and the recipes that are meant to be alike."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_lab_agreement import LR, RECIPES, compared
from tests.unit.checks.check_configs import config_with
from verl_ext.lab.lab_run import LabSettings, allocation_settings
from verl_ext.lab.recipes import find_recipe
from verl_ext.lab.update import UpdateSettings
from verl_ext.training.training_settings import TrainingSettings


def line(start, end, rollouts):
    return np.array([[0, start], [rollouts, end]], float)


def test_curves_are_compared_over_the_rollouts_that_all_have():
    lab = [line(0.4, 0.6, 1000), line(0.4, 0.8, 1000)]
    stack = [line(0.4, 0.6, 2000), line(0.5, 0.7, 2000)]
    found = compared(lab, stack)
    assert found["rollouts"] == 1000
    assert found["final"]["laboratory_runs"] == [0.6, 0.8] and found["final"]["verl_runs"] == [0.5, 0.6]
    assert found["final"]["difference"] == pytest.approx(0.15)
    # Of a straight line, the mean is half way: .5 and .6 against .45 and .55.
    assert found["curve_mean"]["difference"] == pytest.approx(0.05)
    assert found["curve_mean"]["low"] < 0 < found["curve_mean"]["high"]


@pytest.mark.parametrize("name, lab_name", RECIPES.items())
def test_the_two_recipes_are_the_same(name, lab_name):
    config = config_with(f"recipe={name}")
    settings = TrainingSettings.from_config(config)
    lab = allocation_settings(find_recipe(lab_name), 64, 0)
    assert lab.allocator["name"] == settings.allocator["name"] and lab.selector["name"] == settings.selector["name"]
    assert lab.allocator["group_size"] == config.actor_rollout_ref.rollout.n
    assert lab.stop.groups == config.data.train_batch_size
    update = UpdateSettings(lr=LR)
    assert update.mini_batches == config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
    optim = config.actor_rollout_ref.actor.optim
    assert (optim.lr, optim.lr_warmup_steps) == (LR, update.lr_warmup_steps)
    assert (optim.weight_decay, config.actor_rollout_ref.actor.grad_clip) == (update.weight_decay, update.grad_clip)
    assert LabSettings().train_size == 1024
