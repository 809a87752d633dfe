"""Rules judged by what a policy learns: runs what is missing of a plan in the laboratory, and writes docs/evidence.md.

    python -m benchmarks.evidence                 # runs what is missing, writes the page; goes on where it was cut off
    python -m benchmarks.evidence --page          # writes the page from the runs that there are
    python -m benchmarks.evidence --stage screen  # one stage of the plan only
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from benchmarks.evidence_page import write_page  # noqa: E402
from verl_ext.lab.lab_run import LabSettings  # noqa: E402
from verl_ext.lab.recipes import find_recipe  # noqa: E402
from verl_ext.lab.study import Job, run_missing  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "evidence"

OURS = "marginal_signal"
LEADING = ("grpo_64x4", OURS, "greso_64x4")
"""The baseline, and the recipes that could be the best of some regime: 3 policies x 8 seeds of each."""
NEXT = ("greso_sara", "cero", "mopps_64x4")
"""Those that were thought to be, with fewer runs."""
SPACING = ("mopps_64x4+selector.spacing:0.5", "mopps_64x4+selector.spacing:0.75")
"""How long a prompt rests, of a rule that scores candidates; 0 is `mopps_64x4`."""
OTHERS = (
    "grpo", "sara", "vip_64x4", "hora", "knapsack", "reinforce_ada", "dapo", "dps", "dps_sara",
    "cero_sara", "ar3po",
)  # fmt: skip
SIZES = ("grpo_128x2", "grpo_16x16", "grpo_8x32", "grpo_4x64", "sara_8x32", "pilot_commit_8x32", "pods_16x32")
"""Group sizes other than the best."""
CORE = (("impossible", 0.6), ("balanced", None), ("long", None))
"""Tasks, and shares of hopeless training prompts, that `marginal_signal` was made on."""
UNSEEN = (("sparse", None), ("skills", None), ("graded", None), ("impossible", 0.2), ("impossible", 0.3))
"""Regimes that it was not made on."""
SCREEN = (("impossible", 0.6), ("balanced", None), ("sparse", None))
"""Where the other recipes were run."""
ROLLOUTS = {"long": 8192}
"""Rollouts of a run where not 16,384: long answers are learned sooner, and cost more."""


@dataclass(frozen=True)
class Part:
    """Runs that are made together."""

    stage: str
    """lead: the recipes that matter; next, screen: others, fewer runs; sizes: group sizes; spacing: of selectors."""
    recipes: tuple[str, ...]
    """Of the laboratory's table."""
    regimes: tuple[tuple[str, float | None], ...]
    """Task and share of hopeless prompts."""
    policies: tuple[int, ...]
    """Seeds of base policies."""
    seeds: tuple[int, ...]
    """Seeds of runs."""


PLAN = (
    Part("lead", LEADING, CORE + UNSEEN, (1, 2, 3), (0, 1, 2)),
    Part("screen", OTHERS, SCREEN, (1,), (0, 1)),
    Part("sizes", SIZES, SCREEN, (1,), (0, 1)),
    Part("next", NEXT, CORE + UNSEEN, (1, 2, 3), (0, 1, 2)),
    Part("spacing", SPACING, CORE[:2], (1, 2, 3), (0,)),
    Part("lead", LEADING, CORE + UNSEEN, (1, 2, 3), tuple(range(3, 8))),
)
"""In this order, so that a run that is cut off has the most telling part."""


def output(task: str, hopeless: float | None) -> Path:
    """Where the runs of a regime are kept."""
    return RESULTS / f"{task}{'' if hopeless is None else f'-{hopeless:g}'}.json"


def jobs(stage: str | None = None) -> list[Job]:
    """All runs of the plan, or of one stage, each once; seed by seed, so that every recipe has as many."""
    made = []
    for part in PLAN:
        if stage in (None, part.stage):
            for seed, policy, (task, hopeless), recipe in product(
                part.seeds, part.policies, part.regimes, part.recipes
            ):
                settings = LabSettings(task=task, hopeless=hopeless, rollouts=ROLLOUTS.get(task, 16384))
                made.append(Job(output(task, hopeless), find_recipe(recipe), settings, policy, seed))
    return list({(job.path, job.key): job for job in made}.values())


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--stage", choices=sorted({part.stage for part in PLAN}), help="this stage only")
    parser.add_argument("--workers", type=int, help="processes at once; default: one a core")
    options = parser.parse_args()
    if not options.page:
        run_missing(jobs(options.stage), options.workers)
    print(f"written: {write_page(RESULTS)}")


if __name__ == "__main__":
    main()
