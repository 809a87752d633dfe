# SPDX-License-Identifier: Apache-2.0
"""Read a run's folder: `metrics.jsonl` (verl's file logger), `ledger.jsonl` and `config.yaml`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.runs.step_line import FATE_PREFIX, held_out

METRICS, LEDGER, CONFIG, ABOUT = "metrics.jsonl", "ledger.jsonl", "config.yaml", "run.json"
ANSWERS, OUTCOMES = "answers.jsonl", "outcomes"


class RunError(ValueError):
    """A folder that is no run's folder, or a file in it that cannot be understood."""


@dataclass(frozen=True)
class StepRecord:
    """All metrics logged for one step."""

    step: int
    """Training step; 0 holds the validation before training."""
    data: dict[str, float]
    """Metric by name."""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    """The run's folder."""
    records: list[StepRecord]
    """Metrics by step, in rising order, step 0 included where it was logged."""
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the ledger by step, in rising order (form: `verl_ext.allocation.ledger.Ledger.step_record`)."""
    total_steps: int | None = None
    """Training steps asked for, or None if not known."""
    about: dict[str, Any] = field(default_factory=dict)
    """versions and machine the run was made with, and ended_at_step, None while it goes on; empty where not noted."""

    @property
    def ended(self) -> bool:
        """All training steps were made, or the run's rollouts were spent."""
        last = self.steps[-1].step if self.steps else 0
        end = self.about.get("ended_at_step") or self.total_steps
        return bool(end) and last >= end

    @property
    def steps(self) -> list[StepRecord]:
        """Records of training steps: without the validation before training."""
        return [record for record in self.records if record.step > 0]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, over the training steps that logged it."""
        pairs = [(record.step, float(record.data[name])) for record in self.steps if name in record.data]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def accuracy(self) -> dict[str, tuple[str, list[tuple[int, int, float]]]]:
        """Held-out accuracy over the run.

        Returns:
            {data source: (estimate such as "mean@8", [(step, cumulative rollouts, accuracy), ...])}. Rollouts are those
            issued up to the end of the step, validation's own not counted.
        """
        curves: dict[str, tuple[str, list[tuple[int, int, float]]]] = {}
        rollouts = 0
        for record in self.records:
            rollouts = int(record.data.get("allocation/rollouts", rollouts))
            for source, (estimate, value) in held_out(record.data).items():
                curves.setdefault(source, (estimate, []))[1].append((record.step, rollouts, value))
        return curves


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. A last line that was cut off (a run that goes on) is left out.

    Raises:
        RunError: another line is no JSON object.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            # The last line of a whole file ends with a newline, and so is followed by an empty piece.
            if number == len(lines):
                return
            raise RunError(f"{path}, line {number}: not a JSON object ({error}): {line[:80]!r}") from error
        yield value


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, finished or not.

    Raises:
        RunError: the folder has no metrics.jsonl, or one of its files is not in the expected form.
    """
    folder = Path(folder)
    metrics = folder / METRICS
    if not metrics.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {METRICS} in it; is trainer.logger=[console,file] set?"
        expected = "a run's folder, outputs/<trainer.project_name>/<trainer.experiment_name>"
        raise RunError(f"{folder}: {what}. Expected: {expected}")
    by_step: dict[int, dict[str, float]] = {}
    for line in json_lines(metrics):
        if not isinstance(line.get("step"), int) or not isinstance(line.get("data"), dict):
            raise RunError(f"{metrics}: expected lines with 'step' (an integer) and 'data', seen {sorted(line)}")
        by_step.setdefault(line["step"], {}).update(_numbers(metrics, line["step"], line["data"]))
    ledger: dict[int, dict[str, Any]] = {}
    if (folder / LEDGER).is_file():
        for line in json_lines(folder / LEDGER):
            if not isinstance(line.get("step"), int):
                raise RunError(f"{folder / LEDGER}: expected lines with 'step' (an integer), seen {sorted(line)}")
            ledger[line["step"]] = line
    return Run(
        folder=folder,
        records=[StepRecord(step, by_step[step]) for step in sorted(by_step)],
        ledger=[ledger[step] for step in sorted(ledger)],
        total_steps=_total_steps(folder / CONFIG),
        about=_about(folder / ABOUT),
    )


def _numbers(path: Path, step: int, data: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers. A loss may be NaN or infinite, a count may not."""
    numbers = {k: v for k, v in data.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    for name, value in numbers.items():
        try:
            finite = math.isfinite(value)
        except OverflowError as error:
            raise RunError(f"{path}, step {step}: {name} is an integer too large for a number") from error
        if not finite and (name in _COUNTS or name.startswith(FATE_PREFIX)):
            raise RunError(f"{path}, step {step}: {name}={value!r}; expected a finite number")
    return numbers


_COUNTS = ("allocation/rollouts", "allocation/step_rollouts", "allocation/tokens", "allocation/step_tokens")


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml; empty where there is no such file.

    Raises:
        RunError: it is no YAML, or no mapping of settings.
    """
    if not path.is_file():
        return {}
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise RunError(f"{path}: not YAML ({error})") from error
    if config is None:
        return {}
    # The types alone: what is in the file may be a credential.
    if not isinstance(config, dict):
        raise RunError(f"{path}: expected a mapping of settings, seen a {type(config).__name__}")
    if not isinstance(config.get("trainer") or {}, dict):
        raise RunError(f"{path}: trainer: expected a mapping of settings, seen a {type(config['trainer']).__name__}")
    return config


def _about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error})") from error
    found = found if isinstance(found, dict) else {}
    if not isinstance(end := found.get("ended_at_step"), int | None):
        raise RunError(f"{path}: ended_at_step={end!r}; expected an integer, or null while the run goes on")
    return found


def _total_steps(path: Path) -> int | None:
    steps = (read_config(path).get("trainer") or {}).get("total_training_steps")
    return steps if isinstance(steps, int) else None
