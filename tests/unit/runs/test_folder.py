"""ledger.jsonl and metrics.jsonl across a resume."""

import io
import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_ext.runs.folder import RunFolder
from verl_ext.runs.records import RunError, read_run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resume_cuts_both_files_back_and_keeps_what_came_before(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "set")
    config = OmegaConf.create({"x": 1, "y": "${x}"})
    folder = RunFolder(str(tmp_path), config)
    for step in (1, 2, 3):
        folder.add_ledger_line({"step": step, "issued": 8})
        folder.end_step({}, step, 3)
    written = [{"step": step, "data": {"a": step}} for step in (0, 1, 2, 3)]
    cut_off = '{"step": 3, "da'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written) + cut_off)

    resumed = RunFolder(str(tmp_path), config)
    resumed.keep_until(2)
    assert [line["step"] for line in lines(tmp_path / "ledger.jsonl")] == [1, 2]
    open(tmp_path / "metrics.jsonl", "wb").close()  # as verl's logger does
    again = RunFolder(str(tmp_path), config)  # killed there and then, and resumed
    again.keep_until(2)
    with open(tmp_path / "metrics.jsonl", "wb", buffering=0) as file:
        tracking = SimpleNamespace(logger={"file": SimpleNamespace(fp=file)})
        again.restore_metrics(tracking)
        again.restore_metrics(tracking)
    assert lines(tmp_path / "metrics.jsonl") == written[:3]
    assert not (tmp_path / "metrics.jsonl.kept").exists()
    assert OmegaConf.load(tmp_path / "config.yaml").y == 1


def test_a_run_from_scratch_keeps_nothing(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "data": {}}\n')
    folder = RunFolder(str(tmp_path), OmegaConf.create({}))
    folder.keep_until(0)
    file = SimpleNamespace(fp=io.BytesIO())
    folder.restore_metrics(SimpleNamespace(logger={"file": file}))
    assert (tmp_path / "ledger.jsonl").read_text() == "" and file.fp.getvalue() == b""


def test_metrics_go_to_the_runs_folder_unless_the_user_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    import os

    RunFolder(str(tmp_path), OmegaConf.create({}))
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "metrics.jsonl")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "elsewhere")
    RunFolder(str(tmp_path), OmegaConf.create({}))
    assert os.environ["VERL_FILE_LOGGER_PATH"] == "elsewhere"


def test_versions_and_machine_are_noted_and_the_step_the_run_ended_at(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "set")
    folder = RunFolder(str(tmp_path), OmegaConf.create({"trainer": {"total_training_steps": 30}}))
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["versions"]["verl"] == "0.9.1" and about["machine"]["cores"] and about["ended_at_step"] is None

    def read():
        lines = [json.dumps({"step": step, "data": {"a": 1}}) + "\n" for step in range(1, done + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        return read_run(tmp_path)

    done = 6
    folder.end_step({}, 6, 30)
    assert not read().ended
    done = 7
    folder.end_step({}, 7, 7, stopped=True)
    assert not read().ended, "a run that was told to stop can be resumed"
    folder.end_step({}, 7, 7)  # the run's rollouts are spent at step 7 of 30
    assert read().ended and read().about["ended_at_step"] == 7
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="run.json"):
        read()


def test_a_run_that_only_validates_leaves_anothers_files_alone(tmp_path):
    RunFolder(str(tmp_path), OmegaConf.create({"x": 1})).end(3)
    (tmp_path / "ledger.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"config.yaml", "run.json", "ledger.jsonl", "metrics.jsonl"}
    guest = RunFolder(str(tmp_path), OmegaConf.create({"x": 2, "trainer": {"val_only": True}}))
    guest.keep_all()
    with open(tmp_path / "metrics.jsonl", "wb", buffering=0) as file:  # as verl's logger empties it
        guest.restore_metrics(SimpleNamespace(logger={"file": SimpleNamespace(fp=file)}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    alone = tmp_path / "alone"
    RunFolder(str(alone), OmegaConf.create({"x": 2, "trainer": {"val_only": True}}))
    assert OmegaConf.load(alone / "config.yaml").x == 2
