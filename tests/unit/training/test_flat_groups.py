"""Groups whose scores do not differ have advantages of exactly 0; several rows of a session are no rollouts."""

from __future__ import annotations

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from tests.unit.training.in_process import Queue
from verl_ext.allocation.groups import Outcome
from verl_ext.training.group_advantage import check_sessions, flat_groups, without_advantage
from verl_ext.training.training_settings import SettingError


def outcomes(scores, group="g"):
    return [Outcome(group, i, True, score, 1, 1) for i, score in enumerate(scores)]


def verls(scores):
    """GRPO's advantages as verl computes them, in float32."""
    rewards = torch.tensor(scores, dtype=torch.float32)[:, None]
    index = ["g"] * len(scores)
    return compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), index)[0][:, 0]


@pytest.mark.parametrize("n", [3, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("score", [0.1, 0.95, -0.3, 1e9 + 0.5, 1e-9, 0.0])
def test_equal_scores_are_flat_whatever_float32_makes_of_them(n, score):
    assert flat_groups(outcomes([score] * n)) == {"g"}


def test_verl_gives_equal_scores_an_advantage():
    """Or there would be nothing to mend."""
    assert abs(float(verls([0.95] * 8)[0])) > 0.01


def test_near_ties_are_flat_within_the_tolerance_alone():
    near = [0.95] * 7 + [0.9501]
    assert flat_groups(outcomes(near)) == set() and flat_groups(outcomes(near), 1e-3) == {"g"}
    assert float(verls(near).abs().max()) > 2, "blown up to full size by the deviation"
    assert flat_groups(outcomes([0.0, 1.0]), 1.0) == {"g"}, "the tolerance is none"
    assert flat_groups(outcomes([1e9, 1e9 + 1])) == {"g"}, "less than float32 can tell"
    assert flat_groups(outcomes([1e-12, 2e-12])) == set()
    right, wrong = outcomes([0.9501, 0.95])
    wrong.correct = False
    assert flat_groups([right, wrong], 1e-3) == set(), "a right and a wrong one differ"


def test_each_group_is_judged_by_itself_and_what_is_unscored_counts_for_nothing():
    mixed = [*outcomes([1.0, 1.0], "a"), *outcomes([0.0, 1.0], "b"), *outcomes([None, 1.0], "c")]
    assert flat_groups(mixed) == {"a", "c"}


def test_the_rows_of_flat_groups_get_exactly_0_and_the_others_are_left(monkeypatch):
    queue = Queue(monkeypatch)
    keys = ["a_0_0", "b_0_0", "a_1_0", "a_1_1"]
    rows = queue.rows["train"] = {
        key: {"response_mask": torch.ones(i + 1), "advantages": torch.full((i + 1,), 0.056)}
        for i, key in enumerate(keys)
    }
    queue.tags["train"] = {key: {} for key in keys}
    without_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 4), {"a"})
    for i, key in enumerate(keys):
        assert rows[key]["advantages"].tolist() == [0.0 if key[0] == "a" else pytest.approx(0.056)] * (i + 1)


@pytest.mark.bad_input
@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus_baseline", "opo", "gpg"])
def test_estimators_that_take_rows_for_rollouts_are_refused_with_several_rows_a_session(estimator):
    several = KVBatchMeta(partition_id="train", keys=["a_0_0", "a_0_1", "a_1_0"], tags=[{}] * 3)
    with pytest.raises(SettingError, match=f"adv_estimator={estimator} .*3 rows of 2 sessions.*accepted are grpo"):
        check_sessions(several, estimator)
    check_sessions(KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0"], tags=[{}] * 2), estimator)
    for fine in ("grpo", "gae", "reinforce_plus_plus"):
        check_sessions(several, fine)
