# SPDX-License-Identifier: Apache-2.0
"""Which recipe to take, from a run's own first steps: the table of docs/evidence.md as a function."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.runs.records import CONFIG, Run, read_config

FIRST = 20
"""Steps that are looked at, from the first on."""
_LARGE, _MIXED, _FEW = 16, 0.8, 0.1


@dataclass(frozen=True)
class Beginning:
    """What the first steps of a run show."""

    group_size: int
    """actor_rollout_ref.rollout.n."""
    mixed: float
    """Share of the prompts whose rollouts came back right and wrong."""
    failed: float
    """Share whose rollouts came back all wrong."""
    solved: float
    """Share whose rollouts came back all right."""
    selector: str
    """Name of the selector."""
    updating: float
    """Share of a step's time that the update takes, log-probabilities included."""


def advice(seen: Beginning) -> list[str]:
    """What to change, the most telling first; empty where nothing is to be gained by where the rollouts go."""
    found = []
    if seen.group_size >= _LARGE:
        found.append(
            f"groups of {seen.group_size} are large: actor_rollout_ref.rollout.n=4 to 8 with as many rollouts a step "
            "(data.train_batch_size) learned more than any rule did with large groups"
        )
    if seen.selector == "shuffled" and seen.mixed < _MIXED and seen.failed + seen.solved > _FEW:
        found.append(
            f"{seen.failed:.0%} of the prompts came back all wrong and {seen.solved:.0%} all right: over several "
            "epochs allocation/selector=greso, with groups of 4, passes over those that stay so"
        )
    if seen.updating > 0.5:
        found.append(
            f"the update takes {seen.updating:.0%} of a step: allocation/downsampler=max_variance trains on half of "
            "each group"
        )
    return found


def beginning(run: Run) -> Beginning | None:
    """What a run's first steps show; None where they do not say what became of their prompts."""
    totals = {}
    for name in ("mixed", "failed", "solved"):
        totals[name] = sum(run.series(f"allocation/selector/offered_{name}")[1][:FIRST])
    prompts = sum(totals.values())
    config = read_config(run.folder / CONFIG)
    try:
        group_size = int(config["actor_rollout_ref"]["rollout"]["n"])
        selector = str(config["allocation"]["selector"]["name"])
    except (KeyError, TypeError, ValueError):
        return None
    if not prompts:
        return None
    times = {name: sum(run.series(f"timing_s/{name}")[1][:FIRST]) for name in ("step", "old_log_prob", "update_actor")}
    updating = (times["old_log_prob"] + times["update_actor"]) / times["step"] if times["step"] else 0.0
    shares = {name: total / prompts for name, total in totals.items()}
    return Beginning(group_size, **shares, selector=selector, updating=updating)
