# SPDX-License-Identifier: Apache-2.0
"""The progress line of a training step."""

from __future__ import annotations

import re
from collections.abc import Mapping

FATE_PREFIX = "allocation/fate/"
_ACCURACY = re.compile(r"^val-core/(?P<source>.+)/(?P<what>acc|reward)/(?P<estimate>mean@(?P<n>\d+))$")


def held_out(metrics: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """The held-out accuracy among a step's metrics, by data source.

    Args:
        metrics: verl's metrics of one step.

    Returns:
        {data source: (estimate such as "mean@8", value)}: of a source's means the one over most rollouts, and verl's
        `acc` before `reward`. Empty where the step was not validated.
    """
    best: dict[str, tuple[tuple[bool, int], str, float]] = {}
    for key, value in metrics.items():
        if match := _ACCURACY.match(key):
            rank = (match["what"] == "acc", int(match["n"]))
            if match["source"] not in best or rank > best[match["source"]][0]:
                best[match["source"]] = (rank, match["estimate"], float(value))
    return {source: (estimate, value) for source, (_, estimate, value) in sorted(best.items())}


def fates(metrics: Mapping[str, float]) -> dict[str, int]:
    """Rollouts of the step by fate, those with none left out, most first."""
    counts = {key[len(FATE_PREFIX) :]: int(value) for key, value in metrics.items() if key.startswith(FATE_PREFIX)}
    return dict(sorted(((fate, n) for fate, n in counts.items() if n), key=lambda item: -item[1]))


def progress_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """One line about a step: reward, effective share, rounds, rollouts by fate, seconds, held-out accuracy.

    Args:
        step: the training step; 0 is the validation before training.
        total: training steps of the run, or None if not known.
        metrics: the step's metrics, as in `metrics.jsonl`. What is missing is left out of the line.
    """
    of = f"/{total}" if total else ""
    parts = [f"step {step:>{len(str(total or step))}}{of}"]
    if (reward := metrics.get("critic/score/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (share := metrics.get("allocation/effective_share")) is not None:
        parts.append(f"effective {share:.2f}")
    if (rounds := metrics.get("allocation/rounds")) is not None:
        parts.append(f"{rounds:.0f} round" + ("" if rounds == 1 else "s"))
    by_fate = ", ".join(f"{fate} {n}" for fate, n in fates(metrics).items())
    if (rollouts := metrics.get("allocation/step_rollouts")) is not None:
        parts.append(f"{rollouts:.0f} rollouts" + (f": {by_fate}" if by_fate else ""))
    elif by_fate:
        parts.append(f"rollouts: {by_fate}")
    if (seconds := metrics.get("timing_s/step")) is not None:
        parts.append(f"{seconds:.1f} s")
    for source, (estimate, value) in (accuracies := held_out(metrics)).items():
        name = "held-out" if len(accuracies) == 1 else f"held-out {source}"
        parts.append(f"{name} {estimate} {value:.3f}")
    return " | ".join(parts)
