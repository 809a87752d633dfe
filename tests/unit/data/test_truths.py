"""True answers that the reward cannot judge are named with their row and the reason."""

import json

import pytest

from verl_ext.data import truths
from verl_ext.data.dapo_math_17k import prepare
from verl_ext.data.truths import changed, check_truths, describe

from .conftest import published, write_rows


def test_truths_that_can_be_judged():
    good = ["34", "-3", "\\frac{1}{2}", "10:00", "\\frac{1}{0}", "1/2006!", "(1,2)", "x+1", "\\text{even}", "5 cm", "B"]
    checked = check_truths([*good, *good])
    assert checked == {"tried": len(good), "not_tried": 0, "not_judged": 0, "examples": []}


def test_what_cannot_be_judged_is_named_with_its_row_and_reason():
    lines = "34\n35"
    checked = check_truths(["34", "34", lines, " ", "\\sin(9^{9^{9^9}})"])
    assert (checked["tried"], checked["not_judged"]) == (4, 3)
    assert [example["row"] for example in checked["examples"]] == [2, 3, 4]
    assert [example["reason"].split(": ", 1)[-1][:17] for example in checked["examples"]] == [
        "itself is wrong", "an empty answer; ", "deadline"]  # fmt: skip
    assert "1 of 4 different" in describe(checked) and "row 2, '34\\n35'" in describe(checked)


@pytest.mark.parametrize("truth", ["34", "x_1+2", "\\frac{1}{2}", "(1, 2)", "\\pi", "even"])
def test_a_changed_answer_differs(truth):
    assert all(other != truth for other in changed(truth))


def test_what_there_is_no_time_for_is_counted():
    assert check_truths(["1", "2"], limit_s=-1) == {"tried": 0, "not_tried": 2, "not_judged": 0, "examples": []}


def test_without_math_verify_nothing_is_said_to_be_tried(monkeypatch):
    monkeypatch.setattr(truths.importlib.util, "find_spec", lambda name: None)
    assert check_truths(["1"]) == {"skipped": "math-verify is not installed"}
    assert "not tried" in describe(check_truths(["1"]))


def test_the_report_of_a_data_set_names_them(tmp_path, capsys):
    rows = [published(f"Question {n}?", answer, n) for n, answer in enumerate(["1", "\\sin(9^{9^{9^9}})", "3"])]
    prepare(tmp_path / "o.parquet", [write_rows(tmp_path / "i.parquet", rows)])
    report = json.loads((tmp_path / "o.report.json").read_text())
    assert (report["truths"]["tried"], report["truths"]["examples"][0]["row"]) == (3, 1)
    assert "can judge 2 of 3" in capsys.readouterr().out
