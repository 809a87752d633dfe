"""Predict, then select: a seeded sample of the pool is scored and served best first, and every prompt rests a while."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...typed_settings import require
from ..metric import Metric
from ..prompt_pool import PromptPool
from ..state import StateError, check_keys, rng_for
from .selector import Selector, SelectorSettings

logger = logging.getLogger(__name__)

# Scores that differ by less are ties.
TIE_DECIMALS = 12


CANDIDATES = {
    "candidates": Metric("prompts that the best were taken from", "prompts"),
    "seen_share": Metric("prompts of the pool with outcomes", "share", "low: predictions are the prior's"),
}


@dataclass(frozen=True)
class CandidateSettings(SelectorSettings):
    """Settings of selectors that score a sample of the pool."""

    candidates: int = 16
    """Candidates drawn at a time, in units of the batch (``stop.groups``); no more than have rested."""
    spacing: float = 0.75
    """Coverage: a prompt is no candidate again before so large a share of the prompts in play was looked at since.
    Of as many looks as there are prompts, that share at least goes to different ones. 0: as published, with which a
    pool smaller than ``candidates`` narrows to the few prompts that score best; 1: every prompt once an epoch."""
    seed: int = 0
    """Seed of the candidates, of ties and of any draws."""

    def __post_init__(self) -> None:
        require(self.candidates >= 1, "allocation.selector.candidates", self.candidates, "an integer of 1 or more")
        require(0 <= self.spacing <= 1, "allocation.selector.spacing", self.spacing, "a number in [0, 1]")
        require(self.seed >= 0, "allocation.selector.seed", self.seed, "an integer of 0 or more")


class CandidateSelector(Selector):
    """Draws candidates from what the pool may offer, uniformly without replacement, and serves them best first.

    Candidates are prompts that have rested (``spacing``); where fewer have than are asked for, those that have rested
    longest. An allocator that comes back within the step is served on down the same candidates; once all of them are
    offered, as many are drawn again from the rest of the pool. Randomness is by step, so that it needs no saved state.
    """

    Settings: type = CandidateSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._prompts = 0
        self._groups = 1
        self._queue: list[int] = []
        self._seen = array("q")
        self._candidates: list[int] = []  # of the step
        self._capped = False

    def _start(self, prompts: int) -> None:
        """Make the arrays, for so many prompts."""
        raise NotImplementedError

    def _losses(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A number a candidate; the smallest is offered first."""
        raise NotImplementedError

    def _load_arrays(self, rule: str, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take over the number of prompts and the rule's arrays, whose last axis is over prompts.

        Raises:
            StateError: something is missing, unknown, or of another length.
        """
        arrays = names if state.get("prompts") else ()
        check_keys(rule, state, ("prompts", *arrays))
        for name in arrays:
            shape = np.shape(state[name])
            if not shape or shape[-1] != state["prompts"]:
                raise StateError(f"state of {rule}: {name} has the shape {shape}, for {state['prompts']} prompts")
        self._prompts = int(state["prompts"])
        for name in arrays:
            setattr(self, f"_{name}", np.array(state[name]))

    def begin_step(self, step: int, pool: PromptPool) -> None:
        super().begin_step(step, pool)
        if not self._prompts:
            self._prompts = len(pool)
            self._start(len(pool))
        elif self._prompts != len(pool):
            raise StateError(f"{type(self).__name__} knows {self._prompts} prompts and the pool has {len(pool)}")
        self._rng = rng_for(self.settings.seed, type(self).__name__, step)
        self._queue, self._seen, self._candidates = [], array("q"), []

    def step_budget(self, groups: int, group_size: int, rollouts: int) -> int:
        self._groups = groups
        return rollouts

    def select(self, n: int) -> list[int]:
        assert self.pool is not None, "begin_step comes first"
        chosen: list[int] = []
        while len(chosen) < n:
            if not self._queue and not self._draw(n):
                break
            taken, self._queue = self._queue[: n - len(chosen)], self._queue[n - len(chosen) :]
            self.pool.mark_offered(taken)
            chosen += taken
        return chosen

    def observe(self, prompt_row: int, successes: int, trials: int, group_size: int) -> None:
        if trials:
            self._seen.extend((prompt_row, successes, trials, group_size))

    def _outcomes(self) -> np.ndarray:
        """Rows, successes, trials and group sizes of the step, each a row of an integer array."""
        return np.array(self._seen).reshape(-1, 4).T

    def _draw(self, n: int) -> bool:
        """Candidates for the queue; False when the pool has no more in this step."""
        free = self._rested(n)
        wanted = self.settings.candidates * max(self._groups, n)
        size = min(len(free), wanted)
        if not size:
            return False
        if size < wanted and not self._capped:
            self._capped = True
            logger.info(
                "%s: %d candidates wanted, %d of %d prompts have rested: all of them are scored",
                type(self).__name__, wanted, len(free), len(self.pool),
            )  # fmt: skip
        rows = self._rng.choice(free, size, replace=False)  # in random order, so a stable sort breaks ties by seed
        losses = np.round(self._losses(rows, self._rng), TIE_DECIMALS)
        self._queue = rows[np.argsort(losses, kind="stable")].tolist()
        self._candidates += rows.tolist()
        return True

    def _rested(self, n: int) -> np.ndarray:
        """Rows that may be offered and have rested, or the ``n`` that have rested longest."""
        free = np.flatnonzero(self.pool.eligible())
        rest = self.pool.rested()[free]
        enough = rest >= self.settings.spacing
        if enough.sum() >= n:
            return free[enough]
        shuffled = self._rng.permutation(len(free))
        return free[shuffled[np.argsort(-rest[shuffled], kind="stable")[:n]]]
