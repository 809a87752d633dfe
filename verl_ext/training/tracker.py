# SPDX-License-Identifier: Apache-2.0
"""verl's tracker file, which says what checkpoint a run in a folder is resumed from; verl 0.9.1 writes it in place."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from verl_ext.files import write_whole

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")


class TrackerError(ValueError):
    """The tracker names a checkpoint that is not there."""


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
