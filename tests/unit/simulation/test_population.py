# SPDX-License-Identifier: Apache-2.0
"""Populations, update models and closed forms against quadrature, exact fractions and enumeration."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from benchmarks import closed_form
from verl_ext.simulation.population import effective_share, expected_signal, make_population, solve_logits
from verl_ext.simulation.simulation_settings import WorldSettings, world_settings
from verl_ext.simulation.updates import Learner, progress_of
from verl_ext.typed_settings import SettingError


@pytest.mark.parametrize("share, mean, size", [(0.33, 0.35, 8), (0.42, 0.6, 8), (0.2, 0.5, 16)])
def test_logits_have_the_share_and_mean_asked_for(share, mean, size):
    location, sd = solve_logits(share, mean, size)

    def over(f):
        value, _ = quad(lambda x: f(expit(x)) * norm.pdf(x, location, sd), location - 12 * sd, location + 12 * sd,
                        limit=500, points=[0.0, location])  # fmt: skip
        return value

    assert over(lambda p: p) == pytest.approx(mean, abs=1e-4)
    assert over(lambda p: 1 - p**size - (1 - p) ** size) == pytest.approx(share, abs=1e-4)


def test_the_studys_population():
    """sd 5.5 and a mean of .35 go with an effective share of .328."""
    _, sd = solve_logits(0.328, 0.35, 8)
    assert sd == pytest.approx(5.5, abs=0.1)


@pytest.mark.bad_input
def test_a_share_that_cannot_be_is_refused():
    with pytest.raises(SettingError, match=r"simulation.effective_share=0.999.*between"):
        solve_logits(0.999, 0.35, 8)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_expected_signal_by_enumeration(rate):
    total = 0.0
    for outcome in product((0, 1), repeat=5):
        share = sum(outcome) / 5
        total += math.prod(rate if o else 1 - rate for o in outcome) * math.sqrt(share * (1 - share))
    assert expected_signal(np.array([rate]), 5)[0] == pytest.approx(total, abs=1e-12)


def test_populations():
    rng = np.random.default_rng(0)
    pool = make_population("u_shaped", 5000, 1000, 10, rng, share=0.35)
    assert effective_share(pool.rates(), 8) == pytest.approx(0.35, abs=2e-3)
    assert pool.accuracy() == pytest.approx(0.35, abs=5e-3)
    flat = np.sort(make_population("uniform", 1000, 10, 10, rng).rates())
    assert np.allclose(flat, (np.arange(1000) + 0.5) / 1000)
    assert (make_population("all_solved", 50, 10, 10, rng).rates() == 1).all()
    assert (make_population("all_hopeless", 50, 10, 10, rng).rates() == 0).all()


def test_closed_forms_under_a_uniform_population():
    """Exact: E[A_n] = 2 / (n + 1) for p uniform on [0, 1]; k = 8, probe 4 gives 32/3, 72/7 and 4/9."""
    rates = (np.arange(2_000_000) + 0.5) / 2_000_000
    a4, a8 = Fraction(2, 5), Fraction(2, 9)
    assert closed_form.dynamic_sampling(rates, 8) == pytest.approx(float(8 / (1 - a8)), abs=1e-9)
    assert closed_form.sara(rates, 8, 4) == pytest.approx(float((8 - 4 * a4) / (1 - a4)), abs=1e-9)
    assert closed_form.sara(rates, 8, 4, "stop") == pytest.approx(float(4 / (1 - a4)), abs=1e-9)
    assert closed_form.false_abandonment(rates, 8, 4) == pytest.approx(4 / 9, abs=1e-9)


def test_oracle_of_rates_keeps_what_it_says():
    rates = np.array([0.0, 0.0, 0.5, 0.01])
    half = 1 - 2 * 0.5**8
    hard = 1 - 0.01**8 - 0.99**8
    assert closed_form.oracle_of_rates(rates, 8, 0.5) == pytest.approx(8 / half)
    assert closed_form.oracle_of_rates(rates, 8, 0.999) == pytest.approx(16 / (half + hard))


def test_progress_by_hand():
    signals, rows = np.array([0.5, 0.0, 0.3]), np.array([8, 8, 4])
    assert progress_of(signals, rows, None) == pytest.approx(0.8 / 128)
    noise = 2.0 * (1 / 8 + 1 / 4)
    assert progress_of(signals, rows, 2.0) == pytest.approx(0.8 / math.sqrt(0.64 + noise))
    assert progress_of(np.zeros(3), rows, 2.0) == 0


@pytest.mark.parametrize("update", ["linear", "adam1k", "adam20k"])
def test_uniform_grpo_reaches_the_goal_at_the_pace(update):
    rng = np.random.default_rng(1)
    world = WorldSettings(prompts=4000, update=update, pace=60, own=0.0, topics=1)
    pool = make_population("u_shaped", 4000, 2000, 1, rng, share=0.33)
    learner = Learner(pool, world, rng)
    for _ in range(60):
        rows = rng.choice(4000, 128, replace=False)
        learner.update(rows, rng.binomial(8, pool.rates()[rows]), np.full(128, 8))
    assert pool.accuracy() == pytest.approx(0.75, abs=0.03)


def test_training_on_saturated_groups_changes_nothing():
    rng = np.random.default_rng(1)
    pool = make_population("u_shaped", 100, 50, 5, rng)
    before = pool.rates(), pool.accuracy()
    Learner(pool, WorldSettings(topics=5), rng).update(np.arange(3), np.array([0, 8, 8]), np.full(3, 8))
    assert (pool.rates() == before[0]).all() and pool.accuracy() == before[1]


def test_topics_and_own_boost():
    rng = np.random.default_rng(1)
    pool = make_population("u_shaped", 200, 50, 4, rng)
    progress = Learner(pool, WorldSettings(topics=4), rng).update(np.array([7]), np.array([4]), np.array([8]))
    assert pool.ability == pytest.approx(0.8 * progress)
    expected = np.zeros(4)
    expected[pool.topic[7]] = 0.2 * 4 * progress
    assert pool.gained == pytest.approx(expected)
    assert pool.own[7] == pytest.approx(0.8 * 0.5) and np.count_nonzero(pool.own) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize("population, values, message", [
    ("u_shape", {}, "population='u_shape'; accepted: uniform | u_shaped"),
    ("uniform", {"effective_share": 0.3}, "simulation.effective_share=0.3; accepted: null with population=uniform"),
    ("u_shaped", {"promts": 3}, "simulation.promts=3; accepted: the settings"),
    ("u_shaped", {"prompts": 0}, "simulation.prompts=0; accepted: an integer of 1 or more"),
    ("u_shaped", {"update": "sgd"}, "simulation.update='sgd'"),
    ("u_shaped", {"length": {"wrong_factor": -1.0}}, "simulation.length.wrong_factor=-1.0"),
    ("recorded", {}, "simulation.record=None"),
    ("uniform", {"record": "x"}, "simulation.record='x'; accepted: null"),
])  # fmt: skip
def test_settings_are_refused_by_name(population, values, message):
    with pytest.raises(SettingError) as error:
        world_settings(population, values)
    assert message in str(error.value)
