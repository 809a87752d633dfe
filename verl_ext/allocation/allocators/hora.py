"""HORA: a pilot of every prompt, then each rollout where a first right answer is likeliest to come of it.

"Where to Spend Rollouts: Hit-Utility Optimal Rollout Allocation for Group-Based RLVR", arXiv 2605.07114.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import betaln

from ...typed_settings import require
from ..groups import Group, Request, Verdict
from ..metric import SIZES, Metric
from ..registry import register_allocator
from .allocator import Allocator, AllocatorSettings
from .greedy import largest_gains


@dataclass(frozen=True)
class HoraSettings(AllocatorSettings):
    """Settings of HORA.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts, so a batch has no more rows than one of equal groups, but a single group may have ``most``.
    """

    pilot: int | Literal["auto"] = "auto"
    """Rollouts of every prompt in the first round; auto: a quarter of ``group_size``."""
    most: int | Literal["auto"] = "auto"
    """Most rollouts of a prompt; auto: four times ``group_size``, so that storage can be planned. Rarely reached: what
    a further rollout is worth falls with the square of their number."""
    alpha: float = 1.0
    """Prior pseudo-count of successes. 1 and 1 is the uniform prior, as published."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("pilot", max(1, self.group_size // 4))
        self.resolve("most", 4 * self.group_size)
        require(1 <= self.pilot <= self.group_size, "allocation.allocator.pilot", self.pilot,
                f"auto, or an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(self.most >= self.group_size, "allocation.allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.allocator.{name}", value, "a finite number above 0")


@register_allocator("hora")
class Hora(Allocator):
    """Two rounds: pilots, then the rest of the budget by marginal hit utility. Every group is trained on."""

    Settings = HoraSettings

    def __init__(self, settings: HoraSettings) -> None:
        super().__init__(settings)

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def least_rounds(self) -> int:
        return 2

    @property
    def needs_rounds(self) -> str | None:
        return "what is left after the pilots is divided over all prompts at once"

    def ask(self, ctx) -> list[Request]:
        settings = self.settings
        if ctx.round == 1:
            groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // settings.pilot))
            return [ctx.request(group, settings.pilot) for group in groups]
        if ctx.round > 2:
            return []
        going = [group for group in ctx.groups if group.verdict is Verdict.CONTINUE]  # not given up
        if not going:
            return []
        left = min(ctx.budget_left, len(going) * (self.group_size - settings.pilot))
        counts = np.array([(group.successes, group.trials) for group in going]).reshape(-1, 2)
        more = hora_allocation(
            counts[:, 0], counts[:, 1], left, settings.most - settings.pilot, settings.alpha, settings.beta, ctx.rng
        )
        self._numbers = {
            "unsolved_share": float((counts[:, 0] == 0).mean()),
            "largest_group": float(settings.pilot + more.max()),
            "smallest_group": float(settings.pilot + more.min()),
        }
        return [ctx.request(group, n) for group, n in zip(going, more.tolist(), strict=True) if n]

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            group.verdict = Verdict.COMMIT
        return list(ctx.groups)

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
