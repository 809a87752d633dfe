# SPDX-License-Identifier: Apache-2.0
"""How a batch of groups turns into progress. A toy, in three forms: which one is near the truth is not known.

With signals s_g = sqrt(p (1 - p)) of the batch's groups, n_g their rows, and B0 = 128:

    linear   progress = eta sum_g s_g / B0                           the gradient's length counts, its noise does not
    adam     progress = eta G / sqrt(G^2 + V),  G = sum_g s_g / B,  V = sigma^2 sum_{g mixed} (1 / n_g) / B^2

``adam1k`` and ``adam20k`` are normalised updates whose noise equals the signal at 1,000 and 20,000 rows of mixed groups
of average signal s0: sigma^2 = rows s0^2. With 20,000, progress is nearly proportional to signal x sqrt(rows).
Of the progress, 80 % goes to all prompts and 20 % to the topics of the groups, in proportion to their signals.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

from .population import Population, effective_share, expected_signal, signal
from .simulation_settings import WorldSettings

NOISE_ROWS = {"linear": None, "adam1k": 1_000, "adam20k": 20_000}
GLOBAL = 0.8
_BATCH, _SIZE, _NODES = 128, 8, 2048


def progress_of(signals: np.ndarray, rows: np.ndarray, sigma2: float | None) -> float:
    """Progress of a batch, over eta.

    Args:
        signals: a number a group, 0 for saturated ones; rows: rollouts of each that are trained on.
        sigma2: noise of a row; None: the linear model.
    """
    total = float(signals.sum())
    if total == 0:
        return 0.0
    if sigma2 is None:
        return total / _BATCH
    noise = sigma2 * float((1 / rows[signals > 0]).sum())  # both over B^2, which cancels
    return total / np.sqrt(total**2 + noise)


class Learner:
    """Applies a batch's update to a population.

    eta is such that uniform GRPO, 128 prompts x 8, takes the mean success rate from its first value to ``goal`` in
    ``pace`` steps, by integrating d(ability)/dt = eta progress(ability) over the expected batch; where the first value
    is there already, one logit in ``pace`` steps.
    """

    def __init__(self, population: Population, settings: WorldSettings, rng: np.random.Generator) -> None:
        self.population = population
        self.settings = settings
        self._rng = rng
        self._visits = np.zeros(len(population.easiness))
        start = _thin(population.easiness)
        rates = expit(start)
        share = effective_share(rates, _SIZE)
        self.signal0 = float(expected_signal(rates, _SIZE).mean()) / share if share > 0 else 0.0
        """s0, the mean signal of a mixed group of 8 at the start."""
        rows = NOISE_ROWS[settings.update]
        self.sigma2 = None if rows is None else rows * self.signal0**2
        self.eta = self._calibrate(start)
        """Logits of a unit of progress."""

    def _calibrate(self, start: np.ndarray) -> float:
        if self.signal0 == 0:
            return 0.0
        goal, high = self.settings.goal, 200.0
        there = expit(start).mean() < goal < expit(start + high).mean()
        high = brentq(lambda ability: expit(start + ability).mean() - goal, 0.0, high) if there else 1.0
        abilities = np.linspace(0, high, 101)
        slowness = [1 / max(self._expected_progress(expit(start + a)), 1e-12) for a in abilities]
        return float(np.trapezoid(slowness, abilities)) / self.settings.pace

    def _expected_progress(self, rates: np.ndarray) -> float:
        signal_sum = _BATCH * float(expected_signal(rates, _SIZE).mean())
        if self.sigma2 is None:
            return signal_sum / _BATCH
        noise = self.sigma2 * _BATCH * effective_share(rates, _SIZE) / _SIZE
        return signal_sum / np.sqrt(signal_sum**2 + noise) if signal_sum else 0.0

    def update(self, prompts: np.ndarray, successes: np.ndarray, rows: np.ndarray) -> float:
        """One training step on groups, a number each: row of the pool, right answers, rollouts trained on.

        Returns:
            The progress, in logits.
        """
        population, settings = self.population, self.settings
        signals = signal(successes, rows)
        effect = signals
        if settings.diminish is not None:
            effect = signals / (1 + self._visits[prompts] / settings.diminish)
        progress = self.eta * progress_of(effect, rows, self.sigma2)
        if progress:
            share = np.bincount(population.topic[prompts], effect, settings.topics) / effect.sum()
            population.ability += GLOBAL * progress
            population.gained += (1 - GLOBAL) * progress * settings.topics * share
            population.own[prompts] += settings.own * effect
            self._visits[prompts] += signals > 0
        if settings.drift:
            population.own += settings.drift * self._rng.standard_normal(len(population.own))
        return progress


def _thin(logits: np.ndarray) -> np.ndarray:
    """At most ``_NODES`` quantiles of the logits."""
    if len(logits) <= _NODES:
        return logits
    return np.sort(logits)[((np.arange(_NODES) + 0.5) / _NODES * len(logits)).astype(int)]
