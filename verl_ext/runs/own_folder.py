# SPDX-License-Identifier: Apache-2.0
"""Which folder a run writes to: the one that was named, or one of its own where another run's records are.

The same command goes on in the folder that it had. Another command, or the same one again after the run's end, gets
`<folder>-2`, `<folder>-3`, ... A checkpoint in the named folder is resumed from, whatever the command, as verl does.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_ext.files import write_whole
from verl_ext.masking import masked_override
from verl_ext.runs.checkpoints import TRACKER, TrackerError, checkpoints, resume_step
from verl_ext.runs.line_file import not_written, read_lines
from verl_ext.runs.records import ABOUT, LEDGER, METRICS

COMMAND = "command.txt"
"""What the run in a folder was started with, an argument a line, without credentials."""


def own_folder(
    named: str | os.PathLike[str], command: Sequence[str], resume_mode: str = "auto", resume_from: str | None = None
) -> Path:
    """The folder of a run.

    Args:
        named: the folder asked for.
        command: the run's arguments.
        resume_mode: verl's: auto, disable, resume_path.
        resume_from: the checkpoint of resume_path.
    """
    named = Path(named)
    there = list(itertools.takewhile(Path.is_dir, _candidates(named)))
    if resume_mode == "resume_path" and resume_from is not None:
        parent = Path(resume_from).absolute().parent
        if found := [folder for folder in there if folder.absolute() == parent]:
            return found[0]
    if resume_mode != "disable":
        auto = resume_mode == "auto"
        for folder in filter(_has_records, there):
            if _is_of(folder, command, named) and (auto and _resumable(folder) or not _ended(folder)):
                return folder
        if auto and _resumable(named):
            return named
    return next(folder for folder in _candidates(named) if not _has_records(folder))


def note_command(folder: str | os.PathLike[str], command: Sequence[str]) -> None:
    """Keep the run's arguments in its folder.

    Raises:
        NotWrittenError: they cannot be written.
    """
    path = Path(folder, COMMAND)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _text(command).encode())
    except OSError as error:
        raise not_written(path, error) from error


def _candidates(named: Path) -> Iterator[Path]:
    yield named
    yield from (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))


def _text(command: Sequence[str]) -> str:
    # What is shown of a run does not make it another.
    return "".join(f"{masked_override(argument)}\n" for argument in sorted(command) if argument[:8] != "verbose=")


def _has_records(folder: Path) -> bool:
    """Lines of a run, or checkpoints."""
    lines = (folder / name for name in (LEDGER, METRICS, METRICS + ".kept"))
    return any(path.is_file() and path.stat().st_size for path in lines) or _resumable(folder)


def _resumable(folder: Path) -> bool:
    """Whether there is something to resume from, or something that has to be looked at before."""
    try:
        return (folder / TRACKER).exists() and (resume_step(folder) is not None or bool(checkpoints(folder)))
    except TrackerError:
        return True


def _is_of(folder: Path, command: Sequence[str], named: Path) -> bool:
    """Whether the run in the folder was started by this command; the named folder's is, where it does not say."""
    try:
        return (folder / COMMAND).read_text(errors="replace") == _text(command)
    except OSError:
        return folder == named


def _ended(folder: Path) -> bool:
    """Whether the run's last step was made and logged."""
    try:
        end = json.loads((folder / ABOUT).read_bytes())["ended_at_step"]
        steps = [step for step, _ in read_lines(folder / METRICS)[0]]
        return isinstance(end, int) and (not steps or steps[-1] >= end)
    except (OSError, ValueError, TypeError, KeyError):
        return False
