"""GRESO: prompts that were saturated several times in a row are skipped with growing probability.

"Act Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts" (official code:
github Infini-AI-Lab/GRESO). Its dynamic sampling with batches sized by what is missing is the allocator
``dynamic_sampling`` with ``gen_multiple: greso``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...typed_settings import require
from ..metric import Metric
from ..prompt_pool import PromptPool
from ..registry import register_selector
from ..state import StateError, check_keys, rng_for
from .selector import Selector, SelectorSettings

_LOW, _HIGH = 0.05, 0.95


@dataclass(frozen=True)
class GresoSettings(SelectorSettings):
    """Settings of GRESO."""

    target: float = 0.25
    """alpha, the share of saturated groups to aim at: a third of it solved, two thirds failed."""
    step: float = 0.01
    """Change of p_easy and p_hard a step, from the second epoch on."""
    start: float = 0.5
    """p_easy and p_hard at first."""
    least: float = 0.01
    """Least probability of offering a prompt."""
    seed: int = 0
    """Seed of the skipping."""

    def __post_init__(self) -> None:
        require(0 < self.target < 1, "allocation.selector.target", self.target, "a number in (0, 1)")
        require(0 <= self.step <= 1, "allocation.selector.step", self.step, "a number in [0, 1]")
        require(_LOW <= self.start <= _HIGH, "allocation.selector.start", self.start, f"a number in [{_LOW}, {_HIGH}]")
        require(0 < self.least <= 1, "allocation.selector.least", self.least, "a number in (0, 1]")
        require(self.seed >= 0, "allocation.selector.seed", self.seed, "an integer of 0 or more")


@register_selector("greso")
class Greso(Selector):
    """The pool's order, in which a prompt saturated alike z times in a row is offered with probability max(p^z, .01).

    p is p_easy for z visits that were all right, p_hard for z that were all wrong; each falls where its kind of
    saturated groups is at its target or above, and rises where it is below. A skipped prompt counts as offered in its
    epoch.
    """

    Settings = GresoSettings

    def __init__(self, settings: GresoSettings) -> None:
        super().__init__(settings)
        self._runs: np.ndarray | None = None  # length of the run of visits all right, or, negative, all wrong
        self._easy = self._hard = settings.start

    def begin_step(self, step: int, pool: PromptPool) -> None:
        super().begin_step(step, pool)
        if self._runs is None:
            self._runs = np.zeros(len(pool), np.int32)
        elif len(self._runs) != len(pool):
            raise StateError(f"greso knows {len(self._runs)} prompts and the pool has {len(pool)}")
        self._rng = rng_for(self.settings.seed, "greso", step)
        self._groups = self._solved = self._failed = self._skipped = self._offered = 0

    def select(self, n: int) -> list[int]:
        assert self.pool is not None, "begin_step comes first"
        chosen: list[int] = []
        while len(chosen) < n and (rows := self.pool.take(n - len(chosen))):
            runs = self._runs[rows]
            base = np.where(runs > 0, self._easy, self._hard)
            keep = self._rng.random(len(rows)) < np.where(
                runs == 0, 1.0, np.maximum(base ** np.abs(runs), self.settings.least)
            )
            chosen += [row for row, kept in zip(rows, keep.tolist(), strict=True) if kept]
            self._skipped += int((~keep).sum())
        self._offered += len(chosen)
        return chosen

    def observe(self, prompt_row: int, successes: int, trials: int, group_size: int) -> None:
        if not trials:
            return
        self._groups += 1
        run = int(self._runs[prompt_row])
        if successes == trials:
            self._solved += 1
            self._runs[prompt_row] = max(run, 0) + 1
        elif successes == 0:
            self._failed += 1
            self._runs[prompt_row] = min(run, 0) - 1
        else:
            self._runs[prompt_row] = 0

    def end_step(self) -> None:
        target, step = self.settings.target, self.settings.step
        if self._groups and self.pool.epoch >= 1:
            self._easy += -step if self._solved / self._groups >= target / 3 else step
            self._hard += -step if self._failed / self._groups >= 2 * target / 3 else step
            self._easy, self._hard = (min(max(p, _LOW), _HIGH) for p in (self._easy, self._hard))
        drawn = self._offered + self._skipped
        self._numbers = {
            "p_easy": self._easy,
            "p_hard": self._hard,
            "skipped": float(self._skipped),
            "skipped_share": self._skipped / drawn if drawn else 0.0,
        }

    METRICS = {
        "p_easy": Metric("of offering a prompt that was all right once", "probability", "falls: many are easy"),
        "p_hard": Metric("of offering a prompt that was all wrong once", "probability", "falls: many are hard"),
        "skipped": Metric("prompts that were skipped", "prompts"),
        "skipped_share": Metric("`skipped` of the prompts drawn", "share", "near 1: hardly anything is left"),
    }

    def state_dict(self) -> dict[str, Any]:
        """4 bytes a prompt."""
        runs = np.zeros(0, np.int32) if self._runs is None else self._runs.copy()
        return {"runs": runs, "easy": self._easy, "hard": self._hard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("greso", state, ("runs", "easy", "hard"))
        self._runs = np.array(state["runs"], np.int32) if len(state["runs"]) else None
        self._easy, self._hard = float(state["easy"]), float(state["hard"])
