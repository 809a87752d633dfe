# SPDX-License-Identifier: Apache-2.0
"""Safe files: written atomically, never through a link, never writable by everybody."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
"""Modes of what holds prompts and answers; the umask takes away from them what it takes away."""


class UnsafePathError(ValueError):
    """A path that leads out of the folder it should be in, or is a link where a file is expected."""


def restrict_umask() -> None:
    """Set the umask so that files of this process are never writable by everybody.

    A stricter umask stays.
    """
    previous = os.umask(0o077)
    os.umask(previous | 0o002)


def private_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder that its owner alone can enter; one that is there is left as it is.

    Raises:
        UnsafePathError: it is a link, or a file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=PRIVATE_FOLDER)
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise UnsafePathError(f"{path} is a link or a file; a folder is expected") from None
    return path


def own_folder(path: str | os.PathLike[str]) -> Path:
    """Make a private folder in a place that others can write to, such as the temporary directory.

    Raises:
        UnsafePathError: there is one, but it is a link, another user's, or others can write to it: what is in it must
            not be trusted.
    """
    path = private_folder(path)
    found = path.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UnsafePathError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; expected is a folder "
            f"that user {os.getuid()} alone can write to: remove it, or set TMPDIR to a folder of your own"
        )
    return path


def inside(folder: str | os.PathLike[str], name: object) -> Path:
    """The path of a file in a folder, for a name that was read from a file or a network.

    Raises:
        UnsafePathError: the name is no plain file name, or what is there is a link.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or name != os.path.basename(name) or "\0" in name:
        raise UnsafePathError(f"{name!r} is no name of a file in {folder}")
    path = Path(folder, name)
    if path.is_symlink():
        raise UnsafePathError(f"{path} is a link; a file is expected")
    return path


def next_path(pattern: str | os.PathLike[str]) -> Path:
    """The first path that is not there, `{}` in the pattern's name standing for 1, 2, ..."""
    pattern = Path(pattern)
    paths = (pattern.with_name(pattern.name.format(number)) for number in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path))


def append_opener(path: str, flags: int) -> int:
    """For `open(path, "a", opener=append_opener)`: a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o664)


def private_opener(path: str, flags: int) -> int:
    """For `open`: a link is not followed, and a new file can be read by its owner alone."""
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)


def write_whole(path: str | os.PathLike[str], payload: bytes, private: bool = False) -> None:
    """Write a file atomically; it is on disk when this returns. An existing file, or a link, is replaced."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, PRIVATE_FILE if private else 0o664), "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:  # the rename itself must reach the disk too; not every file system lets a folder be synced
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
