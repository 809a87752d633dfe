"""Down-samplers that PODS (arXiv 2504.13818) is compared with: random, highest rewards, evenly spaced percentiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from .downsampling import DownSampler, KeepSettings
from .groups import Group
from .registry import register_downsampler


class _KeepFew(DownSampler):
    """Keeps a subset of the scored rollouts; a group with no more than ``keep`` is kept whole."""

    Settings = KeepSettings

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        scored, keep = group.trainable, self.settings.keep
        if len(scored) <= keep:
            return [outcome.session for outcome in scored]
        return [scored[i].session for i in self._subset([outcome.score for outcome in scored], keep, rng)]

    def _subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        raise NotImplementedError


@register_downsampler("random")
class Random(_KeepFew):
    """Any ``keep`` of the rollouts, all subsets being as likely."""

    def _subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return np.sort(_order(len(rewards), rng)[:keep])


@register_downsampler("max_reward")
class MaxReward(_KeepFew):
    """The ``keep`` highest scores; see :func:`max_reward_subset`."""

    def _subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return max_reward_subset(rewards, keep, rng)


@register_downsampler("percentile")
class Percentile(_KeepFew):
    """Scores at ``keep`` evenly spaced percentiles; see :func:`percentile_subset`."""

    def _subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return percentile_subset(rewards, keep, rng)


def max_reward_subset(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Indices, ascending, of the ``keep`` highest rewards.

    Args:
        rewards: (rollouts,), finite.
        keep: at least 1; with no more rewards than that, all.
        rng: chooses among equal rewards (rounded to 1e-12); None takes the first in order.

    Raises:
        ValueError: the shape is wrong, ``keep`` is below 1, or a reward is NaN or infinite.
    """
    ranked = _ranked(rewards, keep, rng)
    return np.sort(ranked[max(0, len(ranked) - keep) :])


def percentile_subset(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Indices, ascending, of the rewards at the percentiles (i + 1/2) / m, i = 0 .. m - 1.

    Of n rewards in rising order those at the places floor(n (i + 1/2) / m): one from the middle of each of m equal
    parts, so that the subset has the distribution of the whole.

    Args and Raises: as :func:`max_reward_subset`.
    """
    ranked = _ranked(rewards, keep, rng)
    if len(ranked) <= keep:
        return np.sort(ranked)
    places = len(ranked) * (2 * np.arange(keep) + 1) // (2 * keep)
    return np.sort(ranked[places])


def _ranked(rewards: Any, keep: int, rng: np.random.Generator | None) -> np.ndarray:
    """Indices by rising reward; of equal ones the first in order comes last, or a random one."""
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards have shape {values.shape}; accepted: (rollouts,)")
    if keep < 1:
        raise ValueError(f"keep={keep}; accepted: 1 or more")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward {values[at]} of rollout {at}; accepted: finite numbers")
    shuffled = _order(len(values), rng)[::-1]
    return shuffled[np.argsort(np.round(values[shuffled], 12), kind="stable")]


def _order(size: int, rng: np.random.Generator | None) -> np.ndarray:
    return np.arange(size) if rng is None else rng.permutation(size)
