"""MoPPS: discounting by hand-worked cases, and what its draws prefer."""

import json

import numpy as np
import pytest
from scipy.stats import beta

from tests.unit.allocation.helpers import keys
from tests.unit.allocation.selectors.selector_runs import ByHand
from verl_ext.allocation import SettingError, make_selector


@pytest.mark.parametrize(
    "forget, told, expected",
    [
        # 1 -> .5 + .5 + 3 = 4, 1 -> .5 + .5 + 5 = 6
        (0.5, [(3, 8)], (4, 6)),
        # n = 1: 4 -> 2 + .5 + 1 = 3.5, 6 -> 3 + .5 + 0 = 3.5
        (0.5, [(3, 8), (1, 1)], (3.5, 3.5)),
        # and a single failure: 3.5 -> 1.75 + .5 = 2.25, 3.5 -> 1.75 + .5 + 1 = 3.25
        (0.5, [(3, 8), (1, 1), (0, 1)], (2.25, 3.25)),
        # nothing scored is no visit
        (0.5, [(3, 8), (0, 0)], (4, 6)),
        # no discount: counts add up
        (1.0, [(3, 8), (1, 1), (8, 8)], (13, 6)),
        # all forgotten: the prior and the last group
        (0.0, [(3, 8), (2, 8)], (3, 7)),
    ],
)
def test_discounting_by_hand(forget, told, expected):
    run = ByHand("mopps", 1, groups=1, forget=forget)
    for outcome in told:
        run.step(lambda row, outcome=outcome: outcome)
    state = run.selector.state_dict()
    assert (state["alpha"][0], state["beta"][0]) == pytest.approx(expected, abs=1e-12)


def test_the_initial_bandit(tmp_path):
    """As officially: alpha = 1 + 3 successes, beta = 1 + 3 failures; what is not in the file starts from the prior."""
    path = tmp_path / "known.json"
    path.write_text(json.dumps({keys(3)[0]: [1, 0, 0, 0, 1], keys(3)[2]: [0, 0], "another prompt": [1]}))
    run = ByHand("mopps", 3, initial=str(path))
    run.begin()
    assert run.selector.state_dict()["alpha"].tolist() == [7, 1, 1] and run.selector._visited.sum() == 0
    assert run.selector.state_dict()["beta"].tolist() == [10, 1, 7]
    half = ByHand("mopps", 3, initial=str(path), initial_weight=0.5, alpha=2.0)
    half.begin()
    assert half.selector.state_dict()["alpha"].tolist() == [3, 2, 2]


@pytest.mark.bad_input
@pytest.mark.parametrize("text, problem", [
    ("[1, 0]", "a JSON object of lists of 0 and 1"), ("{", "a JSON object of lists of 0 and 1, .*: Expecting"),
    ('{"prompt-0": [1, 2]}', r"'prompt-0' has \[1, 2\]"), ('{"prompt-0": 1}', "'prompt-0' has 1"),
    ('{"x": [1]}', r"none of its 1 keys is one's: \['x'\]"),
])  # fmt: skip
def test_a_wrong_initial_bandit_is_named(tmp_path, text, problem):
    path = tmp_path / "known.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=f"allocation.selector.initial=.*{problem}"):
        ByHand("mopps", 3, initial=str(path)).begin()
    with pytest.raises(SettingError, match="a JSON file that exists"):
        make_selector("mopps", initial=str(tmp_path / "none.json"))


def test_what_is_lost_goes_back_to_the_prior():
    run = ByHand("mopps", 1, groups=1, forget=0.8, alpha=2.0, beta=3.0)
    for _ in range(60):
        run.step(lambda row: (8, 8))
    state = run.selector.state_dict()
    # alpha* = .8 alpha* + .2 x 2 + 8, beta* = .8 beta* + .2 x 3
    assert (state["alpha"][0], state["beta"][0]) == pytest.approx((42, 3), rel=1e-4)


def chances(run, steps):
    """How often each prompt is the one offered."""
    counts = np.zeros(len(run.pool))
    for _ in range(steps):
        counts[run.step()] += 1
    return counts / steps


def test_the_draw_nearest_to_one_half_is_offered():
    """Two prompts, one never seen (uniform), one at 40 of 40: how often the first is nearer, by quadrature."""
    run = ByHand("mopps", 2, groups=1, candidates=2, seed=4)
    run.begin()
    state = run.selector.state_dict()
    state["alpha"] = np.array([1.0, 3.0])
    run.selector.load_state_dict(state)
    grid = (np.arange(20_000) + 0.5) / 20_000
    distance = np.abs(grid - 0.5)
    # P(|x - .5| < |y - .5|) for x uniform, y ~ Beta(3, 1)
    expected = np.mean(2 * distance * beta.pdf(grid, 3, 1))
    assert expected > 0.55
    assert chances(run, 4000)[0] == pytest.approx(expected, abs=0.03)


def test_a_band_prefers_nothing_within_it():
    run = ByHand("mopps", 3, groups=1, candidates=3, lower=0.3, upper=0.7)
    run.begin()
    state = run.selector.state_dict()
    state["alpha"] = np.array([4000.0, 6500.0, 9000.0])
    state["beta"] = 10_000 - state["alpha"]
    run.selector.load_state_dict(state)
    share = chances(run, 2000)
    assert share[:2] == pytest.approx([0.5, 0.5], abs=0.05) and share[2] == 0


def test_it_learns_which_prompts_are_of_middling_difficulty():
    rates = np.linspace(0, 1, 101)
    rng = np.random.default_rng(0)
    run = ByHand("mopps", 101, groups=10, candidates=10)
    for _ in range(60):
        chosen = run.step(lambda row: (int(rng.binomial(8, rates[row])), 8))
    assert np.abs(rates[chosen] - 0.5).mean() < 0.12


def test_wrong_settings_are_named():
    with pytest.raises(SettingError, match=r"allocation.selector.upper=0.2; accepted: a number in \[lower=0.3, 1\]"):
        make_selector("mopps", lower=0.3, upper=0.2)
    with pytest.raises(SettingError, match=r"allocation.selector.beta=-1.0; accepted: a finite number above 0"):
        make_selector("mopps", beta=-1.0)
