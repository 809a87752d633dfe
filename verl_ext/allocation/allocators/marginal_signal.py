"""Marginal signal: each further rollout goes where it is expected to add most to the policy gradient. Derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..groups import Group, Verdict
from ..metric import SIZES, Metric
from ..registry import register_allocator
from ..signal import expected_values, hull_gains
from ..success_rates import SuccessRates
from .piloted import Piloted, PilotedSettings


@dataclass(frozen=True)
class MarginalSignalSettings(PilotedSettings):
    """Settings of marginal signal. The pilot is 2, or half of ``group_size`` where that is more; ``most`` is 32, or
    four times ``group_size`` where that is more. Many prompts with few rollouts each do best: 4 a prompt rather than 8.
    """

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

    cost: Literal["rollouts", "tokens"] = "rollouts"
    """What a gain is divided by: ``rollouts``, nothing; ``tokens``, the length that the prompt's answers of this step
    have on average. A step has as many rollouts in either case, of fewer tokens with ``tokens``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose(max(2, self.group_size // 2), max(32, 4 * self.group_size))
        require(self.waves >= 2, "allocation.allocator.waves", self.waves,
                "an integer of 2 or more: pilots, and the rest")  # fmt: skip
        require(0 <= self.forget <= 1, "allocation.allocator.forget", self.forget, "a number in [0, 1]")
        for name in ("room", "depth"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"allocation.allocator.{name}", value, "a finite number of 0 or more")


@register_allocator("marginal_signal")
class MarginalSignal(Piloted):
    """Pilots of ``stop.groups`` prompts, then waves of rollouts by expected gain; every group is trained on.

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
    def waves(self) -> int:
        return self.settings.waves

    def gains(self, groups: list[Group], most: int) -> np.ndarray:
        settings = self.settings
        successes, trials = (np.array([getattr(group, name) for group in groups]) for name in ("successes", "trials"))
        posterior = self._rates.posterior([group.prompt for group in groups], successes, trials)
        ahead = expected_values(most, settings.room, settings.depth)[:, successes, trials]
        gains = hull_gains(np.einsum("mgj,gj->gm", ahead, posterior))
        return gains / _lengths(groups)[:, None] if settings.cost == "tokens" else gains

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            if group.verdict is Verdict.CONTINUE:  # not given up
                self._rates.observe(group.prompt, group.successes, group.trials)
        self._rates.fit()
        self._numbers = {"hopeless_share": float(self._rates.prior[0])}
        return super().finish(ctx)

    METRICS = {
        "hopeless_share": Metric("prompts of the pool that the fitted prior takes for hopeless", "share",
                                 "high: wrong labels, or prompts far too hard"),
        **SIZES,
    }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self._rates.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state_dict(state)


def _lengths(groups: list[Group]) -> np.ndarray:
    """(groups,), mean tokens of each group's answers over those of all, with one answer of the mean length added."""
    tokens, answers = (np.array(x, float) for x in zip(*(_measure(group) for group in groups), strict=True))
    mean = max(1.0, tokens.sum() / max(1.0, answers.sum()))
    return (tokens / mean + 1) / (answers + 1)


def _measure(group: Group) -> tuple[int, int]:
    return sum(outcome.response_tokens for outcome in group.outcomes), len(group.outcomes)
