# SPDX-License-Identifier: Apache-2.0
"""What a run saw of each prompt (offers, verdicts, when it was last seen, whether it is retired), by difficulty."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.allocation.prompt_pool import prompt_key
from verl_ext.allocation.state import StateError, load_state
from verl_ext.reports.drawing import Chart, axis, bands, colours
from verl_ext.reports.page import Cell, number, table, text
from verl_ext.runs.checkpoints import checkpoints
from verl_ext.runs.outcome_records import RecordError, read_record
from verl_ext.runs.records import CONFIG, OUTCOMES, Run, read_config

_DIFFICULTY = ("difficulty", "level")
_MOST_CLASSES, _BINS = 8, 10
_SEEN = "all prompts"


@dataclass(frozen=True)
class PromptsSeen:
    """One entry a prompt in each array: first those that were sampled, then those that never were."""

    offers: np.ndarray
    """Steps that sampled it."""
    right: np.ndarray
    """Rollouts that were right."""
    wrong: np.ndarray
    """Rollouts that were wrong."""
    unscored: np.ndarray
    """Rollouts that were not scored, or failed."""
    last_step: np.ndarray
    """The last step that sampled it; 0: never."""
    difficulty: np.ndarray
    """Class of difficulty, as text; `all prompts` where the data set gives none."""
    retired: np.ndarray | None
    """Whether it was out at the last checkpoint; None: there is none, or it is of other prompts."""

    @property
    def success(self) -> np.ndarray:
        """Right among the scored; NaN without one."""
        scored = self.right + self.wrong
        return np.divide(self.right, scored, out=np.full(len(scored), np.nan), where=scored > 0)


def prompts_seen(run: Run) -> tuple[PromptsSeen | None, list[str]]:
    """What the record, the data set and the last checkpoint say of the prompts; and what is missing, in sentences."""
    config = read_config(run.folder / CONFIG)
    record = (config.get("allocation") or {}).get("record")
    path = run.folder / OUTCOMES if record in (None, "auto") else Path(record)
    try:
        outcomes = read_record(path)
    except RecordError as error:
        return None, [f"No view of the prompts: {error}. allocation.record=auto records them."]
    outcomes = outcomes.set_column(0, "prompt", outcomes["prompt"].cast("string"))
    seen = outcomes.group_by("prompt").aggregate(
        [("correct", "sum"), ("correct", "count"), ("session", "count"), ("step", "count_distinct"), ("step", "max")]
    )
    rows = {key: i for i, key in enumerate(seen["prompt"].to_pylist())}
    classes, missing = _data_set(config)
    keys = [*rows, *(key for key in classes if key not in rows)]
    retired = _retired(run.folder, list(classes))

    def column(name: str) -> np.ndarray:
        return np.pad(seen[name].fill_null(0).to_numpy(), (0, len(keys) - len(rows))).astype(np.int64)

    scored, right = column("correct_count"), column("correct_sum")
    return PromptsSeen(
        offers=column("step_count_distinct"),
        right=right,
        wrong=scored - right,
        unscored=column("session_count") - scored,
        last_step=column("step_max"),
        difficulty=np.array(_binned([classes.get(key) for key in keys])),
        retired=None if retired is None else np.array([key in retired for key in keys]),
    ), missing


def _data_set(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """By prompt's key, in the order of data.train_files, its difficulty or None; and what could not be read."""
    import pyarrow.parquet as pq

    data = config.get("data") or {}
    files, name = data.get("train_files") or [], data.get("prompt_key", "prompt")
    found: dict[str, Any] = {}
    for path in [files] if isinstance(files, str) else files:
        try:
            file = pq.ParquetFile(os.path.expanduser(path))
            wanted = [n for n in ("data_source", name, "reward_model", "extra_info") if n in file.schema_arrow.names]
            for row in (row for batch in file.iter_batches(4096, columns=wanted) for row in batch.to_pylist()):
                extra = row.get("extra_info") or {}
                truth = (row.get("reward_model") or {}).get("ground_truth")
                key = prompt_key(row.get("data_source", ""), row[name], truth)
                level = next((extra[n] for n in _DIFFICULTY if extra.get(n) is not None), None)
                found.setdefault(key, level if isinstance(level, int | float | None) else str(level))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return {}, [f"Without difficulty and prompts never sampled: data.train_files={path}: {error}."]
    return found, [] if found else ["Without difficulty and prompts never sampled: no data.train_files are known."]


def _binned(values: Sequence[Any]) -> list[str]:
    """A class for each value, few in all: the values themselves, or ranges that hold about as many prompts each."""
    given = [value for value in values if value is not None]
    if not given:
        return [_SEEN] * len(values)
    kept = {value: str(value) for value, _ in Counter(given).most_common(_MOST_CLASSES)}
    if len(set(given)) > _MOST_CLASSES and all(isinstance(value, int | float) for value in given):
        edges = np.unique(np.quantile(given, np.linspace(0, 1, 6)))
        at = np.clip(np.searchsorted(edges, list(set(given)), "right"), 1, len(edges) - 1)
        kept = {value: f"{edges[i - 1]:g} to {edges[i]:g}" for value, i in zip(set(given), at, strict=True)}
    return ["not given" if value is None else kept.get(value, "other") for value in values]


def _retired(folder: Path, keys: list[str]) -> set[str] | None:
    """Keys of the prompts that were out at the last checkpoint; None: there is none, or it is of other prompts."""
    try:
        saved = checkpoints(folder)
        pool = load_state(saved[max(saved)] / "allocation")["allocation"]["pool"]
        digest = hashlib.blake2b("".join(f"{key}\n" for key in keys).encode(), digest_size=16).hexdigest()
        out = np.unpackbits(np.asarray(pool["retired"], np.uint8), count=len(keys))
        return {key for key, is_out in zip(keys, out, strict=True) if is_out} if pool["keys"] == digest else None
    except (StateError, OSError, KeyError, TypeError, ValueError):
        return None


def prompt_charts(seen: PromptsSeen) -> list[Chart]:
    """Histograms of success, offers and the step last seen, stacked by difficulty."""
    sampled = seen.offers > 0
    last = int(seen.last_step.max(initial=1))

    def whole(first: int, last: int) -> np.ndarray:
        """Edges of some twenty bins of whole numbers."""
        every = max(1, -(-(last - first + 1) // 20))
        return np.arange(first, last + every + 1, every)

    found = (
        ("success", "Success of the prompts", "Right among the scored rollouts of a prompt, over the run.",
         seen.success, np.linspace(0, 1, _BINS + 1), ~np.isnan(seen.success)),
        ("offers", "How often prompts were sampled", "Steps that sampled a prompt; those never sampled left out.",
         seen.offers, whole(1, int(seen.offers.max(initial=1))), sampled),
        ("last-seen", "When prompts were last seen", "Last step that sampled a prompt; those never sampled left out.",
         seen.last_step, whole(1, last), sampled),
    )  # fmt: skip
    unit = {"success": "success rate", "offers": "steps", "last-seen": "training step"}
    order = colours(_classes(seen))
    charts = []
    for name, title, note, values, edges, kept in found:
        rows = []
        for each in order:
            counts, _ = np.histogram(values[kept & (seen.difficulty == each)], edges)
            rows += [{"name": each, "from": float(low), "to": float(high), "prompts": int(count)}
                     for low, high, count in zip(edges, edges[1:], counts, strict=False) if count]  # fmt: skip
        ticks = {} if name == "success" else {"axis": {"tickMinStep": 1}}
        place = axis("from", unit[name]) | {"bin": "binned"} | ticks
        spec = bands(rows, place, {"field": "prompts", "type": "quantitative"}, order)
        spec["encoding"]["x2"] = {"field": "to"}
        charts.append(Chart(name, title, note, spec))
    return charts


def _classes(seen: PromptsSeen) -> list[str]:
    """Classes of difficulty, numbers in their order."""

    def rank(name: str) -> tuple[int, float, str]:
        first = name.split(" ")[0]
        return (0, float(first), name) if first.replace(".", "", 1).lstrip("-").isdigit() else (1, 0.0, name)

    return sorted(set(seen.difficulty.tolist()), key=rank)


def difficulty_table(seen: PromptsSeen) -> str:
    """One row a class of difficulty."""
    head = ["difficulty", "prompts", "never sampled", "retired", "offers a prompt", "right", "wrong", "unscored",
            "success", "always right", "never right", "last seen, median step"]  # fmt: skip
    rows: list[list[Cell]] = []
    for name in _classes(seen):
        of = seen.difficulty == name
        sampled = of & (seen.offers > 0)
        success = seen.success[sampled]
        success = success[~np.isnan(success)]
        scored = int((seen.right + seen.wrong)[of].sum())
        rows.append([
            text(name),
            number(int(of.sum()), "{:,}"),
            number(int((of & ~sampled).sum()), "{:,}"),
            number(None if seen.retired is None else int(seen.retired[of].sum()), "{:,}", "not known"),
            number(float(seen.offers[of].mean()), "{:.2f}"),
            *(number(int(count[of].sum()), "{:,}") for count in (seen.right, seen.wrong, seen.unscored)),
            number(int(seen.right[of].sum()) / scored if scored else None, "{:.3f}"),
            number(int((success == 1).sum()), "{:,}"),
            number(int((success == 0).sum()), "{:,}"),
            number(float(np.median(seen.last_step[sampled])) if sampled.any() else None, "{:.0f}"),
        ])  # fmt: skip
    return table(head, rows, "prompts")
