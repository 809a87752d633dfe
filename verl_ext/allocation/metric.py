"""Descriptions of the numbers in the log. Each is declared where it is made; docs/metrics.md is written of them."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """What a number in the log is."""

    meaning: str
    """What is counted or measured, of the step unless it says otherwise."""
    unit: str
    """rollouts, groups, prompts, tokens, a share in [0, 1], seconds, ..."""
    reading: str = ""
    """What good and bad values look like; empty where no value is better."""


SIZES = {
    "largest_group": Metric("largest group of the step", "rollouts"),
    "smallest_group": Metric("smallest group of the step", "rollouts", "1 or 2 for long: the rule starves prompts"),
}
"""Of rules that give each prompt a size of its own."""

WAITING = {
    "stale_groups": Metric("groups that waited longer than `max_staleness`, and were dropped", "groups", "0 is best"),
    "lag_mean": Metric("weights' versions since the batch's prompts were offered, mean", "versions", "0: on policy"),
    "lag_max": Metric("the same, most", "versions", "at most `max_staleness`"),
}
"""Of rules that keep groups for a later step."""
