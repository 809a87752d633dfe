"""MoPPS: a success rate is drawn from each candidate's posterior, and those nearest to one half are offered.

Model Predictive Prompt Selection, a Thompson sampler (official code: github thu-rllab/MoPPS).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..registry import register_selector
from ..settings import require
from .candidates import CandidateSelector, CandidateSettings


@dataclass(frozen=True)
class MoppsSettings(CandidateSettings):
    """Settings of MoPPS."""

    forget: float = 1.0
    """lambda, weight that a prompt's counts keep at each visit; what they lose goes back to the prior. 1 is the
    paper's; .8 and less follow a policy that moves (the paper has .5 for Countdown)."""
    alpha: float = 1.0
    """Prior pseudo-count of successes."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""
    lower: float = 0.5
    """Draws between ``lower`` and ``upper`` are equally good, others the better the nearer. Both .5: those nearest to
    one half; .3 and .7: the paper's threshold."""
    upper: float = 0.5
    """See ``lower``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.forget <= 1, "selector.forget", self.forget, "a number in [0, 1]")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"selector.{name}", value, "a finite number above 0")
        require(0 <= self.lower <= 1, "selector.lower", self.lower, "a number in [0, 1]")
        require(self.lower <= self.upper <= 1, "selector.upper", self.upper, f"a number in [lower={self.lower}, 1]")


@register_selector("mopps")
class Mopps(CandidateSelector):
    """Thompson sampling for difficulty one half.

    At a visit with s successes in n scored rollouts: alpha <- lambda alpha + (1 - lambda) alpha_0 + s, and beta
    likewise with n - s, for every n (the official code replaces the whole update where n = 1).
    """

    Settings = MoppsSettings

    def _start(self, prompts: int) -> None:
        self._alpha = np.full(prompts, self.settings.alpha)
        self._beta = np.full(prompts, self.settings.beta)
        self._visited = np.zeros(prompts, bool)

    def _losses(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.beta(self._alpha[rows], self._beta[rows])
        return np.maximum(np.maximum(self.settings.lower - drawn, drawn - self.settings.upper), 0)

    def end_step(self) -> None:
        settings = self.settings
        rows, successes, trials, _ = self._outcomes()
        self._numbers = {"candidates": float(self._drawn)}
        if len(rows):
            mean = self._alpha[rows] / (self._alpha[rows] + self._beta[rows])
            self._numbers["rate_predicted"] = float(mean.mean())
            self._numbers["rate_realised"] = float((successes / trials).mean())
        keep, back = settings.forget, 1 - settings.forget
        self._alpha[rows] = keep * self._alpha[rows] + back * settings.alpha + successes
        self._beta[rows] = keep * self._beta[rows] + back * settings.beta + (trials - successes)
        self._visited[rows] = True
        self._numbers["seen_share"] = float(self._visited.mean())

    def metrics(self) -> dict[str, float]:
        """``rate_predicted`` and ``rate_realised``: mean success rate of the prompts observed in the step."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        """17 bytes a prompt."""
        if not self._prompts:
            return {"prompts": 0}
        return {
            "prompts": self._prompts,
            "alpha": self._alpha.copy(),
            "beta": self._beta.copy(),
            "visited": self._visited.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load_arrays("mopps", state, ("alpha", "beta", "visited"))
