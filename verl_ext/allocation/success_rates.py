"""Success rates of a pool of prompts, with the prior learned from the pool's own outcomes (empirical Bayes).

The prior is a distribution over a fixed grid of success rates, its ends 0 and 1 included, fitted to all prompts seen so
far by expectation maximisation: the nonparametric maximum likelihood of a mixture of binomials (Laird 1978; derived
here for discounted counts). Where many prompts never succeed it puts weight on 0, and failures make a prompt hopeless
soon; where those that failed at first tend to succeed later it does not, and they stay worth trying.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .state import check_keys

_LOGITS = np.linspace(-6.0, 4.5, 22)
GRID = np.concatenate([[0.0], 1 / (1 + np.exp(-_LOGITS)), [1.0]])
"""Success rates that a prompt may have, (24,), rising."""
_FLOOR = 1e-3  # least share of a grid point, so that none is ruled out for good
_MOST = 4096  # prompts that the prior is fitted to: the latest ones


class SuccessRates:
    """Counts by prompt, and the posterior of its success rate.

    A visit's outcomes enter with weight 1. At every further visit the older ones keep ``forget`` of theirs: the policy
    moves.
    """

    def __init__(self, forget: float) -> None:
        self.forget = forget
        self.counts: dict[int, tuple[float, float]] = {}
        """By row of the pool, in order of the last visit: discounted successes and trials."""
        self.prior = np.full(len(GRID), 1 / len(GRID))
        """(24,), shares of the grid's success rates among the prompts."""

    def observe(self, row: int, successes: int, trials: int) -> None:
        """Enter the outcomes of one visit."""
        s, n = self.counts.pop(row, (0.0, 0.0))
        self.counts[row] = (self.forget * s + successes, self.forget * n + trials)

    def fit(self, rounds: int = 5) -> None:
        """A few rounds of expectation maximisation, from where the last ones ended."""
        if not self.counts:
            return
        counts = np.array(list(self.counts.values())[-_MOST:])
        likelihood = np.exp(log_likelihood(counts[:, 0], counts[:, 1]))
        for _ in range(rounds):
            joint = likelihood * self.prior
            self.prior = (joint / joint.sum(1, keepdims=True)).mean(0)
            self.prior = np.maximum(self.prior, _FLOOR)
            self.prior /= self.prior.sum()

    def posterior(self, rows: np.ndarray, successes: Any = 0, trials: Any = 0) -> np.ndarray:
        """(rows, 24), of prompts with these outcomes in the current visit besides their earlier ones."""
        known = np.array([self.counts.get(int(row), (0.0, 0.0)) for row in rows]).reshape(-1, 2)
        log = log_likelihood(self.forget * known[:, 0] + successes, self.forget * known[:, 1] + trials)
        weights = np.exp(log - log.max(1, keepdims=True)) * self.prior
        return weights / weights.sum(1, keepdims=True)

    def state_dict(self) -> dict[str, Any]:
        """Counts and prior."""
        return {
            "rows": np.array(list(self.counts), np.int64),
            "counts": np.array(list(self.counts.values()), np.float64).reshape(-1, 2),
            "prior": self.prior.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        check_keys(type(self).__name__, state, ("rows", "counts", "prior"))
        pairs = zip(state["rows"].tolist(), state["counts"].tolist(), strict=True)
        self.counts = {row: (s, n) for row, (s, n) in pairs}
        self.prior = np.array(state["prior"], np.float64)


def log_likelihood(successes: Any, trials: Any) -> np.ndarray:
    """(prompts, 24): s log g + (n - s) log(1 - g) over the grid, -inf where the outcomes rule a rate out."""
    s, n = np.asarray(successes, np.float64)[..., None], np.asarray(trials, np.float64)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        right, wrong = np.log(GRID), np.log1p(-GRID)
        return np.where(s > 0, s * right, 0.0) + np.where(n - s > 0, (n - s) * wrong, 0.0)
