"""VIP: a step's rollouts divided over its prompts so that the variance of the gradient is least.

"Adaptive Rollout Allocation for Online Reinforcement Learning with Verifiable Rewards", arXiv 2602.01601. The paper
predicts success rates by a Gaussian process over embeddings of the prompts; here they come from a prompt's own past.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..groups import Group
from ..metric import SIZES, Metric
from ..registry import register_allocator
from .allocator import AllocatorSettings
from .divided import Divided
from .greedy import largest_gains


@dataclass(frozen=True)
class VipSettings(AllocatorSettings):
    """Settings of VIP.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts exactly, so a batch has no more rows than one of equal groups, but a single group may have ``most``.
    """

    least: int | Literal["auto"] = "auto"
    """Least rollouts of a prompt; auto: 3, or ``group_size`` where it is smaller."""
    most: int | Literal["auto"] = "auto"
    """Most rollouts of a prompt; auto: four times ``group_size``."""
    estimator: Literal["rloo", "dr_grpo"] = "rloo"
    """Whose gradient's variance is minimised: p (1 - p) / (n - 1) with ``rloo``, p (1 - p) (n - 1) / n^2 with
    ``dr_grpo``; see :func:`vip_allocation`. The two differ by little."""
    forget: float = 0.5
    """Weight that a prompt's earlier outcomes keep at each visit; 1: all of it. Policies move."""
    alpha: float = 1.0
    """Prior pseudo-count of successes."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("least", min(3, self.group_size))
        self.resolve("most", 4 * self.group_size)
        first = 2 if self.estimator == "rloo" or self.group_size == 2 else 3
        require(first <= self.least <= self.group_size, "allocation.allocator.least", self.least,
                f"auto, or an integer in [{first}, group_size={self.group_size}] with {self.estimator}")  # fmt: skip
        require(self.most >= self.group_size, "allocation.allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip
        require(0 <= self.forget <= 1, "allocation.allocator.forget", self.forget, "a number in [0, 1]")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.allocator.{name}", value, "a finite number above 0")


@register_allocator("vip")
class Vip(Divided):
    """One round; every group is trained on.

    A prompt's success rate is predicted by the mean of its posterior, (alpha + S) / (alpha + beta + N), with
    S <- forget S + successes and N <- forget N + trials at each visit. Prompts never seen have that of the prior.
    """

    Settings = VipSettings
    numbers = 2  # discounted successes and trials

    def divide(self, prompts: list[int], total: int, rng: np.random.Generator) -> np.ndarray:
        settings = self.settings
        self._predicted = np.array([self._rate(prompt) for prompt in prompts])
        self._numbers = {"known_share": float(np.mean([prompt in self._seen for prompt in prompts]))}
        return vip_allocation(self._predicted, total, settings.least, settings.most, settings.estimator, rng)

    def finish(self, ctx) -> list[Group]:
        predicted = self._predicted if ctx.groups else ()
        errors = [(g.successes / g.trials - p) ** 2 for g, p in zip(ctx.groups, predicted, strict=True) if g.trials]
        if errors:
            self._numbers["rate_error"] = float(np.sqrt(np.mean(errors)))
        return super().finish(ctx)

    def learn(self, group: Group) -> None:
        successes, trials = self._seen.get(group.prompt, (0.0, 0.0))
        forget = self.settings.forget
        self._seen[group.prompt] = forget * successes + group.successes, forget * trials + group.trials

    METRICS = {
        "known_share": Metric("the step's prompts that were seen before", "share", "0 in the first epoch"),
        "rate_error": Metric("root mean square of predicted less realised success rate", "rate in [0, 1]",
                             "below .3 the prediction says something"),
        **SIZES,
    }  # fmt: skip

    def _rate(self, prompt: int) -> float:
        successes, trials = self._seen.get(prompt, (0.0, 0.0))
        return (self.settings.alpha + successes) / (self.settings.alpha + self.settings.beta + trials)


def vip_allocation(
    success_rates: Any,
    total: int,
    least: int,
    most: int,
    estimator: str = "rloo",
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Rollouts of each prompt that minimise the summed variance of the prompts' gradients (VIP).

    With a score of variance sigma^2, the same for all prompts, n rollouts of a prompt with success rate p give a
    gradient of variance 4 sigma^2 p (1 - p) f(n), f(n) = 1 / (n - 1) for RLOO and (n - 1) / n^2 for Dr. GRPO. Without
    bounds the first is least at n - 1 in proportion to sqrt(p (1 - p)). f is convex (the second from n = 3 on), so the
    integer optimum under the bounds is found by giving each further rollout to where the variance falls most.

    Args:
        success_rates: (prompts,), in [0, 1].
        total: rollouts to divide; at least prompts x least and at most prompts x most.
        least: 2 or more.
        rng: orders prompts of equal gain (rounded to 1e-12); None: by position.

    Returns:
        int64 (prompts,), summing to ``total``.

    Raises:
        ValueError: ``total`` cannot be divided so, or a rate is outside [0, 1].
    """
    p = np.asarray(success_rates, np.float64)
    if not len(p) * least <= total <= len(p) * most:
        raise ValueError(f"total={total}; accepted: {len(p)} prompts x least={least} to x most={most}")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("success_rates; accepted: numbers in [0, 1]")
    n = np.arange(least, most + 1, dtype=np.float64)
    f = 1 / (n - 1) if estimator == "rloo" else (n - 1) / n**2
    gains = (p * (1 - p))[:, None] * (f[:-1] - f[1:])
    return least + largest_gains(gains, total - len(p) * least, rng)
