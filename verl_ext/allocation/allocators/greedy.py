"""Divide a budget over prompts: the largest gains first, which is exact where each prompt's gains fall."""

from __future__ import annotations

import numpy as np

# Gains that differ by less are ties.
TIE_DECIMALS = 12


def largest_gains(gains: np.ndarray, total: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """How many of its leading gains each prompt gets, of the ``total`` largest of all.

    Maximises the sum of the gains taken, where every row falls: sum_i sum_{m <= x_i} gains[i, m], sum_i x_i = total.

    Args:
        gains: (prompts, most); the m-th column is what the m-th further rollout adds. -inf: not allowed.
        total: rollouts to divide; what exceeds the allowed gains is left over.
        rng: orders prompts of equal gain (rounded to 1e-12); None: by position.

    Returns:
        int64 (prompts,), summing to ``total`` or to the number of allowed gains.
    """
    prompts, most = gains.shape
    order = np.arange(prompts) if rng is None else rng.permutation(prompts)
    # Column by column, and stable: of equal gains a prompt's earlier ones come first, then prompts in order.
    flat = np.round(gains[order], TIE_DECIMALS).T.ravel()
    taken = np.argsort(-flat, kind="stable")[: max(0, total)]
    taken = taken[np.isfinite(flat[taken])]
    counts = np.zeros(prompts, np.int64)
    np.add.at(counts, order[taken % prompts] if most else order[:0], 1)
    return counts
