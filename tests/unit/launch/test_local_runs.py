# SPDX-License-Identifier: Apache-2.0
"""What is run, resumed and left alone. The child is a small program that writes a run's folder."""

import json
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from verl_ext.compare import run
from verl_ext.launch.comparison_plan import CompareError, PlannedRun, State, plan, state_of
from verl_ext.launch.local_runs import Progress, run_all, time_left
from verl_ext.runs.provenance import provenance

CHILD = """
import json, os, sys
arguments = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
folder = arguments["trainer.default_local_dir"]
path = os.path.join(folder, "metrics.jsonl")
done = sum(1 for _ in open(path)) if os.path.exists(path) else 0
fail = json.loads(os.environ.get("FAIL_AT", "{}")).get(os.path.basename(folder))
open(os.path.join(folder, "config.yaml"), "w").write("trainer:\\n  total_training_steps: 4\\n")
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
print("from step", done, os.environ.get("VERL_FILE_LOGGER_PATH"))
with open(path, "a") as file:
    for step in range(max(done, 0), 5):
        if fail == step:
            sys.exit("no more")
        seed = int(arguments["allocation.seed"])
        data = {"val-core/s/acc/mean@8": 0.1 * step + 0.01 * seed, "allocation/rollouts": 64 * step,
                "allocation/tokens": 200 * step}
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
        file.flush()
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    return (sys.executable, str(tmp_path / "child.py"))


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_plan_is_balanced_by_seed(tmp_path):
    runs = plan(["cpu/grpo", "cpu/sara"], [0, 7], tmp_path, ["tiny.mix=sparse"])
    assert [(r.recipe, r.seed) for r in runs] == [("cpu/grpo", 0), ("cpu/sara", 0), ("cpu/grpo", 7), ("cpu/sara", 7)]
    arguments = runs[3].arguments()
    assert arguments[:3] == ["recipe=cpu/sara", "allocation.seed=7", "data.seed=7"]
    assert f"trainer.default_local_dir={tmp_path}/cpu-sara-seed7" in arguments and arguments[-1] == "tiny.mix=sparse"


@pytest.mark.bad_input
@pytest.mark.parametrize("recipes, seeds, message", [
    (["a b"], [0], "recipes: 'a b'"), (["a"], [-1], "seeds: -1"), (["a"], [], "seeds="),
    (["a", "a"], [0], "recipes: a is given twice"), (["a"], [1, 1], "seeds: 1 is given twice"),
])  # fmt: skip
def test_what_cannot_be_planned(tmp_path, recipes, seeds, message):
    with pytest.raises(CompareError, match=message):
        plan(recipes, seeds, tmp_path)


def test_missing_is_run_cut_off_is_resumed_done_is_left_alone(tmp_path, command, monkeypatch):
    runs = plan(["x"], [0, 1, 2], tmp_path / "runs")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/elsewhere")
    monkeypatch.setenv("FAIL_AT", json.dumps({"x-seed1": 2}))
    said = []
    assert [r.seed for r in run_all(runs, said.append, command)] == [1]
    assert [state_of(r.folder) for r in runs] == [State.DONE, State.CUT_OFF, State.DONE]
    assert any("seed 1: FAILED with status 1" in line and "no more" in line for line in said)
    assert "from step 0 None" in (runs[0].folder / "job.log").read_text()
    monkeypatch.delenv("FAIL_AT")
    assert run_all(runs, said.append, command) == []
    assert [len(calls(r.folder)) for r in runs] == [1, 2, 1]
    assert "from step 2" in (runs[1].folder / "job.log").read_text()
    assert "trainer.resume_mode=auto" in calls(runs[1].folder)[1]
    assert all(state_of(r.folder) is State.DONE for r in runs)
    note = json.loads((runs[0].folder / "compare.json").read_text())
    assert note["finished"] and note["versions"]["python"] and note["machine"]["cores"]


def test_a_run_with_other_settings_is_not_mixed_in(tmp_path, command):
    run_all(plan(["x"], [0], tmp_path), lambda line: None, command)
    other = plan(["x"], [0], tmp_path, ["tiny.mix=sparse"])
    with pytest.raises(CompareError, match=r"overrides=\[\], not \['tiny.mix=sparse'\]: choose another project"):
        run_all(other, lambda line: None, command)
    assert len(calls(other[0].folder)) == 1


def test_states(tmp_path):
    assert state_of(tmp_path / "nothing") is State.MISSING
    folder = tmp_path / "run"
    folder.mkdir()
    assert state_of(folder) is State.MISSING
    (folder / "metrics.jsonl").write_text('{"step": 3, "data": {}}\n')
    assert state_of(folder) is State.CUT_OFF
    (folder / "config.yaml").write_text("trainer:\n  total_training_steps: 3\n")
    assert state_of(folder) is State.DONE
    (folder / "metrics.jsonl").write_text('nonsense\n{"step": 3, "data": {}}\n')
    assert state_of(folder) is State.CUT_OFF, "it is gone on with, and what cannot be read is put aside"


def settings(tmp_path, *overrides):
    with initialize_config_module("verl_ext.configs", version_base=None):
        return compose("compare", [f"root={tmp_path}/runs", *overrides])


def test_the_command(tmp_path, command, capsys, monkeypatch):
    config = settings(tmp_path, "recipes=[x,y]", "seeds=[0,1]")
    assert run(config, command) == 0
    output = capsys.readouterr().out
    assert "Nothing separates" in output and (tmp_path / "runs" / "report" / "index.html").is_file()
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])  # a second each
    assert run(config, command) == 0
    assert all(len(calls(tmp_path / "runs" / name)) == 1 for name in ("x-seed0", "x-seed1", "y-seed0", "y-seed1"))
    assert run(settings(tmp_path, "run=false"), ("false",)) == 0


def test_only_building_runs_nothing(tmp_path):
    with pytest.raises(CompareError, match="no runs"):
        run(settings(tmp_path, "recipes=[x]", "run=false"), ("false",))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(CompareError, match="recipes="):
        run(settings(tmp_path))
    with pytest.raises(CompareError, match="folders: .*matches no folder"):
        run(settings(tmp_path, "run=false", f"folders=[{tmp_path}/none*]"))


def test_a_failed_run_is_the_exit_status_and_the_report_is_built(tmp_path, command, monkeypatch):
    monkeypatch.setenv("FAIL_AT", json.dumps({"y-seed0": 3}))
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])
    assert run(settings(tmp_path, "recipes=[x,y]", "seeds=[0]"), command) == 1
    assert (tmp_path / "runs" / "report" / "comparison.json").is_file()


def test_provenance_names_no_host():
    import socket

    text = json.dumps(provenance())
    assert socket.gethostname() not in text and str(Path.home()) not in text


def test_arguments_are_those_of_the_command_line(tmp_path):
    one = PlannedRun("cpu/sara", 3, tmp_path / "p" / "r", ("a=1",), 5)
    assert "trainer.save_freq=5" in one.arguments() and "trainer.project_name=p" in one.arguments()


def test_progress_shows_the_run_its_step_and_the_time_left(monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr("verl_ext.launch.local_runs.time.monotonic", lambda: now[0])
    progress = Progress(said.append, 3, every_s=30.0)
    progress.begin("[1/3] x, seed 0")
    for at, line in ((0, "... Ray starts"), (60, "step 1/11 | a"), (70, "noise"), (80, "step 3/11 | b"),
                     (120, "step 7/11 | c"), (121, "warning: w")):  # fmt: skip
        now[0] = at
        progress.line(line + "\n")
    # 10 s a step: 40 s are left of a run of 160 s, and two more of it
    assert said == [
        "[1/3] x, seed 0 | step 1/11 | a | time left not known yet",
        "[1/3] x, seed 0 | step 7/11 | c | about 6 min left",
        "[1/3] x, seed 0 | warning: w",
    ]
    progress.end(True)  # after 121 s
    progress.begin("[2/3] x, seed 1")
    progress.line("step 1/11 | a")
    now[0] = 131
    assert progress.seconds_left(131, 2, 11) == 90 + 121


def test_time_left_in_words():
    assert [time_left(s) for s in (None, 5, 3000, 3 * 3600)] == [
        "time left not known yet", "about 1 min left", "about 50 min left", "about 3.0 h left"
    ]  # fmt: skip


@pytest.mark.bad_input
def test_the_whole_plan_is_checked_before_the_first_run(tmp_path):
    recipes = "recipes=[cpu/grpo,cpu/sarra,dapo_math_17k/sara]"
    with pytest.raises(CompareError) as error:
        run(settings(tmp_path, recipes, "overrides=['data.val_files=no.parquet']"))
    said = str(error.value)
    assert "recipe=cpu/sarra: there is no such file; did you mean cpu/sara" in said
    assert "cpu/grpo: data.val_files: no.parquet does not exist" in said
    assert "python -m verl_ext.data.dapo_math_17k --output" in said and said.endswith("Nothing was run.")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(CompareError, match="max_roundss: unknown setting; did you mean allocation.max_rounds"):
        run(settings(tmp_path, "recipes=[cpu/grpo]", "overrides=['allocation.max_roundss=3']"))
