# SPDX-License-Identifier: Apache-2.0
"""Prompts under an item-response model: logit p_i = ability - difficulty_i + topic_i + own_i."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import comb, expit, ndtri

from verl_ext.typed_settings import refused, require

_NODES = 2048


def effective_share(rates: np.ndarray, group_size: int) -> float:
    """E[1 - p^k - (1 - p)^k]: P(a group of ``group_size`` is mixed), over the prompts."""
    return float(np.mean(1 - rates**group_size - (1 - rates) ** group_size))


def signal(successes: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """sqrt(p (1 - p)), p = s / n: length of a binary group's gradient per unit of contrast (Pilot-Commit, Prop. 3.1);
    0 for a saturated group."""
    share = successes / np.maximum(trials, 1)
    return np.sqrt(share * (1 - share))


def expected_signal(rates: np.ndarray, group_size: int) -> np.ndarray:
    """E[sqrt(p' (1 - p'))] of a group of ``group_size``, p' its share of right answers: binomial sum, by rate."""
    counts = np.arange(group_size + 1)
    weights = comb(group_size, counts) * signal(counts, np.full(group_size + 1, group_size))
    powers = rates[:, None] ** counts * (1 - rates[:, None]) ** (group_size - counts)
    return powers @ weights


@lru_cache(maxsize=64)
def solve_logits(share: float, mean: float, group_size: int) -> tuple[float, float]:
    """Mean and standard deviation of normal logits for a given effective share and mean success rate.

    Raises:
        SettingError: no such population; says what is the most.
    """
    z = ndtri((np.arange(_NODES) + 0.5) / _NODES)

    def location(sd: float) -> float:
        return brentq(lambda at: expit(at + sd * z).mean() - mean, -60.0 - 8 * sd, 60.0 + 8 * sd)

    def share_at(sd: float) -> float:
        return effective_share(expit(location(sd) + sd * z), group_size)

    narrow, wide = 1e-3, 200.0
    most, least = share_at(narrow), share_at(wide)
    require(
        least < share < most, "simulation.effective_share", share,
        f"between {least:.3f} and {most:.3f} with simulation.mean={mean} and group_size={group_size}",
    )  # fmt: skip
    sd = float(np.exp(brentq(lambda log_sd: share_at(np.exp(log_sd)) - share, np.log(narrow), np.log(wide))))
    return location(sd), sd


@dataclass
class Population:
    """Prompts of the pool and held-out ones, with what the policy can do and has learnt.

    Logits are drawn at the midpoints of equal quantiles, in random order, so that the effective share is that asked
    for and not that of a sample.
    """

    easiness: np.ndarray
    """Minus the difficulty, in logits, by row of the pool; infinite for prompts that no training moves."""
    topic: np.ndarray
    """Topic by row."""
    held_out: np.ndarray
    """Easiness of the held-out prompts."""
    held_out_topic: np.ndarray
    """Their topics."""
    gained: np.ndarray
    """Logits that each topic has gained."""
    own: np.ndarray
    """Logits that each prompt has gained by its own visits, or by drift."""
    ability: float = 0.0
    """Logits gained on all prompts."""

    def rates(self) -> np.ndarray:
        """Success rate by row of the pool."""
        return expit(self.easiness + self.ability + self.gained[self.topic] + self.own)

    def accuracy(self) -> float:
        """Mean success rate of the held-out prompts."""
        return float(expit(self.held_out + self.ability + self.gained[self.held_out_topic]).mean())


def make_population(
    kind: str, prompts: int, held_out: int, topics: int, rng: np.random.Generator, *,
    share: float | None = None, mean: float = 0.35, group_size: int = 8,
) -> Population:  # fmt: skip
    """Draw a population.

    Args:
        kind: ``uniform``: success rates uniform on [0, 1]; ``u_shaped``: normal logits with the effective share
            ``share`` (default .33) and the mean success rate ``mean``; ``all_solved``; ``all_hopeless``.

    Raises:
        SettingError: another kind, or an effective share that cannot be.
    """
    if kind == "uniform":
        def quantiles(u):
            return np.log(u) - np.log1p(-u)
    elif kind == "u_shaped":
        location, sd = solve_logits(0.33 if share is None else share, mean, group_size)

        def quantiles(u):
            return location + sd * ndtri(u)
    elif kind in ("all_solved", "all_hopeless"):
        def quantiles(u):
            return np.full(len(u), np.inf if kind == "all_solved" else -np.inf)
    else:
        raise refused("population", kind, "uniform | u_shaped | all_solved | all_hopeless")

    def draw(n: int) -> np.ndarray:
        return quantiles((rng.permutation(n) + 0.5) / n)

    return Population(
        easiness=draw(prompts), topic=rng.integers(0, topics, prompts), held_out=draw(held_out),
        held_out_topic=rng.integers(0, topics, held_out), gained=np.zeros(topics), own=np.zeros(prompts),
    )  # fmt: skip
