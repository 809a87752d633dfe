"""Expected signal: a prompt is offered as often as a group of it is expected to add to the gradient. Derived here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..metric import Metric
from ..registry import register_selector
from ..signal import expected_value
from ..state import check_keys
from ..success_rates import GRID, SuccessRates
from .skipping import Skipping, SkippingSettings


@dataclass(frozen=True)
class ExpectedSignalSettings(SkippingSettings):
    """Settings of expected signal."""

    forget: float = 0.8
    """Weight that a prompt's earlier outcomes keep at each visit, as the policy moves."""
    room: float = 1.0
    """How much less groups of many right answers are worth: by (1 - s / n)^room. 0: failures of nearly solved prompts
    count as much as successes of nearly hopeless ones."""
    cost: Literal["rollouts", "tokens"] = "rollouts"
    """What a prompt's expected signal is divided by: ``rollouts``, nothing, since all groups have as many; ``tokens``,
    the mean length of its answers at its last visit, over that of all prompts."""
    least: float = 0.02
    """Least probability of offering a prompt at its turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.forget <= 1, "allocation.selector.forget", self.forget, "a number in [0, 1]")
        require(0 <= self.room < float("inf"), "allocation.selector.room", self.room, "a finite number of 0 or more")


@register_selector("expected_signal")
class ExpectedSignal(Skipping):
    """The pool's order, in which a prompt is offered at its turn with probability max(least, w / w_max).

    w is what a group of the prompt is expected to add to the gradient, and so to held-out success: E[v(S, k)]
    (:mod:`verl_ext.allocation.signal`) over S ~ Binomial(k, g) and the posterior of the prompt's success rate g; w_max
    is its maximum over g, k is ``group_size``. The posterior's prior is the distribution of success rates in the pool,
    learned from all outcomes so far, hopeless prompts included (:mod:`verl_ext.allocation.success_rates`). So failures
    mean little in a pool where unsolved prompts tend to be solved later, and much in one where they never are. A prompt
    that was never looked at is offered for certain.

    Why in proportion: what a prompt says repeats itself. If its j-th visit is worth w / j, then m visits are worth
    about w log m, and sum_i w_i log m_i under sum_i l_i m_i = L, l_i being what a visit costs, is largest at m_i in
    proportion to w_i / l_i. With ``cost: tokens`` the probability is max(least, min(1, w / w_max x mean(l) / l)).
    """

    Settings = ExpectedSignalSettings

    def __init__(self, settings: ExpectedSignalSettings) -> None:
        super().__init__(settings)
        self._rates = SuccessRates(settings.forget)
        self._lengths: dict[int, float] = {}  # by prompt, with cost: tokens

    def step_budget(self, groups: int, group_size: int, rollouts: int) -> int:
        worth = expected_value(GRID, group_size, self.settings.room)
        self._worth = worth / worth.max()
        return rollouts

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        known = np.array([row in self._rates.counts for row in rows.tolist()])
        signal = self._rates.posterior(rows) @ self._worth
        if self._lengths:
            mean = sum(self._lengths.values()) / len(self._lengths)
            signal *= [mean / self._lengths.get(row, mean) for row in rows.tolist()]
        return np.where(known, np.clip(signal, self.settings.least, 1.0), 1.0)

    def answered(self, prompt_row: int, tokens: Sequence[int]) -> None:
        if self.settings.cost == "tokens" and sum(tokens):
            self._lengths[prompt_row] = sum(tokens) / len(tokens)

    def observe(self, prompt_row: int, successes: int, trials: int, group_size: int) -> None:
        if trials:
            self._rates.observe(prompt_row, successes, trials)

    def end_step(self) -> None:
        super().end_step()
        self._rates.fit()
        self._numbers["hopeless_share"] = float(self._rates.prior[0])

    METRICS = {
        **Skipping.METRICS,
        "hopeless_share": Metric("prompts of the pool that the fitted prior takes for hopeless", "share",
                                 "high: wrong labels, or prompts far too hard"),
    }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """24 bytes a prompt seen, with ``cost: tokens`` 40."""
        rows, lengths = np.array(list(self._lengths), np.int64), np.array(list(self._lengths.values()), np.float64)
        return {"rates": self._rates.state_dict(), "rows": rows, "lengths": lengths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("expected_signal", state, ("rates", "rows", "lengths"))
        self._rates.load_state_dict(state["rates"])
        self._lengths = dict(zip(state["rows"].tolist(), state["lengths"].tolist(), strict=True))
