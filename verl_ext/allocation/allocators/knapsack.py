"""Knapsack: a step's rollouts divided over its prompts by the value of exploring each.

"Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation", arXiv 2509.25849.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..groups import Group, Request, Verdict
from ..registry import register_allocator
from ..settings import require
from ..state import check_keys
from .base import Allocator, AllocatorSettings

_MEMORY = 32  # most outcomes a prompt's history can hold: bits of a mask


@dataclass(frozen=True)
class KnapsackSettings(AllocatorSettings):
    """Settings of Knapsack.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts exactly, so a batch has no more rows than one of equal groups, but a single group may have ``most``.
    """

    least: int = 2
    """Least rollouts of a prompt."""
    most: int = 128
    """Most rollouts of a prompt."""
    history: int = 16
    """Latest scored rollouts of a prompt that its success rate is estimated from."""
    history_min: int = 8
    """Scored rollouts below which a prompt counts as unknown and gets ``group_size``."""
    confidence: float = 0.9
    """A prompt of success rate p needs log(1 - confidence) / log(max(p, 1 - p)) rollouts to show both outcomes that
    surely; what the prompts with 0 < p < 1 do not need goes to those with p = 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.least <= self.group_size, "allocator.least", self.least,
                f"an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(self.most >= self.group_size, "allocator.most", self.most,
                f"an integer of group_size={self.group_size} or more")  # fmt: skip
        require(1 <= self.history <= _MEMORY, "allocator.history", self.history, f"an integer in [1, {_MEMORY}]")
        require(1 <= self.history_min <= self.history, "allocator.history_min", self.history_min,
                f"an integer in [1, history={self.history}]")  # fmt: skip
        require(0 < self.confidence < 1, "allocator.confidence", self.confidence, "a number in (0, 1)")


@register_allocator("knapsack")
class Knapsack(Allocator):
    """One round; every group is trained on. Success rates come from earlier visits of the prompts, all outcomes."""

    Settings = KnapsackSettings

    def __init__(self, settings: KnapsackSettings) -> None:
        super().__init__(settings)
        self._seen: dict[int, tuple[int, int]] = {}  # by prompt: the latest outcomes as bits, and how many
        self._numbers: dict[str, float] = {}

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def needs_rounds(self) -> None:
        return None  # everything is asked for at once

    def ask(self, ctx) -> list[Request]:
        if ctx.round > 1:
            return []
        settings = self.settings
        groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // settings.least))
        if not groups:
            return []
        total = min(ctx.budget_left, len(groups) * self.group_size)
        rates = np.array([self._success_rate(group.prompt) for group in groups])
        sizes = knapsack_allocation(
            rates, total, settings.least, settings.most, self.group_size, settings.confidence, ctx.rng
        )
        self._numbers = {
            "known_share": float(np.isfinite(rates).mean()),
            "largest_group": float(sizes.max()),
            "smallest_group": float(sizes.min()),
        }
        return [ctx.request(group, n) for group, n in zip(groups, sizes.tolist(), strict=True)]

    def finish(self, ctx) -> list[Group]:
        mask = (1 << self.settings.history) - 1
        for group in ctx.groups:
            group.verdict = Verdict.COMMIT
            bits, n = self._seen.get(group.prompt, (0, 0))
            for outcome in group.outcomes:
                if outcome.correct is not None:
                    bits, n = (bits << 1 | outcome.correct) & mask, n + 1
            if n:
                self._seen[group.prompt] = bits, min(n, self.settings.history)
        return list(ctx.groups)

    def metrics(self) -> dict[str, float]:
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        """13 bytes a prompt seen."""
        return {
            "prompts": np.array(list(self._seen), np.int64),
            "outcomes": np.array([bits for bits, _ in self._seen.values()], np.uint32),
            "counts": np.array([n for _, n in self._seen.values()], np.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("knapsack", state, ("prompts", "outcomes", "counts"))
        prompts, bits, counts = (np.asarray(state[name]).tolist() for name in ("prompts", "outcomes", "counts"))
        self._seen = {prompt: (b, n) for prompt, b, n in zip(prompts, bits, counts, strict=True)}

    def _success_rate(self, prompt: int) -> float:
        """NaN: unknown."""
        bits, n = self._seen.get(prompt, (0, 0))
        return bits.bit_count() / n if n >= self.settings.history_min else float("nan")


def knapsack_allocation(
    success_rates: Any,
    total: int,
    least: int,
    most: int,
    typical: int,
    confidence: float = 0.9,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Rollouts of each prompt: maximise sum_i V(p_i, N_i) with V(p, N) = (1 - p^N - (1 - p)^N) p (1 - p)^2.

    Subject to sum N_i = ``total`` and least <= N_i <= most (Knapsack RL). A further rollout adds
    (p^N (1 - p) + (1 - p)^N p) p (1 - p)^2, which falls with N: taking the largest gains first is exact, and no dynamic
    program is needed. Prompts with p of 0 or 1 add nothing and get ``least``, unknown ones (NaN) ``typical``. Where the
    others need less than is left (see ``confidence``), the rest goes evenly to the prompts with p = 0, if there are
    none to those with p = 1, and what fits nowhere there to any. Where unknown prompts would leave the others less
    than ``least``, all get alike.

    Args:
        success_rates: (prompts,), in [0, 1] or NaN.
        total: rollouts to divide; at least prompts x least and at most prompts x most.
        rng: orders prompts of equal gain (rounded to 1e-12); None: by position.

    Returns:
        int64 (prompts,), summing to ``total``.

    Raises:
        ValueError: ``total`` cannot be divided so, or a rate is outside [0, 1].
    """
    p = np.asarray(success_rates, np.float64)
    size = len(p)
    if not size * least <= total <= size * most:
        raise ValueError(f"total={total}; accepted: {size} prompts x least={least} to x most={most}")
    if ((p < 0) | (p > 1)).any():
        raise ValueError("success_rates; accepted: numbers in [0, 1], or NaN for unknown")
    order = np.arange(size) if rng is None else rng.permutation(size)
    unknown = np.isnan(p)
    inner = (p > 0) & (p < 1)
    sizes = np.where(unknown, typical, least).astype(np.int64)
    if sizes.sum() > total or unknown.all():
        return _evenly(np.full(size, least), np.ones(size, bool), total - size * least, most, order)[0]
    left = total - int(sizes.sum())
    if inner.any():
        rarer = np.maximum(p[inner], 1 - p[inner])
        need = int(np.minimum(most, np.log(1 - confidence) / np.log(rarer)).astype(np.int64).sum())
        spare = max(0, left - need)
    else:
        spare = left
    left -= spare
    for others in (p == 0, p == 1):
        if spare and others.any():
            sizes, spare = _evenly(sizes, others, spare, most, order)
            break
    sizes, left = _greedy(p, sizes, inner, left + spare, most, order)
    for others in (p == 0, p == 1, np.ones(size, bool)):
        sizes, left = _evenly(sizes, others, left, most, order)
    return sizes


def _greedy(
    p: np.ndarray, sizes: np.ndarray, inner: np.ndarray, total: int, most: int, order: np.ndarray
) -> tuple[np.ndarray, int]:
    """The ``total`` largest gains of the inner prompts; returns what fits nowhere too."""
    rows = order[inner[order]]
    if not len(rows) or total <= 0:
        return sizes, total
    n = np.arange(int(sizes[rows].min()), most)
    q = p[rows, None]
    gains = np.round((q**n * (1 - q) + (1 - q) ** n * q) * q * (1 - q) ** 2, 12)
    # Stable: of equal gains those of a prompt's earlier rollouts come first, then prompts in order.
    flat = np.argsort(-gains.T.ravel(), kind="stable")[:total]
    sizes = sizes.copy()
    np.add.at(sizes, rows[flat % len(rows)], 1)
    return sizes, total - len(flat)


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
