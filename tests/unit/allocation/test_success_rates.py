"""The pool's distribution of success rates is found from its outcomes, and a prompt's posterior is Bayes'."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from verl_ext.allocation.state import StateError
from verl_ext.allocation.success_rates import GRID, SuccessRates, log_likelihood


def learned(share_hopeless, rng, prompts=3000, trials=8):
    rates = np.where(rng.random(prompts) < share_hopeless, 0.0, rng.beta(2, 3, prompts))
    known = SuccessRates(0.5)
    for row, s in enumerate(rng.binomial(trials, rates)):
        known.observe(row, int(s), trials)
    for _ in range(60):
        known.fit()
    return known


def hopeless_after(m, share):
    """P(hopeless | m failures) where the others are Beta(2, 3): by quadrature."""
    g = np.linspace(0, 1, 20001)
    alive = np.trapezoid(beta.pdf(g, 2, 3) * (1 - g) ** m, g)
    return share / (share + (1 - share) * alive)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_failures_mean_as_much_as_the_pool_says(share):
    known = learned(share, np.random.default_rng(0))
    for m in (2, 4, 8):
        posterior = known.posterior([10**6], 0, m)[0]
        mean = posterior @ GRID
        g = np.linspace(0, 1, 20001)
        weight = beta.pdf(g, 2, 3) * (1 - g) ** m
        expected = (1 - hopeless_after(m, share)) * np.trapezoid(weight * g, g) / np.trapezoid(weight, g)
        assert mean == pytest.approx(expected, abs=0.02)
    assert known.posterior([10**6], 0, 6)[0, :4].sum() == pytest.approx(hopeless_after(6, share), abs=0.12)


def test_a_posterior_is_bayes_over_the_grid_with_earlier_visits_discounted():
    known = SuccessRates(0.5)
    known.observe(7, 2, 4)
    known.observe(7, 1, 2)  # now 2 of 4 counts: 0.5 x (2, 4) + (1, 2)
    assert known.counts[7] == (2.0, 4.0)
    expected = known.prior * binom.pmf(1, 3, GRID) * np.exp(log_likelihood(1.0, 2.0))  # half of (2, 4), then 1 of 3 new
    assert known.posterior([7], 1, 3)[0] == pytest.approx(expected / expected.sum())
    fresh = known.posterior([8, 7])
    assert fresh[0] == pytest.approx(known.prior) and fresh.sum(1) == pytest.approx([1, 1])


def test_outcomes_rule_out_what_cannot_be():
    known = SuccessRates(1.0)
    assert known.posterior([0], 1, 2)[0, [0, -1]].tolist() == [0, 0]
    assert known.posterior([0], 0, 2)[0, -1] == 0 and known.posterior([0], 0, 2)[0, 0] > 0
    assert log_likelihood(0, 0).tolist() == [0] * len(GRID)


def test_fitting_raises_the_likelihood():
    rng = np.random.default_rng(3)
    known = SuccessRates(0.5)
    for row in range(500):
        known.observe(row, int(rng.binomial(4, rng.beta(0.4, 0.8))), 4)
    counts = np.array(list(known.counts.values()))

    def total():
        return np.log(np.exp(log_likelihood(counts[:, 0], counts[:, 1])) @ known.prior).sum()

    before = total()
    for _ in range(8):
        known.fit(1)
        assert total() >= before - 1e-6 * abs(before)
        before = total()
    assert known.prior.sum() == pytest.approx(1) and (known.prior > 0).all()


def test_a_saved_state_goes_on():
    known = learned(0.3, np.random.default_rng(1), prompts=50)
    other = SuccessRates(0.5)
    other.load_state_dict(known.state_dict())
    assert other.counts == known.counts and list(other.counts) == list(known.counts)
    for one in (known, other):
        one.observe(3, 1, 2)
        one.fit()
    assert other.prior.tolist() == known.prior.tolist()
    with pytest.raises(StateError, match="missing"):
        other.load_state_dict({"rows": np.zeros(0)})
