"""What a group is worth to the policy gradient, and what further rollouts are expected to add to it.

Derived here. Let S_j be the gradient of rollout j's log-probability, and mu_R, mu_W its means over right and wrong
rollouts of a prompt with success rate g: the gradient of logit g is mu_R - mu_W. A group of n rollouts with s right has
GRPO's advantages (1 - p) / sigma and -p / sigma, where p = s / n and sigma^2 = p (1 - p) n / (n - 1). Given s,

    E[sum_j A_j S_j] = c(s, n) (mu_R - mu_W),        c(s, n) = sqrt(s (n - s) (n - 1) / n)

and a saturated group gives nothing. Two more factors were measured (`benchmarks/bench_signal.py`, chain sums of the
laboratory): what this direction is worth to held-out prompts, a unit of c, and the variance of the gradient, a rollout.
Groups with many right answers are worth little, and are noisy: there is one way to be right and many to be wrong, and
a rare failure says little about the next one. The first falls about as 1 - p, the second rises several times from p = 0
to p = 1. Their ratio is close to (1 - p)^2; on skills it falls less, about as (1 - p)^(1/2). Last, what a prompt says
repeats itself: with c its value grows ever less.

    v(s, n) = u / (1 + depth u),        u = c(s, n) (1 - s / n)^room
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .success_rates import GRID


def group_value(successes: np.ndarray, trials: np.ndarray, room: float, depth: float) -> np.ndarray:
    """v(s, n) of the module's docstring; 0 for a group of fewer than two rollouts. Arguments broadcast."""
    s, n = np.broadcast_arrays(np.asarray(successes, float), np.asarray(trials, float))
    size = np.maximum(n, 1)
    u = np.sqrt(s * (n - s) * (size - 1) / size) * (1 - s / size) ** room
    return u / (1 + depth * u)


@lru_cache(maxsize=8)
def expected_values(most: int, room: float, depth: float) -> np.ndarray:
    """Expected value of a group after m further rollouts, by the prompt's success rate.

    E_0 = v(s, n) and E_m(s, n; g) = g E_{m-1}(s + 1, n + 1; g) + (1 - g) E_{m-1}(s, n + 1; g).

    Returns:
        (m, s, n, 24), m, s and n from 0 to ``most``; where n + m exceeds ``most`` the group stops there.
    """
    s, n = np.meshgrid(np.arange(most + 1), np.arange(most + 1), indexing="ij")
    start = np.where(s <= n, group_value(np.minimum(s, n), n, room, depth), 0.0)
    layers = [np.repeat(start[:, :, None], len(GRID), 2)]
    for _ in range(most):
        last = layers[-1]
        after = last.copy()
        after[:-1, :-1] = GRID * last[1:, 1:] + (1 - GRID) * last[:-1, 1:]
        layers.append(after)
    return np.array(layers)


def hull_gains(curves: np.ndarray) -> np.ndarray:
    """Slopes of the least concave majorant of each curve: they fall, and sum to what the curve reaches at its corners.

    A first right answer may be worth waiting for: a prompt's value is not concave in its rollouts. The largest slopes
    of the majorants first is exact for every total at which no prompt stops between two corners.

    Args:
        curves: (groups, points).

    Returns:
        (groups, points - 1).
    """
    groups, points = curves.shape
    steps = np.arange(points)[None, :] - np.arange(points - 1)[:, None]  # from each point to each other
    slopes = (curves[:, None, :] - curves[:, :-1, None]) / np.where(steps > 0, steps, 1)
    slopes = np.where(steps > 0, slopes, -np.inf)
    best = slopes.max(2)
    corner = points - 1 - (slopes >= best[:, :, None] - 1e-15)[:, :, ::-1].argmax(2)  # the farthest of equal slopes
    gains = np.empty((groups, points - 1))
    at, slope = np.zeros(groups, np.int64), np.zeros(groups)
    for i in range(points - 1):
        new = at == i
        slope = np.where(new, best[:, i], slope)
        at = np.where(new, corner[:, i], at)
        gains[:, i] = slope
    return gains
