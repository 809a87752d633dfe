# SPDX-License-Identifier: Apache-2.0
"""A damaged file is named, and a plot that cannot be written ends nothing."""

import json

import pytest

from verl_ext.main_ppo import _show_report
from verl_ext.report import main


def change_last(folder, name, change):
    lines = (folder / name).read_text().splitlines()
    last = json.loads(lines[-1])
    change(last)
    (folder / name).write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")


@pytest.mark.bad_input
@pytest.mark.parametrize("file, content, message", [
    ("config.yaml", b"trainer: foo\n", "config.yaml: trainer: expected a mapping of settings, seen a str"),
    ("config.yaml", b"- trainer\n", "config.yaml: expected a mapping of settings, seen a list"),
    ("config.yaml", b"trainer: [1\n", "config.yaml: not YAML"),
    ("config.yaml", b"a: \xff\n", "config.yaml: not YAML"),
    ("run.json", b'{"ended_at_step": "x"}', "run.json: ended_at_step='x'; expected an integer"),
    ("metrics.jsonl", b'{"step": 3, "data": {"allocation/rollouts": 1e400}}\n',
     "metrics.jsonl, step 3: allocation/rollouts=inf; expected a finite number"),
    ("metrics.jsonl", b'{"step": 3, "data": {"allocation/fate/trained": NaN}}\n',
     "metrics.jsonl, step 3: allocation/fate/trained=nan; expected a finite number"),
    ("metrics.jsonl", b'{"step": 3, "data": {"x": 1' + b"0" * 400 + b"}}\n", "step 3: x is an integer too large"),
])  # fmt: skip
def test_a_damaged_file_is_named(run_folder, capsys, file, content, message):
    (run_folder / file).write_bytes(content)
    assert main([str(run_folder), "--no-plot"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.bad_input
@pytest.mark.parametrize("change, fault", [
    (lambda line: line.update(fates=None), "step 30: fates is None, not counts by fate"),
    (lambda line: line.update(fates_total=None), "step 30: fates_total is None, not counts by fate"),
    (lambda line: line["fates"].update(trained="x"), "step 30: fates is {'trained': 'x'"),
    (lambda line: line.update(in_flight=[1]), "step 30: in_flight is [1], not a count"),
    (lambda line: line.pop("tokens_total"), "step 30: no tokens_total in its line"),
])  # fmt: skip
def test_a_damaged_ledger_line_is_a_fault(run_folder, capsys, change, fault):
    change_last(run_folder, "ledger.jsonl", change)
    assert main([str(run_folder), "--no-plot"]) == 1
    assert fault in capsys.readouterr().out


@pytest.mark.parametrize("show", [lambda folder: main([str(folder)]), lambda folder: _show_report(str(folder))])
def test_a_plot_that_cannot_be_written_is_said(run_folder, capsys, show):
    (run_folder / "report.png").mkdir()
    assert show(run_folder) in (0, None)
    out = capsys.readouterr().out
    assert "The ledger adds up" in out and "No plot: " in out and "report.png" in out
    assert [path.name for path in run_folder.iterdir() if path.name.startswith(".")] == []
