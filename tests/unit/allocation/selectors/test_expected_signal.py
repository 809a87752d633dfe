"""Expected signal: how often a prompt is offered follows from what its outcomes say of it, and of the pool."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tests.unit.allocation.helpers import Run
from tests.unit.allocation.selectors.selector_runs import ByHand
from verl_ext.allocation import SettingError, make_selector
from verl_ext.allocation.signal import group_value
from verl_ext.allocation.success_rates import GRID


def test_a_prompt_never_looked_at_is_offered_for_certain():
    run = ByHand("expected_signal", 500, groups=500)
    assert sorted(run.step(want=500)) == list(range(500))


def test_others_are_offered_by_the_posterior_of_what_a_group_adds():
    prompts, k = 8000, 8
    run = ByHand("expected_signal", prompts, groups=prompts, forget=0.5, least=0.02)
    kind = np.arange(prompts) % 3
    run.step(lambda row: ((0, 3, 8)[kind[row]], 8), want=prompts)
    prior = run.selector.state_dict()["rates"]["prior"]
    offered = np.zeros(prompts, bool)
    offered[run.step(want=prompts)] = True
    s = np.arange(k + 1)
    worth = np.array([(binom.pmf(s, k, g) * group_value(s, k, 1.0)).sum() for g in GRID])
    for of, successes in enumerate((0, 3, 8)):
        posterior = prior * GRID ** (successes / 2) * (1 - GRID) ** ((8 - successes) / 2)  # discounted by half
        expected = max(0.02, (posterior * worth).sum() / posterior.sum() / worth.max())
        assert offered[kind == of].mean() == pytest.approx(expected, abs=0.03)


def shares(rates, steps=40):
    """Offers of each rate's prompts over those of all, in the last half of the steps."""
    run = Run(np.array(rates), "uniform", selector="expected_signal", groups=64, settings={"group_size": 4})
    offered = []
    for number in range(steps):
        collected = run.step(number)
        assert len(collected.started) == 64
        if number >= steps // 2:
            offered += [rates[group.prompt] for group in collected.started]
    return {rate: offered.count(rate) / len(offered) for rate in set(rates)}, run


def test_hopeless_and_solved_prompts_are_passed_over_and_never_for_good():
    found, run = shares([0.0, 0.0, 0.0, 0.3, 1.0] * 128)
    assert found[0.3] > 0.6 and 0 < found[0.0] < 0.25 and 0 < found[1.0] < 0.15  # .2 of the prompts, .6 and .2
    assert run.selector.metrics()["hopeless_share"] > 0.1
    assert run.selector.metrics()["skipped_share"] > 0.5


def test_the_pool_says_whether_unsolved_prompts_are_worth_a_visit():
    hard, _ = shares([0.08, 0.08, 0.5, 1.0] * 160)
    hopeless, _ = shares([0.0, 0.0, 0.5, 1.0] * 160)
    assert hard[0.08] > 2 * hopeless[0.0]


@pytest.mark.parametrize("cost", ["rollouts", "tokens"])
def test_by_tokens_a_prompt_of_answers_twice_as_long_is_offered_half_as_often(cost):
    prompts = 6000
    run = ByHand("expected_signal", prompts, groups=prompts, cost=cost)
    for row in run.step(lambda row: (6, 8), want=prompts):  # far from certain to be offered again
        run.selector.answered(row, [100 * (1 + row % 2)] * 8)
    offered = np.zeros(prompts, bool)
    offered[run.step(want=prompts)] = True
    short, long = offered[::2].mean(), offered[1::2].mean()
    assert 0.06 < long and short / long == pytest.approx(2 if cost == "tokens" else 1, rel=0.2)


@pytest.mark.bad_input
def test_settings_are_checked_by_name():
    for bad, named in [({"forget": 1.5}, "forget=1.5"), ({"room": -1.0}, "room=-1.0"), ({"least": 0.0}, "least=0.0"),
                       ({"seed": -1}, "seed=-1"), ({"cost": "time"}, "cost='time'"),
                       ({"room": "much"}, "room='much'")]:  # fmt: skip
        with pytest.raises(SettingError, match=f"allocation.selector.{named}"):
            make_selector("expected_signal", **bad)
