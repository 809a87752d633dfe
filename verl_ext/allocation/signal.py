"""What a group is expected to add to the policy gradient. Derived here, with one factor measured.

Let S_j be the gradient of rollout j's log-probability, and mu_R, mu_W its means over right and wrong rollouts of a
prompt with success rate g: the gradient of logit g is mu_R - mu_W. A group of n rollouts with s right has GRPO's
advantages (1 - p) / sigma and -p / sigma, where p = s / n and sigma^2 = p (1 - p) n / (n - 1). Given s,

    E[sum_j A_j S_j] = c(s, n) (mu_R - mu_W),        c(s, n) = sqrt(s (n - s) (n - 1) / n)

and a saturated group gives nothing. What this direction is worth to held-out prompts, a unit of c, was measured in the
laboratory, and the variance of the gradient, a rollout (`benchmarks/bench_signal.py`). Groups with many right answers
are worth less: there is one way to be right and many to be wrong, and a rare failure says little about the next one.
The ratio of the two falls with p about as (1 - p)^2 on chain sums, and about as (1 - p)^(1/2) on skills; between them
lies 1 - p. So a group is worth

    v(s, n) = c(s, n) (1 - s / n)^room
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import binom


def group_value(successes: Any, trials: Any, room: float) -> np.ndarray:
    """v(s, n) of the module's docstring; 0 for a group of fewer than two rollouts. Arguments broadcast."""
    s, n = np.broadcast_arrays(np.asarray(successes, float), np.asarray(trials, float))
    size = np.maximum(n, 1)
    return np.sqrt(s * (n - s) * (size - 1) / size) * (1 - s / size) ** room


def expected_value(success_rates: np.ndarray, group_size: int, room: float) -> np.ndarray:
    """E[v(S, k)], S ~ Binomial(k, g), of every success rate g: the same shape."""
    s = np.arange(group_size + 1)
    return binom.pmf(s, group_size, success_rates[..., None]) @ group_value(s, group_size, room)
