"""HORA: hit utility against exact fractions and quadrature, the greedy choice against all choices, and its steps."""

import itertools
from fractions import Fraction
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta as beta_distribution

from tests.unit.allocation.helpers import Run
from verl_ext.allocation import SettingError, make_allocator
from verl_ext.allocation.allocators import hora_allocation
from verl_ext.allocation.allocators.hora import hit_gains


def exact_gain(successes, trials, m):
    """E[g (1 - g)^(m - 1)] for g ~ Beta(1 + s, 1 + n - s), by factorials."""
    a, b = 1 + successes, 1 + trials - successes

    def beta(x, y):
        return Fraction(factorial(x - 1) * factorial(y - 1), factorial(x + y - 1))

    return beta(a + 1, b + m - 1) / beta(a, b)


@pytest.mark.parametrize("successes, trials", [(0, 0), (0, 2), (1, 2), (2, 2), (0, 16), (3, 7)])
def test_gains_are_exact_under_the_uniform_prior(successes, trials):
    found = hit_gains(np.array([1.0 + successes]), np.array([1.0 + trials - successes]), 40)[0]
    expected = [float(exact_gain(successes, trials, m)) for m in range(1, 41)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert (np.diff(found) < 0).all()
    # the utility itself: 1 - E[(1 - g)^m], the sum of the gains
    hit = 1 - beta_distribution(1 + successes, 1 + trials - successes).expect(lambda g: (1 - g) ** 40)
    assert found.sum() == pytest.approx(hit, rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 9), st.floats(0.2, 9), st.integers(1, 30))
def test_gains_are_the_integral_under_any_prior(a, b, m):
    posterior = beta_distribution(a, b)
    value, error = quad(lambda g: g * (1 - g) ** (m - 1) * posterior.pdf(g), 0, 1, limit=200)
    assert hit_gains(np.array([a]), np.array([b]), m)[0, -1] == pytest.approx(value, rel=1e-5, abs=10 * error + 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
    total=st.integers(0, 9), most=st.integers(1, 6), seed=st.integers(0, 5),
)  # fmt: skip
def test_no_other_division_hits_more(counts, total, most, seed):
    s, n = np.array([s for s, _ in counts]), np.array([s + f for s, f in counts])
    found = hora_allocation(s, n, total, most, rng=np.random.default_rng(seed))
    total = min(total, len(counts) * most)
    assert found.sum() == total and found.max() <= most and found.min() >= 0

    def utility(sizes):
        return sum(sum(exact_gain(*prompt, m) for m in range(1, size + 1))
                   for prompt, size in zip(zip(s.tolist(), n.tolist(), strict=True), sizes, strict=True))  # fmt: skip

    best = max(
        utility(sizes) for sizes in itertools.product(range(most + 1), repeat=len(counts)) if sum(sizes) == total
    )
    assert float(utility(found.tolist())) == pytest.approx(float(best), abs=1e-10)


def test_who_gets_what():
    # after a pilot of 2: gains of 0/2 are 3 / ((m + 2)(m + 3)), those of 2/2 are 18 (m - 1)! 3! / (m + 3)!
    unsolved, solved = hora_allocation([0, 2], [2, 2], 12, 32)
    assert unsolved > 2 * solved and unsolved + solved == 12
    assert hora_allocation([2], [2], 0, 8).tolist() == [0]
    assert hora_allocation([0, 0], [2, 2], 100, 8).tolist() == [8, 8]  # no more than most
    assert hora_allocation([0, 0, 0], [1, 1, 1], 4, 8).tolist() == [2, 1, 1]
    ties = {tuple(hora_allocation([0] * 3, [1] * 3, 4, 8, rng=np.random.default_rng(i))) for i in range(30)}
    assert ties == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    with pytest.raises(ValueError, match="successes <= trials"):
        hora_allocation([3], [2], 1, 8)


def test_a_step_spends_what_uniform_does_in_two_rounds():
    rates = np.tile([0.0, 0.05, 0.5, 0.95, 1.0], 30)
    run = Run(rates, "hora", groups=50, settings={"group_size": 8})
    sizes = {}
    for number in range(3):
        collected = run.step(number)
        assert collected.rollouts == 50 * 8 and collected.rounds == 2 and len(collected.groups) == 50
        for group in collected.started:
            assert 2 <= group.requested <= 32
            sizes.setdefault(rates[group.prompt], []).append(group.requested)
    assert np.mean(sizes[0.0]) > np.mean(sizes[0.5]) > np.mean(sizes[1.0])
    short = Run(rates, "hora", groups=50, rollouts=120, settings={"group_size": 8}).step(0)
    assert short.rollouts == 120 and len(short.started) == 50
    shorter = Run(rates, "hora", groups=50, rollouts=60, settings={"group_size": 8}).step(0)
    assert shorter.rollouts == 60 and len(shorter.started) == 30 and shorter.short_by == 20


@pytest.mark.bad_input
def test_settings_are_checked_by_name():
    assert make_allocator("hora", group_size=64).settings.pilot == 16
    assert make_allocator("hora", group_size=2).settings.pilot == 1
    for bad, named in [({"pilot": 9}, "pilot=9"), ({"pilot": 0}, "pilot=0"), ({"most": 7}, "most=7"),
                       ({"alpha": 0.0}, "alpha=0.0"), ({"pilot": "half"}, "pilot='half'")]:  # fmt: skip
        with pytest.raises(SettingError, match=named):
            make_allocator("hora", **bad)
    with pytest.raises(SettingError, match="max_rounds=1; accepted: 2 or more with Hora"):
        Run(np.full(9, 0.5), "hora", max_rounds=1)
