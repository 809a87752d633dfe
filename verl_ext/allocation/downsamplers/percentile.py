"""Rewards of a group at evenly spaced percentiles, a baseline of PODS (arXiv 2504.13818)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..registry import register_downsampler
from .downsampler import KeepFew, ranked


@register_downsampler("percentile")
class Percentile(KeepFew):
    """Scores at ``keep`` evenly spaced percentiles; see :func:`percentile_subset`."""

    def subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return percentile_subset(rewards, keep, rng)


def percentile_subset(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Indices, ascending, of the rewards at the percentiles (i + 1/2) / m, i = 0 .. m - 1.

    Of n rewards in rising order those at the places floor(n (i + 1/2) / m): one from the middle of each of m equal
    parts, so that the subset has the distribution of the whole.

    Args and Raises: as :func:`~.max_reward.max_reward_subset`.
    """
    order = ranked(rewards, keep, rng)
    if len(order) <= keep:
        return np.sort(order)
    places = len(order) * (2 * np.arange(keep) + 1) // (2 * keep)
    return np.sort(order[places])
