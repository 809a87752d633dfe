# SPDX-License-Identifier: Apache-2.0
"""What is said where a run is cut off or was not validated, and what of folders that are damaged."""

import json
import math
import re

import pytest

from tests.unit.runs.run_folders import write_compared_run as write_run
from verl_ext.compare import build
from verl_ext.launch.comparison_plan import CompareError
from verl_ext.reports.compared_runs import find, load
from verl_ext.reports.comparison import compare


def numbers(root, **more):
    return compare([load(folder) for folder in find(root, [])], "a", **more)


def edit(folder, change, name="metrics.jsonl"):
    """Rewrite the lines of a file."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for line in lines:
        change(line)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def not_validated(line):
    line["data"] = {key: value for key, value in line["data"].items() if not key.startswith("val-core")}


@pytest.fixture
def pair(tmp_path):
    """a and b, two seeds each."""
    for recipe in "ab":
        for seed in range(2):
            write_run(tmp_path / "runs" / f"{recipe}-seed{seed}", seed=seed)
    return tmp_path / "runs"


def test_a_run_without_validation_is_named_and_counted_nowhere(pair, tmp_path, monkeypatch):
    edit(write_run(pair / "foreign-seed0"), not_validated)
    found = numbers(pair, target=0.54)
    assert found["recipes"]["foreign"]["to_target"]["rollouts"]["of"] == 0
    said = " ".join(found["sentences"])
    assert f"Left out, for want of a held-out accuracy: {pair / 'foreign-seed0'}." in found["sentences"]
    assert "every validated run has reached" in said and "which every run" not in said and "Short of" not in said
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])
    build(find(pair, []), tmp_path / "report", "t", "a", 0.54)
    assert "not measured" in (tmp_path / "report" / "index.html").read_text()


def test_of_two_runs_the_one_validated_counts(pair):
    edit(pair / "b-seed1", not_validated)
    found = numbers(pair, target=0.99)
    assert "Short of 0.99: a (2 of 2 runs), b (1 of 1 runs)." in found["sentences"]
    reached = numbers(pair, target=0.5)["recipes"]["b"]["to_target"]["rollouts"]
    assert (reached["reached"], reached["of"]) == (1, 1) and reached["ratio"]


def test_a_baseline_without_validation_has_no_ratio(pair):
    for seed in range(2):
        edit(pair / f"a-seed{seed}", not_validated)
    assert numbers(pair, target=0.5)["recipes"]["b"]["to_target"]["rollouts"]["ratio"] is None


def test_a_run_cut_to_its_first_validation_is_named(pair):
    path = pair / "b-seed1" / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    first, *rest = numbers(pair, target=0.5)["sentences"]
    assert first.endswith(f"the last validation is at 0 rollouts in {pair / 'b-seed1'}.")
    assert rest == ["Short of 0.5: b (1 of 2 runs)."]


def test_an_accuracy_that_is_no_number_is_left_out(pair, tmp_path, monkeypatch):
    def break_last(line):
        if line["step"] == 20:
            line["data"]["val-core/sums/acc/mean@8"] = math.nan

    edit(pair / "b-seed1", break_last)
    assert load(pair / "b-seed1").points[-1]["steps"] == 16
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])
    found = build(find(pair, []), tmp_path / "report", "t", "a")
    assert "nan" not in " ".join(found["sentences"])
    assert "NaN" not in (tmp_path / "report" / "comparison.json").read_text()


# damaged folders


@pytest.mark.bad_input
@pytest.mark.parametrize("file, content, message", [
    ("config.yaml", b"trainer: foo\n", "config.yaml: trainer: expected a mapping of settings, seen a str"),
    ("config.yaml", b"- trainer\n", "config.yaml: expected a mapping of settings, seen a list"),
    ("config.yaml", b"a: [1\n", "config.yaml: not YAML"), ("config.yaml", b"a: \xff\n", "config.yaml: not YAML"),
    ("config.yaml", b"allocation: {seed: [1]}\n", "config.yaml: allocation.seed=[1]; accepted"),
    ("compare.json", b'{"recipe": 5}', "compare.json: recipe=5; accepted: null, or a name"),
    ("compare.json", b'{"seed": [1]}', "compare.json: seed=[1]; accepted: null, or an integer"),
    ("compare.json", b'{"machine": 5}', "compare.json: machine=5; accepted"),
    ("metrics.jsonl", b'{"step": 1, "data": {"allocation/rollouts": 1e400}}\n',
     "metrics.jsonl, step 1: allocation/rollouts=inf; expected a finite number"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, file, content, message):
    folder = write_run(tmp_path / "a-seed0", note=False)
    (folder / file).write_bytes(content)
    with pytest.raises(CompareError, match=re.escape(message)):
        load(folder)


@pytest.mark.bad_input
@pytest.mark.parametrize("change", [
    lambda line: line.update(fates_total=None), lambda line: line.update(fates=None),
    lambda line: line.update(waiting="x"), lambda line: line.pop("tokens_total"),
])  # fmt: skip
def test_a_damaged_ledger_is_a_fault_not_a_traceback(pair, change):
    edit(pair / "b-seed1", change, "ledger.jsonl")
    found = numbers(pair)
    assert "The ledger of a run does NOT add up; see below." in found["sentences"]
    assert found["recipes"]["b"]["fates"]["trained"] > 0
