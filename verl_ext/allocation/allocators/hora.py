"""HORA: a pilot of every prompt, then each rollout where a first right answer is likeliest to come of it.

"Where to Spend Rollouts: Hit-Utility Optimal Rollout Allocation for Group-Based RLVR", arXiv 2605.07114.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaln

from ...typed_settings import require
from ..groups import Group
from ..metric import SIZES, Metric
from ..registry import register_allocator
from .greedy import largest_gains
from .piloted import Piloted, PilotedSettings


@dataclass(frozen=True)
class HoraSettings(PilotedSettings):
    """Settings of HORA. The pilot is a quarter of ``group_size``; ``most``, four times it, is rarely reached: what a
    further rollout is worth falls with the square of their number."""

    alpha: float = 1.0
    """Prior pseudo-count of successes. 1 and 1 is the uniform prior, as published."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose(max(1, self.group_size // 4), 4 * self.group_size)
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.allocator.{name}", value, "a finite number above 0")


@register_allocator("hora")
class Hora(Piloted):
    """Two rounds: pilots, then the rest of the budget by marginal hit utility, see :func:`hora_allocation`."""

    Settings = HoraSettings

    def gains(self, groups: list[Group], most: int) -> np.ndarray:
        s, n = np.array([(group.successes, group.trials) for group in groups]).T
        self._numbers = {"unsolved_share": float((s == 0).mean())}
        return hit_gains(self.settings.alpha + s, self.settings.beta + n - s, most)

    METRICS = {
        "unsolved_share": Metric("prompts without a right answer in their pilot", "share", "near 1: too hard"),
        **SIZES,
    }


def hora_allocation(
    successes: Any,
    trials: Any,
    total: int,
    most: int,
    alpha: float = 1.0,
    beta: float = 1.0,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Further rollouts of each prompt that maximise the summed hit utility (HORA).

    After s successes in n rollouts gamma ~ Beta(a, b), a = alpha + s, b = beta + n - s. The hit utility of m further
    rollouts is the probability that one of them is right, H(m) = 1 - E[(1 - gamma)^m] = 1 - B(a, b + m) / B(a, b), and
    the m-th adds E[gamma (1 - gamma)^(m - 1)] = B(a + 1, b + m - 1) / B(a, b), which falls with m: taking the
    largest first is exact.

    Args:
        successes, trials: (prompts,), scored outcomes.
        total: rollouts to divide; what exceeds prompts x ``most`` is left over.
        most: most further rollouts of a prompt.
        rng: orders prompts of equal gain (rounded to 1e-12); None: by position.

    Returns:
        int64 (prompts,).

    Raises:
        ValueError: not 0 <= successes <= trials everywhere.
    """
    s, n = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    if (s < 0).any() or (s > n).any():
        raise ValueError("successes and trials; accepted: 0 <= successes <= trials")
    return largest_gains(hit_gains(alpha + s, beta + n - s, most), total, rng)


def hit_gains(a: np.ndarray, b: np.ndarray, most: int) -> np.ndarray:
    """(prompts, most): B(a + 1, b + m - 1) / B(a, b) for m = 1 .. most, see :func:`hora_allocation`."""
    a, b, m = a[:, None], b[:, None], np.arange(1, most + 1)
    return np.exp(betaln(a + 1, b + m - 1) - betaln(a, b))
