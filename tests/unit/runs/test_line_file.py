# SPDX-License-Identifier: Apache-2.0
"""Lines that are added while the disk fills up, or while the file is taken away."""

from __future__ import annotations

import errno
import subprocess

import pytest

from verl_ext.runs.line_file import LineFile, NotWrittenError, read_lines


def line(step):
    return b'{"step": %d, "data": {}}\n' % step


def test_lines_follow_what_is_kept(tmp_path):
    (tmp_path / "a").write_bytes(line(9))
    file = LineFile(tmp_path / "a", line(1))
    file.write(line(2))
    LineFile(tmp_path / "a").write(line(3))
    assert (tmp_path / "a").read_bytes() == line(1) + line(2) + line(3)
    assert read_lines(tmp_path / "none") == ([], [])


@pytest.mark.parametrize("how", ["moved", "deleted", "moved with its folder"])
def test_a_file_that_is_taken_away_is_said_and_written_anew(tmp_path, caplog, how):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = LineFile(path)
    file.write(line(1))
    if how == "moved":
        path.rename(tmp_path / "away")
    elif how == "deleted":
        path.unlink()
    else:
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.mkdir()
    file.write(line(2))
    file.write(line(3))
    assert path.read_bytes() == line(1) + line(2) + line(3)
    assert caplog.text.count("was moved away or deleted") == 1


def test_a_file_that_was_replaced_is_said_and_gone_on_with(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.write(line(1))
    (tmp_path / "edited").write_bytes(line(1) + line(1))
    (tmp_path / "edited").rename(path)
    file.write(line(2))
    assert path.read_bytes() == line(1) + line(1) + line(2) and "was replaced by another file" in caplog.text


@pytest.mark.bad_input
def test_a_path_that_becomes_a_folder_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(NotWrittenError, match=f"{tmp_path / 'a'} is a folder; a file is expected: move it away"):
        LineFile(tmp_path / "a")
    with pytest.raises(NotWrittenError, match="is a folder"):
        read_lines(tmp_path / "a")
    file = LineFile(tmp_path / "b")
    (tmp_path / "b").unlink()
    (tmp_path / "b").mkdir()
    with pytest.raises(NotWrittenError, match=f"{tmp_path / 'b'} is a folder"):
        file.write(line(1))


class FullDisk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, content):
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(content[: self._room])
        self._room -= taken
        return taken

    def fileno(self):
        return self._file.fileno()


@pytest.mark.parametrize("room", [0, 1, 11])
def test_a_full_disk_is_named_also_where_it_takes_a_part_of_a_line(tmp_path, room):
    file = LineFile(tmp_path / "ledger.jsonl")
    file.write(line(1))
    file._file = FullDisk(file._file, room)
    with pytest.raises(NotWrittenError, match=f"{tmp_path / 'ledger.jsonl'} could not be written: .*No space left"):
        file.write(line(2))
    records, unreadable = read_lines(tmp_path / "ledger.jsonl")
    assert [step for step, _ in records] == [1] and len(b"".join(unreadable).rstrip()) == room


def test_a_disk_that_is_really_full(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        file = LineFile(place / "ledger.jsonl")
        with pytest.raises(NotWrittenError, match="ledger.jsonl could not be written: .*No space left on device"):
            for step in range(10_000):
                file.write(line(step))
        assert len(read_lines(place / "ledger.jsonl")[0]) == step
        file.close()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
