"""A half-written state never wins over a whole one: saving is broken off at every file operation in turn."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from verl_ext import files
from verl_ext.allocation.state import StateError, load_state, save_state
from verl_ext.testing import same

OLD = {"counts": np.arange(5), "step": 2, "name": "old"}
NEW = {"counts": np.arange(9), "step": 4, "name": "new"}
OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir")


class Gone(BaseException):
    """The process was killed: nothing after it happens, not even tidying up."""


class Breaks:
    """Counts file operations, and at one of them fails (the disk is full) or dies, and with it all after it."""

    def __init__(self, monkeypatch, at: int | None, error: BaseException) -> None:
        self.count, self.at, self.error = 0, at, error
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._breaking(getattr(os, name)))
        monkeypatch.setattr(os, "fdopen", self._writing(os.fdopen))

    def _breaking(self, operation):
        def call(*args, **kwargs):
            self._pass()
            return operation(*args, **kwargs)

        return call

    def _writing(self, fdopen):
        def open_broken(*args, **kwargs):
            file = fdopen(*args, **kwargs)
            write = file.write

            class Half:
                def __enter__(self):
                    return self

                def __exit__(self, *exc):
                    file.close()

                def __getattr__(self, name):
                    return getattr(file, name)

                def write(inner, payload):
                    try:
                        self._pass()
                    except BaseException:
                        write(payload[: len(payload) // 2])
                        raise
                    return write(payload)

            return Half()

        return open_broken

    def _pass(self) -> None:
        self.count += 1
        dead = isinstance(self.error, Gone) and self.at is not None and self.count > self.at
        if self.count == self.at or dead:
            raise self.error


def broken_saves(folder: Path, error: BaseException, before: dict | None):
    """Save ``NEW`` over ``before`` in folders of their own, broken off at the first operation, the second, ..."""
    for at in range(1, 100):
        place = folder / str(at)
        if before is not None:
            save_state(place, before)
        with pytest.MonkeyPatch.context() as patch:
            breaks = Breaks(patch, at, error)
            try:
                save_state(place, NEW)
                done = True
            except type(error):
                done = False
        if breaks.count < at:
            assert done
            return
        yield at, place, done
    raise AssertionError("a save of a hundred operations")


@pytest.mark.parametrize("error", [Gone(), OSError(errno.ENOSPC, "No space left on device")], ids=["killed", "full"])
def test_either_the_old_state_or_the_new_one_whole(tmp_path, error):
    kinds = []
    for at, place, done in broken_saves(tmp_path, error, OLD):
        found = load_state(place)
        assert same(found, OLD) or same(found, NEW), f"broken off at operation {at}: {found}"
        assert not done or same(found, NEW), f"operation {at}: the save says it succeeded"
        kinds.append(found["name"])
        save_state(place, NEW)
        assert same(load_state(place), NEW), f"operation {at}: what was left behind is in the way of the next save"
    assert len(kinds) >= 10 and set(kinds) == {"old", "new"}
    if isinstance(error, Gone):
        assert kinds == sorted(kinds, reverse=True), "first the old state, from one point on the new"


def test_a_first_save_broken_off_leaves_no_state(tmp_path):
    for at, place, _ in broken_saves(tmp_path, Gone(), None):
        try:
            found = load_state(place)
        except StateError as error:
            assert "missing" in str(error)
        else:
            assert same(found, NEW), f"broken off at operation {at}"


def test_a_full_disk_is_an_error_and_leaves_no_scraps(tmp_path, monkeypatch):
    save_state(tmp_path, OLD)
    names = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        save_state(tmp_path, NEW)
    assert sorted(os.listdir(tmp_path)) == names
