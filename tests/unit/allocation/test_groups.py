"""Outcomes, groups and requests."""

import numpy as np
import pytest

from verl_ext.allocation import Group, Outcome, Request, RoundError


def outcome(session, correct=True, score=None, group="g", **more):
    return Outcome(group, session, correct, float(correct) if score is None else score, 3, 5, **more)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), np.nan, None])
def test_what_cannot_be_scored_is_unscored_and_not_wrong(score):
    found = Outcome("g", 0, False, score, 3, 5)
    assert found.correct is None and found.score is None and not found.scored


def test_correctness_is_a_truth_value():
    assert outcome(0, np.bool_(True)).correct is True
    assert Outcome("g", 0, 1.0, 0.7, 1, 1).correct is True
    assert Outcome("g", 0, 0, 0.7, 1, 1).correct is False
    assert Outcome("g", 0, float("nan"), 0.7, 1, 1).score is None
    assert outcome(0, failed=True).correct is None
    with pytest.raises(ValueError, match="correct=0.5"):
        Outcome("g", 0, 0.5, 1.0, 1, 1)
    with pytest.raises(ValueError, match="response_tokens=-1"):
        Outcome("g", 0, True, 1.0, 1, -1)


def test_outcomes_come_in_any_order():
    group = Group("g", 7, 1, requested=4)
    for session in (2, 0, 3):
        group.add(outcome(session, correct=session == 3))
    assert [o.session for o in group.outcomes] == [0, 2, 3]
    assert (group.successes, group.trials, group.returned, group.pending) == (1, 3, 3, 1)
    assert group.missing() == [1] and group.mixed and not group.saturated
    for session, group_uid, problem in ((2, "g", "told twice"), (4, "g", "never asked"), (1, "h", "belongs")):
        with pytest.raises(RoundError, match=problem):
            group.add(outcome(session, group=group_uid))
    assert group.returned == 3


def test_shaped_scores_do_not_make_a_dead_group_look_alive():
    group = Group("g", 0, 0, requested=3)
    for session, score in enumerate((0.1, -0.4, 0.3)):
        group.add(outcome(session, correct=False, score=score))
    assert group.saturated and not group.mixed
    empty = Group("h", 0, 0, requested=1)
    empty.add(Outcome("h", 0, None, None, 1, 1))
    assert not empty.saturated and not empty.mixed


def test_requests_number_sessions_on():
    group = Group("g", 0, 0, requested=4)
    request = Request(group, 3)
    group.requested += 3
    assert request.first == 4 and list(request.sessions) == [4, 5, 6]
    with pytest.raises(ValueError, match="n=0"):
        Request(group, 0)
    with pytest.raises(ValueError, match="a_b"):
        Group("a_b", 0, 0)
