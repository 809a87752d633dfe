"""DPS: a three-state hidden Markov model of each prompt predicts which will be mixed.

"Dynamics-Predictive Sampling", arXiv 2603.10887. States: 0 all failed, 1 mixed, 2 all passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import entr

from ...typed_settings import require
from ..metric import Metric
from ..registry import register_selector
from .candidates import CANDIDATES, CandidateSelector, CandidateSettings

MIXED = 1


def predict(counts: np.ndarray, state: np.ndarray) -> np.ndarray:
    """pi' = P pi with P = A / column sums: the distribution of the next state.

    Args:
        counts: A, shape (3, 3, M): weight of transitions to the first index from the second.
        state: pi, shape (3, M).
    """
    weight = state / counts.sum(axis=0)
    return (counts * weight).sum(axis=1)


def condition(counts: np.ndarray, state: np.ndarray, likelihood: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next state and the transition into it, given an observation: one step of the forward filter.

    xi_ij = e_i P_ij pi_j / sum;   pi_i = sum_j xi_ij

    An observation that is impossible under A (``prior: local``) is believed all the same: xi_ij = e_i pi_j / sum.

    Args:
        counts: A, (3, 3, M).
        state: pi before, (3, M).
        likelihood: e, (3, M): probability of the observation in each state.

    Returns:
        pi, (3, M), and xi, (3, 3, M).
    """
    joint = likelihood[:, None] * counts * (state / counts.sum(axis=0))
    impossible = joint.sum(axis=(0, 1)) == 0
    if impossible.any():
        joint[:, :, impossible] = (likelihood[:, None] * state)[:, :, impossible]
    joint /= joint.sum(axis=(0, 1))
    return joint.sum(axis=1), joint


def likelihood(successes: np.ndarray, trials: np.ndarray, group_size: np.ndarray, soft: bool) -> np.ndarray:
    """e, (3, M): how probable each state makes the outcomes, up to a factor.

    One-hot, but for a pure prefix of n < k rollouts with ``soft``: a mixed group of k, its number of successes uniform
    on 1 .. k - 1, begins with n alike with probability (k - n) / ((n + 1)(k - 1)).
    """
    none, every = successes == 0, successes == trials
    one_hot = np.stack([none, ~none & ~every, every]).astype(np.float64)
    if soft:
        short = (none | every) & (trials < group_size)
        n, k = trials[short], group_size[short]
        one_hot[MIXED, short] = (k - n) / ((n + 1) * (k - 1))
    return one_hot


@dataclass(frozen=True)
class DpsSettings(CandidateSettings):
    """Settings of DPS."""

    candidates: int = 32
    """Candidates drawn at a time, in units of the batch (``stop.groups``). 32 is the paper's for mathematics."""
    forget: float = 0.7
    """lambda, weight that a prompt's transition counts keep each step; what they lose goes back to the prior. .95 is
    better once nothing moves, and worse while learning."""
    prior: float | Literal["progress", "stability", "local"] = 1.0
    """Prior weights of the transitions: a number for all of them, or one of the official code's: ``progress`` (1, and
    .5 to a worse state), ``stability`` (1, and .5 to another state), ``local`` (1, and 0 between all failed and all
    passed)."""
    start: Literal["uniform", "failed", "mixed", "passed"] = "uniform"
    """State of a prompt that has not been a candidate yet, which its first prediction is, too."""
    entropy: float = 0.0
    """Weight of the entropy of the predicted state in a candidate's score (the official ``topk+entropy``): above 0,
    prompts of which little is known are preferred."""
    censored: Literal["hard", "soft"] = "hard"
    """What an abandoned prefix says, e.g. 4 of 4 failed where the group has 8: ``hard``: the group would have failed;
    ``soft``: that weighed with the chance that it would have become mixed, by the prefix's length. Hard labels learn
    faster, soft ones keep falsely abandoned prompts alive where the policy hardly moves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.forget <= 1, "allocation.selector.forget", self.forget, "a number in [0, 1]")
        require(isinstance(self.prior, str) or 0 < self.prior < float("inf"), "allocation.selector.prior", self.prior,
                "a finite number above 0, progress, stability, or local")  # fmt: skip
        require(0 <= self.entropy < float("inf"), "allocation.selector.entropy", self.entropy,
                "a finite number of 0 or more")  # fmt: skip

    def prior_counts(self) -> np.ndarray:
        """A_0, (3, 3, 1): to the first index from the second."""
        to, of = np.indices((3, 3))
        if self.prior == "progress":
            return np.where(to < of, 0.5, 1.0)[:, :, None]
        if self.prior == "stability":
            return np.where(to != of, 0.5, 1.0)[:, :, None]
        if self.prior == "local":
            return np.where(abs(to - of) == 2, 0.0, 1.0)[:, :, None]
        return np.full((3, 3, 1), float(self.prior))


@register_selector("dps")
class Dps(CandidateSelector):
    """Offers the candidates most likely to be mixed, by pi'_mixed + w H(pi') with pi' = P pi and w = ``entropy``.

    Each step, for every prompt: A <- lambda A + (1 - lambda) A_0, plus the transition seen if it was observed;
    pi <- the state seen, or P pi. A prompt that has never been a candidate stays as it starts. What is unscorable is
    unobserved. After about 40 steps without observation, predictions agree to within rounding: they are rounded, and
    such ties broken by the seed.
    """

    Settings = DpsSettings

    def _start(self, prompts: int) -> None:
        start = self.settings.start
        first = np.full(3, 1 / 3) if start == "uniform" else np.eye(3)[("failed", "mixed", "passed").index(start)]
        self._counts = np.tile(self.settings.prior_counts(), (1, 1, prompts))
        self._state = np.tile(first[:, None], (1, prompts))
        self._known = np.zeros(prompts, bool)  # has been a candidate
        # Scored rollouts and group size of the last observation: fewer than the group size is a censored one.
        self._trials = np.zeros(prompts, np.uint16)
        self._sizes = np.zeros(prompts, np.uint16)

    def _losses(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        ahead = self._ahead(rows)
        return -ahead[MIXED] - self.settings.entropy * entr(ahead).sum(axis=0)

    def _ahead(self, rows: np.ndarray) -> np.ndarray:
        """pi', (3, rows)."""
        state = self._state[:, rows]
        return np.where(self._known[rows], predict(self._counts[:, :, rows], state), state)

    def end_step(self) -> None:
        forget, prior = self.settings.forget, self.settings.prior_counts()
        rows, successes, trials, sizes = self._outcomes()
        weights = likelihood(successes, trials, sizes, self.settings.censored == "soft")
        before = self._state[:, rows]
        seen, moved = condition(self._counts[:, :, rows], before, weights)
        expected = self._ahead(rows)[MIXED]
        self._state = np.where(self._known, predict(self._counts, self._state), self._state)
        self._state[:, rows] = seen
        self._known[self._candidates] = self._known[rows] = True
        self._counts *= forget
        self._counts += (1 - forget) * prior
        self._counts[:, :, rows] += moved
        self._trials[rows], self._sizes[rows] = trials, sizes
        seen = self._sizes > 0
        self._numbers = {
            "candidates": float(len(self._candidates)),
            "seen_share": float(seen.mean()),
            "censored_share": float((self._trials < self._sizes)[seen].mean()) if seen.any() else 0.0,
        }
        if len(rows):
            self._numbers["mixed_predicted"] = float(expected.mean())
            self._numbers["mixed_realised"] = float(((0 < successes) & (successes < trials)).mean())

    METRICS = {
        **CANDIDATES,
        "censored_share": Metric("seen prompts whose last observation was a prefix", "share", "high: little is known"),
        "mixed_predicted": Metric("predicted share of mixed groups among the prompts observed", "probability",
                                  "near `mixed_realised`: calibrated"),
        "mixed_realised": Metric("prompts observed that were mixed", "share", "high: the rule finds signal"),
    }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """101 bytes a prompt."""
        if not self._prompts:
            return {"prompts": 0}
        return {
            "prompts": self._prompts,
            "counts": self._counts.copy(),
            "state": self._state.copy(),
            "known": self._known.copy(),
            "trials": self._trials.copy(),
            "sizes": self._sizes.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load_arrays("dps", state, ("counts", "state", "known", "trials", "sizes"))
