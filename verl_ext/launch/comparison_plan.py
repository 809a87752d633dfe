# SPDX-License-Identifier: Apache-2.0
"""The runs that a comparison needs, and which of them are done, as their folders say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from verl_ext.masking import masked_override
from verl_ext.runs.records import RunError, read_run

NOTE = "compare.json"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_./-]*$")


class CompareError(ValueError):
    """A setting of the comparison, or a run's folder, that cannot be used; the message says which and why."""


class State(str, Enum):
    """Progress of a run."""

    MISSING = "missing"
    CUT_OFF = "cut off"
    DONE = "done"


@dataclass(frozen=True)
class PlannedRun:
    """A run of one recipe with one seed."""

    recipe: str
    """Name in the configuration group ``recipe``."""
    seed: int
    """Of the rules and of the order of the prompts."""
    folder: Path
    """The run's folder."""
    overrides: tuple[str, ...] = ()
    """Settings of all runs of the comparison."""
    save_freq: int = 10
    """Steps between checkpoints."""

    def arguments(self) -> list[str]:
        """Arguments of `verl_ext.main_ppo`; the comparison's own overrides come last."""
        return [
            f"recipe={self.recipe}",
            f"allocation.seed={self.seed}",
            f"data.seed={self.seed}",
            f"trainer.experiment_name={self.folder.name}",
            f"trainer.project_name={self.folder.parent.name}",
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            f"trainer.save_freq={self.save_freq}",
            "trainer.max_actor_ckpt_to_keep=1",
            *self.overrides,
        ]

    def note(self) -> dict[str, Any]:
        """What identifies the run, as kept in its folder: without credentials."""
        return {"recipe": self.recipe, "seed": self.seed, "overrides": [masked_override(o) for o in self.overrides]}


def plan(
    recipes: Sequence[str], seeds: Sequence[int], root: Path, overrides: Sequence[str] = (), save_freq: int = 10
) -> list[PlannedRun]:
    """Every recipe with every seed. One seed's recipes come before the next seed's: a cut-off comparison is balanced.

    Raises:
        CompareError: a name or a seed that cannot be, or one given twice.
    """
    for recipe in recipes:
        if not isinstance(recipe, str) or not _NAME.match(recipe):
            raise CompareError(f"recipes: {recipe!r}; accepted: names of the group recipe, such as cpu/sara")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise CompareError(f"seeds: {seed!r}; accepted: integers of 0 or more")
    if recipes and not seeds:
        raise CompareError("seeds=[]; accepted: one seed or more")
    for what, values in (("recipes", recipes), ("seeds", seeds)):
        if twice := sorted({str(v) for v in values if list(values).count(v) > 1}):
            raise CompareError(f"{what}: {', '.join(twice)} is given twice")
    if isinstance(save_freq, bool) or not isinstance(save_freq, int) or (save_freq < 1 and save_freq != -1):
        raise CompareError(f"save_freq={save_freq!r}; accepted: an integer of 1 or more, or -1 for no checkpoints")
    return [
        PlannedRun(recipe, seed, root / f"{recipe.replace('/', '-')}-seed{seed}", tuple(overrides), save_freq)
        for seed in seeds
        for recipe in recipes
    ]


def state_of(folder: Path) -> State:
    """From the folder: done if its last step was logged (or its process ended well), else cut off, or missing.

    A run whose records are damaged is cut off: when it goes on, it puts aside what cannot be read.

    Raises:
        CompareError: the comparison's note is damaged.
    """
    if not folder.is_dir():
        return State.MISSING
    if read_note(folder).get("finished"):
        return State.DONE
    if not (folder / "metrics.jsonl").is_file():
        return State.CUT_OFF if any(folder.glob("global_step_*")) else State.MISSING
    try:
        run = read_run(folder)
    except RunError:
        return State.CUT_OFF
    return State.DONE if run.ended else State.CUT_OFF


def read_note(folder: Path) -> dict[str, Any]:
    """What the comparison noted of a run; empty where there is nothing.

    Raises:
        CompareError: the file is damaged.
    """
    path = folder / NOTE
    if not path.is_file():
        return {}
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CompareError(f"{path} is not JSON: {error}") from error
    return note if isinstance(note, dict) else {}


def write_note(folder: Path, note: dict[str, Any]) -> None:
    """Write the comparison's note of a run, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{NOTE}.{os.getpid()}"
    partial.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / NOTE)


def check_same(run: PlannedRun) -> None:
    """Refuse a folder that holds a run with other settings.

    Raises:
        CompareError: names what differs.
    """
    kept = read_note(run.folder)
    for name, value in run.note().items():
        if name in kept and kept[name] != value:
            raise CompareError(
                f"{run.folder} holds a run with {name}={kept[name]!r}, not {value!r}: choose another project=..."
            )
