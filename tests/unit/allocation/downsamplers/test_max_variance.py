"""The PODS subset against brute force in exact fractions, the tie rule, and sampling among equals."""

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import examples
from verl_ext.allocation import Group, Outcome, make_downsampler, max_variance_mask, max_variance_subset

GRADED = st.sampled_from(["0", "1", "0.1", "0.3", "-0.5", "1.1", "0.25", "2", "0.001"])


def score(values):
    """m^2 times the variance."""
    return len(values) * sum(v * v for v in values) - sum(values) ** 2


def official_split(values, keep):
    """Values that the official code keeps, in fractions: it starts from the top m, then tries h = 0 .. m - 1 highest,
    and moves on a larger variance only."""
    ordered = sorted(values)
    splits = [ordered[: keep - h] + ordered[len(ordered) - h :] for h in (keep, *range(keep))]
    return max(splits, key=score)  # the first of equal ones


@settings(max_examples=examples(150))
@given(texts=st.lists(GRADED, min_size=2, max_size=8), keep=st.integers(1, 7), offset=st.sampled_from([0, 1000, -7]))
def test_equals_brute_force_for_graded_rewards(texts, keep, offset):
    exact = [Fraction(text) + offset for text in texts]
    rewards = [float(value) for value in exact]
    chosen = max_variance_subset(rewards, keep)
    assert len(chosen) == min(keep, len(rewards)) and (np.diff(chosen) > 0).all()
    if keep >= len(rewards):
        return
    found = [exact[i] for i in chosen]
    assert score(found) == max(score(subset) for subset in combinations(exact, keep))
    assert sorted(found) == sorted(official_split(exact, keep))
    sampled = max_variance_subset(rewards, keep, np.random.default_rng(1))
    assert sorted(exact[i] for i in sampled) == sorted(found)


@settings(max_examples=examples(60))
@given(rewards=st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=3, max_size=8), keep=st.integers(2, 6))
def test_any_floats(rewards, keep):
    chosen = max_variance_subset(rewards, keep)
    exact = [Fraction(value) for value in rewards]
    if keep < len(exact):
        best = max(score(subset) for subset in combinations(exact, keep))
        spread = max(exact) - min(exact)
        # rewards closer than the comparison's resolution may count as equal
        assert best - score([exact[i] for i in chosen]) <= (Fraction(1, 10**9) + spread * 2 / 10**9) * spread * keep**2


def test_binary_rewards_keep_as_equal_a_share_as_there_is():
    for n in range(2, 13):
        for correct in range(n + 1):
            for keep in range(2, n):
                rewards = np.zeros(n)
                rewards[:correct] = 1
                kept = int(rewards[max_variance_subset(rewards, keep)].sum())
                low, high = max(0, keep - (n - correct)), min(keep, correct)
                if keep % 2 and correct == (keep + 1) // 2:
                    assert kept == correct  # all that are right: the top m is one of the two optima
                else:
                    assert kept == min(max(keep // 2, low), high)  # of two optima for odd m, the fewer correct


def test_float_residue_does_not_move_a_tie():
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 1.3, 0.1 + 0.2 + 1.0, 1.3])
    kept = rewards[max_variance_subset(rewards, 3)]
    assert (kept > 1).sum() == 1
    shifted = np.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]) * 1e-3 + 1000.0
    assert max_variance_mask(shifted, 3)[0, 3:].sum() == 1
    for low, high in ((1 / 3, np.pi), (-0.1234567891, 2 / 3), (1e3 + 1 / 3, 1e3 + 1 / 7)):  # two values off any lattice
        low, high = min(low, high), max(low, high)
        for n in range(4, 14):
            for keep in range(3, n, 2):
                for top in range(keep // 2 + 1, n - keep // 2):
                    chosen = max_variance_subset([high] * top + [low] * (n - top), keep)
                    assert (chosen < top).sum() == keep // 2 + (top == keep // 2 + 1)
    thirds = np.array([1 / 3, 1 / 3, 2 / 3, 1.0, 1.0, 1 / 3])  # no decimal lattice
    kept = thirds[max_variance_subset(thirds, 3)]
    assert (kept == 1.0).sum() == 1 and (kept == 1 / 3).sum() == 2


def test_large_offsets_and_scores():
    """What matters is the spread within the group, not the size of the scores."""
    pattern = np.array([0.0, 1, 4, 4, 8, 3, 0, 7])
    expected = [max_variance_subset(pattern, keep).tolist() for keep in range(2, 8)]
    for offset, step in ((1e9, 2.0**-23), (-1e9, 2.0**-23), (0.0, 1e300), (0.0, 2e307), (0.0, 4e307), (0, 1e-300)):
        rewards = offset + (pattern - 4) * step
        assert len(set(rewards)) == 6 and np.isfinite(rewards).all()
        assert [max_variance_subset(rewards, keep).tolist() for keep in range(2, 8)] == expected
    assert max_variance_subset([1e308, -1e308, 0.0, 1e308, -1e308], 2).tolist() == [0, 1]
    mixed = max_variance_mask([[1e308, -1e308, 0, 0], [0, 1e-9, 0, 1], [1e9, 1e9 + 1e-6, 1e9, 1e9]], 2)
    assert mixed.tolist() == [[True, True, False, False], [True, False, False, True], [True, True, False, False]]


def test_equal_rewards_first_in_order_or_at_random():
    assert max_variance_subset([1, 0, 1, 0, 1, 0], 2).tolist() == [0, 1]
    assert max_variance_subset([5, 5, 5, 5], 2).tolist() == [0, 1]
    rewards = np.tile([0.0, 1, 0, 1, 1, 0, 0.0, 1], (6000, 1))
    mask = max_variance_mask(rewards, 4, np.random.default_rng(0))
    assert (mask.sum(1) == 4).all() and ((mask * rewards).sum(1) == 2).all()
    np.testing.assert_allclose(mask.mean(0), 0.5, atol=0.03)
    pairs = Counter(
        tuple(np.flatnonzero(row)[:2]) for row in max_variance_mask(np.ones((6000, 4)), 2, np.random.default_rng(1))
    )
    assert len(pairs) == 6 and all(abs(n / 6000 - 1 / 6) < 0.02 for n in pairs.values())
    again = max_variance_mask(rewards, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(mask, again)


def test_rows_are_independent():
    rng = np.random.default_rng(3)
    rewards = np.round(rng.normal(size=(50, 9)), 1)
    mask = max_variance_mask(rewards, 4)
    for row, values in zip(mask, rewards, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), max_variance_subset(values, 4))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="group 1, rollout 2"):
        max_variance_mask([[0, 1, 0], [0, 1, np.nan]], 2)
    with pytest.raises(ValueError, match="shape"):
        max_variance_mask([0, 1], 1)
    with pytest.raises(ValueError, match="keep=0"):
        max_variance_mask([[0, 1]], 0)
    assert max_variance_mask(np.zeros((0, 5)), 2).shape == (0, 5)


def test_rules_act_on_the_scored_rollouts():
    group = Group("g", 0, 0, requested=6)
    scores = [1.0, None, 0.0, 0.0, 0.0, 1.0]
    for session, value in enumerate(scores):
        group.add(Outcome("g", session, None if value is None else value > 0.5, value, 1, 1))
    assert make_downsampler("none").select(group) == [0, 2, 3, 4, 5]
    assert make_downsampler("max_variance", keep=5).select(group) == [0, 2, 3, 4, 5]
    assert make_downsampler("max_variance", keep=2).select(group) == [0, 2]
    kept = make_downsampler("max_variance", keep=4).select(group, np.random.default_rng(0))
    assert {0, 5} < set(kept) and len(kept) == 4 and 1 not in kept
