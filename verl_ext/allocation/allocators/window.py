"""How many prompts a wave has: as many as are likely to fill what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..state import check_keys

# Weight, in prompts, of the rate known before against what is seen; and what a step keeps of the earlier ones' counts.
_PRIOR_PROMPTS = 8
_MEMORY = 0.9


class CommitRate:
    """Share of started prompts that commit, over steps and within the step.

    Only resolved cohorts count (all prompts of a wave decided): in a wave half decided, commits come before
    abandonments and the share is biased upward. Within a step the rate is that of the last resolved wave, with the rate
    over steps as 8 prompts of prior weight.

    Args:
        first: the rate assumed before anything is seen.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._prompts = self._commits = 0.0
        self._step: list[tuple[int, int]] = []

    def begin_step(self) -> None:
        """A step begins."""
        self._step = []

    def resolved(self, prompts: int, commits: int) -> None:
        """All ``prompts`` of a wave are decided, ``commits`` of them for the batch."""
        self._step.append((prompts, commits))

    def decided(self, prompts: int, commits: int) -> None:
        """Streaming, where there are no waves: ``prompts`` more are decided, ``commits`` of them for the batch."""
        before = self._step[-1] if self._step else (0, 0)
        self._step = [(before[0] + prompts, before[1] + commits)]

    def end_step(self) -> None:
        """Enter the step's resolved waves into the rate over steps."""
        if self._step:
            self._prompts = _MEMORY * self._prompts + sum(prompts for prompts, _ in self._step)
            self._commits = _MEMORY * self._commits + sum(commits for _, commits in self._step)
        self._step = []

    @property
    def over_steps(self) -> float:
        """The rate over steps."""
        return (self._commits + _PRIOR_PROMPTS * self._first) / (self._prompts + _PRIOR_PROMPTS)

    @property
    def now(self) -> float:
        """The rate to plan the next wave with."""
        if not self._step:
            return self.over_steps
        prompts, commits = self._step[-1]
        return (commits + _PRIOR_PROMPTS * self.over_steps) / (prompts + _PRIOR_PROMPTS)

    @property
    def pooled(self) -> float:
        """The rate over steps and all of this one: what streaming plans with, as it plans again after every group and
        would admit too many on the dips of a rate of few prompts."""
        prompts, commits = (sum(column) for column in zip(*self._step, strict=True)) if self._step else (0, 0)
        weight = self._prompts + _PRIOR_PROMPTS + prompts
        return (self._commits + _PRIOR_PROMPTS * self._first + commits) / weight

    def state_dict(self) -> dict[str, Any]:
        """The counts over steps."""
        return {"prompts": self._prompts, "commits": self._commits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts."""
        check_keys("commit rate", state, ("prompts", "commits"))
        self._prompts, self._commits = float(state["prompts"]), float(state["commits"])
        self._step = []


def adaptive_wave(
    need: float, rate: float, wave: int, target: int, *, margin: float = 0.0, growth: float = 1.3, cap: float = 8.0
) -> int:
    """Prompts of the step's ``wave``-th wave (from 1): ceil(need / rate x (1 + margin) x growth^(wave - 2)).

    The growth sets in after the second wave; a wave is at most ``cap`` times the batch, so that a rate near 0 does not
    ask for the whole data set.

    Args:
        need: groups missing, less those expected of prompts still undecided.
        rate: commits per prompt.
        target: groups of the batch.
    """
    most = math.ceil(cap * target)
    if need <= 0:
        return 0
    wanted = need * (1 + margin) * growth ** max(0, wave - 2)
    return most if wanted >= most * rate else max(1, math.ceil(wanted / rate))
