"""Effective probability against a Polya urn in exact fractions, quadrature, and the martingale property."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import beta as beta_function

from tests.unit.allocation.helpers import examples
from verl_ext.allocation import abandonment_point, effective_probability, expected_variance

PRIORS = [(1, 1), (Fraction(1, 2), Fraction(1, 2)), (Fraction(3, 25), Fraction(3, 25)), (2, Fraction(1, 3)), (7, 3)]


def urn(successes, trials, group_size, alpha, beta):
    """P(mixed at the end), rollout by rollout, in fractions."""

    @cache
    def mixed(s, n):
        if n == group_size:
            return Fraction(int(0 < s < n))
        p = Fraction(alpha + s) / (alpha + beta + n)
        return p * mixed(s + 1, n + 1) + (1 - p) * mixed(s, n + 1)

    return mixed(successes, trials)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("group_size", [1, 2, 3, 8, 16, 31])
def test_equals_the_urn(prior, group_size):
    prefixes = [(s, n) for n in range(group_size + 1) for s in {0, n, n // 2}]
    s, n = np.array(prefixes).T
    found = effective_probability(s, n, group_size, *map(float, prior))
    exact = np.array([float(urn(a, b, group_size, *prior)) for a, b in prefixes])
    np.testing.assert_allclose(found, exact, rtol=2e-13, atol=0)


@settings(max_examples=examples(40))
@given(
    alpha=st.floats(0.05, 20), beta=st.floats(0.05, 20), size=st.integers(2, 40), data=st.data(), passed=st.booleans()
)
def test_equals_quadrature(alpha, beta, size, data, passed):
    n = data.draw(st.integers(0, size))
    pure = n > 0
    a, b = (alpha + n * passed, beta + n * (not passed)) if pure else (alpha, beta)

    def moment(power, first, second):  # E[(1 - p)^power] for p ~ Beta(second, first), the singular ends as a weight
        value = quad(lambda q: q**power, 0, 1, weight="alg", wvar=(first - 1, second - 1), epsabs=0, epsrel=1e-9)[0]
        return value / beta_function(first, second)

    saturated = 0.0
    if not pure or passed:
        saturated += moment(size - n, a, b)
    if not pure or not passed:
        saturated += moment(size - n, b, a)
    found = effective_probability(n * passed, n, size, alpha, beta)
    assert found == pytest.approx(1 - saturated, abs=1e-8)


@settings(max_examples=examples(60))
@given(alpha=st.floats(1e-3, 50), beta=st.floats(1e-3, 50), size=st.integers(1, 64), data=st.data())
def test_is_a_martingale(alpha, beta, size, data):
    n = data.draw(st.integers(0, size - 1))
    s = data.draw(st.sampled_from(sorted({0, n, n // 2})))
    p = (alpha + s) / (alpha + beta + n)
    later = p * effective_probability(s + 1, n + 1, size, alpha, beta)
    later += (1 - p) * effective_probability(s, n + 1, size, alpha, beta)
    assert effective_probability(s, n, size, alpha, beta) == pytest.approx(later, rel=1e-11, abs=1e-14)


def test_uniform_prior_is_rational():
    for size in range(2, 65):
        n = np.arange(1, size + 1)
        np.testing.assert_array_equal(effective_probability(0, n, size), (size - n) / (size + 1))
        np.testing.assert_array_equal(effective_probability(n, n, size), (size - n) / (size + 1))
        assert effective_probability(0, 0, size) == (size - 1) / (size + 1)


def test_published_values():
    expected = [0.7778, 0.6667, 0.5556, 0.4444, 0.3333, 0.2222, 0.1111, 0]
    np.testing.assert_allclose(effective_probability(0, np.arange(1, 9), 8), expected, atol=5e-5)
    jeffreys = [0.607, 0.476, 0.372, 0.282, 0.202, 0.129, 0.062, 0]
    np.testing.assert_allclose(effective_probability(0, np.arange(1, 9), 8, 0.5, 0.5), jeffreys, atol=5.1e-4)


def test_long_groups_and_tiny_priors_keep_their_accuracy():
    exact = float(urn(0, 3, 60, Fraction(1, 10**6), 1))
    assert effective_probability(0, 3, 60, 1e-6, 1.0) == pytest.approx(exact, rel=1e-12)
    size = 3000  # beyond the summed product
    expected = -np.expm1(np.log1p(-0.3 / (0.3 + 0.7 + np.arange(2, size))).sum())
    assert effective_probability(0, 2, size, 0.3, 0.7) == pytest.approx(expected, rel=1e-9)


def test_broadcasts_and_returns_floats_for_scalars():
    grid = effective_probability(0, np.arange(1, 5)[:, None], 8, np.array([0.5, 1.0, 2.0]), 1.0)
    assert grid.shape == (4, 3)
    assert grid[2, 0] == effective_probability(0, 3, 8, 0.5, 1.0)
    assert type(effective_probability(0, 3, 8)) is float
    assert effective_probability(2, 5, 8) == 1.0


@pytest.mark.parametrize(
    "arguments, named",
    [((3, 2, 8), "successes=3"), ((-1, 2, 8), "successes=-1"), ((0, 9, 8), "trials=9"), ((0, 0, 0), "group_size=0"),
     ((0, 1.5, 8), "trials"), ((0, 1, 8, 0.0), "alpha"), ((0, 1, 8, 1.0, float("nan")), "beta")],
)  # fmt: skip
def test_bad_input_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        effective_probability(*arguments)


def test_expected_variance_by_quadrature():
    assert expected_variance(1, 1) == pytest.approx(1 / 6)
    assert expected_variance(1, 9) == pytest.approx(9 / 110)
    for a, b in [(0.12, 0.4), (3.0, 1.5), (40.0, 2.0)]:
        value = quad(lambda p: p * (1 - p), 0, 1, weight="alg", wvar=(a - 1, b - 1))[0] / beta_function(a, b)
        assert expected_variance(a, b) == pytest.approx(value, rel=1e-8)
    assert expected_variance(np.array([1.0, 2.0]), 1.0).shape == (2,)
    with pytest.raises(ValueError, match="alpha"):
        expected_variance(-1, 1)


TAUS = [0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.7, 0.75, 0.8]


@pytest.mark.parametrize(
    "group_size, points", [(8, [8, 7, 6, 5, 4, 4, 3, 2, 2, 1]), (16, [15, 13, 11, 10, 9, 8, 6, 5, 4, 3])]
)
def test_abandonment_points(group_size, points):
    assert [abandonment_point(group_size, tau)[0] for tau in TAUS] == points
    assert [abandonment_point(group_size, tau)[1] for tau in TAUS] == points


def test_ties_on_the_grid_are_not_below():
    for size in range(2, 65):
        for n in range(1, size):
            tie = (size - n) / (size + 1)  # p_eff(n) itself, in floating point
            assert abandonment_point(size, tie) == (n + 1, n + 1)
            assert abandonment_point(size, Fraction(size - n, size + 1)) == (n + 1, n + 1)
    assert abandonment_point(8, 5 / 9) == (4, 4) and abandonment_point(8, 4 / 9) == (5, 5)


def test_asymmetric_prior_has_two_points():
    failures, passes = abandonment_point(8, 0.3, 0.5, 2.0)
    assert failures != passes
    for successes, point in ((0, failures), (None, passes)):
        n = np.arange(1, 9)
        p = effective_probability(n if successes is None else 0, n, 8, 0.5, 2.0)
        assert (p[: point - 1] >= 0.3).all() and (p[point - 1 :] < 0.3).all()
    assert abandonment_point(8, 0.45, 0.5, 0.5) == (3, 3)
    assert abandonment_point(8, 0.45, 0.12, 0.12) == (1, 1)
    with pytest.raises(ValueError, match="tau=1"):
        abandonment_point(8, 1.0)
