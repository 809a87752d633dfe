"""docs/evidence.md from the runs of `benchmarks.evidence`: every figure on the page is computed here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.lab.summary import compare, curve_mean, draw, final, rollouts_to, task_name

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
TEXT = Path(__file__).with_name("evidence_text.md")
BASELINE = "grpo_64x4"
FEWEST = 6
"""Runs of a regime with which a recipe is compared over all of them."""
LEADING = ("grpo_64x4", "marginal_signal", "greso_64x4")
SIZES = ("grpo_128x2", "grpo_64x4", "grpo", "grpo_16x16", "grpo_8x32", "grpo_4x64", "sara_8x32", "pilot_commit_8x32",
         "pods_16x32")  # fmt: skip

Run = dict[str, Any]


def read(folder: Path) -> list[Run]:
    """All runs that there are, regime by regime."""
    return [run for path in sorted(folder.glob("*.json")) for run in json.loads(path.read_text())["runs"]]


def _difference(row: dict[str, Any]) -> str:
    if "difference" not in row:
        return ""
    star = "**" if row["holm"] < 0.05 else ""
    return f"{star}{row['difference']:+.3f}{star} ({row['low']:+.3f} to {row['high']:+.3f})"


def regime_table(runs: Sequence[Run]) -> str:
    """One regime: every recipe against the baseline, paired by policy and seed."""
    named = [run for run in runs if run["recipe"] in LEADING]  # two families of tests: each is corrected by itself
    others = [run for run in runs if run["recipe"] not in LEADING or run["recipe"] == BASELINE]
    tested = [*compare(others, BASELINE), *(compare(named, BASELINE) if named else [])]
    rows = {(row["measure"], row["recipe"]): row for row in tested}
    recipes = sorted({run["recipe"] for run in runs}, key=lambda name: -rows["final", name]["mean"])
    lines = [
        "| recipe | runs | final | against `grpo_64x4`, 95 % | curve mean | against `grpo_64x4`, 95 % | could have "
        "seen (final) | rollouts to its final | tokens of its | rollouts an effective group | steps | pool seen |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = [run for run in runs if run["recipe"] == BASELINE]
    for name in recipes:
        own = [run for run in runs if run["recipe"] == name]
        end, mean = rows["final", name], rows["curve mean", name]
        per = sum(run["rollouts"] for run in own) / max(1, sum(run["effective_groups"] for run in own))
        seen = np.mean([run["distinct_share"] for run in own])
        tokens = np.mean([run["tokens"] for run in own]) / np.mean([run["tokens"] for run in base])
        could = f"{end['detectable']:.3f}" if "detectable" in end else ""
        lines.append(
            f"| `{name}` | {end['n']} | {end['mean']:.3f} | {_difference(end)} | {mean['mean']:.3f} | "
            f"{_difference(mean)} | {could} | {share_of_rollouts(own, base)} | "
            f"{tokens:.2f} | {per:.1f} | {np.mean([run['steps'] for run in own]):.0f} | {seen:.2f} |"
        )
    return "\n".join(lines)


def share_of_rollouts(runs: Sequence[Run], base: Sequence[Run]) -> str:
    """Rollouts until the mean curve reaches the baseline's mean final, over those that the baseline spent."""
    keys = {(run["policy"], run["seed"]) for run in runs} & {(run["policy"], run["seed"]) for run in base}
    own = [run for run in runs if (run["policy"], run["seed"]) in keys]
    ours = [run for run in base if (run["policy"], run["seed"]) in keys]
    if not keys:
        return ""
    target, spent = float(np.mean([final(run) for run in ours])), float(np.mean([run["rollouts"] for run in ours]))
    grid = np.linspace(0, spent, 65)
    curve = np.mean([np.interp(grid, *np.array(run["curve"]).T) for run in own], axis=0)
    reached = rollouts_to({"curve": list(zip(grid, curve, strict=True))}, target)
    return "not reached" if reached is None else f"{reached / spent:.2f}"


def overview(
    by_task: dict[str, list[Run]], value: Callable[[Run], float] = final, recipes: Sequence[str] | None = None,
    fewest: int = 1,
) -> str:  # fmt: skip
    """Recipes x regimes: what is missing to the best recipe of the regime, over the runs that all of them have.

    Args:
        recipes: those to compare; None: all.
        fewest: runs in every regime that a recipe must have to be in the table.
    """
    if recipes is not None:
        by_task = {task: [run for run in runs if run["recipe"] in recipes] for task, runs in by_task.items()}
    names = sorted({run["recipe"] for runs in by_task.values() for run in runs})
    common = [name for name in names
              if all(sum(run["recipe"] == name for run in runs) >= fewest for runs in by_task.values())]  # fmt: skip
    if not common:
        return "No recipe has so many runs yet."
    lines = ["| recipe | " + " | ".join(by_task) + " | worst |", "|---|" + "---|" * (len(by_task) + 1)]
    gaps: dict[str, list[float]] = {name: [] for name in common}
    for runs in by_task.values():
        keys = set.intersection(*({(r["policy"], r["seed"]) for r in runs if r["recipe"] == name} for name in common))
        means = {
            name: np.mean([value(r) for r in runs if r["recipe"] == name and (r["policy"], r["seed"]) in keys])
            for name in common
        }
        for name in common:
            gaps[name].append(float(means[name] - max(means.values())))
    for name in sorted(common, key=lambda name: -min(gaps[name])):
        cells = [f"{gap:+.3f}" for gap in (*gaps[name], min(gaps[name]))]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size_table(by_task: dict[str, list[Run]]) -> str:
    """Group sizes: final and curve mean."""
    lines = ["| recipe | " + " | ".join(f"{task}: final; curve mean (runs)" for task in by_task) + " |",
             "|---|" + "---|" * len(by_task)]  # fmt: skip
    for name in SIZES:
        cells = []
        for runs in by_task.values():
            own = [run for run in runs if run["recipe"] == name and run["policy"] == 1]
            cells.append(
                f"{np.mean([final(r) for r in own]):.3f}; {np.mean([curve_mean(r) for r in own]):.3f} ({len(own)})"
                if own else ""
            )  # fmt: skip
        if any(cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tried_table(path: Path) -> str:
    """What was tried: variants x regimes, difference from the baseline in final and curve mean."""
    tried = json.loads(path.read_text())["tried"]
    regimes = list(dict.fromkeys((one["task"], one["hopeless"]) for one in tried))
    heads = [task if hopeless is None else f"{task} {hopeless:g}" for task, hopeless in regimes]
    lines = ["| variant | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for variant in dict.fromkeys(one["variant"] for one in tried):
        cells = {
            (one["task"], one["hopeless"]): f"{one['final']:+.3f}; {one['curve_mean']:+.3f} ({one['runs']})"
            for one in tried
            if one["variant"] == variant
        }
        lines.append(f"| {variant} | " + " | ".join(cells.get(regime, "") for regime in regimes) + " |")
    return "\n".join(lines)


def agreement_table(path: Path) -> str:
    """The laboratory and verl's stack: mean over the curve and end, by recipe."""
    lines = ["| recipe | measure | laboratory | verl | laboratory - verl, 95 % | p |", "|---|---|---|---|---|---|"]
    for recipe, found in json.loads(path.read_text()).items():
        for measure, name in (("curve_mean", "curve mean"), ("final", "at the end")):
            row = found[measure]
            spread = {side: f"{min(row[side + '_runs']):.3f} to {max(row[side + '_runs']):.3f}"
                      for side in ("laboratory", "verl")}  # fmt: skip
            lines.append(
                f"| `{recipe}` | {name} | {row['laboratory']:.3f} ({found['laboratory_runs']} runs: "
                f"{spread['laboratory']}) | {row['verl']:.3f} ({found['verl_runs']}: {spread['verl']}) | "
                f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}) | {row['p']:.2f} |"
            )
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """Fill the text's places with tables and write the page and its picture."""
    runs = read(folder)
    hopeless = sorted({task_name(run) for run in runs if run["task"] == "impossible"})
    names = ["balanced", "sparse", *hopeless, "skills", "long", "graded"]
    by_task = {name: own for name in names if (own := [run for run in runs if task_name(run) == name])}
    leading = {name: own for name, own in by_task.items() if any(run["recipe"] == BASELINE for run in own)}
    tables = "\n\n".join(f"### {name}\n\n{regime_table(own)}" for name, own in leading.items())
    page = TEXT.read_text()
    for place, table in (
        ("OVERVIEW", overview(leading, recipes=LEADING, fewest=FEWEST)),
        ("OVERVIEW CURVE", overview(leading, curve_mean, LEADING, FEWEST)),
        ("OVERVIEW ALL", overview(leading, fewest=FEWEST)),
        ("REGIMES", tables),
        ("SIZES", size_table({name: by_task[name] for name in ("balanced", "sparse") if name in by_task})),
        ("TRIED", tried_table(folder.parent / "evidence_tried.json")),
        ("AGREEMENT", agreement_table(folder.parent / "lab_agreement_balanced.json")),
        ("RUNS", f"{len(runs):,}"),
    ):
        page = page.replace(f"<!-- {place} -->", table)
    PAGE.write_text(page)
    draw([run for own in leading.values() for run in own if run["recipe"] in LEADING], folder / "curves.png")
    return PAGE
