# SPDX-License-Identifier: Apache-2.0
"""Expected rollouts per effective group on a frozen population, and what an oracle would need.

p is a prompt's success rate, A_n(p) = p^n + (1 - p)^n the probability that n rollouts are alike, k the group size;
means are over the prompts. Waves, surplus and rounds are left out: every count is that of refilling one by one.
"""

from __future__ import annotations

import numpy as np


def alike(rates: np.ndarray, n: int) -> np.ndarray:
    """A_n(p)."""
    return rates**n + (1 - rates) ** n


def dynamic_sampling(rates: np.ndarray, group_size: int) -> float:
    """k / e, e = mean(1 - A_k)."""
    return group_size / float(np.mean(1 - alike(rates, group_size)))


def sara(rates: np.ndarray, group_size: int, probe: int, commit: str = "top_up") -> float:
    """SARA with a probe of n rollouts at once.

    top_up:  mean(k - (k - n) A_n) / mean(1 - A_n)
    stop:    n / mean(1 - A_n)
    """
    pure = alike(rates, probe)
    cost = group_size - (group_size - probe) * pure if commit == "top_up" else np.full(len(rates), float(probe))
    return float(np.mean(cost) / np.mean(1 - pure))


def false_abandonment(rates: np.ndarray, group_size: int, probe: int) -> float:
    """P(a group of k is effective | its first n rollouts are alike) = mean(A_n - A_k) / mean(A_n)."""
    pure = alike(rates, probe)
    return float(np.mean(pure - alike(rates, group_size)) / np.mean(pure))


def oracle_of_outcomes(group_size: int) -> float:
    """k: it is known beforehand which groups will be effective, and only those are sampled."""
    return float(group_size)


def oracle_of_rates(rates: np.ndarray, group_size: int, keep: float) -> float:
    """Success rates are known; the prompts most likely to be mixed are sampled, as many as hold the share ``keep`` of
    all effective groups: k / (mean effective share of those)."""
    effective = np.sort(1 - alike(rates, group_size))[::-1]
    mass = np.cumsum(effective)
    at = int(np.searchsorted(mass, keep * mass[-1])) + 1
    return group_size * at / float(mass[at - 1])
