"""CERO's utility, its concave conjugate, and the steps of the two duals, as plain functions of arrays.

A prompt that has had n rollouts is worth U(n) = 1 - exp(-L n) with rate L = eta q, q being its expected reward
variance. Over K rounds of at most N_max rollouts a prompt, the plan is

    max sum_i U_i(sum_k N_ik)   subject to   sum_ik N_ik <= B,   0 <= N_ik <= N_max

U(n) = min over theta in (0, L] of theta n - U_*(theta) takes the sum over rounds out of U; with one multiplier theta_i
a prompt and one price mu for the budget, the plan falls apart into rounds, each of which gives N_max to the prompts
with theta_i > mu (CERO, arXiv 2606.05606). The conjugate, the projections and the step sizes are derived here: the
papers do not give them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Values that differ by less, in units of 1 / (K N_max), are ties.
TIE_DECIMALS = 12


def utility(n: Any, rate: Any) -> np.ndarray:
    """U(n) = 1 - exp(-L n), for ``n`` >= 0 rollouts at ``rate`` L > 0; broadcasts."""
    return -np.expm1(-np.asarray(rate, np.float64) * n)


def conjugate(theta: Any, rate: Any) -> np.ndarray:
    """U_*(theta) = inf over n >= 0 of theta n - U(n); broadcasts.

    (theta / L)(1 + ln(L / theta)) - 1 on (0, L]; -1 at 0; 0 above L; minus infinity below 0.
    """
    theta, rate = np.broadcast_arrays(np.asarray(theta, np.float64), np.asarray(rate, np.float64))
    part = theta / rate
    inside = (part > 0) & (part < 1)
    safe = np.where(inside, part, 1.0)
    value = np.where(inside, safe * (1 - np.log(safe)) - 1, np.where(part >= 1, 0.0, -1.0))
    return np.where(part < 0, -np.inf, value)


def exposure(theta: Any, rate: Any) -> np.ndarray:
    """n(theta) = ln(L / theta) / L, the slope of the conjugate: the rollouts after which another is worth theta.

    For theta in (0, L]; broadcasts.
    """
    rate = np.asarray(rate, np.float64)
    return np.log(rate / theta) / rate


def floor(rate: Any, most: float) -> np.ndarray:
    """The least theta of use: U'(most) = L exp(-L most), ``most`` = K N_max being all a prompt can get."""
    rate = np.asarray(rate, np.float64)
    return rate * np.exp(-rate * most)


def step_theta(
    theta: np.ndarray, rate: np.ndarray, given: np.ndarray, rounds: int, n_max: int, scale: float = 1.0
) -> np.ndarray:
    """theta <- clip(theta - a (N - n(theta) / K)) into [floor, L], with a = L / (N_max sqrt(K)).

    Args:
        given: N, rollouts of each prompt in the round.
        rounds: K.
        scale: factor on a.
    """
    gradient = given - exposure(theta, rate) / rounds
    moved = theta - (scale / (n_max * rounds**0.5)) * rate * gradient
    return np.clip(moved, floor(rate, rounds * n_max), rate, out=moved)


def step_price(
    price: float, given: float, share: float, prompts: int, n_max: int, rounds: int, top: float, scale: float = 1.0
) -> float:
    """mu <- clip(mu + b (sum N - rho)) into [0, top], with b = top / (max(rho, M N_max - rho) sqrt(K)).

    Args:
        given: sum N, rollouts of the round.
        share: rho = B / K.
        prompts: M.
        top: the largest price of use, max L.
        scale: factor on b.
    """
    reach = max(share, prompts * n_max - share)
    return float(min(max(price + scale * top * (given - share) / (reach * rounds**0.5), 0.0), top))


def rescale(theta: np.ndarray, old: np.ndarray, new: np.ndarray, most: float) -> np.ndarray:
    """theta L_new / L_old, clipped into [floor, L_new]: a prompt whose rate rose above what it was must rise too."""
    moved = theta * (new / old)
    return np.clip(moved, floor(new, most), new, out=moved)


def rank(theta: np.ndarray, rows: np.ndarray, most: float, rng: np.random.Generator) -> np.ndarray:
    """``rows`` by falling theta, ties in random order.

    Args:
        most: K N_max; theta is compared in units of its inverse, rounded.
    """
    return by_theta(theta, rng.permutation(rows), most)


def rank_first(
    theta: np.ndarray, rows: np.ndarray, first: int, most: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`rank` in two parts, so that a large pool need not be sorted where only the first prompts are offered.

    Returns:
        The beginning of the ranking, ``first`` rows or more (ties are not torn apart), and the other rows, from which
        :func:`by_theta` makes the rest of it.
    """
    shuffled = rng.permutation(rows)
    if first >= len(shuffled):
        return by_theta(theta, shuffled, most), shuffled[:0]
    values = _rounded(theta, most)  # of all prompts: in order, which is faster than to gather them in random order
    at = len(rows) - max(1, first)
    ahead = (values >= np.partition(values[rows], at)[at])[shuffled]
    return by_theta(theta, shuffled[ahead], most), shuffled[~ahead]


def by_theta(theta: np.ndarray, rows: np.ndarray, most: float) -> np.ndarray:
    """``rows`` by falling theta, in units of 1 / ``most`` and rounded; ties stay in order."""
    return rows[np.argsort(-_rounded(theta[rows], most), kind="stable")]


def admitted(theta: np.ndarray, ranked: np.ndarray, price: float, fill: int, most: float) -> int:
    """How many of ``ranked`` a given price admits: all with theta > mu, then ties at mu while fewer than ``fill``.

    Under a strict margin the first round, in which all thetas equal the price, would admit nobody.
    """
    values, price = _rounded(theta[ranked], most), float(_rounded(np.float64(price), most))
    above, not_below = int((values > price).sum()), int((values >= price).sum())
    return max(above, min(not_below, fill))


def _rounded(value: Any, most: float) -> np.ndarray:
    return np.round(value * most, TIE_DECIMALS)
