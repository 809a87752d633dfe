"""Marginal signal: pilots and waves, what the pool's history changes, and its settings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.allocation.helpers import Run
from verl_ext.allocation import Outcome, SettingError, Verdict, make_allocator

FOUR = {"group_size": 4}


def test_a_step_spends_what_uniform_does_in_four_waves_and_trains_on_every_group():
    run = Run(np.tile([0.0, 0.05, 0.3, 0.95, 1.0], 30), "marginal_signal", groups=50, settings=FOUR)
    for number in range(3):
        collected = run.step(number)
        assert collected.rollouts == 50 * 4 and collected.rounds == 4 and len(collected.started) == 50
        assert all(2 <= group.requested <= 32 for group in collected.started)
        assert collected.groups == collected.started and {g.verdict for g in collected.groups} == {Verdict.COMMIT}
    short = Run(np.full(99, 0.3), "marginal_signal", groups=50, rollouts=121, settings=FOUR).step(0)
    assert short.rollouts == 121 and len(short.started) == 50
    shorter = Run(np.full(99, 0.3), "marginal_signal", groups=50, rollouts=61, settings=FOUR).step(0)
    assert shorter.rollouts == 61 and len(shorter.started) == 30
    two = Run(np.full(99, 0.3), "marginal_signal", groups=50, max_rounds=2, settings=FOUR).step(0)
    assert two.rollouts == 200 and two.rounds == 2


def spent_on(rates, kind, steps=12):
    """Rollouts a visit of prompts whose rate is ``kind``, in the last third of the steps."""
    run = Run(rates, "marginal_signal", groups=64, settings=FOUR)
    sizes = []
    for number in range(steps):
        collected = run.step(number)
        if number >= 2 * steps // 3:
            sizes += [group.requested for group in collected.started if rates[group.prompt] == kind]
    return np.mean(sizes), run.allocator.metrics()["hopeless_share"]


def test_the_pool_says_whether_unsolved_prompts_are_gone_on_with():
    hard, _ = spent_on(np.tile([0.08, 0.08, 0.5, 1.0], 64), 0.08)
    hopeless, share = spent_on(np.tile([0.0, 0.0, 0.5, 1.0], 64), 0.0)
    assert hard > 3.5 > 2.2 > hopeless >= 2  # 4 on average; 2 are the pilot
    assert share > 0.1
    solved, _ = spent_on(np.tile([0.08, 0.08, 0.5, 1.0], 64), 1.0)
    assert solved < 2.2


def test_a_prompt_that_often_failed_in_earlier_epochs_gets_less_than_a_new_one():
    rates = np.tile([0.0, 0.4], 32)
    run = Run(rates, "marginal_signal", groups=64, settings=FOUR)
    for number in range(4):  # every prompt once a step
        collected = run.step(number)
    sizes = {rate: np.mean([g.requested for g in collected.started if rates[g.prompt] == rate]) for rate in (0.0, 0.4)}
    assert sizes[0.0] < 2.5 and sizes[0.4] > 5.5


class Long:
    """Answers of prompts in the second half of the pool have ten times the tokens; a third of all are right."""

    def generate(self, requests):
        return [
            Outcome(r.group.uid, s, s % 3 == r.group.prompt % 3, 0.0 + (s % 3 == r.group.prompt % 3), 1,
                    1000 if r.group.prompt >= 32 else 100)
            for r in requests for s in r.sessions
        ]  # fmt: skip


@pytest.mark.parametrize("cost", ["rollouts", "tokens"])
def test_by_tokens_prompts_of_long_answers_get_fewer(cost):
    run = Run(np.full(64, 0.3), "marginal_signal", groups=64, backend=Long(), settings={**FOUR, "cost": cost})
    collected = run.step(0)
    sizes = [[g.requested for g in collected.started if (g.prompt >= 32) == long] for long in (False, True)]
    assert collected.rollouts == 256
    if cost == "tokens":
        assert np.mean(sizes[0]) > 5 and np.mean(sizes[1]) < 3
    else:
        assert abs(np.mean(sizes[0]) - np.mean(sizes[1])) < 0.3


@pytest.mark.bad_input
def test_settings_are_checked_by_name():
    assert (make_allocator("marginal_signal", group_size=16).settings.pilot,
            make_allocator("marginal_signal", group_size=16).settings.most) == (8, 64)  # fmt: skip
    for bad, named in [({"pilot": 9}, "pilot=9"), ({"most": 7}, "most=7"), ({"waves": 1}, "waves=1"),
                       ({"forget": 1.5}, "forget=1.5"), ({"room": -1.0}, "room=-1.0"), ({"depth": -0.1}, "depth=-0.1"),
                       ({"pilot": "half"}, "pilot='half'")]:  # fmt: skip
        with pytest.raises(SettingError, match=named):
            make_allocator("marginal_signal", **bad)
    with pytest.raises(SettingError, match="max_rounds=1; accepted: 2 or more with MarginalSignal"):
        Run(np.full(9, 0.5), "marginal_signal", max_rounds=1).step(0)
