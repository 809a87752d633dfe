# SPDX-License-Identifier: Apache-2.0
"""Runs of the laboratory and of simulations are compared by the command that compares real ones."""

import json

import pytest

from verl_ext.compare import run
from verl_ext.configuration import compose_config
from verl_ext.launch.comparison_plan import CompareError
from verl_ext.reports.toy_runs import load_all
from verl_ext.simulate import run as simulate


def lab_run(recipe, policy, seed, end, task="balanced", hopeless=None):
    return {
        "recipe": recipe, "task": task, "hopeless": hopeless, "policy": policy, "seed": seed, "effective_groups": 40,
        "curve": [[0, 0.44], [512, 0.5], [1024, end]], "curve_steps": [0, 4, 8], "curve_tokens": [0, 1500, 3000],
    }  # fmt: skip


@pytest.fixture
def lab(tmp_path):
    runs = [lab_run(name, p, s, end + 0.01 * s) for name, end in (("grpo", 0.55), ("sara", 0.65))
            for p in (1, 2) for s in (0, 1)]  # fmt: skip
    (tmp_path / "lab.json").write_text(json.dumps({"runs": runs}))
    return tmp_path / "lab.json"


def test_the_laboratorys_runs_have_their_curves(lab):
    runs = load_all(lab)
    assert [(r.recipe, r.seed) for r in runs[:4]] == [("grpo", 100), ("grpo", 101), ("grpo", 200), ("grpo", 201)]
    assert [(p["rollouts"], p["tokens"], p["steps"], p["accuracy"]) for p in runs[0].points] == [
        (0, 0, 0, 0.44), (512, 1500, 4, 0.5), (1024, 3000, 8, 0.55)
    ]  # fmt: skip
    assert runs[0].complete and runs[0].effective_groups() == 40 and "exact" in runs[0].estimate


def test_they_are_compared_by_the_same_command(lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])
    assert run(compose_config([f"folders=[{lab}]", f"output={tmp_path}/report", f"root={tmp_path}/no"], "compare")) == 0
    comparison = json.loads((tmp_path / "report" / "comparison.json").read_text())
    assert comparison["baseline"] == "grpo" and set(comparison["recipes"]) == {"grpo", "sara"}
    assert (tmp_path / "report" / "index.html").is_file() and "Report: " in capsys.readouterr().out


def test_tasks_are_kept_apart(tmp_path):
    runs = [lab_run("grpo", 1, 0, 0.5), lab_run("grpo", 1, 0, 0.4, hopeless=0.6)]
    (tmp_path / "lab.json").write_text(json.dumps({"runs": runs}))
    assert [r.recipe for r in load_all(tmp_path / "lab.json")] == ["grpo (balanced)", "grpo (balanced, 60% hopeless)"]


def test_a_simulation_is_named_after_its_file(tmp_path):
    words = ["allocation/allocator=sara", "simulation.steps=3", "simulation.prompts=64", "simulation.batch=4", "seed=5"]
    (tmp_path / "greso_sara_seed5.json").write_text(json.dumps(simulate(compose_config(words, "simulate"))))
    (found,) = load_all(tmp_path / "greso_sara_seed5.json")
    assert (found.recipe, found.seed, len(found.points)) == ("greso_sara", 5, 4)
    assert found.config["allocation"]["allocator"]["name"] == "sara" and found.points[-1]["rollouts"] > 0


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["{}", "no JSON", '{"runs": []}', '{"runs": [{"recipe": "a"}]}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(CompareError, match="other.json: "):
        load_all(tmp_path / "other.json")
