"""CERO's mathematics against independent truth: numeric conjugates, SciPy's solvers, the published rate of regret."""

import numpy as np
import pytest
from scipy.optimize import brentq, linprog, minimize, minimize_scalar

from tests.unit.allocation.selectors.selector_runs import ByHand
from verl_ext.allocation.selectors import fenchel


@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.7, 3.0])
def test_conjugate_is_the_infimum(rate):
    for part in (1e-6, 0.03, 0.4, 0.99, 1.0, 1.7):
        theta = part * rate
        top = 40 / rate
        best = minimize_scalar(
            lambda n, theta=theta: theta * n - (1 - np.exp(-rate * n)), bounds=(0, top), method="bounded",
            options={"xatol": 1e-9 * top},
        )  # fmt: skip
        # The bounded search never looks at the ends, and the infimum is at n = 0 where theta >= L.
        assert fenchel.conjugate(theta, rate) == pytest.approx(min(best.fun, 0.0), abs=1e-8)
    assert fenchel.conjugate(0.0, rate) == -1
    assert fenchel.conjugate(-rate, rate) == -np.inf


@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.7, 3.0])
def test_biconjugate_is_the_utility(rate):
    """U(n) = min over theta of theta n - U_*(theta), at theta = U'(n)."""
    for exposure in (0.0, 0.01, 0.5, 2.0, 8.0):
        n = exposure / rate
        best = minimize_scalar(
            lambda log, n=n: np.exp(log) * n - float(fenchel.conjugate(np.exp(log), rate)),
            bounds=(np.log(rate) - 12, np.log(rate)), method="bounded", options={"xatol": 1e-10},
        )  # fmt: skip
        assert best.fun == pytest.approx(float(fenchel.utility(n, rate)), abs=1e-8)
        if exposure:
            assert fenchel.exposure(np.exp(best.x), rate) == pytest.approx(n, rel=1e-3)


def test_exposure_is_the_slope_of_the_conjugate():
    rate = np.array([0.01, 0.3, 2.0])
    for part in (0.05, 0.4, 0.9):
        theta, h = part * rate, 1e-6 * rate
        slope = (fenchel.conjugate(theta + h, rate) - fenchel.conjugate(theta - h, rate)) / (2 * h)
        assert fenchel.exposure(theta, rate) == pytest.approx(slope, rel=1e-6)


def test_floor_is_the_slope_at_full_exposure():
    assert fenchel.exposure(fenchel.floor(0.3, 17.0), 0.3) == pytest.approx(17.0)


def known(q, rounds, budget, groups, group_size=8, **settings):
    """A run whose prompts have the expected variances ``q``, from .002 to .249, which no observation will change."""
    run = ByHand("cero", len(q), groups, group_size, rounds=rounds, budget=budget, explore=0.0, **settings)
    run.begin()
    state = run.selector.state_dict()
    # Beta(a, b) with a + b = 1000 has E[p (1 - p)] = 1000 / 1001 m (1 - m), m being its mean.
    q = np.asarray(q, float)
    mean = (1 - np.sqrt(1 - 4.004 * q)) / 2
    state["successes"], state["failures"] = 1000 * mean - 1, 1000 * (1 - mean) - 1
    state["rate"] = state["theta"] = q * 6 / (rounds * group_size)
    state |= {"open": False, "price": float(state["rate"].max())}
    run.selector.load_state_dict(state)
    return run, state["rate"]


def optimum(rate, budget, most):
    """The best plan's utility, by the price at which the budget is spent."""

    def plan(log):
        return np.clip(fenchel.exposure(np.minimum(np.exp(log), rate), rate), 0, most)

    if plan(np.log(rate.min()) - 50).sum() <= budget:
        return fenchel.utility(most, rate).sum()
    log = brentq(lambda log: plan(log).sum() - budget, np.log(rate.min()) - 50, np.log(rate.max()), xtol=1e-14)
    return fenchel.utility(plan(log), rate).sum()


def test_small_problem_against_a_convex_program():
    """Total rollouts over many rounds approach the plan that SciPy finds, and so does strong duality hold."""
    rounds, size, budget = 900, 8, 900 * 8 * 2
    run, rate = known([0.08, 0.1, 0.14, 0.19, 0.245], rounds, budget, groups=2)
    most = rounds * size
    solved = minimize(
        lambda x: -fenchel.utility(x * most, rate).sum(), np.full(5, 0.4), method="SLSQP", bounds=[(0, 1)] * 5,
        jac=lambda x: -rate * most * np.exp(-rate * x * most),
        constraints={"type": "ineq", "fun": lambda x: budget / most - x.sum(), "jac": lambda x: -np.ones(5)},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert solved.success
    assert -solved.fun == pytest.approx(optimum(rate, budget, most), rel=1e-8)
    theta = rate * np.exp(-rate * solved.x * most)
    price = theta[(solved.x > 1e-6) & (solved.x < 1 - 1e-6)].mean()
    dual = (most * np.maximum(theta - price, 0) - fenchel.conjugate(theta, rate)).sum() + price * budget
    assert dual == pytest.approx(-solved.fun, rel=1e-6)

    for _ in range(rounds):
        run.step(want=5)
    assert run.given.sum() == budget
    assert run.given / most == pytest.approx(solved.x, abs=0.02)
    assert run.selector.metrics()["price"] == pytest.approx(price, rel=0.05)
    assert fenchel.utility(run.given, rate).sum() >= 0.999 * -solved.fun


def test_the_price_clears_the_round_as_in_a_linear_program():
    """mu is the multiplier of the round's budget in max sum theta N, sum N <= share, 0 <= N <= N_max."""
    rng = np.random.default_rng(3)
    run, _ = known(rng.uniform(0.01, 0.249, 40), 50, 50 * 9 * 8, groups=9)
    for _ in range(30):
        theta = run.selector.state_dict()["theta"]
        rows = run.step(want=40)
        # One short of nine groups, so that the ninth is the marginal one and the multiplier is unique.
        solved = linprog(-theta, A_ub=np.ones((1, 40)), b_ub=[9 * 8 - 1], bounds=[(0, 8)] * 40, method="highs")
        assert solved.status == 0
        assert run.selector.metrics()["price"] == pytest.approx(-solved.ineqlin.marginals[0], rel=1e-9)
        assert set(rows) == set(np.flatnonzero(solved.x > 1e-9))


def test_regret_of_the_published_form_falls_like_one_over_the_root_of_rounds():
    success = np.random.default_rng(0).beta(0.5, 0.5, 200)
    q = np.clip(success * (1 - success), 0.002, 0.249)
    rounds, regret, used = [10, 40, 160, 640], [], []
    for k in rounds:
        budget = 200 * k * 8 // 4
        run, rate = known(q, k, budget, groups=200, price="dual", dual="virtual")
        for _ in range(k):
            run.step()
        best = optimum(rate, budget, k * 8)
        regret.append((best - fenchel.utility(run.given, rate).sum()) / best)
        used.append(run.given.sum() / budget)
        assert run.given.sum() <= budget
    slope = np.polyfit(np.log(rounds), np.log(regret), 1)[0]
    assert -0.6 <= slope <= -0.45, (regret, used)
    assert all(r * np.sqrt(k) <= 1.5 for r, k in zip(regret, rounds, strict=True)), (regret, used)
    assert used == sorted(used)


def test_step_of_the_price_rises_with_overspending():
    settings = {"share": 100.0, "prompts": 50, "n_max": 8, "rounds": 25, "top": 2.0}
    assert fenchel.step_price(0.5, 200.0, **settings) == pytest.approx(0.5 + 2 / (300 * 5) * 100)
    assert fenchel.step_price(0.5, 0.0, **settings) == pytest.approx(0.5 - 2 / (300 * 5) * 100)
    assert fenchel.step_price(0.0, 0.0, **settings) == 0 and fenchel.step_price(2.0, 400.0, **settings) == 2


def test_step_of_theta_by_hand():
    """L = .5, N_max = 4, K = 4: a = .0625; floor .5 exp(-8)."""
    rate = np.array([0.5, 0.5, 0.5])
    theta = np.array([0.5, 0.25, 0.001])
    moved = fenchel.step_theta(theta, rate, np.array([4, 0, 4]), rounds=4, n_max=4)
    least = 0.5 * np.exp(-8)
    assert moved[0] == pytest.approx(0.5 - 0.0625 * 4)
    assert moved[1] == pytest.approx(0.25 + 0.0625 * np.log(2) / 0.5 / 4)
    assert moved[2] == pytest.approx(least)


def test_rescaling_lifts_theta_with_its_rate():
    theta, old = np.array([0.2, 0.2, 0.2]), np.array([0.2, 0.4, 0.4])
    moved = fenchel.rescale(theta, old, np.array([0.3, 0.2, 0.4]), most=10.0)
    assert moved == pytest.approx([0.3, 0.1, 0.2])


def test_ties_at_the_price_are_admitted_up_to_the_share():
    theta = np.array([3.0, 2.0, 2.0, 2.0 - 1e-14, 1.0])
    ranked = fenchel.rank(theta, np.arange(5), 1.0, np.random.default_rng(0))
    assert ranked[0] == 0 and ranked[-1] == 4
    assert fenchel.admitted(theta, ranked, 2.0, fill=3, most=1.0) == 3
    assert fenchel.admitted(theta, ranked, 2.0, fill=9, most=1.0) == 4
    assert fenchel.admitted(theta, ranked, 2.0, fill=0, most=1.0) == 1
    assert fenchel.admitted(theta, ranked, 0.5, fill=1, most=1.0) == 5


@pytest.mark.parametrize("first", [0, 1, 7, 30, 100])
def test_the_beginning_of_the_ranking_and_the_rest_are_the_ranking(first):
    """Also where ties lie across the cut, and where they differ by less than the rounding."""
    rng = np.random.default_rng(2)
    theta = rng.integers(0, 9, 60) / 8 + rng.uniform(0, 1e-14, 60)
    rows = np.flatnonzero(rng.random(60) < 0.8)
    whole = fenchel.rank(theta, rows, 1.0, np.random.default_rng(5))
    head, others = fenchel.rank_first(theta, rows, first, 1.0, np.random.default_rng(5))
    assert len(head) >= min(first, len(rows))
    assert np.concatenate([head, fenchel.by_theta(theta, others, 1.0)]).tolist() == whole.tolist()
    assert first > 30 or len(others)
