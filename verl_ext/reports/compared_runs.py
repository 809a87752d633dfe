# SPDX-License-Identifier: Apache-2.0
"""A run, read for a comparison: held-out accuracy along four axes, fates, shares, predictions."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.launch.comparison_plan import NOTE, CompareError, read_note
from verl_ext.masking import masked
from verl_ext.runs.ledger_check import ledger_faults, malformed
from verl_ext.runs.records import ABOUT, CONFIG, METRICS, Run, RunError, read_config, read_run
from verl_ext.runs.step_line import held_out

AXES = {"rollouts": "rollouts", "tokens": "generated tokens", "hours": "hours", "steps": "training steps"}
"""Axis and its label; hours are those of training steps, validation not counted."""

PREDICTIONS = (
    ("SARA: mixed within the probe", "allocation/p_eff_predicted", "allocation/p_eff_realised", False),
    ("SARA: abandoned, yet mixed (audit)", "allocation/p_eff_audited_predicted", "allocation/p_eff_audited", True),
    ("DPS: mixed", "allocation/selector/mixed_predicted", "allocation/selector/mixed_realised", False),
    ("MoPPS: success rate", "allocation/selector/rate_predicted", "allocation/selector/rate_realised", False),
)
"""Label, metric predicted, metric realised, and whether the two are over the run so far."""

_BLOCKS = 5
SEED = re.compile(r"[-_](?:seed|s)(\d+)$")


@dataclass
class RunData:
    """A run, ready to be compared."""

    recipe: str
    """What it is a run of."""
    seed: int | None
    """Its seed; None where the folder does not say."""
    folder: Path
    """Its folder."""
    run: Run
    """What was logged."""
    config: dict[str, Any]
    """The whole configuration; empty where it is not there."""
    note: dict[str, Any]
    """What the run and `verl_ext.compare` noted: versions, machine."""
    points: list[dict[str, float]] = field(default_factory=list)
    """Held-out accuracy: one point a validation, with all axes."""
    totals: dict[str, float] = field(default_factory=dict)
    """Axes at the run's end."""
    estimate: str = ""
    """How accuracy was estimated, e.g. mean@8, and on what."""

    @property
    def complete(self) -> bool:
        """All training steps were made."""
        return bool(self.note.get("finished")) or self.run.ended

    @property
    def final(self) -> float | None:
        """Accuracy at the last validation."""
        return self.points[-1]["accuracy"] if self.points else None

    def fates(self) -> dict[str, int]:
        """Rollouts by fate over the run, those waiting or in flight at its end included."""
        if not self.run.ledger or malformed(self.run.ledger[-1], ("fates_total",)):
            return {}
        last = self.run.ledger[-1]
        counts = {fate: n for fate, n in last["fates_total"].items() if n}
        for name in ("waiting", "in_flight"):
            if last.get(name) and not malformed(last, (name,)):
                counts[name] = last[name]
        return counts

    def faults(self) -> list[str]:
        """Faults of the ledger: what does not add up."""
        return ledger_faults(self.run.ledger)

    def effective_groups(self) -> float | None:
        """Groups trained on with a right and a wrong answer, over the run."""
        steps = [record.data for record in self.run.steps]
        names = ("allocation/groups", "allocation/batch_effective_share")
        if not steps or not all(name in data for data in steps for name in names):
            return None
        return sum(data[names[0]] * data[names[1]] for data in steps)

    def predictions(self) -> list[dict[str, Any]]:
        """Predicted and realised probabilities, in blocks of steps; those over the run so far once, at its end."""
        found = []
        for label, predicted, realised, cumulative in PREDICTIONS:
            pairs = [(r.data[predicted], r.data[realised]) for r in self.run.steps
                     if predicted in r.data and realised in r.data]  # fmt: skip
            if cumulative:
                pairs = pairs[-1:] if self.run.steps and self.run.steps[-1].data.get("allocation/audit_groups") else []
            size = max(1, -(-len(pairs) // _BLOCKS))
            for at in range(0, len(pairs), size):
                block = pairs[at : at + size]
                means = [sum(column) / len(block) for column in zip(*block, strict=True)]
                found.append({"what": label, "predicted": means[0], "realised": means[1], "steps": len(block)})
        return found


def load(folder: Path) -> RunData:
    """Read a run's folder.

    Raises:
        CompareError: the folder holds no run, or a file in it is damaged.
    """
    try:
        run = read_run(folder)
        config = masked(read_config(folder / CONFIG))
    except RunError as error:
        raise CompareError(f"{folder}: {error}") from error
    own = read_note(folder)
    _check_note(folder / ABOUT, run.about)
    _check_note(folder / NOTE, own)
    note = {**run.about, **own}
    name = _get(config, "trainer.experiment_name") or folder.name
    match = SEED.search(str(name))
    seed = note.get("seed", _get(config, "allocation.seed", int(match[1]) if match else None))
    if not _is_seed(seed):
        raise CompareError(f"{folder / CONFIG}: allocation.seed={seed!r}; accepted: null, or an integer")
    data = RunData(note.get("recipe") or SEED.sub("", str(name)), seed, folder, run, config, note)
    measure(data)
    return data


def _is_seed(value: Any) -> bool:
    return value is None or isinstance(value, int) and not isinstance(value, bool)


_NOTED = {
    "recipe": ("null, or a name", lambda value: value is None or isinstance(value, str)),
    "seed": ("null, or an integer", _is_seed),
    "overrides": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(o, str) for o in value)),
    "versions": ("a mapping", lambda value: isinstance(value, dict)),
    "machine": ("a mapping", lambda value: isinstance(value, dict)),
}


def _check_note(path: Path, note: dict[str, Any]) -> None:
    """Refuse a note whose values the report cannot show."""
    for name, (accepted, fits) in _NOTED.items():
        if name in note and not fits(note[name]):
            raise CompareError(f"{path}: {name}={note[name]!r}; accepted: {accepted}")


def find(root: Path | None, patterns: Iterable[str]) -> list[Path]:
    """Folders with metrics: directly under ``root``, and those the patterns match, each once; also JSON files that the
    patterns match.

    Raises:
        CompareError: a pattern matches no run's folder.
    """
    given = {None: sorted(root.iterdir()) if root is not None and root.is_dir() else []}
    given |= {pattern: [Path(match) for match in sorted(glob.glob(pattern))] for pattern in patterns}
    found: dict[Path, Path] = {}
    for pattern, paths in given.items():
        runs = [path for path in paths if (path / METRICS).is_file() or pattern is not None and path.suffix == ".json"]
        if not runs and pattern is not None:
            raise CompareError(f"folders: {pattern!r} matches no folder with a {METRICS}, and no .json of verl_ext.lab")
        for path in runs:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def measure(data: RunData) -> None:
    """Walk over the steps and note the axes at every validation."""
    at = dict.fromkeys(AXES, 0.0)
    batch, n = _get(data.config, "data.train_batch_size"), _get(data.config, "actor_rollout_ref.rollout.n")
    counted = any("allocation/rollouts" in record.data for record in data.run.steps)
    sources: dict[str, str] = {}
    for record in data.run.records:
        numbers = record.data
        if record.step > 0:
            at["steps"] = float(record.step)
            at["hours"] += numbers.get("timing_s/step", 0.0) / 3600
            if counted:
                at["rollouts"] = numbers.get("allocation/rollouts", at["rollouts"])
                at["tokens"] = numbers.get("allocation/tokens", at["tokens"])
            elif batch and n:  # verl's own trainer: every rollout is trained on
                at["rollouts"] = float(record.step * batch * n)
                at["tokens"] += batch * n * numbers.get("response_length/mean", 0.0)
        accuracies = held_out(numbers)
        # All sets or none: the mean of those left would be another measure.
        if accuracies and all(math.isfinite(value) for _, value in accuracies.values()):
            sources.update({source: estimate for source, (estimate, _) in accuracies.items()})
            accuracy = sum(value for _, value in accuracies.values()) / len(accuracies)
            data.points.append({**at, "accuracy": accuracy})
    data.totals = at
    if sources:
        names = ", ".join(sorted(sources))
        data.estimate = f"{', '.join(sorted(set(sources.values())))} on {names}"
        if len(sources) > 1:
            data.estimate += " (mean of the sets)"


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_RUNS_OWN = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir", "seed")


def differing_settings(runs: Sequence[RunData]) -> dict[str, dict[str, Any]]:
    """Settings that are not the same in all recipes: {setting: {recipe: value}}; seeds and names left out."""
    flat = {data.recipe: dict(_flat(data.config)) for data in reversed(runs) if data.config}
    flat = {recipe: flat[recipe] for recipe in dict.fromkeys(data.recipe for data in runs) if recipe in flat}
    found = {}
    for name in sorted({name for settings in flat.values() for name in settings}):
        values = {recipe: settings.get(name, "not there") for recipe, settings in flat.items()}
        if len({repr(value) for value in values.values()}) > 1 and name not in _RUNS_OWN and not name.endswith(".seed"):
            found[name] = values
    return found


def _get(config: dict[str, Any], dotted: str, default: Any = None) -> Any:
    for key in dotted.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config
