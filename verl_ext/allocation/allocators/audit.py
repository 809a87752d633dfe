"""A live estimate of what abandoning costs: some abandoned groups are completed all the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

from ..groups import Group
from ..state import check_keys


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share: the p with |s/n - p| <= z sqrt(p (1 - p) / n).

    (p' + z^2/2n +- z sqrt(p' (1 - p') / n + z^2 / 4 n^2)) / (1 + z^2/n), p' = s/n; (0, 1) without trials.

    Raises:
        ValueError: not 0 <= successes <= trials, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(
            f"successes={successes}, trials={trials}, confidence={confidence}; "
            "accepted: 0 <= successes <= trials, confidence in (0, 1)"
        )
    if trials == 0:
        return 0.0, 1.0
    z2 = float(ndtri((1 + confidence) / 2)) ** 2 / trials
    share = successes / trials
    middle = share + z2 / 2
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    low, high = (middle - half) / (1 + z2), (middle + half) / (1 + z2)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


class Audit:
    """Which abandoned groups are completed, and what became of them, over the run.

    Args:
        fraction: probability that an abandoned group is drawn.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._abandoned: dict[str, float] = {}
        self._running: list[tuple[Group, float]] = []
        self._groups = self._effective = 0
        self._predicted = 0.0
        self._predictions: dict[str, float] = {}

    def begin_step(self) -> None:
        """A step begins."""
        self._abandoned, self._running = {}, []

    def abandoned(self, group: Group, predicted: float) -> None:
        """A group was abandoned that more rollouts would complete, ``predicted`` to be effective then."""
        if self.fraction:
            self._abandoned[group.uid] = predicted

    def draw(self, groups: Sequence[Group], rng: np.random.Generator) -> list[Group]:
        """Those of the groups, all of the step, that were abandoned since the last draw and are to be completed."""
        if not self._abandoned:
            return []
        candidates = [group for group in groups if group.uid in self._abandoned]  # in the step's order, not of arrival
        hit = (rng.random(len(candidates)) < self.fraction).tolist()
        self._predictions = self._abandoned
        self._abandoned = {}
        return [group for group, drawn in zip(candidates, hit, strict=True) if drawn]

    def started(self, group: Group) -> None:
        """The rest of its rollouts is asked for."""
        self._running.append((group, self._predictions[group.uid]))

    def end_step(self, effective: Any) -> None:
        """Count the groups completed; ``effective(group)`` says whether one has signal."""
        for group, predicted in self._running:
            self._groups += 1
            self._effective += bool(effective(group))
            self._predicted += predicted
        self._abandoned, self._running = {}, []

    @property
    def estimate(self) -> float:
        """Share of audited groups that were effective; 0 without any."""
        return self._effective / self._groups if self._groups else 0.0

    def metrics(self) -> dict[str, float]:
        """Over the run: groups audited, P(effective | abandoned) with its 95 % interval, and what was predicted."""
        if not self.fraction:
            return {}
        low, high = wilson_interval(self._effective, self._groups)
        return {
            "audit_groups": float(self._groups),
            "p_eff_audited": self.estimate,
            "p_eff_audited_low": low,
            "p_eff_audited_high": high,
            "p_eff_audited_predicted": self._predicted / self._groups if self._groups else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """The counts over the run."""
        return {"groups": self._groups, "effective": self._effective, "predicted": self._predicted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts."""
        check_keys("audit", state, ("groups", "effective", "predicted"))
        self._groups, self._effective = int(state["groups"]), int(state["effective"])
        self._predicted = float(state["predicted"])
