"""VIP: a step's rollouts divided over its prompts so that the variance of the gradient is least.

"Adaptive Rollout Allocation for Online Reinforcement Learning with Verifiable Rewards", arXiv 2602.01601. The paper
predicts success rates by a Gaussian process over embeddings of the prompts; here they come from a prompt's own past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..groups import Group, Request, Verdict
from ..metric import SIZES, Metric
from ..registry import register_allocator
from ..rule_settings import require
from ..state import check_keys
from .allocator import Allocator, AllocatorSettings
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
        require(first <= self.least <= self.group_size, "allocator.least", self.least,
                f"auto, or an integer in [{first}, group_size={self.group_size}] with {self.estimator}")  # fmt: skip
        require(self.most >= self.group_size, "allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip
        require(0 <= self.forget <= 1, "allocator.forget", self.forget, "a number in [0, 1]")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocator.{name}", value, "a finite number above 0")


@register_allocator("vip")
class Vip(Allocator):
    """One round; every group is trained on.

    A prompt's success rate is predicted by the mean of its posterior, (alpha + S) / (alpha + beta + N), with
    S <- forget S + successes and N <- forget N + trials at each visit. Prompts never seen have that of the prior.
    """

    Settings = VipSettings

    def __init__(self, settings: VipSettings) -> None:
        super().__init__(settings)
        self._seen: dict[int, tuple[float, float]] = {}  # by prompt: discounted successes and trials

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def needs_rounds(self) -> None:
        return None  # everything is asked for at once

    def ask(self, ctx) -> list[Request]:
        if ctx.round > 1:
            return []
        settings = self.settings
        groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // settings.least))
        if not groups:
            return []
        total = min(ctx.budget_left, len(groups) * self.group_size)
        self._predicted = np.array([self._rate(group.prompt) for group in groups])
        sizes = vip_allocation(self._predicted, total, settings.least, settings.most, settings.estimator, ctx.rng)
        self._numbers = {
            "known_share": float(np.mean([group.prompt in self._seen for group in groups])),
            "largest_group": float(sizes.max()),
            "smallest_group": float(sizes.min()),
        }
        return [ctx.request(group, n) for group, n in zip(groups, sizes.tolist(), strict=True)]

    def finish(self, ctx) -> list[Group]:
        forget, errors = self.settings.forget, []
        for group, predicted in zip(ctx.groups, self._predicted if ctx.groups else (), strict=True):
            group.verdict = Verdict.COMMIT
            if group.trials:
                errors.append((group.successes / group.trials - predicted) ** 2)
                successes, trials = self._seen.get(group.prompt, (0.0, 0.0))
                self._seen[group.prompt] = forget * successes + group.successes, forget * trials + group.trials
        if errors:
            self._numbers["rate_error"] = float(np.sqrt(np.mean(errors)))
        return list(ctx.groups)

    METRICS = {
        "known_share": Metric("the step's prompts that were seen before", "share", "0 in the first epoch"),
        "rate_error": Metric("root mean square of predicted less realised success rate", "rate in [0, 1]",
                             "below .3 the prediction says something"),
        **SIZES,
    }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """24 bytes a prompt seen."""
        counts = np.array(list(self._seen.values()), np.float64).reshape(-1, 2)
        return {"prompts": np.array(list(self._seen), np.int64), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("vip", state, ("prompts", "counts"))
        prompts, counts = np.asarray(state["prompts"]).tolist(), np.asarray(state["counts"]).tolist()
        self._seen = {prompt: (s, n) for prompt, (s, n) in zip(prompts, counts, strict=True)}

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
