"""verl's tracker file: what a run is resumed from after a save that was broken off, or in a folder with another run."""

from __future__ import annotations

import json
import shutil
import zipfile
from types import SimpleNamespace

import pytest

from verl_ext.runs.checkpoints import (
    TRACKER,
    TrackerError,
    checkpoints,
    drop_trajectories,
    make_room,
    mend,
    missing_from,
    point_at,
    remove_old,
    resume_step,
    whole_checkpoints,
    why_not_saved,
)

WEIGHTS = [f"actor/{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)]


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", "0" * 100)


def checkpoint(folder, step, *, without=(), cut_off=()):
    """A checkpoint as verl writes it, some of its files missing, some ending in the middle."""
    at = folder / f"global_step_{step}"
    for name in ("allocation/allocation.json", *WEIGHTS, "actor/huggingface/config.json", "data.pt"):
        if name in without:
            continue
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        archive(at / name) if name.endswith(".pt") else (at / name).write_text("{}")
        if name in cut_off:
            (at / name).write_bytes((at / name).read_bytes()[:50])
    return at


@pytest.mark.parametrize("left", ["", "\0\0", "ten"])
def test_a_tracker_that_was_cut_off_names_the_newest_whole_checkpoint(tmp_path, left):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, without=["data.pt"])  # a save that was broken off
    checkpoint(tmp_path, 12, without=["allocation/allocation.json"])
    checkpoint(tmp_path, 13, without=WEIGHTS)
    (tmp_path / TRACKER).write_text(left)
    assert whole_checkpoints(tmp_path) == [9, 10]
    mend(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "10"


@pytest.mark.parametrize("name", [*WEIGHTS, "data.pt", "allocation/allocation.json"])
def test_each_file_of_a_checkpoint_has_to_be_there_and_whole(tmp_path, name):
    assert missing_from(checkpoint(tmp_path, 1)) == []
    assert missing_from(checkpoint(tmp_path, 2, without=[name])) == [name]
    if name.endswith(".pt"):
        assert missing_from(checkpoint(tmp_path, 3, cut_off=[name])) == [name]


def test_checkpoints_of_a_critic_and_of_other_engines(tmp_path):
    at = checkpoint(tmp_path, 1)
    (at / "critic").mkdir()
    assert missing_from(at) == ["critic/(weights)"]
    archive(at / "critic" / "model_world_size_2_rank_1.pt")
    assert missing_from(at) == ["critic/model_world_size_2_rank_0.pt"]
    archive(at / "critic" / "model_world_size_2_rank_0.pt")
    assert missing_from(at) == []
    other = checkpoint(tmp_path, 2, without=WEIGHTS)
    (other / "actor" / "dist_ckpt").mkdir()
    (other / "actor" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"weights")
    assert missing_from(other) == []
    (other / "actor" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"")
    assert missing_from(other) == ["actor/dist_ckpt/__0_0.distcp"]
    assert missing_from(tmp_path / "global_step_7") == ["global_step_7"]


def test_a_tracker_that_names_a_checkpoint_without_weights_stands_for_the_newest_whole_one_before_it(tmp_path, caplog):
    for step, without in ((1, WEIGHTS), (2, ()), (3, ()), (4, WEIGHTS[:1]), (5, ())):
        checkpoint(tmp_path, step, without=without)
    (tmp_path / TRACKER).write_text("4")
    assert resume_step(tmp_path) == 3, "step 5 is another run's"
    mend(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "3" and WEIGHTS[0] in caplog.text


def test_a_tracker_that_was_cut_off_is_not_mended_with_a_checkpoint_of_another_run(tmp_path):
    """A run that began again at step 4 lies beside the later checkpoints of the one before it."""
    for step in (4, 6, 10):
        checkpoint(tmp_path, step)
    (tmp_path / TRACKER).write_text("")
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 7)) + '{"ste')
    assert resume_step(tmp_path) == 6


def test_a_tracker_that_was_cut_off_with_nothing_whole_beside_it(tmp_path):
    checkpoint(tmp_path, 2, without=["data.pt"])
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


@pytest.mark.bad_input
def test_a_checkpoint_that_is_gone_is_an_error_and_no_start_from_scratch(tmp_path):
    (tmp_path / TRACKER).write_text("8")
    with pytest.raises(TrackerError, match="global_step_8, which is not there.*resume_from_path.*resume_mode=disable"):
        mend(tmp_path)
    checkpoint(tmp_path, 8, without=["data.pt"])
    with pytest.raises(TrackerError, match=r"global_step_8, which is not whole \(no data.pt\).*resume_mode=disable"):
        mend(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(TrackerError, match=f"{tmp_path / TRACKER} is a folder"):
        mend(tmp_path)


def test_a_run_that_begins_earlier_is_never_resumed_from_the_later_checkpoint_of_another(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    point_at(tmp_path, 2)
    assert (tmp_path / TRACKER).read_text() == "2"
    point_at(tmp_path, 0)
    assert not (tmp_path / TRACKER).exists()


@pytest.mark.parametrize(("most", "left"), [(1, [4, 6]), (2, [3, 4, 6]), (9, [1, 2, 3, 4, 6]), (None, [1, 2, 3, 4, 6])])
def test_the_newest_checkpoints_up_to_the_step_keep_their_weights(tmp_path, most, left):
    for step in (1, 2, 3, 4, 6):
        checkpoint(tmp_path, step)
    remove_old(tmp_path, 4, {"actor": most, "critic": None})
    assert [step for step, at in checkpoints(tmp_path).items() if (at / "actor").exists()] == left
    assert list(checkpoints(tmp_path)) == [1, 2, 3, 4, 6] and not list(tmp_path.rglob("*.removed"))


def test_a_removal_that_was_broken_off_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_old(tmp_path, 2, {"actor": 1})
    assert whole_checkpoints(tmp_path) == [2]
    monkeypatch.undo()
    remove_old(tmp_path, 2, {"actor": 1})
    assert not list(tmp_path.rglob("*.removed"))


def test_a_save_begins_without_what_another_of_its_step_left(tmp_path, caplog):
    broken = checkpoint(tmp_path, 2, without=["data.pt"])
    make_room(broken)
    assert not broken.exists()
    make_room(broken)
    for number in (1, 2):
        whole = checkpoint(tmp_path, 2)
        make_room(whole)
        assert missing_from(tmp_path / f"global_step_2.replaced-{number}") == [] and not whole.exists()
    assert list(checkpoints(tmp_path)) == [] and "is kept as" in caplog.text
    make_room(checkpoint(tmp_path, 2), keep_whole=False)
    assert len(list(tmp_path.iterdir())) == 2


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
    checkpoint(tmp_path, 2)
    (tmp_path / TRACKER).write_text("2")
    assert why_not_saved(folder, TORCHS).endswith("A resume goes on from step 2, whose checkpoint is whole")
    shutil.rmtree(tmp_path / "global_step_2" / "actor")
    assert "A resume is refused: " in why_not_saved(folder, TORCHS)
    assert why_not_saved(tmp_path / "gone" / "global_step_3", TORCHS).startswith(str(tmp_path))


def test_waiting_trajectories_go_with_the_weights_they_belong_to(tmp_path):
    for step in (1, 2):
        at = checkpoint(tmp_path, step)
        (at / "allocation" / "waiting-ab.safetensors").write_bytes(b"")
    shutil.rmtree(tmp_path / "global_step_1" / "actor")
    drop_trajectories(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/allocation/*"))
    assert left == [
        "global_step_1/allocation/allocation.json",
        "global_step_2/allocation/allocation.json",
        "global_step_2/allocation/waiting-ab.safetensors",
    ]
