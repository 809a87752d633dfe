"""The laboratory's runs, its output, what is resumed, and its comparison."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from verl_ext.allocation import SettingError
from verl_ext.lab import policies, summary
from verl_ext.lab.decoder import DecoderSettings
from verl_ext.lab.lab_run import LabSettings, allocation_settings, run
from verl_ext.lab.recipes import RECIPES, find_recipe
from verl_ext.lab.study import study
from verl_ext.lab.tasks import FAMILIES, TASKS, Task, make_task

SMALL = DecoderSettings(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
CONFIG = {
    "recipes": ["grpo+groups=8+rollouts=64", "sara+groups=16+rollouts=64"], "baseline": None, "task": "balanced",
    "hopeless": None, "seeds": [0], "policies": [1], "rollouts": 192, "train_size": 40, "held_out": 12,
    "eval_every": 64,    "device": "cpu", "workers": 1, "output": "", "update": {"lr": 1e-3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick_policies(monkeypatch, tmp_path_factory):
    """Base policies of a few steps, made once for all tests."""
    monkeypatch.setenv("VERL_EXT_CACHE", str(tmp_path_factory.getbasetemp() / "policies"))
    for name, family in list(FAMILIES.items()):
        monkeypatch.setitem(FAMILIES, name, dataclasses.replace(family, sizes=SMALL, steps=31, batch=16, lr=1e-2))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_the_same_each_time_and_its_right_answers_are_right(name):
    task, again = make_task(name, 200, 50), make_task(name, 200, 50)
    assert (task.prompts, task.answers, task.held_out) == (again.prompts, again.answers, again.held_out)
    assert len(set(task.prompts)) == 200 and not set(task.prompts) & {prompt for prompt, _ in task.held_out}
    hopeless = [row for row, answer in enumerate(task.answers) if answer is None]
    assert len(hopeless) == (40 if name == "impossible" else 0)
    for row, answer in enumerate(task.answers):
        assert task.score(row, answer) == ((False, 0.0) if answer is None else (True, 1.0))
        assert task.score(row, None) == (False, 0.0)
        assert answer is None or len(answer) < task.max_tokens
    assert make_task(name, 200, 50, hopeless=0.6).answers.count(None) == 120


def test_graded_rewards_fall_with_the_distance():
    task = make_task("graded", 50, 10)
    row = next(row for row, answer in enumerate(task.answers) if int(bytes(answer)) >= 30)
    total = int(bytes(task.answers[row]))
    assert task.score(row, tuple(str(total - 10).encode())) == (False, pytest.approx(2 / 3))
    assert task.score(row, tuple(b"xy")) == (False, 0.0)


def test_a_base_policy_learns_its_corpus_and_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_EXT_CACHE", str(tmp_path))
    family = dataclasses.replace(FAMILIES["digits"], steps=35)
    monkeypatch.setitem(FAMILIES, "digits", family)
    task = make_task("skills", 20, 10)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = policies.base_policy(task, 0)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(policies, "pretrain", lambda *_: pytest.fail("made twice"))
    again = policies.base_policy(task, 0)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    # every answer of the corpus is digits: the untrained policy gives them 10 of 264 tokens
    log_probs, _ = policies.answer_log_probs(first, task.held_out)
    assert log_probs.mean() > np.log(1 / 30)


def test_a_run_counts_what_it_did_and_repeats_itself(monkeypatch):
    # these policies know no sums: what they do reach is rewarded
    monkeypatch.setattr(Task, "score", lambda self, row, answer: (sum(answer or ()) % 2 == 1, sum(answer or ()) % 2))
    settings = LabSettings(rollouts=192, train_size=40, held_out=12, eval_every=64)
    first = run(find_recipe("sara+groups=16+rollouts=64"), settings, 1, 1)
    again = run(find_recipe("sara+groups=16+rollouts=64"), settings, 1, 1)
    del first["seconds"], again["seconds"]
    assert first == again
    assert first["rollouts"] >= 192 and first["curve"][-1][0] == first["rollouts"]
    assert sum(first["fates"].values()) == first["rollouts"] == sum(first["rollouts_by_level"])
    assert sum(i * n for i, n in enumerate(first["prompts_by_offers"])) == first["offers"]
    other = run(find_recipe("sara+groups=16+rollouts=64"), settings, 1, 2)
    assert other["curve"] != first["curve"]


def test_a_uniform_run_covers_every_prompt_of_an_epoch():
    settings = LabSettings(rollouts=320, train_size=40, held_out=12, eval_every=320)
    made = run(find_recipe("grpo+groups=8+rollouts=64"), settings, 1, 0)
    assert made["distinct_share"] == 1.0 and made["prompts_by_offers"] == [0, 40]
    assert made["longest_unseen_steps"] <= 5 and made["optimizer_steps"] == 10


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_the_table_is_made_and_runs(name):
    recipe = RECIPES[name]
    assert allocation_settings(recipe, 64, 0).rules
    settings = LabSettings(rollouts=1, train_size=600, held_out=6, eval_every=1000)
    made = run(recipe, settings, 1, 0)
    assert made["steps"] == 1 and made["rollouts"] <= (recipe.rollouts or 6 * recipe.groups * recipe.group_size)


def test_a_study_keeps_what_is_done_and_runs_what_is_missing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "lab.json"
    config = {**CONFIG, "output": str(path)}
    import verl_ext.lab.study as module

    class Here:  # no processes: the settings of this test would not reach them
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def submit(self, call, *args):
            from concurrent.futures import Future

            future = Future()
            future.set_result(call(*args))
            return future

    monkeypatch.setattr(module, "ProcessPoolExecutor", Here)
    assert [(r["recipe"], r["seed"]) for r in study(config)] == [(name, 0) for name in CONFIG["recipes"]]
    capsys.readouterr()
    runs = study({**config, "seeds": [0, 1]})
    out = capsys.readouterr().out
    assert len(runs) == 4 and "2/2" in out and "policy 1 seed 1" in out and "seed 0:" not in out
    assert len(json.loads(path.read_text())["runs"]) == 4 and path.with_suffix(".png").exists()
    assert "not separated" in out or "p after Holm" in out


def test_workers_end_with_a_parent_that_was_killed():
    code = (
        "import multiprocessing, os, signal, time\n"
        "from verl_ext.lab.study import _end_with\n"
        "def work(parent):\n    _end_with(parent)\n    time.sleep(60)\n"
        "child = multiprocessing.get_context('fork').Process(target=work, args=(os.getpid(),))\n"
        "child.start()\nprint(child.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.2)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"task": "sums"}, "task='sums'; accepted: one of balanced, sparse"),
        ({"recipes": ["gropo"]}, "recipes='gropo'; accepted: one of grpo"),
        ({"recipes": ["sara+probe=6"]}, "accepted: +allocator.<setting>="),
        ({"recipes": ["sara+allocator.prob=6"]}, "allocator.prob=6; accepted: the settings"),
        ({"rollouts": 0}, "lab.rollouts=0; accepted: an integer of 1 or more"),
        ({"hopeless": 1.0}, "hopeless=1.0; accepted: null or a number in"),
        ({"update": {"lr": -1.0}}, "lab.update.lr=-1.0; accepted: a number above 0"),
        ({"update": {"clip": 1.0}}, "lab.update.clip=1.0; accepted: the settings"),
        ({"output": "lab.csv"}, "output='lab.csv'; accepted: a path that ends in .json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, change, message):
    with pytest.raises(SettingError, match="accepted") as error:
        study({**CONFIG, "output": str(tmp_path / "lab.json"), **change})
    assert message in str(error.value)
    assert not (tmp_path / "lab.json").exists()


def test_paired_differences_are_students_and_find_what_they_say():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.6, 0.03, 24), rng.normal(0.58, 0.03, 24)
    test = summary.paired({(0, i): x for i, x in enumerate(a)}, {(0, i): x for i, x in enumerate(b)})
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert test["p"] == pytest.approx(expected.pvalue) and test["low"] == pytest.approx(interval.low)
    error = np.std(a - b, ddof=1) / 24**0.5
    draws = rng.normal(test["detectable"], error * 24**0.5, (4000, 24))
    assert (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)


def test_final_and_curve_mean_of_a_straight_line():
    made = {"curve": [[1000 * i, i / 16] for i in range(17)]}
    assert summary.final(made) == pytest.approx((14 + 15 + 16) / 3 / 16)
    assert summary.curve_mean(made) == pytest.approx(0.5)
    assert summary.rollouts_to(made, 0.25) == pytest.approx(4000)


def test_the_laboratory_imports_no_trainer():
    others = ("ray", "verl", "vllm", "transformers")
    code = f"import sys, verl_ext.lab.study; print([m for m in {others} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
