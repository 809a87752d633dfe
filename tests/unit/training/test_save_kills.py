# SPDX-License-Identifier: Apache-2.0
"""A kill at every point of a save leaves something that a resume goes on from.

The trainer's save runs once, verl's retention of old checkpoints included, and the run's folder is copied before every
operation on a file in it: these are the states that a kill leaves. Files that are written in place are also cut off at
nothing and at half.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.unit.training.conftest import train
from verl_ext.runs.checkpoints import TRACKER, resume_step, whole_checkpoints

COMMON = ("allocation/allocator=uniform", "trainer.save_freq=1", "trainer.total_epochs=9")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_watching: list = []


def _audit(event, arguments):
    for watch in _watching:
        watch(event, arguments)


sys.addaudithook(_audit)


@contextmanager
def copied_at_every_operation(folder: Path, into: Path):
    """Copies of the folder, one before each operation that changes it and one at the end; yields their list."""
    copies: list[Path] = []
    opened: set[str] = set()

    def copy():
        _watching.remove(watch)
        state = into / f"{len(copies):03d}"
        shutil.copytree(folder, state)
        for torn in sorted(opened):  # written in place since the copy before
            size = (folder / torn).stat().st_size if (folder / torn).is_file() else 0
            for length in {0, size // 2} if size else ():
                cut = into / f"{len(copies):03d}-{torn.replace('/', '_')}-{length}"
                shutil.copytree(folder, cut)
                os.truncate(cut / torn, length)
                copies.append(cut)
        opened.clear()
        copies.append(state)
        _watching.append(watch)

    def watch(event, arguments):
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else None
        if path is None or not path.startswith(str(folder)) and event != "os.rmdir":
            return
        copy()
        if event == "open":
            opened.add(os.path.relpath(path, folder))

    _watching.append(watch)
    try:
        yield copies
    finally:
        copy()
        _watching.remove(watch)


def saved_through_python(state, path):
    """torch.save, which writes by code of its own, by way of a file of Python's, so that it is seen."""
    buffer = io.BytesIO()
    torch_save(state, buffer)
    with open(path, "wb") as file:
        file.write(buffer.getvalue())


torch_save = torch.save


def ledger_steps(folder):
    return [json.loads(line)["step"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


def content(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_every_point_of_a_save(made, queue, tmp_path, monkeypatch, keep):
    monkeypatch.setattr(torch, "save", saved_through_python)
    run = tmp_path / "run"
    overrides = (*COMMON, f"trainer.max_actor_ckpt_to_keep={keep}")
    elsewhere = f"trainer.default_local_dir={tmp_path / 'all'}"
    straight = train(made(*overrides, "trainer.total_training_steps=5", elsewhere))
    trained = [sorted(update["keys"]) for update in straight.actor_rollout_wg.updates]
    trainer = made(*overrides, "trainer.total_training_steps=4")
    save, states = trainer._save_checkpoint, []

    def watched():
        if trainer.global_steps < 4:
            return save()
        with copied_at_every_operation(run, tmp_path / "states") as copies:
            save()
        states.extend(copies)

    trainer._save_checkpoint = watched
    train(trainer)
    weights = sorted(path.parent.name for path in run.glob("global_step_*/actor"))
    assert weights == [f"global_step_{step}" for step in range(5 - keep, 5)], "no more are kept than was asked for"
    # Three files of weights, two of JSON, the data loader's, the tracker's: each is seen before, torn and after.
    assert len(states) > 40
    names = {state.name.partition("-")[2].rpartition("-")[0] for state in states}
    assert {TRACKER, "global_step_4_data.pt", "global_step_4_actor_model_world_size_1_rank_0.pt"} <= names
    seen, tried = set(), []
    for state in states:
        if tried and content(state) == tried[-1]:
            continue
        tried.append(content(state))
        begins = resume_step(state)
        assert begins in (3, 4) and begins in whole_checkpoints(state), state.name
        seen.add(begins)
        shutil.rmtree(run)
        shutil.copytree(state, run)
        again = made(*overrides, "trainer.total_training_steps=5")
        assert again.global_steps == begins, state.name
        train(again)
        assert ledger_steps(run) == [1, 2, 3, 4, 5], state.name
        assert [sorted(update["keys"]) for update in again.actor_rollout_wg.updates] == trained[begins:], state.name
        assert (run / TRACKER).read_text() == "5" and whole_checkpoints(run)[-1] == 5
        assert len(list(run.glob("global_step_*/actor"))) == keep and not list(run.rglob("*.removed"))
    assert seen == {3, 4}
