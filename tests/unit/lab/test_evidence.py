"""The evidence page's figures are those of the runs, and its plan is one the laboratory can run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import evidence, evidence_page
from benchmarks.bench_lab_agreement import compared
from benchmarks.result_files import write_result
from verl_ext.lab.lab_run import allocation_settings


def made(recipe, end, policy=1, seed=0, task="balanced", hopeless=None, rollouts=1600, start=0.4):
    curve = [[rollouts * i // 16, start + (end - start) * i / 16] for i in range(17)]
    return {"recipe": recipe, "task": task, "hopeless": hopeless, "policy": policy, "seed": seed, "rollouts": rollouts,
            "tokens": 3 * rollouts, "steps": 64, "effective_groups": 100, "distinct_share": 1.0,
            "curve": curve}  # fmt: skip


def test_every_run_of_the_plan_can_be_made_and_is_there_once():
    jobs = evidence.jobs()
    assert len({(job.path, job.key) for job in jobs}) == len(jobs)
    for recipe in {job.recipe.name: job.recipe for job in jobs}.values():
        assert allocation_settings(recipe, 64, 0).rules
    lead = [job for job in evidence.jobs("lead") if job.recipe.name == evidence.OURS and job.settings.task == "skills"]
    assert {(job.policy, job.seed) for job in lead} == {(p, s) for p in (1, 2, 3) for s in range(8)}


def test_share_of_rollouts_is_where_the_mean_curve_meets_the_baselines_end():
    base = [made("grpo_64x4", 0.6, seed=s) for s in range(2)]
    # twice as steep: at the height of the baseline's last eighth after half of its way
    fast = [made("fast", 0.8, seed=s) for s in range(2)]
    target = np.mean([0.4 + 0.2 * i / 16 for i in (14, 15, 16)])
    assert evidence_page.share_of_rollouts(fast, base) == f"{np.ceil((target - 0.4) / 0.4 * 64) / 64:.2f}"
    assert evidence_page.share_of_rollouts([made("slow", 0.5)], base) == "not reached"
    assert evidence_page.share_of_rollouts([made("other", 0.9, seed=7)], base) == ""


def test_the_overview_is_over_runs_that_all_have():
    runs = [made("a", 0.6), made("b", 0.5), made("b", 0.9, seed=1)]
    other = [made("a", 0.5, task="sparse"), made("b", 0.7, task="sparse")]
    lines = evidence_page.overview({"balanced": runs, "sparse": other}).splitlines()
    gap = 0.1 * np.mean([14, 15, 16]) / 16
    assert lines[2] == f"| `b` | {-gap:+.3f} | +0.000 | {-gap:+.3f} |"
    assert lines[3] == f"| `a` | +0.000 | {-2 * gap:+.3f} | {-2 * gap:+.3f} |"


def test_a_regimes_table_marks_what_is_separated():
    noise = np.random.default_rng(0).normal(0, 0.002, (3, 8))
    runs = [
        made(recipe, end + noise[i, s], seed=s)
        for i, (recipe, end) in enumerate((("grpo_64x4", 0.6), ("better", 0.63), ("same", 0.6)))
        for s in range(8)
    ]
    table = evidence_page.regime_table(runs)
    rows = {line.split("`")[1]: line for line in table.splitlines()[2:]}
    assert list(rows)[0] == "better" and rows["better"].count("**") == 4 and "**" not in rows["same"]


def test_the_overview_leaves_out_recipes_of_few_runs():
    runs = [made(name, 0.6, seed=s) for name, n in (("a", 3), ("b", 2)) for s in range(n)]
    assert "`b`" in evidence_page.overview({"balanced": runs}, fewest=2)
    assert "`b`" not in evidence_page.overview({"balanced": runs}, fewest=3)


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    runs = [made(name, 0.6, seed=s, policy=1) for name in ("grpo_64x4", "marginal_signal") for s in range(2)]
    results = tmp_path / "evidence"
    results.mkdir()
    (results / "balanced.json").write_text(json.dumps({"runs": runs}))
    tried = [{"variant": "x", "task": "balanced", "hopeless": None, "runs": 1, "final": 0.01, "curve_mean": -0.02}]
    (tmp_path / "evidence_tried.json").write_text(json.dumps({"tried": tried}))
    curves = [np.array([[0, 0.4], [1600, end]]) for end in (0.5, 0.6)]
    beside = {"cpu/grpo": compared(curves, [curve + [0, 0.1] for curve in curves])}
    write_result(tmp_path / "lab_agreement_balanced.json", beside)
    monkeypatch.setattr(evidence_page, "PAGE", tmp_path / "evidence.md")
    return results


def test_the_page_has_every_place_filled(folder):
    page = evidence_page.write_page(folder).read_text()
    assert "<!--" not in page and "from 4 runs" in page and "+0.010; -0.020 (1)" in page
    assert "| `cpu/grpo` | at the end | 0.550 (2 runs: 0.500 to 0.600) | 0.650 (2: 0.600 to 0.700) | -0.100 (" in page
    assert (folder / "curves.png").exists()
