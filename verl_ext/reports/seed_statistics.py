# SPDX-License-Identifier: Apache-2.0
"""Means, intervals and tests over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.stats import ttest_ind

_MOST_EXACT, _DRAWS = 4096, 4000


def resamples(n: int, seed: int = 0) -> np.ndarray:
    """Indices of bootstrap resamples of n values, one a row: all n^n where they are few, else random ones."""
    if n**n <= _MOST_EXACT:
        return np.array(list(product(range(n), repeat=n)))
    return np.random.default_rng(seed).integers(0, n, (_DRAWS, n))


def bootstrap_mean(values: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray] | None:
    """Percentile interval of the mean over the first axis; None for a single value.

    With few seeds it is too narrow (with three it covers about three quarters): it shows the spread and is no test.
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return None
    means = values[resamples(len(values))].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def bootstrap_ratio(
    values: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """mean(values) / mean(reference) with its percentile interval, both resampled independently.

    Without resampling on a side that has a single value; the interval is the ratio itself where both have.
    """
    a, b = np.asarray(values, float), np.asarray(reference, float)
    first, second = (x[resamples(len(x), seed)].mean(axis=1) for seed, x in enumerate((a, b)))
    if len(first) * len(second) > 10**6:
        rng = np.random.default_rng(2)
        first, second = rng.choice(first, 10**5), rng.choice(second, 10**5)
        ratios = first / second
    else:
        ratios = (first[:, None] / second[None, :]).ravel()
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return float(a.mean() / b.mean()), float(low), float(high)


def welch(values: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> dict[str, float] | None:
    """Welch's t test of the difference of two means.

    Returns:
        ``difference``, ``low``, ``high`` of its interval, and the two-sided ``p``; None with fewer than two values on a
        side.
    """
    a, b = np.asarray(values, float), np.asarray(reference, float)
    if len(a) < 2 or len(b) < 2:
        return None
    difference = float(a.mean() - b.mean())
    if a.var() + b.var() <= 1e-30:
        return {"difference": difference, "low": difference, "high": difference, "p": float(abs(difference) < 1e-12)}
    test = ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(confidence)
    return {"difference": difference, "low": float(low), "high": float(high), "p": float(test.pvalue)}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for several tests: adjusted p values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = worst
    return adjusted


def interpolate(points: Sequence[tuple[float, float]], at: np.ndarray | float) -> np.ndarray:
    """Piecewise linear through points of rising x; of several at the same x the last counts."""
    unique = dict(points)
    x = sorted(unique)
    return np.interp(at, x, [unique[value] for value in x])


def first_reach(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The x at which y first reaches the target, linear between two points; None if it never does."""
    before = None
    for x, y in points:
        if y >= target:
            if before is None or y == before[1]:
                return float(x)
            share = (target - before[1]) / (y - before[1])
            return float(before[0] + share * (x - before[0]))
        before = (x, y)
    return None
