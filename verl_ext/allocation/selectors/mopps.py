"""MoPPS: a success rate is drawn from each candidate's posterior, and those nearest to one half are offered.

Model Predictive Prompt Selection, a Thompson sampler (official code: github thu-rllab/MoPPS).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...typed_settings import refused, require
from ..metric import Metric
from ..registry import register_selector
from .candidates import CANDIDATES, CandidateSelector, CandidateSettings


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
    initial: str | None = None
    """JSON file of outcomes known before the run (the official initial bandit): a list of 0 and 1 for the key of each
    prompt, see :func:`~verl_ext.allocation.prompt_pool.prompt_key`; prompts that it lacks start from the prior."""
    initial_weight: float = 3.0
    """Weight of each of those outcomes; 3 is the official code's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.forget <= 1, "allocation.selector.forget", self.forget, "a number in [0, 1]")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.selector.{name}", value, "a finite number above 0")
        require(0 <= self.lower <= 1, "allocation.selector.lower", self.lower, "a number in [0, 1]")
        require(self.lower <= self.upper <= 1, "allocation.selector.upper", self.upper,
                f"a number in [lower={self.lower}, 1]")  # fmt: skip
        require(self.initial is None or Path(self.initial).is_file(), "allocation.selector.initial", self.initial,
                "null, or a JSON file that exists")  # fmt: skip
        weight = self.initial_weight
        require(0 <= weight < float("inf"), "allocation.selector.initial_weight", weight,
                "a finite number of 0 or more")  # fmt: skip

    def initial_outcomes(self) -> dict[str, list[int]]:
        """By prompt's key: outcomes known before the run.

        Raises:
            SettingError: the file is not as described; says where.
        """
        if self.initial is None:
            return {}
        expected = "a JSON object of lists of 0 and 1, one for each prompt's key"
        try:
            known = json.loads(Path(self.initial).read_text())
        except (OSError, ValueError) as error:
            raise refused("allocation.selector.initial", self.initial, f"{expected}: {error}") from error
        require(isinstance(known, dict), "allocation.selector.initial", self.initial, expected)
        for key, outcomes in known.items():
            right = isinstance(outcomes, list) and all(type(o) in (int, bool) and o in (0, 1) for o in outcomes)
            require(right, "allocation.selector.initial", self.initial, f"{expected}; {key!r} has {outcomes!r}"[:300])
        return known


@register_selector("mopps")
class Mopps(CandidateSelector):
    """Thompson sampling for difficulty one half.

    At a visit with s successes in n scored rollouts: alpha <- lambda alpha + (1 - lambda) alpha_0 + s, and beta
    likewise with n - s, for every n (the official code replaces the whole update where n = 1).
    """

    Settings = MoppsSettings

    def _start(self, prompts: int) -> None:
        settings = self.settings
        self._alpha = np.full(prompts, settings.alpha)
        self._beta = np.full(prompts, settings.beta)
        known, rows = settings.initial_outcomes(), {key: row for row, key in enumerate(self.pool.keys)}
        found = [key for key in known if key in rows]
        require(not known or bool(found), "allocation.selector.initial", settings.initial,
                f"prompts of this data set; none of its {len(known)} keys is one's: {list(known)[:1]}")  # fmt: skip
        for key in found:
            outcomes, row = known[key], rows[key]
            self._alpha[row] += settings.initial_weight * sum(outcomes)
            self._beta[row] += settings.initial_weight * (len(outcomes) - sum(outcomes))
        self._visited = np.zeros(prompts, bool)

    def _losses(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.beta(self._alpha[rows], self._beta[rows])
        return np.maximum(np.maximum(self.settings.lower - drawn, drawn - self.settings.upper), 0)

    def end_step(self) -> None:
        settings = self.settings
        rows, successes, trials, _ = self._outcomes()
        self._numbers = {"candidates": float(len(self._candidates))}
        if len(rows):
            mean = self._alpha[rows] / (self._alpha[rows] + self._beta[rows])
            self._numbers["rate_predicted"] = float(mean.mean())
            self._numbers["rate_realised"] = float((successes / trials).mean())
        keep, back = settings.forget, 1 - settings.forget
        self._alpha[rows] = keep * self._alpha[rows] + back * settings.alpha + successes
        self._beta[rows] = keep * self._beta[rows] + back * settings.beta + (trials - successes)
        self._visited[rows] = True
        self._numbers["seen_share"] = float(self._visited.mean())

    METRICS = {
        **CANDIDATES,
        "rate_predicted": Metric("predicted success rate of the prompts observed, mean", "rate in [0, 1]",
                                 "near `rate_realised`: calibrated"),
        "rate_realised": Metric("their success rate, mean", "rate in [0, 1]", "near the target, .5"),
    }  # fmt: skip

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
