"""Mean and standard deviation of a group's rewards, for advantages relative to the whole group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .groups import Group


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of the scored rewards of a group."""

    mean: float
    """Mean; NaN for no rewards."""
    std: float
    """Standard deviation with n - 1, as verl's GRPO takes it; exactly 0 where there is no signal."""
    n: int
    """Number of rewards."""

    def advantage(self, reward: float, divide_by_std: bool = True, epsilon: float = 1e-6) -> float:
        """(r - mean) / (std + epsilon), or r - mean; exactly 0 where there is no signal (GRPO, Dr. GRPO)."""
        if self.std == 0:
            return 0.0
        return (reward - self.mean) / (self.std + epsilon) if divide_by_std else reward - self.mean


def reward_statistics(rewards: Iterable[float]) -> GroupStatistics:
    """Mean and sample standard deviation: std^2 = sum (r - mean)^2 / (n - 1), summed without rounding error.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    values = [float(reward) for reward in rewards]
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"reward {wrong[0]}; accepted: finite numbers")
    n = len(values)
    if n == 0:
        return GroupStatistics(math.nan, 0.0, 0)
    if min(values) == max(values):  # float residue must not make a saturated group look alive
        return GroupStatistics(values[0], 0.0, n)
    mean = math.fsum(values) / n
    return GroupStatistics(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)), n)


def group_statistics(group: Group, tolerance: float = 0.0) -> GroupStatistics:
    """:func:`reward_statistics` over the scores of all scored rollouts, those that never reach the update included.

    The deviation of a saturated group is exactly 0: outcomes of one kind, scores spread over ``tolerance`` at most.
    """
    found = reward_statistics(outcome.score for outcome in group.outcomes if outcome.score is not None)
    if group.mixed or group.spread > tolerance:
        return found
    return GroupStatistics(found.mean, 0.0, found.n)


def normalised_over(allocator: Any, downsampler: Any) -> str:
    """``group`` if ``normalise_over`` of the allocator or of the down-sampler says so, else ``selected``."""
    settings = (allocator.settings, downsampler.settings)
    return "group" if any(getattr(part, "normalise_over", "selected") == "group" for part in settings) else "selected"
