# SPDX-License-Identifier: Apache-2.0
"""The demo around a stand-in for the run: a small script instead of Ray and vLLM. The real thing is `make demo`."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from verl_ext import demo
from verl_ext.launch import cleanup
from verl_ext.runs.records import Run, StepRecord, read_run
from verl_ext.tiny import ensure_tiny
from verl_ext.tiny.measure import measure_saved
from verl_ext.tiny.policy_store import SHIPPED

START = """
import json, os, shutil, sys, time
folder = [a.split("=", 1)[1] for a in sys.argv if a.startswith("trainer.default_local_dir=")][-1]
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def run_script(monkeypatch):
    """Lets `train` start a script instead of verl_ext.main_ppo, with the same arguments."""

    def use(code):
        assert demo.COMMAND[1:3] == ("-m", "verl_ext.main_ppo")
        monkeypatch.setattr(demo, "COMMAND", (sys.executable, "-c", START + code))

    return use


WRITES = """
config = {"actor_rollout_ref": {"model": {"path": sys.argv[1]}}, "data": {"val_files": sys.argv[2]},
          "trainer": {"total_training_steps": 2}}
open(folder + "/config.yaml", "w").write(json.dumps(config))
print("... Ray starts\\nwarning: a key is not read\\nanything else")
for step in (1, 2):
    if step == 2:
        shutil.copytree(sys.argv[1], folder + "/global_step_2/actor/huggingface")
    line = f"step {step}/2 | reward {step / 4:.3f}\\n"
    sys.stdout.write(line[:25]); sys.stdout.flush(); time.sleep(0.4); sys.stdout.write(line[25:]); sys.stdout.flush()
    open(folder + "/metrics.jsonl", "a").write(json.dumps({"step": step, "data": {"critic/score/mean": 0.5}}) + "\\n")
"""


def test_each_step_is_shown_once_with_what_its_weights_do(run_script, folder, tmp_path, capsys):
    val = ensure_tiny(cache=tmp_path / "cache").val
    success = measure_saved(SHIPPED, val).mean
    capsys.readouterr()
    run_script(WRITES)
    demo.train(folder, [str(SHIPPED), str(val)])
    assert capsys.readouterr().out.splitlines() == [
        "... Ray starts",
        "warning: a key is not read",
        "step 1/2 | reward 0.250",
        f"step 2/2 | reward 0.500 | held-out {success:.3f}",
    ]
    # what was measured is part of the run from then on: the table, the plot and the verdict have it
    estimate, points = read_run(folder).accuracy()["chain_sums"]
    assert estimate == "mean@1" and [(step, p) for step, _, p in points] == [(0, success), (2, success)]


def test_a_failure_shows_what_the_run_said_last(run_script, folder):
    run_script("print('first'); raise MemoryError('too much')")
    with pytest.raises(RuntimeError, match="status 1:\nfirst\n(.*\n)*MemoryError: too much"):
        demo.train(folder, [])


def test_a_refused_configuration_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert demo.main(["trainer.nonsense=1"]) == 1
    assert "trainer.nonsense" in capsys.readouterr().err


def test_the_users_arguments_win_over_the_demos(run_script, folder):
    run_script("print(' '.join(sys.argv[1:]), file=open(folder + '/seen', 'w')); sys.exit(3)")
    with pytest.raises(RuntimeError, match="status 3"):
        demo.train(folder, ["recipe=cpu/grpo", "trainer.default_local_dir=elsewhere"])
    assert (folder / "seen").read_text() == (
        f"recipe=cpu/grpo trainer.default_local_dir=elsewhere trainer.default_local_dir={folder}\n"
    )


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
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(folder + "/pids.tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename(folder + "/pids.tmp", folder + "/pids")
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_and_leaves_nothing_even_of_a_run_that_does_not_listen(tmp_path, number):
    """The command itself, with a run that only sleeps: a signal gives 130 and ends the run."""
    code = f"""
import sys
from verl_ext import demo
from verl_ext.launch import cleanup
demo.COMMAND = (sys.executable, "-c", {START + STUBBORN!r})
cleanup._PATIENCE_S = 0.5
sys.exit(demo.main([]))
"""
    assert hasattr(cleanup, "_PATIENCE_S")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 20
    while not (found := list(tmp_path.glob("outputs/verl_ext/demo-*/pids"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.rstrip().endswith("Stopped.")
    pids = [int(pid) for pid in found[0].read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def ledger_line(trained=8, issued=8):
    return {
        **{"step": 1, "issued": issued, "tokens": 16, "fates": {"trained": trained}, "fate_tokens": {"trained": 16}},
        **{"in_flight": 0, "waiting": 0, "in_flight_tokens": 0, "waiting_tokens": 0, "issued_total": issued},
        **{"tokens_total": 16, "fates_total": {"trained": trained}, "fate_tokens_total": {"trained": 16}},
    }


@pytest.mark.parametrize(
    ("success", "ledger", "reached", "says"),
    [
        ({0: 0.47, 2: 0.56}, [ledger_line()], True, "Reached: held-out success 0.470 -> 0.560, +0.090"),
        ({0: 0.47, 1: 0.58, 2: 0.53}, [ledger_line()], False, "NOT reached: held-out success 0.470 -> 0.530"),
        ({0: 0.47, 2: 0.58}, [ledger_line(trained=7)], False, "does not add up"),
        ({0: 0.47, 2: 0.58}, [], False, "does not add up"),
        ({0: 0.47, 1: 0.58}, [ledger_line()], False, "not both there"),
        ({2: 0.58}, [ledger_line()], False, "not both there"),
        ({0: 0.47}, [ledger_line()], False, "not both there"),
        ({}, [ledger_line()], False, "not both there"),
    ],
)
def test_verdict(tmp_path, success, ledger, reached, says):
    records = [StepRecord(step, {demo.HELD_OUT: success[step]} if step in success else {}) for step in range(3)]
    seen, sentence = demo.verdict(Run(tmp_path, records, ledger))
    assert seen is reached
    assert says in sentence


def test_the_settings_of_the_demo_are_settings():
    """Composed as the run composes them; the weights of the last step are saved whatever the number of steps."""
    done = subprocess.run([*demo.COMMAND, "--cfg", "job", "--resolve"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["trainer"]["save_freq"] > 0 and config["trainer"]["logger"] == ["console", "file"]
    assert config["actor_rollout_ref"]["actor"]["checkpoint"]["save_contents"] == ["hf_model"]
