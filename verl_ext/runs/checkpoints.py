# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: which of them are whole, which one a resume takes, and which may be removed.

verl's tracker file names the step that a resume takes. verl 0.9.1 writes it in place, as the last act of a save.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from verl_ext.files import write_whole
from verl_ext.runs.records import LEDGER

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
ROLES = ("actor", "critic")
"""Folders of a checkpoint that hold weights."""
_FOLDER = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"(.+)_world_size_(\d+)_rank_(\d+)\.pt")
_WEIGHTS = (".pt", ".safetensors", ".bin", ".distcp")
_REMOVED = ".removed"
_FULL = 2**20
"""Free bytes below which a disk counts as full: what is left is less than any file that a save breaks off at."""


class TrackerError(ValueError):
    """The tracker names a checkpoint that is not whole, and no other is."""


class SaveError(OSError):
    """A checkpoint could not be saved."""


def why_not_saved(folder: str | os.PathLike[str], error: BaseException) -> str:
    """What to say of a save into ``folder`` that broke off: a full disk by its name, and where a resume begins.

    torch writes the weights by code of its own, whose error on a full disk is about positions in a file.
    """
    folder = Path(folder)
    return f"{folder} could not be saved: {said_of(folder, error)}. {where_a_resume_begins(folder.parent)}"


def said_of(path: Path, error: BaseException) -> str:
    """The last line of an error about ``path``; where the disk is full and the error is of something else, that too."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    try:
        free = shutil.disk_usage(there).free if there else None
    except OSError:
        free = None
    said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
    if free is not None and free < _FULL and "No space left" not in said:
        said = f"No space left on device ({free / 1024:.0f} KiB); {said}"
    return said


def where_a_resume_begins(folder: str | os.PathLike[str]) -> str:
    """A sentence about a run's folder."""
    try:
        step = resume_step(folder)
    except TrackerError as error:
        return f"A resume is refused: {error}"
    begins = f"step {step}, whose checkpoint is whole" if step else "the start: no checkpoint is whole"
    return f"A resume goes on from {begins}"


# ------------------------------------------------ what is whole


def missing_from(checkpoint: str | os.PathLike[str]) -> list[str]:
    """What a checkpoint lacks of all that is written before the tracker names it; nothing where it is whole.

    Looked at are the rules' state, the weights of each role, and verl's data loader. Files of torch are zip archives,
    whose list of contents is at the end: one that was cut off has none.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        return [checkpoint.name]
    lacking = [name for name in ("allocation/allocation.json",) if not (checkpoint / name).is_file()]
    if not zipfile.is_zipfile(checkpoint / "data.pt"):
        lacking.append("data.pt")
    for role in ROLES:
        folder = checkpoint / role
        if folder.is_dir():
            lacking += [f"{role}/{name}" for name in _missing_weights(folder)]
        elif role == "actor":
            lacking.append(role)
    return lacking


def _missing_weights(folder: Path) -> list[str]:
    """Files of a role's folder that are cut off, empty, or missing beside those of other ranks."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not any(path.suffix in _WEIGHTS for path in files):
        return ["(weights)"]
    lacking, ranks = [], defaultdict(set)
    for path in files:
        name = str(path.relative_to(folder))
        cut_off = path.suffix in (*_WEIGHTS, ".json") and path.stat().st_size == 0
        if cut_off or path.suffix == ".pt" and not zipfile.is_zipfile(path):
            lacking.append(name)
        if shard := _SHARD.fullmatch(name):
            ranks[shard[1], int(shard[2])].add(int(shard[3]))
    for (kind, size), there in sorted(ranks.items()):
        lacking += [f"{kind}_world_size_{size}_rank_{rank}.pt" for rank in range(size) if rank not in there]
    return sorted(set(lacking))


def checkpoints(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """By step, in rising order, the folders of a run's checkpoints, whole or not."""
    found = [(_FOLDER.fullmatch(path.name), path) for path in Path(folder).glob("global_step_*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def whole_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Steps whose checkpoint is whole."""
    return [step for step, path in checkpoints(folder).items() if not missing_from(path)]


def _last_step(folder: Path) -> int | None:
    """The last step of the ledger, beyond which a checkpoint is another run's; None where there is no such line."""
    try:
        lines = (folder / LEDGER).read_bytes().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return None


# ------------------------------------------------ where a resume begins


def resume_step(folder: str | os.PathLike[str]) -> int | None:
    """The step whose checkpoint a resume takes, None: from scratch. Changes nothing.

    It is the tracker's, where its checkpoint is whole, else the newest whole one before it. A tracker that was cut off
    in being written stands for the newest whole one.

    Raises:
        TrackerError: the tracker names a checkpoint that is not whole, and no earlier one is.
    """
    folder = Path(folder)
    path = folder / TRACKER
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise TrackerError(f"{path} is a folder; a file is expected: move it away") from None
    named = int(text) if text.isdecimal() else None
    if named is not None and not missing_from(folder / f"global_step_{named}"):
        return named
    most = named if named is not None else _last_step(folder)
    whole = [step for step in whole_checkpoints(folder) if most is None or step <= most]
    if named is not None and not whole:
        lacking = ", ".join(missing_from(folder / f"global_step_{named}")[:4])
        what = "is not there" if not (folder / f"global_step_{named}").is_dir() else f"is not whole (no {lacking})"
        raise TrackerError(
            f"{path} names global_step_{named}, which {what}, and no earlier checkpoint is whole: put it back, name "
            f"another one by trainer.resume_mode=resume_path and trainer.resume_from_path, or start from scratch by "
            f"trainer.resume_mode=disable"
        )
    return whole[-1] if whole else None


def mend(folder: str | os.PathLike[str]) -> None:
    """Make the tracker name the checkpoint that a resume takes, or be absent; to be called before verl reads it.

    Raises:
        TrackerError: as `resume_step`; verl would start from scratch without a word, or end in an error of torch's.
    """
    path = Path(folder, TRACKER)
    step = resume_step(folder)
    if not path.is_file() or (text := path.read_text(errors="replace")).strip() == str(step):
        return
    named = f"global_step_{text.strip()}" if text.strip().isdecimal() else None
    why = f"lacks {', '.join(missing_from(Path(folder, named))[:4])}" if named else "is no step: a save was broken off"
    begins = f"step {step}" if step else "the start"
    logger.warning("%s names %r, which %s: the run goes on from %s", path, text, why, begins)
    if step is None:
        path.unlink()
    else:
        write_whole(path, str(step).encode())


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


# ------------------------------------------------ before and after a save


def make_room(checkpoint: str | os.PathLike[str], keep_whole: bool = True) -> None:
    """Take away what an earlier save of the same step left, so that a checkpoint is never of two saves.

    Args:
        keep_whole: a whole checkpoint, of a run that went on from an earlier step than this one, is kept under another
            name; else it is removed like one that broke off.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        return
    if keep_whole and not missing_from(checkpoint):
        number = 1 + len(list(checkpoint.parent.glob(f"{checkpoint.name}.replaced-*")))
        kept = checkpoint.with_name(f"{checkpoint.name}.replaced-{number}")
        logger.warning("%s is saved anew; the one that was there is kept as %s", checkpoint, kept)
        os.replace(checkpoint, kept)
        return
    (checkpoint / "data.pt").unlink(missing_ok=True)  # first: without it nothing else counts
    shutil.rmtree(checkpoint)


def commit(folder: str | os.PathLike[str], step: int, remove: bool) -> None:
    """After verl has named the step in its tracker: the tracker is whole and on disk.

    Args:
        remove: older checkpoints are to be removed; the new one's files must be on disk first.
    """
    if remove:
        for path in Path(folder, f"global_step_{step}").rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
    write_whole(Path(folder, TRACKER), str(step).encode())


def remove_old(folder: str | os.PathLike[str], step: int, keep: Mapping[str, int | None]) -> None:
    """Remove the weights of all but the newest checkpoints up to ``step``, which the tracker names.

    Args:
        keep: by role, the number of checkpoints that keep their weights; None keeps all.
    """
    for role, most in keep.items():
        if not most:
            continue
        having = [path / role for at, path in checkpoints(folder).items() if at <= step and (path / role).is_dir()]
        for weights in having[:-most]:
            # Renamed first: half a folder must never look like a whole one.
            os.replace(weights, weights.with_name(role + _REMOVED))
    for left in Path(folder).glob(f"global_step_*/*{_REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)
        if left.exists():
            logger.warning("%s could not be removed; nothing reads it", left)


def drop_trajectories(folder: str | os.PathLike[str]) -> None:
    """Delete the trajectories that wait beside checkpoints whose weights are gone (max_actor_ckpt_to_keep).

    Nothing can be resumed from there, and they may be gigabytes; what is small stays, to be read.
    """
    for path in Path(folder).glob("global_step_*/allocation/waiting-*.safetensors"):
        if not (path.parents[1] / "actor").exists():
            path.unlink()
