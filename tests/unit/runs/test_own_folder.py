# SPDX-License-Identifier: Apache-2.0
"""Which folder a run gets, where others have been."""

from __future__ import annotations

import json

import pytest

from tests.unit.runs.test_checkpoints import checkpoint
from verl_ext.runs.checkpoints import TRACKER
from verl_ext.runs.own_folder import note_command, own_folder

A, B, C = (["recipe=cpu/sara", *more] for more in ([], ["allocation/allocator=uniform"], ["trainer.total_epochs=2"]))


class Runs:
    """Runs one after the other in a named folder."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, command, *, steps=3, ended=True, saved=False, **options):
        """Start a run; it records so many steps. Returns its folder's name."""
        folder = own_folder(self.folder, command, **options)
        note_command(folder, command)
        for name in ("ledger.jsonl", "metrics.jsonl") if steps else ():
            lines = (json.dumps({"step": n + 1, "data": {}}) + "\n" for n in range(steps))
            (folder / name).write_text("".join(lines))
            (folder / "run.json").write_text(json.dumps({"ended_at_step": steps if ended else None}))
        if saved:
            checkpoint(folder, steps)
            (folder / TRACKER).write_text(str(steps))
        return folder.name


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path / "cpu-sara")


def test_three_commands_of_one_name_have_three_folders(runs):
    assert [runs.run(command) for command in (A, B, C)] == ["cpu-sara", "cpu-sara-2", "cpu-sara-3"]
    assert runs.run(A) == "cpu-sara-4", "the first had ended: once more is another run"
    assert runs.run(["allocation/allocator=uniform", "recipe=cpu/sara"]) == "cpu-sara-5"


def test_the_same_command_goes_on_in_the_folder_it_had(runs):
    """As a job does that is put back into the queue before its first checkpoint, and after it."""
    runs.run(A)
    for _ in range(3):
        assert runs.run(B, ended=False) == "cpu-sara-2"
    assert runs.run(B, ended=False, saved=True) == "cpu-sara-2"
    assert runs.run(B, ended=True, saved=True) == "cpu-sara-2"
    assert runs.run(C) == "cpu-sara-3"


def test_what_is_shown_of_a_run_does_not_make_it_another(runs):
    runs.run(A, ended=False)
    assert runs.run([*A, "verbose=true"], ended=False) == "cpu-sara" == runs.run(A, ended=False)


def test_a_job_that_is_requeued_never_takes_up_the_run_of_another(runs):
    """The other one, in the folder of the common name, has saved since."""
    runs.run(A, ended=False)
    assert runs.run(B, ended=False) == "cpu-sara-2"
    assert runs.run(A, ended=False, saved=True) == "cpu-sara"
    assert runs.run(B, ended=False) == "cpu-sara-2"


def test_a_checkpoint_in_the_named_folder_is_resumed_from_whatever_the_command(runs):
    runs.run(A, saved=True)
    assert runs.run(C, saved=True) == "cpu-sara"
    assert runs.run(C, resume_mode="disable") == "cpu-sara-2"
    assert runs.run(C, resume_mode="disable", ended=False) == "cpu-sara-3"
    assert runs.run(C, resume_mode="disable") == "cpu-sara-4", "from scratch is from scratch"


def test_a_checkpoint_that_is_named_is_gone_on_from_in_its_own_folder(runs):
    runs.run(A, saved=True)
    runs.run(B, resume_mode="disable", saved=True)
    for name in ("cpu-sara", "cpu-sara-2"):
        path = str(runs.folder.with_name(name) / "global_step_3")
        assert runs.run(C, resume_mode="resume_path", resume_from=path) == name
    other = str(runs.folder.with_name("other") / "global_step_3")
    assert runs.run(C, steps=0, resume_mode="resume_path", resume_from=other) == "cpu-sara-3"


def test_what_recorded_nothing_takes_no_folder(runs):
    assert [runs.run(A, steps=0), runs.run(B, steps=0), runs.run(C)] == ["cpu-sara"] * 3


def test_a_folder_that_does_not_say_its_command_is_taken_for_the_same_runs(runs):
    runs.run(A, ended=False)
    (runs.folder / "command.txt").unlink()
    assert runs.run(B, ended=False) == "cpu-sara"


def test_a_tracker_that_names_nothing_whole_is_left_for_the_run_to_refuse(runs):
    runs.run(A)
    (runs.folder / TRACKER).write_text("7")
    assert runs.run(B, steps=0) == "cpu-sara"


def test_no_credential_is_kept_with_the_command(runs):
    runs.run(["+a.b.api_key=topsecret"])
    assert "topsecret" not in (runs.folder / "command.txt").read_text()
