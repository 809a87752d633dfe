"""`python -m verl_ext.check` on a real Ray: what is short is said within seconds, where a run would wait for ever."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.real_stack


def check(folder, *overrides):
    command = [sys.executable, "-m", "verl_ext.check", "recipe=cpu/sara", "check.timeout_s=90", *overrides]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=400,
    )  # fmt: skip
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return done, {words[1]: (words[0], words[2]) for words in lines if len(words) == 3}


def rays_processes():
    return {
        process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in ("raylet", "gcs_server")
    }


def test_where_there_is_room_nothing_is_short_and_nothing_is_left(tmp_path):
    before = rays_processes()
    done, found = check(tmp_path)
    assert done.returncode == 0 and "Nothing is short" in done.stdout, done.stdout
    assert {found[name][0] for name in ("ray", "cpus", "accelerators", "placement", "nodes")} == {"ok"}
    assert "1 GPU needed, 1 of 1 free" in found["accelerators"][1] and "on all 1 node(s)" in found["nodes"][1]
    assert rays_processes() <= before


def test_too_few_cpus_are_said_where_a_run_would_wait_for_them(tmp_path):
    done, found = check(tmp_path, "ray_kwargs.ray_init.num_cpus=3")
    assert done.returncode == 1, done.stdout
    assert [found[name][0] for name in ("ray", "cpus", "accelerators")] == ["ok", "PROBLEM", "ok"]
    said = found["cpus"][1]
    assert "CPUs: 6 needed" in said and "3 of the cluster's 3 are free" in said and "ray_init.num_cpus" in said
