# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines: read past what a power cut garbled, and written so that nothing that fails is silent."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from verl_ext.files import append_opener, private_opener, write_whole
from verl_ext.runs.checkpoints import said_of

logger = logging.getLogger(__name__)


class NotWrittenError(OSError):
    """A record of the run could not be read or written; the message has the path."""


def not_written(path: str | os.PathLike[str], error: OSError) -> NotWrittenError:
    """The error for a file that could not be written."""
    if Path(path).is_dir():
        return NotWrittenError(f"{path} is a folder; a file is expected: move it away")
    return NotWrittenError(f"{path} could not be written: {said_of(Path(path), error)}")


def read_lines(path: str | os.PathLike[str]) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    """The lines of a file of records, each with its step; and those that cannot be read.

    A record is a JSON object in UTF-8 with an integer `step`. A kill leaves a last line that is cut off, a power cut
    may leave anything. Both are empty where there is no file.

    Raises:
        NotWrittenError: the path is a folder.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return [], []
    except IsADirectoryError as error:
        raise not_written(path, error) from error
    records, unreadable = [], []
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        step = _step_of(line)
        if step is None:
            unreadable.append(line + b"\n")
        else:
            records.append((step, line + b"\n"))
    return records, unreadable


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


class LineFile:
    """A file that lines are added to, open all the time; stands for the file object of verl's logger.

    If the file is moved away or deleted meanwhile, that is said, and a new one with all lines so far takes its place.

    Args:
        path: the file; made if missing, never through a link.
        keep: what it is to begin with; None: what is there.
        private: its owner alone may read it.

    Raises:
        NotWrittenError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], keep: bytes | None = None, private: bool = False) -> None:
        self.path = Path(path)
        self._private = private
        try:
            if keep is not None:
                write_whole(self.path, keep, private)
            self._file = self._open()
        except OSError as error:
            raise not_written(self.path, error) from error

    def _open(self) -> Any:
        opener = private_opener if self._private else append_opener
        return open(self.path, "ab", buffering=0, opener=opener)

    def write(self, line: bytes) -> int:
        """Add a line, whole.

        Raises:
            NotWrittenError: the disk is full, or the path has become a folder.
        """
        try:
            self._look()
            rest = memoryview(line)
            while rest:  # a disk that is nearly full takes a part, without an error
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise not_written(self.path, error) from error
        return len(line)

    def _look(self) -> None:
        """Notice that the file is no longer where it was."""
        mine = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is not None and (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            return
        if there is None:
            # Linux gives a deleted file's content by the descriptor that is still open.
            with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as old:
                write_whole(self.path, old.read(), self._private)
            logger.warning("%s was moved away or deleted while the run goes on: it is written anew, whole", self.path)
        else:
            logger.warning("%s was replaced by another file while the run goes on: further lines go there", self.path)
        self._file.close()
        self._file = self._open()

    def fileno(self) -> int:
        """The descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """No line follows."""
        self._file.close()
