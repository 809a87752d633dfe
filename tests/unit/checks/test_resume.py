# SPDX-License-Identifier: Apache-2.0
"""A resume with other rules is refused before Ray starts, by the state that is saved beside the weights."""

import json

import pytest
from omegaconf import OmegaConf

from tests.unit.checks.check_configs import config_with
from tests.unit.runs.test_checkpoints import checkpoint
from verl_ext.allocation import save_state
from verl_ext.checks import Problems
from verl_ext.checks.resume import check_resume
from verl_ext.runs.checkpoints import TRACKER
from verl_ext.training.identity import identity
from verl_ext.training.training_settings import TrainingSettings, resolve_budget


def settings_of(config):
    return TrainingSettings.from_config(config)


@pytest.fixture
def saved(tmp_path):
    """A run's folder with a checkpoint of recipe=cpu/sara."""
    config = config_with()
    settings = settings_of(config)
    data = OmegaConf.to_container(config.data, resolve=True)
    known = identity(settings, resolve_budget(config, settings), data)
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    save_state(tmp_path / "global_step_4" / "allocation", {"identity": {"training prompts": "9", **known}})
    return tmp_path


def test_the_same_rules_are_resumed(saved):
    config = config_with()
    assert "of the same rules" in check_resume(config, settings_of(config), saved).text


@pytest.mark.bad_input
@pytest.mark.parametrize("overrides, said", [
    (["allocation/allocator=uniform"], "allocation.allocator.name: saved 'sara', now 'uniform'"),
    (["allocation/selector=greso"], "allocation.selector.name: saved 'shuffled', now 'greso'"),
    (["allocation.seed=7"], "allocation.seed: saved 0, now 7"),
    (["data.seed=7"], "data.seed: saved .*, now 7"),
])  # fmt: skip
def test_other_rules_are_refused_by_name(saved, overrides, said):
    config = config_with("recipe=cpu/sara", *overrides)
    with pytest.raises(Problems, match=said + ".*allocation.resume=fresh"):
        check_resume(config, settings_of(config), saved)
    config.allocation.resume = "fresh"
    check_resume(config, settings_of(config), saved)
    config.allocation.resume, config.trainer.resume_mode = "strict", "disable"
    check_resume(config, settings_of(config), saved)
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(saved / "global_step_4")
    with pytest.raises(Problems, match=said):
        check_resume(config, settings_of(config), saved / "elsewhere")


@pytest.mark.bad_input
def test_a_damaged_state_is_refused(saved):
    path = saved / "global_step_4" / "allocation" / "allocation.json"
    document = json.loads(path.read_text())
    document["state"]["identity"]["allocation.seed"] = 3
    path.write_text(json.dumps(document))
    config = config_with()
    with pytest.raises(Problems, match="damaged.*allocation.resume=fresh"):
        check_resume(config, settings_of(config), saved)


def test_without_a_checkpoint_nothing_is_compared(tmp_path):
    config = config_with()
    assert "no checkpoint" in check_resume(config, settings_of(config), tmp_path).text
