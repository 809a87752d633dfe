"""Any rollouts of a group, a baseline of PODS (arXiv 2504.13818)."""

from __future__ import annotations

import numpy as np

from ..registry import register_downsampler
from .downsampler import KeepFew, shuffled_indices


@register_downsampler("random")
class Random(KeepFew):
    """Any ``keep`` of the rollouts, all subsets being as likely."""

    def subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        return np.sort(shuffled_indices(len(rewards), rng)[:keep])
