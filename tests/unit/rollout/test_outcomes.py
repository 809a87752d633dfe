"""Correct, wrong, or not scored: what a reward's answer means."""

import math

import pytest

from verl_ext.rollout.outcomes import OutcomeError, OutcomeRule, read_outcome

ACC = OutcomeRule()


@pytest.mark.parametrize(
    ("score", "extra", "expected"),
    [
        (1.0, {"acc": True, "score": 1.0}, (True, 1.0)),
        (-1.0, {"acc": False, "score": -1.0}, (False, -1.0)),
        (-0.7, {"acc": 1, "score": 1.0}, (True, -0.7)),
        (-1.0, {"acc": -1}, (False, -1.0)),
        (1, {}, (True, 1.0)),
        (0.0, {"score": 0.0}, (False, 0.0)),
        (None, {"acc": True}, (None, None)),
        (math.nan, {"acc": True}, (None, None)),
        (-math.inf, {"acc": False}, (None, None)),
        ("1.0", {"acc": True}, (None, None)),
        (1.0, {"acc": None}, (None, None)),
        (1.0, {"acc": math.nan}, (None, None)),
        (True, None, (True, 1.0)),
    ],
)
def test_outcome(score, extra, expected):
    assert read_outcome(score, extra, ACC) == expected


def test_a_graded_value_needs_a_threshold():
    with pytest.raises(OutcomeError, match="allocation.outcome.threshold"):
        read_outcome(0.4, {"acc": 0.4}, ACC)
    rule = OutcomeRule(threshold=0.5)
    assert read_outcome(0.4, {"acc": 0.4}, rule) == (False, 0.4)
    assert read_outcome(0.5, {"acc": 0.5}, rule) == (True, 0.5)


def test_a_reward_without_the_field_is_an_error_that_names_the_keys_seen():
    with pytest.raises(OutcomeError, match=r"allocation.outcome.key.*\['format', 'score'\]"):
        read_outcome(1.0, {"score": 1.0, "format": 1.0}, ACC)
    assert read_outcome(1.0, {"score": 1.0, "format": 1.0}, OutcomeRule(key="format")) == (True, 1.0)
