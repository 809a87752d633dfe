"""Variables that repeat another are left out of verl's bootstrap; what is left has verl's own values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.training.trainer import PPOTrainerAllocated

PROMPTS, N = 3, 4


def answers(missing: int = 0) -> tuple[list[str], list[str], dict[str, list], np.ndarray, dict[tuple[str, str], int]]:
    """What verl's validation hands over; of the last prompt's rollouts `missing` have not come back."""
    rows = [(f"prompt{i}", float((i + j) % 2)) for i in range(PROMPTS) for j in range(N)]
    rows = rows[: len(rows) - missing]
    uids, rewards = [uid for uid, _ in rows], [reward for _, reward in rows]
    infos = {"reward": rewards, "score": list(rewards), "acc": [bool(reward) for reward in rewards]}
    expected = {("sums", f"prompt{i}"): N for i in range(PROMPTS)}
    return ["sums"] * len(rows), uids, infos, np.ones(len(rows)), expected


@pytest.mark.parametrize("missing", [0, 2])
def test_what_is_left_is_verls_own(missing):
    trainer = object.__new__(PPOTrainerAllocated)
    arguments = answers(missing)
    theirs = PPOTrainerSync._val_metrics_update(trainer, *copy.deepcopy(arguments))
    ours = trainer._val_metrics_update(*copy.deepcopy(arguments))
    assert ours.pop("allocation/val_lost") == missing
    assert set(ours) < set(theirs) and all(ours[name] == theirs[name] for name in ours)
    core = {name for name in theirs if name.startswith("val-core/")}
    assert core and core <= set(ours)
    left = {name.split("/")[2] for name in ours if name.startswith("val-") and "num_turns" not in name}
    assert left == ({"acc"} if not missing else {"acc", "acc_success_only"})
    kept = {name.split("/")[2] for name in theirs if "num_turns" not in name}
    assert kept == {"acc", "reward", "score", "acc_success_only"}


def test_a_reward_of_its_own_stays():
    arguments = answers()
    arguments[2]["reward"] = [value + 0.5 for value in arguments[2]["reward"]]
    ours = object.__new__(PPOTrainerAllocated)._val_metrics_update(*arguments)
    assert ours.pop("allocation/val_lost") == 0
    assert {"acc", "reward", "score"} == {name.split("/")[2] for name in ours if "num_turns" not in name}
