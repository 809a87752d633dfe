"""What a down-sampler is: it decides which rollouts of a committed group reach the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..groups import Group


@dataclass(frozen=True)
class DownSamplerSettings:
    """A down-sampler without settings."""


@dataclass(frozen=True)
class KeepSettings:
    """Settings of the down-samplers that keep a fixed number."""

    keep: int | Literal["auto"] = "auto"
    """Rollouts of a group that reach the update (m); a group with no more than that is kept whole. auto: a quarter of
    ``group_size`` and at least 2, as in PODS' runs of 64 and 128 rollouts."""
    group_size: int = 8
    """Rollouts of a finished group, which ``keep: auto`` follows."""
    normalise_over: Literal["selected", "group"] = "selected"
    """Whose mean and standard deviation the advantage uses: ``selected``, of the rollouts kept (as PODS; a group's
    advantages sum to zero); ``group``, of all scored rollouts of the group."""

    def __post_init__(self) -> None:
        require(self.group_size >= 2, "allocation.downsampler.group_size", self.group_size, "an integer of 2 or more")
        if self.keep == "auto":
            object.__setattr__(self, "keep", max(2, self.group_size // 4))  # frozen, and still being made
        require(self.keep >= 2, "allocation.downsampler.keep", self.keep, "auto, or an integer of 2 or more")


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


class KeepFew(DownSampler):
    """Keeps ``keep`` of the scored rollouts by their scores; a group with no more than that is kept whole."""

    Settings = KeepSettings

    def select(self, group: Group, rng: np.random.Generator | None = None) -> list[int]:
        scored, keep = group.trainable, self.settings.keep
        if len(scored) <= keep:
            return [outcome.session for outcome in scored]
        return [scored[i].session for i in self.subset([outcome.score for outcome in scored], keep, rng)]

    def subset(self, rewards: list[float], keep: int, rng: np.random.Generator | None) -> np.ndarray:
        """Indices, ascending, of ``keep`` of the rewards, of which there are more; ``rng`` chooses among equal ones."""
        raise NotImplementedError


def ranked(rewards: Any, keep: int, rng: np.random.Generator | None) -> np.ndarray:
    """Indices by rising reward; of equal ones (rounded to 1e-12) the first in order comes last, or a random one.

    Raises:
        ValueError: the shape is not (rollouts,), ``keep`` is below 1, or a reward is NaN or infinite.
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards have shape {values.shape}; accepted: (rollouts,)")
    if keep < 1:
        raise ValueError(f"keep={keep}; accepted: 1 or more")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward {values[at]} of rollout {at}; accepted: finite numbers")
    shuffled = shuffled_indices(len(values), rng)[::-1]
    return shuffled[np.argsort(np.round(values[shuffled], 12), kind="stable")]


def shuffled_indices(size: int, rng: np.random.Generator | None) -> np.ndarray:
    """0 .. size - 1 in random order; None: in order."""
    return np.arange(size) if rng is None else rng.permutation(size)
