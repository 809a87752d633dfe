"""SIGTERM: asked to stop first, ended by the second; the exit status says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest


def ended(asked: str, signals: int) -> tuple[int, str]:
    """Exit status and output of a guarded block that ends by itself after a while."""
    body = f"""
        import os, signal, time
        from verl_ext.launch.cleanup import run_guard
        with run_guard({asked}):
            for _ in range({signals}):
                os.kill(os.getpid(), signal.SIGTERM)
            print("made its step", flush=True)
        print("not reached", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("asked, signals, output", [
    ("lambda: True", 1, "made its step\n"),  # the block ends by itself
    ("lambda: True", 2, ""),
    ("lambda: False", 1, ""),  # nothing to ask yet
    ("None", 1, ""),
])  # fmt: skip
def test_the_first_sigterm_asks_and_the_second_ends(asked, signals, output):
    assert ended(asked, signals) == (128 + signal.SIGTERM, output)


def test_the_folder_of_vllms_sockets_goes_with_the_run(tmp_path):
    body = """
        import os, signal
        from verl_ext.launch.cleanup import run_guard
        with run_guard():
            open(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], "socket"), "w").close()
            print(os.listdir(os.environ["TMPDIR"]), flush=True)
            if {killed}:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    for killed in (False, True):
        code = textwrap.dedent(body).format(killed=killed)
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        environment.pop("VLLM_RPC_BASE_PATH", None)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
        assert "verl_ext-" in done.stdout
        deadline = time.monotonic() + 30
        while os.listdir(tmp_path) and time.monotonic() < deadline:  # the watcher is another process
            time.sleep(0.1)
        assert os.listdir(tmp_path) == []


def test_without_a_cluster_there_is_nothing_to_ask(monkeypatch):
    from verl_ext.training.stopping import ask_trainer_to_stop

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert ask_trainer_to_stop() is False


SEGMENT = """
import os, socket, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as a process that is killed: nobody tidies up after it
segment = shared_memory.SharedMemory(create=True, size=4096)
bound = socket.socket(socket.AF_UNIX)
bound.bind(sys.argv[1])
print(segment.name, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_shared_memory_and_sockets_of_a_run_go_with_its_processes_and_those_of_others_stay(tmp_path):
    from verl_ext.launch.cleanup import RUN_ID, end_run_processes

    children = {
        run: subprocess.Popen(
            [sys.executable, "-c", SEGMENT, str(tmp_path / run)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, RUN_ID: run},
        )
        for run in ("stopping-a", "stopping-b")
    }
    paths = {run: os.path.join("/dev/shm", child.stdout.readline().strip()) for run, child in children.items()}
    try:
        assert all(map(os.path.exists, paths.values()))
        assert end_run_processes("stopping-a", 1.0) == [children["stopping-a"].pid]
        assert not os.path.exists(paths["stopping-a"]) and os.path.exists(paths["stopping-b"])
        assert sorted(os.listdir(tmp_path)) == ["stopping-b"]
    finally:
        end_run_processes("stopping-b", 1.0)
        for child in children.values():
            child.wait()
    assert not os.path.exists(paths["stopping-b"]) and os.listdir(tmp_path) == []
