"""The rollouts of a group whose scores vary most (PODS).

"Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning", arXiv 2504.13818.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..registry import register_downsampler
from .downsampler import KeepFew


@register_downsampler("max_variance")
class MaxVariance(KeepFew):
    """The ``keep`` rollouts with the largest variance of scores (PODS); see :func:`max_variance_mask`."""

    def subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return max_variance_subset(rewards, keep, rng)


def max_variance_subset(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Indices, ascending, of the ``keep`` rewards with the largest variance; see :func:`max_variance_mask`.

    Raises:
        ValueError: as there.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {rewards.shape}; accepted: (rollouts,)")
    return np.flatnonzero(max_variance_mask(rewards[None], keep, rng)[0])


def max_variance_mask(rewards: Any, keep: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """For each group the subset of ``keep`` rewards with the largest variance.

    Such a subset consists of the h highest and the m - h lowest rewards for some h (PODS), so the score m S2 - S1^2
    (m^2 times the variance) of every h is read off prefix sums. Of several best h the official code takes m if it is
    among them, else the smallest: of 0 and 1 with c right and m odd, all right ones if c = (m + 1) / 2, else at most
    (m - 1) / 2. Rewards are centred and scaled by group first. Those closer than 1e-12 of the group's spread, or than
    their own rounding where that is less than 1e-6 of it, are equal, and so are scores that differ by less.

    Args:
        rewards: shape (groups, rollouts), finite.
        keep: m; groups of m or fewer are kept whole.
        rng: chooses among equal rewards; None takes the first in order.

    Returns:
        Boolean mask of the shape of ``rewards`` with ``min(keep, rollouts)`` True in each row.

    Raises:
        ValueError: the shape is wrong, ``keep`` is below 1, or a reward is NaN or infinite (its place is named).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2:
        raise ValueError(f"rewards have shape {rewards.shape}; accepted: (groups, rollouts)")
    if keep < 1:
        raise ValueError(f"keep={keep}; accepted: 1 or more")
    if not np.isfinite(rewards).all():
        row, column = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(f"reward {rewards[row, column]} of group {row}, rollout {column}; accepted: finite numbers")
    size = rewards.shape[1]
    if size <= keep or rewards.size == 0:
        return np.ones(rewards.shape, bool)
    values, tolerance = _comparable(rewards)
    ordered = np.sort(values, axis=1)
    high = _best_split(ordered, keep, tolerance)
    return _mark(values, ordered, high, keep, rng)


def _comparable(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each group's rewards on [0, 1], equal ones exactly so, and the difference that counts as none, (groups, 1)."""
    largest = np.abs(rewards).max(axis=1, keepdims=True)
    _, exponent = np.frexp(largest)
    scaled = np.ldexp(rewards, -exponent)  # exact: no reward is too large, and no sum of two
    shifted = scaled - scaled.min(axis=1, keepdims=True)
    spread = shifted.max(axis=1, keepdims=True)
    rounding = 4 * np.finfo(np.float64).eps / np.where(spread > 0, spread, np.inf)
    tolerance = np.where(rounding < 1e-6, np.maximum(rounding, 1e-12), 1e-12)
    unit = shifted / np.where(spread > 0, spread, 1.0)
    return np.rint(unit / tolerance) * tolerance, tolerance


def _best_split(ordered: np.ndarray, keep: int, tolerance: np.ndarray) -> np.ndarray:
    """For each group the h that maximises m S2 - S1^2 over {h highest, m - h lowest}; of several m, else the least."""
    low, top = ordered[:, :keep], ordered[:, : -keep - 1 : -1]
    zero = np.zeros((len(ordered), 1))
    lows = [np.concatenate([zero, np.cumsum(part, axis=1)], axis=1)[:, ::-1] for part in (low, low * low)]
    tops = [np.concatenate([zero, np.cumsum(part, axis=1)], axis=1) for part in (top, top * top)]
    total = lows[0] + tops[0]
    score = keep * (lows[1] + tops[1]) - total * total
    best = score >= score.max(axis=1, keepdims=True) - tolerance * keep * keep
    return np.where(best[:, -1], keep, best.argmax(axis=1))


def _mark(
    values: np.ndarray, ordered: np.ndarray, high: np.ndarray, keep: int, rng: np.random.Generator | None
) -> np.ndarray:
    """The mask for h highest and m - h lowest; where a cut runs through equal values, that many of them."""
    groups, size = values.shape
    every = np.arange(groups)
    low = keep - high
    floor = ordered[every, np.maximum(low - 1, 0)][:, None]  # the highest of the low part
    ceiling = ordered[every, np.minimum(size - high, size - 1)][:, None]  # the lowest of the high part
    some_low, some_high = (low > 0)[:, None], (high > 0)[:, None]
    mask = (some_low & (values < floor)) | (some_high & (values > ceiling))
    at_floor, at_ceiling = some_low & (values == floor), some_high & (values == ceiling)
    one_class = some_low & some_high & (floor == ceiling)  # both cuts run through the same values
    below = (values < floor).sum(axis=1)
    above = (values > ceiling).sum(axis=1)
    want_floor = np.where(some_low[:, 0], low - below, 0)
    want_ceiling = np.where(some_high[:, 0], high - above, 0)
    want_floor = np.where(one_class[:, 0], want_floor + want_ceiling, want_floor)
    mask |= _pick(at_floor, want_floor, rng)
    mask |= _pick(at_ceiling & ~one_class, np.where(one_class[:, 0], 0, want_ceiling), rng)
    return mask


def _pick(members: np.ndarray, want: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """``want[g]`` of each group's members: at random, or the first in order."""
    counts = members.sum(axis=1)
    rows = np.flatnonzero((want > 0) & (want < counts))
    picked = members & (want > 0)[:, None]
    if not len(rows):
        return picked
    some = members[rows]
    if rng is None:
        picked[rows] = some & (np.cumsum(some, axis=1, dtype=np.int32) <= want[rows, None])
        return picked
    # A random key for each member, made distinct by its column; the smallest keys win.
    bits = max(1, int(members.shape[1] - 1).bit_length())
    keys = rng.integers(0, 1 << (62 - bits), size=some.shape, dtype=np.int64) << bits
    keys |= np.arange(members.shape[1])
    keys[~some] = np.iinfo(np.int64).max
    last = np.sort(keys, axis=1)[np.arange(len(rows)), want[rows] - 1]
    picked[rows] = keys <= last[:, None]
    return picked
