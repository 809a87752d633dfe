# SPDX-License-Identifier: Apache-2.0
"""Intervals and tests against SciPy, enumeration, and what they promise."""

import numpy as np
import pytest
from scipy import stats

from verl_ext.reports.seed_statistics import (
    bootstrap_mean,
    bootstrap_ratio,
    first_reach,
    holm,
    interpolate,
    resamples,
    welch,
)


def test_resamples_are_all_or_many():
    assert sorted(map(tuple, resamples(2))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert resamples(5).shape == (3125, 5) and resamples(6).shape == (4000, 6)
    assert (resamples(9) == resamples(9)).all()


def test_bootstrap_of_three_by_enumeration():
    values = np.array([0.1, 0.4, 0.7])
    means = [(a + b + c) / 3 for a in values for b in values for c in values]
    low, high = bootstrap_mean(values)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    assert bootstrap_mean(np.array([0.3])) is None


def test_bootstrap_covers_the_mean_of_many():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_mean(rng.normal(size=30))
        hits += low <= 0 <= high
    assert 180 <= hits <= 199


def test_ratio():
    ratio, low, high = bootstrap_ratio([2.0, 2.0], [4.0, 4.0])
    assert (ratio, low, high) == pytest.approx((0.5, 0.5, 0.5))
    ratio, low, high = bootstrap_ratio([1.0, 3.0], [4.0])
    assert (ratio, low, high) == pytest.approx((0.5, *np.quantile([0.25, 0.5, 0.5, 0.75], [0.025, 0.975])))
    many = bootstrap_ratio(np.linspace(1, 3, 12), np.linspace(3, 5, 12))
    assert many[0] == pytest.approx(0.5) and 0.3 < many[1] < 0.5 < many[2] < 0.7


def test_welch_is_scipys():
    a, b = [0.61, 0.64, 0.66], [0.50, 0.58, 0.55, 0.57]
    ours, theirs = welch(a, b), stats.ttest_ind(a, b, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert ours["p"] == pytest.approx(theirs.pvalue)
    assert (ours["low"], ours["high"]) == pytest.approx((interval.low, interval.high))
    assert welch([0.5], [0.4, 0.5]) is None
    assert welch([0.5, 0.5], [0.5, 0.5])["p"] == 1 and welch([0.5, 0.5], [0.4, 0.4])["p"] == 0


def test_three_seeds_that_agree_by_chance_seldom_separate():
    """Under no difference at all, Welch's test with Holm's correction errs in about one comparison of twenty; believing
    bootstrap intervals of three seeds errs far more often."""
    rng = np.random.default_rng(1)
    wrong = naive = 0
    for _ in range(300):
        base, others = rng.normal(size=3), rng.normal(size=(4, 3))
        wrong += min(holm([welch(other, base)["p"] for other in others])) < 0.05
        intervals = [bootstrap_mean(other - base) for other in others]
        naive += any(low > 0 or high < 0 for low, high in intervals)
    assert wrong / 300 < 0.08 < naive / 300


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_first_reach():
    points = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (30.0, 0.6)]
    assert first_reach(points, 0.3) == pytest.approx(5.0)
    assert first_reach(points, 0.5) == pytest.approx(20 + 10 * 2 / 3)
    assert first_reach(points, 0.2) == 0.0
    assert first_reach(points, 0.7) is None


def test_interpolate_takes_the_last_of_equal_x():
    assert interpolate([(0.0, 0.0), (2.0, 1.0), (2.0, 3.0), (4.0, 5.0)], np.array([2.0, 3.0])).tolist() == [3.0, 4.0]
