# SPDX-License-Identifier: Apache-2.0
"""The demo around a stand-in for the run: a small script instead of Ray and vLLM. The real thing is `make demo`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from verl_ext import demo
from verl_ext.launch import cleanup
from verl_ext.runs.records import Run, StepRecord

ACCURACY = "val-core/chain_sums/acc/mean@8"


def plan(folder, total=2):
    return demo.Plan(overrides=[], folder=folder, total_steps=total, mix=None)


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Lets `train` start a script instead of verl_ext.main_ppo; the script's folder is its first argument."""
    real = subprocess.Popen

    def use(code):
        def popen(command, **settings):
            assert command[1:3] == ["-m", "verl_ext.main_ppo"]
            return real([sys.executable, "-c", code, str(tmp_path)], **settings)

        monkeypatch.setattr(demo.subprocess, "Popen", popen)
        return tmp_path

    return use


WRITES = """
import json, sys, time
with open(sys.argv[1] + "/metrics.jsonl", "w", buffering=1) as file:
    for step in range(3):
        line = json.dumps({"step": step, "data": {"critic/score/mean": step / 4}}) + "\\n"
        file.write(line[:9]); file.flush(); time.sleep(0.4); file.write(line[9:])
"""


def test_each_step_is_shown_once(run_script):
    folder = run_script(WRITES)
    shown = []
    demo.train(plan(folder), shown.append)
    assert shown == ["step 0/2 | reward 0.000", "step 1/2 | reward 0.250", "step 2/2 | reward 0.500"]


def test_a_failure_shows_the_end_of_the_log_and_a_hint(run_script):
    folder = run_script("print('\\x1b[31mfirst\\x1b[0m'); raise MemoryError('too much')")
    with pytest.raises(demo.DemoError, match="status 1") as caught:
        demo.train(plan(folder), lambda line: None)
    message = str(caught.value)
    assert "first\n" in message and "\x1b" not in message
    assert "MemoryError: too much" in message and "about 6 GiB" in message
    assert str(folder / "train.log") in message


def gone(pid, within=5):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1] + "/pids.tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + "/pids.tmp", sys.argv[1] + "/pids")
time.sleep(60)
"""


def test_stopping_leaves_nothing_even_of_a_run_that_does_not_listen(run_script, monkeypatch):
    monkeypatch.setattr(cleanup, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(demo, "_QUIET_S", 0.0)
    folder = run_script(STUBBORN)

    def interrupt(line):
        if (folder / "pids").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.train(plan(folder), interrupt)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_signal_ends_the_demo_and_its_run(tmp_path):
    """The command itself, with a run that only sleeps: SIGINT gives 130 and ends the run."""
    code = f"""
import sys
from verl_ext import demo
from verl_ext.launch import cleanup
real = demo.subprocess.Popen
script = [sys.executable, "-c", {STUBBORN!r}, {str(tmp_path)!r}]
demo.subprocess.Popen = lambda command, **settings: real(script, **settings)
demo.make_plan = lambda arguments: demo.Plan([], demo.Path({str(tmp_path)!r}), 2, None)
cleanup._PATIENCE_S = 0.5
sys.exit(demo.main([]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.rstrip().endswith("Stopped.")
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_sign_of_life_while_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_QUIET_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    lines = list(demo.follow(child, plan(tmp_path)))
    assert lines and all(line.startswith("... ") and "starting Ray" in line for line in lines)


def test_of_a_progress_bar_the_last_state_is_shown():
    assert demo.tail("a\n\nb\n 10%|#\r 50%|##\r100%|###\nend\n", lines=3) == "b\n100%|###\nend"


def test_the_stage_is_the_last_one_in_the_log():
    log = "INFO -- Started a local Ray instance.\n(vLLMHttpServer pid=1) WARNING\n"
    assert demo.stage(log) == "vLLM starts"
    assert "validated" in demo.stage(log + "INFO: all initialize finished, ready to fit\n")


def test_new_lines_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert demo.new_lines(path, 0) == ([], 0)
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert demo.new_lines(path, 0) == ([{"a": 1}], 9)
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n')
    assert demo.new_lines(path, 9) == ([{"b": 2}], 18)


def ledger_line(trained=8, issued=8):
    return {
        **{"step": 1, "issued": issued, "tokens": 16, "fates": {"trained": trained}, "fate_tokens": {"trained": 16}},
        **{"in_flight": 0, "waiting": 0, "in_flight_tokens": 0, "waiting_tokens": 0, "issued_total": issued},
        **{"tokens_total": 16, "fates_total": {"trained": trained}, "fate_tokens_total": {"trained": 16}},
    }


@pytest.mark.parametrize(
    ("accuracies", "ledger", "reached", "says"),
    [
        ({0: 0.47, 1: 0.58}, [ledger_line()], True, "Reached: held-out mean@8 0.470 -> 0.580, +0.110"),
        ({0: 0.47, 1: 0.56}, [ledger_line()], False, "NOT reached: held-out mean@8 0.470 -> 0.560"),
        ({0: 0.47, 1: 0.58}, [ledger_line(trained=7)], False, "does not add up"),
        ({0: 0.47, 1: 0.58}, [], False, "does not add up"),
        ({1: 0.58}, [ledger_line()], False, "not measured"),
        ({}, [ledger_line()], False, "not measured"),
    ],
)
def test_verdict(tmp_path, accuracies, ledger, reached, says):
    records = [StepRecord(step, {ACCURACY: value}) for step, value in accuracies.items()]
    seen, sentence = demo.verdict(Run(tmp_path, records, ledger))
    assert seen is reached
    assert says in sentence


def test_a_refused_configuration_is_told(monkeypatch):
    def refuse(command, **settings):
        assert "recipe=cpu/sara" in command and "nonsense=1" in command
        return subprocess.CompletedProcess(command, 1, "", "Could not override 'nonsense'")

    monkeypatch.setattr(demo.subprocess, "run", refuse)
    with pytest.raises(demo.DemoError, match="refused:\nCould not override"):
        demo.make_plan(["nonsense=1"])


def test_the_plan_is_the_configurations(monkeypatch):
    config = {
        "trainer": {"default_local_dir": "outputs/p/e", "total_training_steps": 5, "logger": ["console", "file"]},
        "tiny": {"mix": "sparse"},
    }
    monkeypatch.setattr(
        demo.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, json.dumps(config), "")
    )
    made = demo.make_plan(["recipe=cpu/grpo", "trainer.total_training_steps=5"])
    assert made.overrides.count("recipe=cpu/grpo") == 1 and "recipe=cpu/sara" not in made.overrides
    assert (str(made.folder), made.total_steps, made.mix) == ("outputs/p/e", 5, "sparse")
    config["trainer"]["logger"] = ["console"]
    with pytest.raises(demo.DemoError, match="trainer.logger must contain 'file'"):
        demo.make_plan([])
