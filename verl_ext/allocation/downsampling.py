"""Which rollouts of a committed group reach the update.

PODS, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning", arXiv 2504.13818.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .groups import Group
from .registry import register_downsampler
from .settings import require


@dataclass(frozen=True)
class DownSamplerSettings:
    """A down-sampler without settings."""


@dataclass(frozen=True)
class KeepSettings:
    """Settings of the down-samplers that keep a fixed number."""

    keep: int
    """Rollouts of a group that reach the update (m); a group with no more than that is kept whole."""
    normalise_over: Literal["selected", "group"] = "selected"
    """Whose mean and standard deviation the advantage uses: ``selected``, of the rollouts kept (as PODS; a group's
    advantages sum to zero); ``group``, of all scored rollouts of the group."""

    def __post_init__(self) -> None:
        require(self.keep >= 2, "downsampler.keep", self.keep, "an integer of 2 or more")


class DownSampler:
    """Chooses among the scored rollouts of one group. Subclass, set ``Settings``, register a name."""

    Settings: type = DownSamplerSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def keep(self) -> int | None:
        """Most rollouts kept of a group; None: all."""
        return getattr(self.settings, "keep", None)

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        """Sessions kept, in order, of ``group.trainable``."""
        raise NotImplementedError


@register_downsampler("none")
class KeepAll(DownSampler):
    """Every scored rollout."""

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        return [outcome.session for outcome in group.trainable]


@register_downsampler("max_variance")
class MaxVariance(DownSampler):
    """The ``keep`` rollouts with the largest variance of scores (PODS); see :func:`max_variance_mask`."""

    Settings = KeepSettings

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        scored = group.trainable
        if len(scored) <= self.settings.keep:
            return [outcome.session for outcome in scored]
        kept = max_variance_subset([outcome.score for outcome in scored], self.settings.keep, rng)
        return [scored[i].session for i in kept]


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
    (m^2 times the variance) of every h is read off prefix sums. When several h tie, the smallest wins. Rewards that
    are multiples of 10^-6 or coarser are compared in exact integers; others in float64, centred and scaled by group,
    where variances within 1e-12 of the spread squared count as ties.

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
    values, exact = _comparable(rewards, keep)
    ordered = np.sort(values, axis=1)
    high = _best_split(ordered, keep, exact)
    return _mark(values, ordered, high, keep, rng)


def _comparable(rewards: np.ndarray, keep: int) -> tuple[np.ndarray, bool]:
    """Rewards as integers above each group's lowest, else as floats centred and scaled by group."""
    shifted = rewards - rewards.min(axis=1, keepdims=True)
    spread = float(shifted.max())
    # m^2 V^2 must stay within int64; relative to large offsets the rewards' own rounding is what limits a lattice
    rounding = 4 * np.finfo(np.float64).eps * max(float(np.abs(rewards).max()), 1.0)
    for scale in (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000):
        if keep * spread * scale >= 2**31 or rounding * scale > 1e-6:
            break
        scaled = shifted * scale if scale > 1 else shifted
        whole = np.rint(scaled)
        if np.abs(scaled - whole).max() <= max(1e-9, rounding * scale):
            return whole.astype(np.int64), True
    middle = shifted - shifted.mean(axis=1, keepdims=True)
    widest = np.abs(middle).max(axis=1, keepdims=True)
    return middle / np.where(widest > 0, widest, 1.0), False


def _best_split(ordered: np.ndarray, keep: int, exact: bool) -> np.ndarray:
    """For each group the smallest h that maximises m S2 - S1^2 over {h highest, m - h lowest}."""
    low, top = ordered[:, :keep], ordered[:, : -keep - 1 : -1]
    zero = np.zeros((len(ordered), 1), ordered.dtype)
    lows = [np.concatenate([zero, np.cumsum(part, axis=1)], axis=1)[:, ::-1] for part in (low, low * low)]
    tops = [np.concatenate([zero, np.cumsum(part, axis=1)], axis=1) for part in (top, top * top)]
    total = lows[0] + tops[0]
    score = keep * (lows[1] + tops[1]) - total * total
    if exact:
        return score.argmax(axis=1)
    return (score >= score.max(axis=1, keepdims=True) - 1e-12 * keep * keep).argmax(axis=1)


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
