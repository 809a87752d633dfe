"""What a group is worth: its closed form, and the expectation of it."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.allocation import reward_statistics
from verl_ext.allocation.signal import expected_value, group_value


@given(st.integers(2, 40), st.data())
def test_without_weights_it_is_what_grpos_advantages_leave_of_the_two_directions(n, data):
    s = data.draw(st.integers(0, n))
    scores = [1.0] * s + [0.0] * (n - s)
    over = reward_statistics(scores)
    advantages = [(score - over.mean) / (over.std + 1e-12) for score in scores]
    right, wrong = sum(advantages[:s]), sum(advantages[s:])  # factors of mu_R and mu_W
    assert right == pytest.approx(-wrong, abs=1e-9)
    assert group_value(s, n, 0.0) == pytest.approx(right, abs=1e-9)


@given(st.integers(2, 30), st.floats(0.1, 4))
def test_room_takes_from_groups_of_many_right_answers_only(n, room):
    s = np.arange(n + 1)
    plain, weighted = group_value(s, n, 0.0), group_value(s, n, room)
    inner = (s > 0) & (s < n / 2)
    assert (weighted[inner] > weighted[::-1][inner]).all()
    assert (weighted <= plain).all() and weighted[0] == weighted[n] == 0


@pytest.mark.parametrize("room", [0, 1, 2])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_expectation_is_that_over_all_sequences_of_outcomes(k, room):
    rate = Fraction(2, 7)
    expected = 0.0
    for outcomes in product((0, 1), repeat=k):
        s = sum(outcomes)
        chance = rate**s * (1 - rate) ** (k - s)
        c = float(Fraction(s * (k - s) * (k - 1), k)) ** 0.5
        expected += float(chance) * c * float(1 - Fraction(s, k)) ** room
    assert expected_value(np.array([float(rate)]), k, room)[0] == pytest.approx(expected, abs=1e-12)
    assert expected_value(np.array([0.0, 1.0]), k, room).tolist() == [0.0, 0.0]
