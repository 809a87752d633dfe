"""Marginal signal: each further rollout goes where it is expected to add most to the policy gradient. Derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..groups import Group, Request, Verdict
from ..metric import SIZES, Metric
from ..registry import register_allocator
from ..rule_settings import require
from ..signal import expected_values, hull_gains
from ..success_rates import SuccessRates
from .allocator import Allocator, AllocatorSettings
from .greedy import largest_gains


@dataclass(frozen=True)
class MarginalSignalSettings(AllocatorSettings):
    """Settings of marginal signal.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts. Many prompts with few rollouts each do best: 4 a prompt rather than 8.
    """

    pilot: int | Literal["auto"] = "auto"
    """Rollouts of every prompt in the first round; auto: 2, or half of ``group_size`` where that is more."""
    most: int | Literal["auto"] = "auto"
    """Most rollouts of a prompt; auto: 32, or four times ``group_size`` where that is more."""
    waves: int = 4
    """Rounds of a step, pilots included: each gives out half of what is left, the last one all of it. Fewer are faster,
    more know more of what they decide on."""
    forget: float = 0.5
    """Weight that a prompt's earlier outcomes keep at each visit, as the policy moves."""
    room: float = 2.0
    """How much less groups of many right answers are worth: by (1 - s / n)^room. 0: failures of nearly solved prompts
    count as much as successes of nearly hopeless ones."""
    depth: float = 0.5
    """How fast a prompt's value falls with the size of its gradient, u / (1 + depth u). 0: as if its rollouts were as
    different from each other as those of different prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("pilot", max(2, self.group_size // 2))
        self.resolve("most", max(32, 4 * self.group_size))
        require(1 <= self.pilot <= self.group_size, "allocator.pilot", self.pilot,
                f"auto, or an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(self.most >= self.group_size, "allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip
        require(self.waves >= 2, "allocator.waves", self.waves, "an integer of 2 or more: pilots, and the rest")
        require(0 <= self.forget <= 1, "allocator.forget", self.forget, "a number in [0, 1]")
        for name in ("room", "depth"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"allocator.{name}", value, "a finite number of 0 or more")


@register_allocator("marginal_signal")
class MarginalSignal(Allocator):
    """Pilots of ``stop.groups`` prompts, then waves of rollouts by expected gain; mixed groups are trained on.

    The value of a group with s right answers in n, v(s, n), is its expected contribution to the gradient, weighted by
    what it is worth: see :mod:`verl_ext.allocation.signal`. Of m further rollouts a prompt is expected to gain

        E_g[v(s + X, n + m)] - v(s, n),      X ~ Binomial(m, g),

    over the posterior of its success rate g. Its prior is the distribution of success rates in the pool, learned from
    all outcomes so far, hopeless prompts included (:mod:`verl_ext.allocation.success_rates`); the prompt's own outcomes
    of earlier visits count, too, discounted by ``forget``. So failures of a pilot mean little in a pool where unsolved
    prompts tend to be solved later, and much in one where they never are, and no setting has to say which it is.

    A wave's rollouts are the largest slopes of these gains' concave majorants.
    """

    Settings = MarginalSignalSettings

    def __init__(self, settings: MarginalSignalSettings) -> None:
        super().__init__(settings)
        self._rates = SuccessRates(settings.forget)

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def least_rounds(self) -> int:
        return 2

    @property
    def needs_rounds(self) -> str | None:
        return "a wave is divided over all prompts at once"

    def ask(self, ctx) -> list[Request]:
        settings = self.settings
        if ctx.round == 1:
            groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // settings.pilot))
            return [ctx.request(group, settings.pilot) for group in groups]
        waves = min(settings.waves, ctx.max_rounds)
        groups = [group for group in ctx.groups if group.verdict is Verdict.CONTINUE]
        if ctx.round > waves or not groups:
            return []
        left = len(ctx.groups) * self.group_size - sum(group.requested for group in ctx.groups)
        left = min(left, ctx.budget_left)
        counts = largest_gains(self._gains(groups), left if ctx.round == waves else (left + 1) // 2, ctx.rng)
        return [ctx.request(group, n) for group, n in zip(groups, counts.tolist(), strict=True) if n]

    def _gains(self, groups: list[Group]) -> np.ndarray:
        """(groups, most): what each further rollout adds; -inf beyond the largest group."""
        settings = self.settings
        successes, trials = (np.array([getattr(group, name) for group in groups]) for name in ("successes", "trials"))
        posterior = self._rates.posterior([group.prompt for group in groups], successes, trials)
        ahead = expected_values(settings.most, settings.room, settings.depth)[:, successes, trials]
        gains = hull_gains(np.einsum("mgj,gj->gm", ahead, posterior))
        room = settings.most - np.array([group.requested for group in groups])
        gains[np.arange(settings.most) >= room[:, None]] = -np.inf
        return gains

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            if group.verdict is not Verdict.CONTINUE:
                continue
            group.verdict = Verdict.COMMIT if group.mixed else Verdict.ABANDON
            self._rates.observe(group.prompt, group.successes, group.trials)
        self._rates.fit()
        sizes = [group.requested for group in ctx.groups] or [0]
        self._numbers = {
            "hopeless_share": float(self._rates.prior[0]),
            "largest_group": float(max(sizes)),
            "smallest_group": float(min(sizes)),
        }
        return [group for group in ctx.groups if group.verdict is Verdict.COMMIT]

    METRICS = {
        "hopeless_share": Metric("prompts of the pool that the fitted prior takes for hopeless", "share"),
        **SIZES,
    }

    def state_dict(self) -> dict[str, Any]:
        return self._rates.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state_dict(state)
