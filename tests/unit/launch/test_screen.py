# SPDX-License-Identifier: Apache-2.0
"""What a run shows, and what goes to its log; the run is a small program in place of verl, Ray and vLLM."""

import os
import subprocess
import sys

import pytest

from verl_ext.launch.screen import Picked, Screen, one_line
from verl_ext.runs.line_file import NotWrittenError

PROGRAM = """
import os, subprocess, sys
from verl_ext.launch.screen import Screen
with Screen(verbose={verbose}, plain=(KeyError,)) as screen:
    print("before the folder is known")
    screen.say("a budget")
    {before}
    screen.log_to({folder!r})
    print("noise of ours")
    subprocess.run([sys.executable, "-c", "print('noise of a child')"])
    print("(Runner pid=7) worker group kwargs: 3; create worker group")
    print("\\x1b[36m(Runner pid=7)\\x1b[0m step 1/2 | reward 0.250")
    for n in range(5):
        print(f"(Runner pid=7) WARNING verl_ext.training.collector: step {{n}} is odd\\n(Runner pid=7)   a sample")
    print("(Runner pid=7) bar\\r(Runner pid=7) step 2/2 | reward 0.500")
    {after}
"""
SHOWN = """\
a budget
All output of verl, Ray and vLLM: LOG (verbose=true shows it here)
... the trainer loads the policy
step 1/2 | reward 0.250
warning: step 0 is odd
  a sample
warning: step 1 is odd
  a sample
warning: step 2 is odd
  a sample
step 2/2 | reward 0.500
2 more warning(s) of the kinds above
"""


def program(folder, verbose=False, before="", after="", **kwargs):
    code = PROGRAM.format(folder=str(folder), verbose=verbose, before=before, after=after)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    kwargs = {"capture_output": True, **kwargs}
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=60, env=environment, **kwargs)


def test_steps_stages_and_warnings_are_shown_and_all_is_logged(tmp_path):
    (tmp_path / "train.log").write_text("step 7/9 | of an earlier run\n")
    done = program(tmp_path)
    assert done.stdout == SHOWN.replace("LOG", str(tmp_path / "train.log")) and done.stderr == ""
    log = (tmp_path / "train.log").read_text()
    assert log.index("of an earlier run") < log.index("before the folder is known") < log.index("noise of a child")
    assert "step 4 is odd" in log and "a budget" not in log


def test_verbose_changes_nothing(tmp_path):
    done = program(tmp_path, verbose=True)
    assert done.stdout.startswith("before the folder is known\na budget\nnoise of ours\n")
    assert not (tmp_path / "train.log").exists()


def test_an_error_leaves_its_traceback_in_the_log(tmp_path):
    done = program(tmp_path, after="raise ValueError('it broke')")
    assert done.returncode == 1 and "step 2/2" in done.stdout
    assert "Traceback" in (tmp_path / "train.log").read_text() and "it broke" in (tmp_path / "train.log").read_text()


def test_an_error_before_there_is_a_log_shows_what_was_printed(tmp_path):
    assert "before the folder is known" in program(tmp_path, before="raise ValueError('early')").stdout
    assert "before the folder is known" not in program(tmp_path, before="raise KeyError('said')").stdout


def test_output_that_is_the_log_already_stays_there(tmp_path):
    """Else what is shown would be read again, and shown again."""
    with open(tmp_path / "train.log", "a") as log:
        assert program(tmp_path, capture_output=False, stdout=log, stderr=subprocess.STDOUT).returncode == 0
    assert (tmp_path / "train.log").read_text().count("step 2/2") == 1


def test_a_folder_that_is_remote_has_no_log_and_all_is_shown(tmp_path):
    done = program(tmp_path, before="screen.show_all()")
    assert "noise of ours" in done.stdout and not (tmp_path / "train.log").exists()


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    after = "open({!r}, 'w').write('went on')".format(str(tmp_path / "end"))
    assert program(tmp_path, after=after, capture_output=False, stdout=writer).returncode == 0
    assert (tmp_path / "end").read_text() == "went on"


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with Screen(verbose=False) as screen, pytest.raises(NotWrittenError, match="file/train.log"):
        screen.log_to(str(tmp_path / "file"))


def test_a_stage_is_said_once_and_not_after_the_first_step():
    picked = Picked()
    assert [picked.pick("ready to fit\n") for _ in range(2)] == ["... rollout workers start", None]
    assert picked.pick("step 1/2 | reward 0.1\n") and picked.pick("model engine initialized") is None


def test_what_the_run_ends_by_is_shown_and_is_no_warning():
    line = "(Runner pid=7) INFO verl_ext.training.trainer: 8 of the 8 rollouts are issued: the run ends after step 4"
    assert Picked().pick(line) == "8 of the 8 rollouts are issued: the run ends after step 4"
    assert Picked().pick("(Runner pid=7) INFO verl_ext.training.trainer: allocation: a training step") is None


def test_an_error_of_an_actor_is_one_line():
    error = RuntimeError("ray::run() (pid=1)\nTraceback\n")
    error.cause = MemoryError("CUDA out of memory. Tried\nto allocate")
    assert one_line(error).startswith("MemoryError: CUDA out of memory. Tried; python -m verl_ext.check")
    assert "\n" not in one_line(error) and one_line(KeyError()) == "KeyError"
