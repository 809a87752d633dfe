"""The pool's order, in which each prompt is offered at its turn with a probability of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...typed_settings import require
from ..metric import Metric
from ..prompt_pool import PromptPool
from ..state import rng_for
from .selector import Selector, SelectorSettings


@dataclass(frozen=True)
class SkippingSettings(SelectorSettings):
    """Settings of rules that skip."""

    least: float = 0.01
    """Least probability of offering a prompt at its turn."""
    seed: int = 0
    """Seed of the skipping."""

    def __post_init__(self) -> None:
        require(0 < self.least <= 1, "allocation.selector.least", self.least, "a number in (0, 1]")
        require(self.seed >= 0, "allocation.selector.seed", self.seed, "an integer of 0 or more")


class Skipping(Selector):
    """A skipped prompt counts as offered in its epoch. Randomness is by step, so that it needs no saved state."""

    Settings: type = SkippingSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._offered = self._skipped = 0

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        """(rows,), of being offered."""
        raise NotImplementedError

    def begin_step(self, step: int, pool: PromptPool) -> None:
        super().begin_step(step, pool)
        self._rng = rng_for(self.settings.seed, type(self).__name__.lower(), step)
        self._offered = self._skipped = 0

    def select(self, n: int) -> list[int]:
        assert self.pool is not None, "begin_step comes first"
        chosen: list[int] = []
        while len(chosen) < n and (rows := self.pool.take(n - len(chosen))):
            keep = self._rng.random(len(rows)) < self.probabilities(np.array(rows))
            chosen += [row for row, kept in zip(rows, keep.tolist(), strict=True) if kept]
            self._skipped += int((~keep).sum())
        self._offered += len(chosen)
        return chosen

    def end_step(self) -> None:
        drawn = self._offered + self._skipped
        self._numbers = {
            "skipped": float(self._skipped),
            "skipped_share": self._skipped / drawn if drawn else 0.0,
        }

    METRICS = {
        "skipped": Metric("prompts that were skipped", "prompts"),
        "skipped_share": Metric("`skipped` of the prompts drawn", "share", "near 1: hardly anything is left"),
    }
