"""verl's tracker file: what a run is resumed from after a save that was broken off, or in a folder with another run."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from verl_ext.runs.metrics_file import (
    TRACKER,
    TrackerError,
    drop_trajectories,
    mend,
    point_at,
    whole_checkpoints,
    why_not_saved,
)


def checkpoint(folder, step, *, data=True, state=True):
    (folder / f"global_step_{step}" / "allocation").mkdir(parents=True)
    if state:
        (folder / f"global_step_{step}" / "allocation" / "allocation.json").write_text("{}")
    if data:
        (folder / f"global_step_{step}" / "data.pt").write_bytes(b"")


@pytest.mark.parametrize("left", ["", "\0\0", "ten"])
def test_a_tracker_that_was_cut_off_names_the_newest_whole_checkpoint(tmp_path, left):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, data=False)  # a save that was broken off
    checkpoint(tmp_path, 12, state=False)
    (tmp_path / TRACKER).write_text(left)
    assert whole_checkpoints(tmp_path) == [9, 10]
    mend(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "10"


def test_a_tracker_that_was_cut_off_with_nothing_whole_beside_it(tmp_path):
    checkpoint(tmp_path, 2, data=False)
    (tmp_path / TRACKER).write_text("")
    mend(tmp_path)
    assert not (tmp_path / TRACKER).exists()


def test_a_tracker_that_is_whole_or_absent_is_left_alone(tmp_path):
    mend(tmp_path)
    assert not (tmp_path / TRACKER).exists()
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("2")
    mend(tmp_path)
    point_at(tmp_path, 2)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_a_checkpoint_that_is_gone_is_an_error_and_no_start_from_scratch(tmp_path):
    (tmp_path / TRACKER).write_text("8")
    with pytest.raises(TrackerError, match="global_step_8, which is not there.*resume_from_path.*resume_mode=disable"):
        mend(tmp_path)


def test_a_run_that_begins_earlier_is_never_resumed_from_the_later_checkpoint_of_another(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    point_at(tmp_path, 2)
    assert (tmp_path / TRACKER).read_text() == "2"
    point_at(tmp_path, 0)
    assert not (tmp_path / TRACKER).exists()


TORCHS = RuntimeError("Traceback ...\n  torch.save(...)\nRuntimeError: unexpected pos 1732224 vs 1732116\n")
"""What torch says of a full disk, as Ray passes it on."""


@pytest.mark.parametrize(
    ("free", "error", "said"),
    [
        (20 * 1024, TORCHS, "No space left on device (20 KiB); RuntimeError: unexpected pos 1732224 vs 1732116."),
        (0, OSError(28, "No space left on device"), "could not be saved: [Errno 28] No space left on device."),
        (2**30, TORCHS, "could not be saved: RuntimeError: unexpected pos 1732224 vs 1732116."),
        (2**30, RuntimeError(), "could not be saved: RuntimeError()."),
    ],
)
def test_a_save_that_broke_off_says_why(tmp_path, monkeypatch, free, error, said):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert said in why_not_saved(tmp_path / "global_step_3", error)


def test_a_save_that_broke_off_says_where_a_resume_begins(tmp_path):
    folder = tmp_path / "global_step_3"
    assert why_not_saved(folder, TORCHS).endswith("A resume goes on from the start: no checkpoint is whole")
    (tmp_path / TRACKER).write_text("2")
    assert why_not_saved(folder, TORCHS).endswith("A resume goes on from step 2, whose checkpoint is whole")
    assert why_not_saved(tmp_path / "gone" / "global_step_3", TORCHS).startswith(str(tmp_path))


def test_waiting_trajectories_go_with_the_weights_they_belong_to(tmp_path):
    for step in (1, 2):
        checkpoint(tmp_path, step)
        (tmp_path / f"global_step_{step}" / "allocation" / "waiting-ab.safetensors").write_bytes(b"")
    (tmp_path / "global_step_2" / "actor").mkdir()
    drop_trajectories(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/allocation/*"))
    assert left == [
        "global_step_1/allocation/allocation.json",
        "global_step_2/allocation/allocation.json",
        "global_step_2/allocation/waiting-ab.safetensors",
    ]
