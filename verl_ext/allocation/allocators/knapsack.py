"""Knapsack: a step's rollouts divided over its prompts by the value of exploring each.

"Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation", arXiv 2509.25849.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..groups import Group
from ..metric import SIZES, Metric
from ..registry import register_allocator
from .allocator import AllocatorSettings
from .divided import Divided
from .greedy import largest_gains

_MEMORY = 62  # most outcomes that the latest of a prompt can be: bits of a mask


@dataclass(frozen=True)
class KnapsackSettings(AllocatorSettings):
    """Settings of Knapsack.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts exactly, so a batch has no more rows than one of equal groups, but a single group may have ``most``.
    """

    least: int = 2
    """Least rollouts of a prompt with 0 < p < 1, p being its estimated success rate."""
    most: int | Literal["auto"] = "auto"
    """Most rollouts of a prompt; auto: 16 times ``group_size``, 128 of 8 as published."""
    negative: int | Literal["auto"] = "auto"
    """Rollouts of a prompt with p = 0, before any surplus; auto: ``least``."""
    positive: int | Literal["auto"] = "auto"
    """Rollouts of a prompt with p = 1; auto: ``least``."""
    history: int = 16
    """p is estimated over the whole last visit of a prompt where that had so many scored rollouts, else over its latest
    so many of all visits."""
    history_min: int = 8
    """Scored rollouts of all visits below which a prompt counts as unknown and gets ``group_size``."""
    cost: Literal["probability", "expectation"] = "probability"
    """Rollouts that a prompt needs to show both outcomes: ``probability``, with the probability ``confidence``,
    log(1 - confidence) / log(max(p, 1 - p)); ``expectation``, 1 / (p (1 - p)) - 1."""
    confidence: float = 0.9
    """See ``cost``."""
    fallback: bool = True
    """Whether what the prompts with 0 < p < 1 do not need goes to those with p = 0 and the unknown ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("most", 16 * self.group_size)
        self.resolve("negative", self.least)
        self.resolve("positive", self.least)
        for name in ("least", "negative", "positive"):
            value = getattr(self, name)
            require(1 <= value <= self.group_size, f"allocation.allocator.{name}", value,
                    f"an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(self.most >= self.group_size, "allocation.allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip
        require(1 <= self.history <= _MEMORY, "allocation.allocator.history", self.history,
                f"an integer in [1, {_MEMORY}]")  # fmt: skip
        require(self.history_min >= 1, "allocation.allocator.history_min", self.history_min, "an integer of 1 or more")
        require(0 < self.confidence < 1, "allocation.allocator.confidence", self.confidence, "a number in (0, 1)")


@register_allocator("knapsack")
class Knapsack(Divided):
    """One round; every group is trained on. Success rates come from earlier visits of the prompts, all outcomes."""

    Settings = KnapsackSettings
    number = int
    numbers = 4  # the latest outcomes as bits; scored rollouts of all visits; right ones and all of the last visit

    @property
    def fewest(self) -> int:
        return min(self.settings.least, self.settings.negative, self.settings.positive)

    def divide(self, prompts: list[int], total: int, rng: np.random.Generator) -> np.ndarray:
        settings = self.settings
        rates = np.array([self._success_rate(prompt) for prompt in prompts])
        self._numbers = {"known_share": float(np.isfinite(rates).mean())}
        return knapsack_allocation(
            rates, total, settings.least, settings.most, self.group_size, settings.confidence, rng,
            negative=settings.negative, positive=settings.positive, cost=settings.cost, fallback=settings.fallback,
        )  # fmt: skip

    def learn(self, group: Group) -> None:
        bits, n, *_ = self._seen.get(group.prompt, (0, 0))
        for outcome in group.outcomes:
            if outcome.correct is not None:
                bits = (bits << 1 | outcome.correct) & (1 << self.settings.history) - 1
        self._seen[group.prompt] = bits, n + group.trials, group.successes, group.trials

    METRICS = {
        "known_share": Metric("the step's prompts with a success rate from earlier", "share", "0 in the first epoch"),
        **SIZES,
    }

    def _success_rate(self, prompt: int) -> float:
        """NaN: unknown."""
        bits, n, last_right, last = self._seen.get(prompt, (0, 0, 0, 0))
        if n < self.settings.history_min:
            return float("nan")
        if last >= self.settings.history:
            return last_right / last
        return bits.bit_count() / min(n, self.settings.history)


def knapsack_allocation(
    success_rates: Any,
    total: int,
    least: int,
    most: int,
    typical: int,
    confidence: float = 0.9,
    rng: np.random.Generator | None = None,
    *,
    negative: int | None = None,
    positive: int | None = None,
    cost: str = "probability",
    fallback: bool = True,
) -> np.ndarray:
    """Rollouts of each prompt: maximise sum_i V(p_i, N_i) with V(p, N) = (1 - p^N - (1 - p)^N) p (1 - p)^2.

    Subject to sum N_i = ``total`` and N_i <= ``most`` (Knapsack RL). At first prompts with 0 < p < 1 get ``least``,
    those with p = 0 ``negative``, with p = 1 ``positive``, unknown ones (NaN) ``typical``. A further rollout of the
    first kind adds (p^N (1 - p) + (1 - p)^N p) p (1 - p)^2, which falls with N: the largest gains first is exact, and
    no dynamic program is needed. Where they need less than is left (``cost``), the surplus goes in equal parts to
    the prompts with p = 0 and the unknown ones, if there are none to those with p = 1; what fits nowhere there to any.
    Where the first sizes exceed ``total``, all get alike.

    Args:
        success_rates: (prompts,), in [0, 1] or NaN.
        total: rollouts to divide; at most prompts x most.
        rng: orders prompts of equal gain (rounded to 1e-12); None: by position.
        negative, positive: None: ``least``.
        cost, confidence, fallback: as the settings.

    Returns:
        int64 (prompts,), summing to ``total``.

    Raises:
        ValueError: ``total`` cannot be divided so, or a rate is outside [0, 1].
    """
    p = np.asarray(success_rates, np.float64)
    size = len(p)
    negative, positive = (least if value is None else value for value in (negative, positive))
    fewest = min(least, negative, positive)
    if not size * fewest <= total <= size * most:
        raise ValueError(f"total={total}; accepted: {size} prompts x least={fewest} to x most={most}")
    if ((p < 0) | (p > 1)).any():
        raise ValueError("success_rates; accepted: numbers in [0, 1], or NaN for unknown")
    order = np.arange(size) if rng is None else rng.permutation(size)
    unknown, inner, every = np.isnan(p), (p > 0) & (p < 1), np.ones(size, bool)
    sizes = np.select([unknown, p == 0, p == 1], [typical, negative, positive], least).astype(np.int64)
    left = total - int(sizes.sum())
    if left < 0 or unknown.all():
        return _evenly(np.full(size, fewest), every, total - size * fewest, most, order)[0]
    surplus = 0 if inner.any() else left
    if inner.any() and fallback:
        q = p[inner]
        if cost == "probability":
            needs = np.log(1 - confidence) / np.log(np.maximum(q, 1 - q))
        else:
            needs = 1 / (q * (1 - q)) - 1
        surplus = max(0, left - int(np.minimum(most, needs).astype(np.int64).sum()))
    unsolved = unknown | (p == 0)
    left -= surplus
    sizes, surplus = _evenly(sizes, unsolved if unsolved.any() else p == 1, surplus, most, order)
    q, n = np.where(inner, p, 0.5)[:, None], np.arange(least, most)
    gains = np.where(inner[:, None], (q**n * (1 - q) + (1 - q) ** n * q) * q * (1 - q) ** 2, -np.inf)
    more = largest_gains(gains[order], left + surplus)
    sizes[order] += more
    left += surplus - int(more.sum())
    for others in (unsolved, p == 1, every):
        sizes, left = _evenly(sizes, others, left, most, order)
    return sizes


def _evenly(sizes: np.ndarray, members: np.ndarray, total: int, most: int, order: np.ndarray) -> tuple[np.ndarray, int]:
    """Add ``total`` to the members in equal parts, up to ``most`` each; returns what fits nowhere too."""
    sizes = sizes.astype(np.int64, copy=True)
    rows = order[members[order]]
    while total > 0 and len(rows := rows[sizes[rows] < most]):
        part, extra = divmod(total, len(rows))
        want = np.full(len(rows), part)
        want[:extra] += 1
        given = np.minimum(want, most - sizes[rows])
        sizes[rows] += given
        total -= int(given.sum())
    return sizes, total
