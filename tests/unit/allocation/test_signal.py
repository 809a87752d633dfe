"""What a group is worth: its closed form, expectations of it, and the gains that rollouts are given by."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from verl_ext.allocation import reward_statistics
from verl_ext.allocation.signal import expected_values, group_value, hull_gains
from verl_ext.allocation.success_rates import GRID


@given(st.integers(2, 40), st.data())
def test_without_weights_it_is_what_grpos_advantages_leave_of_the_two_directions(n, data):
    s = data.draw(st.integers(0, n))
    scores = [1.0] * s + [0.0] * (n - s)
    over = reward_statistics(scores)
    advantages = [(score - over.mean) / (over.std + 1e-12) for score in scores]
    right, wrong = sum(advantages[:s]), sum(advantages[s:])  # factors of mu_R and mu_W
    assert right == pytest.approx(-wrong, abs=1e-9)
    assert group_value(s, n, 0.0, 0.0) == pytest.approx(right, abs=1e-9)


@given(st.integers(2, 30), st.floats(0.1, 4), st.floats(0, 3))
def test_room_takes_from_groups_of_many_right_answers_only_and_depth_from_large_ones(n, room, depth):
    s = np.arange(n + 1)
    plain, weighted = group_value(s, n, 0.0, 0.0), group_value(s, n, room, 0.0)
    mirrored = weighted[::-1]
    inner = (s > 0) & (s < n)
    assert (weighted[inner & (s < n / 2)] > mirrored[inner & (s < n / 2)]).all()
    assert (weighted <= plain).all() and weighted[0] == weighted[n] == 0
    assert group_value(s, n, room, depth) == pytest.approx(weighted / (1 + depth * weighted))


@pytest.mark.parametrize("s, n, m", [(0, 0, 5), (0, 2, 6), (1, 2, 3), (3, 4, 4), (2, 2, 0)])
def test_expected_values_are_binomial_expectations(s, n, m):
    ahead = expected_values(8, 2.0, 0.5)[m, s, n]
    x = np.arange(m + 1)
    for j in (0, 3, 11, 20, len(GRID) - 1):
        expected = (binom.pmf(x, m, GRID[j]) * group_value(s + x, n + m, 2.0, 0.5)).sum()
        assert ahead[j] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_hull_gains_are_the_least_concave_majorant(values):
    curve = np.array(values)
    gains = hull_gains(curve[None])[0]
    hull = curve[0] + np.concatenate([[0], np.cumsum(gains)])
    points = np.arange(len(curve))
    chords = np.full(len(curve), -np.inf)  # the majorant at i: the best chord over i
    for a, b in itertools.combinations_with_replacement(points, 2):
        inside = points[a : b + 1]
        line = curve[a] + (curve[b] - curve[a]) * (inside - a) / max(b - a, 1)
        chords[a : b + 1] = np.maximum(chords[a : b + 1], line)
    assert hull == pytest.approx(chords, abs=1e-9)
    assert (np.diff(gains) <= 1e-9).all()


def test_a_curve_that_rises_late_is_taken_at_its_average_slope():
    assert hull_gains(np.array([[0.0, 0.0, 0.0, 3.0, 3.5]]))[0] == pytest.approx([1, 1, 1, 0.5])
