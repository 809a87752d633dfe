"""ledger.jsonl and metrics.jsonl across a resume."""

import json
import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_ext.runs.folder import RunFolder
from verl_ext.runs.line_file import NotWrittenError
from verl_ext.runs.records import RunError, read_run


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("VERL_FILE_LOGGER_PATH", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "x")  # so that what a test sets is taken away after it
        monkeypatch.delenv(name)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logger_of(folder):
    """verl's file logger, which empties the file that it opens."""
    return SimpleNamespace(logger={"file": SimpleNamespace(fp=open(os.environ["VERL_FILE_LOGGER_PATH"], "wb"))})


def recorded(path, *steps, config=None):
    """A run that recorded these steps and ended."""
    folder = RunFolder(str(path), OmegaConf.create(config or {"x": 1}))
    folder.begin(0)
    tracking = logger_of(folder)
    folder.restore_metrics(tracking)
    for step in steps:
        folder.add_ledger_line({"step": step, "issued": 8})
        tracking.logger["file"].fp.write(json.dumps({"step": step, "data": {"a": step}}).encode() + b"\n")
        folder.end_step({}, step, steps[-1])
    return folder


def steps_in(path):
    return [line["step"] for line in lines(path)]


def test_sample_answers_are_cut_back_too(tmp_path):
    folder = recorded(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        folder.add_answers([{"step": step, "answer": "é\n"}] * 2)
    folder.add_answers([])
    again = RunFolder(str(tmp_path), OmegaConf.create({"x": 1}))
    again.begin(2)
    again.add_answers([{"step": 3, "answer": "new"}])
    assert steps_in(tmp_path / "answers.jsonl") == [1, 1, 2, 2, 3]
    assert lines(tmp_path / "earlier-1" / "answers.jsonl") == [{"step": 3, "answer": "é\n"}] * 2
    texts = (tmp_path / "answers.jsonl", tmp_path / "earlier-1" / "answers.jsonl")
    assert [path.stat().st_mode & 0o777 for path in texts] == [0o600, 0o600]
    assert again.outcomes == str(tmp_path / "outcomes")


def test_a_resume_cuts_both_files_back_and_puts_aside_what_came_after(tmp_path):
    recorded(tmp_path, 1, 2, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "da')
    config = OmegaConf.create({"x": 1, "y": "${x}"})
    RunFolder(str(tmp_path), config).begin(2)
    assert steps_in(tmp_path / "ledger.jsonl") == [1, 2]
    assert [steps_in(tmp_path / "earlier-1" / name) for name in ("ledger.jsonl", "metrics.jsonl")] == [[3], [3]]
    assert (tmp_path / "earlier-1" / "metrics.jsonl.unreadable").read_text() == '{"step": 3, "da\n'
    assert OmegaConf.load(tmp_path / "config.yaml").y == 1
    assert OmegaConf.load(tmp_path / "earlier-1" / "config.yaml") == {"x": 1}
    open(tmp_path / "metrics.jsonl", "wb").close()  # as verl's logger does
    again = RunFolder(str(tmp_path), config)  # killed there and then, and resumed
    again.begin(2)
    tracking = logger_of(again)
    again.restore_metrics(tracking)
    again.restore_metrics(tracking)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": step, "data": {"a": step}} for step in (1, 2)]
    assert not (tmp_path / "metrics.jsonl.kept").exists() and not (tmp_path / "earlier-2").exists()


def test_a_run_from_scratch_leaves_the_one_before_it_whole_in_a_folder_beside_it(tmp_path):
    recorded(tmp_path, 1, 2, config={"x": 1})
    names = ("config.yaml", "run.json", "ledger.jsonl", "metrics.jsonl")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    recorded(tmp_path, 1, config={"x": 2})
    recorded(tmp_path, 1, 2, 3, config={"x": 2})
    assert {name: (tmp_path / "earlier-1" / name).read_bytes() for name in before} == before
    assert read_run(tmp_path / "earlier-1").ended and len(read_run(tmp_path / "earlier-2").records) == 1
    assert steps_in(tmp_path / "ledger.jsonl") == steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert OmegaConf.load(tmp_path / "config.yaml").x == 2


GARBLED = {
    "not UTF-8": b'{"step": 2, "data": {"a": "\xff\xfe"}}',
    "a list": b"[1, 2]",
    "a number": b"17",
    "no step": b'{"data": {}}',
    "a step that is no number": b'{"step": "two", "data": {}}',
    "a step that is true": b'{"step": true, "data": {}}',
    "nothing but zeros": b"\0" * 4096,
    "cut off": b'{"step": 2, "da',
    "deep": b"[" * 100_000,
}


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", GARBLED)
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_a_garbled_line_is_put_aside_under_a_name_and_the_run_goes_on(tmp_path, name, kind, caplog):
    recorded(tmp_path, 1, 2, 3)
    whole = (tmp_path / name).read_bytes().splitlines(keepends=True)
    (tmp_path / name).write_bytes(whole[0] + GARBLED[kind] + b"\n" + whole[1] + whole[2])
    resumed = RunFolder(str(tmp_path), OmegaConf.create({"x": 1}))
    resumed.begin(3)
    resumed.restore_metrics(logger_of(resumed))
    assert (tmp_path / name).read_bytes() == b"".join(whole)
    assert (tmp_path / "earlier-1" / f"{name}.unreadable").read_bytes() == GARBLED[kind] + b"\n"
    assert f"{name}: 1 lines that cannot be read are put aside" in caplog.text


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "config.yaml", "run.json"])
def test_a_folder_where_a_file_should_be_is_named(tmp_path, name):
    (tmp_path / name / "x").mkdir(parents=True)
    with pytest.raises(NotWrittenError, match=f"{tmp_path / name} is a folder; a file is expected"):
        RunFolder(str(tmp_path), OmegaConf.create({"x": 1})).begin(0)


def test_a_resumed_run_goes_on_with_its_run_of_wandb_and_one_from_scratch_does_not(tmp_path, monkeypatch):
    config = OmegaConf.create({"trainer": {"logger": ["console", "wandb"]}})
    seen = []
    for step in (0, 4, 0):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            monkeypatch.delenv(name, raising=False)
        RunFolder(str(tmp_path), config).begin(step)
        seen.append(os.environ["WANDB_RUN_ID"])
        assert os.environ["WANDB_RESUME"] == "allow"
    assert seen[0] == seen[1] != seen[2]
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    RunFolder(str(tmp_path), config).begin(4)
    assert os.environ["WANDB_RUN_ID"] == "mine"
    monkeypatch.delenv("WANDB_RUN_ID")
    RunFolder(str(tmp_path / "without"), OmegaConf.create({"trainer": {"logger": ["console"]}})).begin(0)
    assert "WANDB_RUN_ID" not in os.environ


def test_metrics_go_to_the_runs_folder_unless_the_user_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    RunFolder(str(tmp_path), OmegaConf.create({}))
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "metrics.jsonl")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "elsewhere")
    RunFolder(str(tmp_path), OmegaConf.create({}))
    assert os.environ["VERL_FILE_LOGGER_PATH"] == "elsewhere"


def test_versions_and_machine_are_noted_and_the_step_the_run_ended_at(tmp_path, monkeypatch):
    folder = RunFolder(str(tmp_path), OmegaConf.create({"trainer": {"total_training_steps": 30}}))
    folder.begin(0)
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
    recorded(tmp_path, 1, 2, 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"config.yaml", "run.json", "ledger.jsonl", "metrics.jsonl"}
    for number in (1, 2):
        os.environ.pop("VERL_FILE_LOGGER_PATH")
        guest = RunFolder(str(tmp_path), OmegaConf.create({"x": 2}))
        guest.visit()
        tracking = logger_of(guest)
        guest.restore_metrics(tracking)
        tracking.logger["file"].fp.write(b'{"step": 3, "data": {"val": 1}}\n')
        assert steps_in(tmp_path / f"validation-{number}.jsonl") == [3]
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if "validation" not in path.name}
    assert after == before
    os.environ["VERL_FILE_LOGGER_PATH"] = str(tmp_path / "metrics.jsonl.mine")
    (tmp_path / "metrics.jsonl.mine").write_text('{"step": 1, "data": {}}\n')
    guest = RunFolder(str(tmp_path), OmegaConf.create({"x": 2}))
    guest.visit()
    guest.restore_metrics(logger_of(guest))
    assert steps_in(tmp_path / "metrics.jsonl.mine") == [1]
    alone = tmp_path / "alone"
    os.environ.pop("VERL_FILE_LOGGER_PATH")
    RunFolder(str(alone), OmegaConf.create({"x": 2})).visit()
    assert OmegaConf.load(alone / "config.yaml").x == 2
