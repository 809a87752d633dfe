"""SIGTERM: asked to stop first, ended by the second; the exit status says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest


def ended(asked: str, signals: int) -> tuple[int, str]:
    """Exit status and output of a guarded block that ends by itself after a while."""
    body = f"""
        import os, signal, time
        from verl_ext.platform.cleanup import run_guard
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


def test_without_a_cluster_there_is_nothing_to_ask(monkeypatch):
    from verl_ext.training.stopping import ask_trainer_to_stop

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert ask_trainer_to_stop() is False
