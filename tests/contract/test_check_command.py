"""`python -m verl_ext.check` in a process of its own, as people start it; nothing of Ray is started."""

import subprocess
import sys


def check(*arguments, cwd):
    command = [sys.executable, "-m", "verl_ext.check", *arguments]
    return subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)


def test_the_command_prints_every_check_and_says_whether_something_is_short(tmp_path):
    """In a process of its own, as people start it; nothing of Ray is started."""
    done = check("recipe=cpu/sara", "check.cluster=false", "allocation.max_rounds=1", "trainer.logger=[nothing]",
                 cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "PROBLEM", "skipped", "warning"))]
    states = {(line.split()[0], line.split()[1]) for line in lines}
    assert states >= {("ok", "configuration"), ("PROBLEM", "settings"), ("ok", "model"), ("ok", "data"),
                      ("ok", "platform"), ("PROBLEM", "verl"), ("ok", "reward"), ("skipped", "cluster")}  # fmt: skip
    assert "2 problem(s)" in done.stdout and "Ray" not in done.stderr
    assert not list(tmp_path.iterdir())
