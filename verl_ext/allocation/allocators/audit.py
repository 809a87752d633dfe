"""A live estimate of what abandoning costs: some abandoned groups are completed all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

from ..groups import Group
from ..metric import Metric
from ..state import check_keys

AUDITED = {
    "audit_groups": Metric("abandoned groups so far that were completed to see what they would have been", "groups"),
    "p_eff_audited": Metric("those that were mixed after all", "share", "small: little signal is given away"),
    "p_eff_audited_low": Metric("lower end of its 95 % interval (Wilson)", "share"),
    "p_eff_audited_high": Metric("upper end of the same", "share"),
    "p_eff_audited_predicted": Metric("what the prior said of them, mean", "probability",
                                      "within the interval: the prior is calibrated"),
}  # fmt: skip


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
        """Numbers over the run, each described in ``AUDITED``; none without audits."""
        if not self.fraction:
            return {}
        low, high = 0.0, 1.0
        if self._groups:
            low, high = binomtest(self._effective, self._groups).proportion_ci(0.95, method="wilson")
        return {
            "audit_groups": float(self._groups),
            "p_eff_audited": self.estimate,
            "p_eff_audited_low": float(low),
            "p_eff_audited_high": float(high),
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
