"""The reward, tried before a run: what it returns, raises and takes too long for."""


import pytest

from tests.unit.checks.check_configs import config_with, found
from tests.unit.checks.data_rows import checked, rows
from verl_ext.checks import Checks, State, local
from verl_ext.checks.reward_trial import check_reward
from verl_ext.training.training_settings import TrainingSettings
from verl_ext.typed_settings import SettingError

REWARDS = """
import time
def bare(data_source, solution_str, ground_truth, extra_info): return 1.0
def right(**kwargs): return {"score": 0.5, "acc": True}
def nameless(**kwargs): return {"score": 0.5, "correct": True}
def scoreless(**kwargs): return {"acc": True}
def graded(**kwargs): return 0.25
def none(**kwargs): return None
def raises(**kwargs): raise RuntimeError("no such answer")
def hangs(**kwargs): time.sleep(60)
"""


def reward(tmp_path, name, given=None, **values):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    config = config_with(**{"reward.custom_reward_function.path": str(path),
                            "reward.custom_reward_function.name": name, **values})  # fmt: skip
    return check_reward(config, TrainingSettings.from_config(config), rows(1) if given is None else given)


@pytest.mark.parametrize(("name", "words"), [("bare", "scores 1.0"), ("right", "scores {'score': 0.5"),
                                             ("none", "scores None"), ("raises", "not scored")])  # fmt: skip
def test_a_reward_that_can_be_read(tmp_path, name, words):
    assert words in reward(tmp_path, name)


def test_a_reward_that_raises_is_warned_of(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = config_with(**{"reward.custom_reward_function.path": str(tmp_path / "rewards.py"),
                            "reward.custom_reward_function.name": "raises"})  # fmt: skip
    checks = Checks()
    checks.run("reward", local._reward, config, TrainingSettings.from_config(config), rows(1))
    warnings = found(checks, State.WARNING)
    assert len(warnings) == 2 and all("no such answer" in said and "not scored" in said for said in warnings)


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "words"), [("nameless", "keys seen .*correct.*score"), ("scoreless", "keys seen"),
                                             ("graded", "threshold"), ("nothing", "cannot be imported.*nothing"),
                                             ("hangs", "more than 0.2 s")])  # fmt: skip
def test_a_reward_that_cannot_be_read_is_refused(tmp_path, name, words, monkeypatch):
    monkeypatch.setattr("verl_ext.checks.reward_trial.ANSWER_S", 0.2)
    with pytest.raises(SettingError, match=words):
        reward(tmp_path, name)


def test_a_data_source_that_verl_has_no_reward_for(tmp_path):
    config = config_with(**{"reward.custom_reward_function.path": None})
    with pytest.raises(SettingError, match="data_source='chain_sums' is not known"):
        check_reward(config, TrainingSettings.from_config(config), rows(1))


def test_one_row_of_every_data_source_is_tried_with_an_empty_and_a_wrong_answer(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "seen = []\n"
        "def mine(data_source, solution_str, **_):\n"
        "    if data_source == 'held_out' and solution_str:\n"
        "        return {'score': 1.0, 'correct': 1}\n"
        "    return {'score': 0.0, 'acc': bool(solution_str) and data_source == 'easy'}\n"
    )
    config = config_with(**{"reward.custom_reward_function.path": str(path),
                            "reward.custom_reward_function.name": "mine"})  # fmt: skip
    settings, warned = TrainingSettings.from_config(config), []
    train = [row | {"data_source": source} for source in ("sums", "easy") for row in rows(20)]
    given = checked(tmp_path, train)[1].by_source
    assert list(given) == ["sums", "easy"]
    assert "tried on 2 data sources" in check_reward(config, settings, list(given.values()), warned.append)
    (said,) = warned
    assert "a wrong answer to a prompt of data_source='easy' is right" in said
    held_out = rows(1)[0] | {"data_source": "held_out"}
    with pytest.raises(SettingError, match="of a wrong answer to a prompt of data_source='held_out'.*correct"):
        check_reward(config, settings, [*given.values(), held_out])
