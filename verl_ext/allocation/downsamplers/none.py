"""Every scored rollout reaches the update."""

from __future__ import annotations

import numpy as np

from ..groups import Group
from ..registry import register_downsampler
from .downsampler import DownSampler


@register_downsampler("none")
class KeepAll(DownSampler):
    """Every scored rollout."""

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        return [outcome.session for outcome in group.trainable]
