# SPDX-License-Identifier: Apache-2.0
import copy
import json
import subprocess
import sys

import pytest

from verl_ext.report import main
from verl_ext.reports.run_plot import draw
from verl_ext.reports.run_table import table
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import RunError, read_run
from verl_ext.runs.step_line import held_out, progress_line


def ledger_lines(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


# reading


def test_a_run_is_read(run_folder):
    run = read_run(run_folder)
    assert [record.step for record in run.records] == list(range(31))
    assert [record.step for record in run.steps] == list(range(1, 31))
    assert run.total_steps == 30
    assert [line["step"] for line in run.ledger] == list(range(1, 31))
    estimate, points = run.accuracy()["chain_sums"]
    assert estimate == "mean@8"
    totals = {line["step"]: line["issued_total"] for line in ledger_lines(run_folder)}
    expected = [(0, 0, 0.47), (10, totals[10], 0.52), (20, totals[20], 0.57), (30, totals[30], 0.62)]
    assert points == [(step, rollouts, pytest.approx(value)) for step, rollouts, value in expected]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_cut_last_line_is_left_out(run_folder, name, cut):
    path = run_folder / name
    path.write_bytes(path.read_bytes()[:-cut])
    run = read_run(run_folder)
    # Without its newline alone the last line is still whole.
    last = 30 if cut == 1 else 29
    read = {"metrics.jsonl": run.records[-1].step, "ledger.jsonl": run.ledger[-1]["step"]}
    assert read[name] == last


@pytest.mark.bad_input
def test_a_broken_line_inside_is_an_error(run_folder):
    path = run_folder / "ledger.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match="ledger.jsonl, line 4"):
        read_run(run_folder)


@pytest.mark.bad_input
def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"no metrics.jsonl in it.*trainer.logger"):
        read_run(tmp_path)


def test_two_lines_of_one_step_are_one_record(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "data": {"extra": 1.0, "critic/score/mean": 0.9}}) + "\n")
    last = read_run(run_folder).records[-1]
    assert last.step == 30
    assert last.data["extra"] == 1.0
    assert last.data["critic/score/mean"] == 0.9
    assert last.data["allocation/rounds"] == 3


# progress


def test_progress_line():
    metrics = {
        "critic/score/mean": 0.5123,
        "allocation/effective_share": 0.414,
        "allocation/rounds": 3,
        "allocation/step_rollouts": 268,
        "allocation/fate/filtered": 8,
        "allocation/fate/trained": 256,
        "allocation/fate/abandoned": 4,
        "allocation/fate/failed": 0,
        "timing_s/step": 5.23,
        "val-core/chain_sums/acc/mean@8": 0.553,
    }
    assert progress_line(7, 100, metrics) == (
        "step   7/100 | reward 0.512 | effective 0.41 | 3 rounds | 268 rollouts: trained 256, filtered 8, abandoned 4 "
        "| 5.2 s | held-out mean@8 0.553"
    )


def test_progress_line_leaves_out_what_is_missing():
    assert progress_line(3, None, {}) == "step 3"
    assert progress_line(0, 30, {"val-core/a/acc/mean@8": 0.5, "val-core/b/acc/mean@4": 0.25}) == (
        "step  0/30 | held-out a mean@8 0.500 | held-out b mean@4 0.250"
    )
    assert progress_line(1, 2, {"allocation/rounds": 1}) == "step 1/2 | 1 round"


def test_held_out_prefers_accuracy_and_most_rollouts():
    metrics = {
        "val-core/x/reward/mean@8": 0.1,
        "val-core/x/acc/mean@1": 0.2,
        "val-core/x/acc/mean@8": 0.3,
        "val-core/x/acc/best@8/mean": 0.9,
        "val-aux/x/acc/mean@16": 0.4,
        "val-core/y/reward/mean@4": 0.5,
    }
    assert held_out(metrics) == {"x": ("mean@8", 0.3), "y": ("mean@4", 0.5)}


# ledger


def test_a_whole_ledger_has_no_faults(run_folder):
    assert ledger_faults(ledger_lines(run_folder)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda line: line["fates_total"].update(trained=line["fates_total"]["trained"] - 1), "rollouts issued, but"),
        (lambda line: line["fate_tokens_total"].update(trained=0), "tokens issued, but"),
        (lambda line: line.update(issued=line["issued"] + 1), "issued of the steps so far sum to"),
        (lambda line: line["fates"].update(surplus=line["fates"]["surplus"] + 1), "for surplus"),
        (lambda line: line.update(in_flight=-1, issued_total=line["issued_total"] - 1), "negative count of rollouts"),
        (lambda line: line.pop("fates_total"), "no fates_total"),
    ],
)
def test_every_kind_of_fault_is_found(run_folder, change, fault):
    lines = copy.deepcopy(ledger_lines(run_folder))
    change(lines[4])
    assert any(found.startswith("step 5: ") and fault in found for found in ledger_faults(lines))


def test_a_lost_line_is_found(run_folder):
    lines = ledger_lines(run_folder)
    del lines[6]
    assert any("step 8" in fault for fault in ledger_faults(lines))


# table


def test_the_table_tells_the_run(run_folder):
    last = ledger_lines(run_folder)[-1]
    text = table(read_run(run_folder))
    assert f"{last['issued_total']:,} rollouts issued" in text
    assert "held-out mean@8       0.470 (step 0) -> 0.620 (step 30, +0.150), chain_sums" in text
    assert "The ledger adds up" in text
    rows = {line[:34].strip(): line[34:].split() for line in text.splitlines() if len(line) > 40}
    share = 100 * last["fates_total"]["trained"] / last["issued_total"]
    assert rows["trained"] == [f"{30 * 256:,}", f"{share:.1f}", f"{last['fate_tokens_total']['trained']:,}"]
    assert rows["issued"][:2] == [f"{last['issued_total']:,}", "100.0"]
    assert float(rows["policy update"][0]) == 1.1
    assert float(rows["rest of the step"][0]) == pytest.approx(0.1)
    total = sum(float(cells[-1]) for name, cells in rows.items() if name in LABELS)
    assert total == pytest.approx(100, abs=0.3)


LABELS = ("rollouts: generate and score", "old log-probs", "policy update", "weights to the engine", "rest of the step")


def test_a_run_that_was_stopped_before_its_first_step(run_folder):
    (run_folder / "ledger.jsonl").unlink()
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    run = read_run(run_folder)
    text = table(run)
    assert "training steps        0 of 30" in text
    assert "No ledger" in text
    assert draw(run).stat().st_size > 0


# plot and command line


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_the_plot_is_drawn_into_the_folder(run_folder):
    path = draw(read_run(run_folder))
    assert path == run_folder / "report.png"
    width, height = png_size(path)
    assert width > 1000 and height > 300
    assert [p.name for p in run_folder.iterdir() if p.name.startswith(".")] == []


def test_command_line(run_folder, capsys):
    assert main([str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "The ledger adds up" in out
    assert f"Plot: {run_folder / 'report.png'}" in out


def test_command_line_says_what_is_wrong(run_folder, capsys):
    assert main([str(run_folder / "no")]) == 2
    assert "no such folder" in capsys.readouterr().err
    lines = ledger_lines(run_folder)
    lines[-1]["fates_total"]["trained"] += 1
    (run_folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(run_folder), "--no-plot"]) == 1
    assert "does NOT add up" in capsys.readouterr().out


def test_the_report_loads_nothing_heavy():
    code = "import sys, verl_ext.report; print([m for m in ('torch', 'verl', 'ray', 'vl_convert') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
