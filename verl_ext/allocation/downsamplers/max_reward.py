"""The highest rewards of a group, a baseline of PODS (arXiv 2504.13818)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..registry import register_downsampler
from .downsampler import KeepFew, ranked


@register_downsampler("max_reward")
class MaxReward(KeepFew):
    """The ``keep`` highest scores; see :func:`max_reward_subset`."""

    def subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return max_reward_subset(rewards, keep, rng)


def max_reward_subset(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Indices, ascending, of the ``keep`` highest rewards.

    Args:
        rewards: (rollouts,), finite.
        keep: at least 1; with no more rewards than that, all.
        rng: chooses among equal rewards (rounded to 1e-12); None takes the first in order.

    Raises:
        ValueError: the shape is wrong, ``keep`` is below 1, or a reward is NaN or infinite.
    """
    order = ranked(rewards, keep, rng)
    return np.sort(order[max(0, len(order) - keep) :])
