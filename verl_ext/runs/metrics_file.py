# SPDX-License-Identifier: Apache-2.0
"""verl's tracker file, which says what checkpoint a run in a folder is resumed from; verl 0.9.1 writes it in place."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from verl_ext.files import write_whole

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")
_FULL = 2**20
"""Free bytes below which a disk counts as full: what is left is less than any file that a save breaks off at."""


class TrackerError(ValueError):
    """The tracker names a checkpoint that is not there."""


class SaveError(OSError):
    """A checkpoint could not be saved."""


def why_not_saved(folder: str | os.PathLike[str], error: BaseException) -> str:
    """What to say of a save into ``folder`` that broke off: a full disk by its name, and where a resume begins.

    torch writes the weights by code of its own, whose error on a full disk is about positions in a file.
    """
    folder = Path(folder)
    try:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError:
        free = None
    said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
    if free is not None and free < _FULL and "No space left" not in said:
        said = f"No space left on device ({free / 1024:.0f} KiB); {said}"
    try:
        begins = f"step {int((folder.parent / TRACKER).read_text())}, whose checkpoint is whole"
    except (OSError, ValueError):
        begins = "the start: no checkpoint is whole"
    return f"{folder} could not be saved: {said}. A resume goes on from {begins}"


def mend(folder: str | os.PathLike[str]) -> None:
    """Make the tracker name a checkpoint that is whole, or be absent; to be called before verl reads it.

    A kill or a full disk in the moment in which verl writes it leaves it empty. verl writes it after all the rest, so
    the newest checkpoint is whole then.

    Raises:
        TrackerError: it names a checkpoint that is not there; verl would start from scratch without a word.
    """
    path = Path(folder, TRACKER)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    if text.strip().isdecimal():
        if not Path(folder, f"global_step_{int(text)}").is_dir():
            raise TrackerError(
                f"{path} names global_step_{int(text)}, which is not there: put it back, name another one by "
                f"trainer.resume_mode=resume_path and trainer.resume_from_path, or start from scratch by "
                f"trainer.resume_mode=disable"
            )
        return
    whole = whole_checkpoints(folder)
    logger.warning("%s holds %r, no step: a save was broken off; whole checkpoints: %s", path, text, whole or "none")
    if whole:
        write_whole(path, str(whole[-1]).encode())
    else:
        path.unlink()


def whole_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Steps whose checkpoint has all that is written before the tracker: the rules' state and verl's data loader's."""
    found = [_FOLDER.fullmatch(entry.name) for entry in Path(folder).iterdir()]
    return sorted(
        int(match[1])
        for match in found
        if match
        and Path(folder, match[0], "allocation", "allocation.json").is_file()
        and Path(folder, match[0], "data.pt").is_file()
    )


def drop_trajectories(folder: str | os.PathLike[str]) -> None:
    """Delete the trajectories that wait beside checkpoints whose weights verl has deleted (max_actor_ckpt_to_keep).

    Nothing can be resumed from there, and they may be gigabytes; what is small stays, to be read.
    """
    for path in Path(folder).glob("global_step_*/allocation/waiting-*.safetensors"):
        if not (path.parents[1] / "actor").exists():
            path.unlink()


def point_at(folder: str | os.PathLike[str], step: int) -> None:
    """A run begins at this step: a tracker that names a later one, of another run in this folder, would mix the two."""
    path = Path(folder, TRACKER)
    if not path.exists() or path.read_text().strip() == str(step):
        return
    logger.warning("%s named step %s; this run begins at step %d", path, path.read_text().strip(), step)
    if step and Path(folder, f"global_step_{step}").is_dir():
        write_whole(path, str(step).encode())
    else:
        path.unlink()
