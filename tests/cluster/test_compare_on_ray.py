"""`launcher=ray` of `verl_ext.compare` on a real Ray and its job server; a small program in place of the trainer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from verl_ext.compare import run
from verl_ext.launch.comparison_plan import read_note

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ray_address():
    """A Ray of its own with a job server, ended afterwards."""
    ports = []
    for _ in range(3):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            ports.append(taken.getsockname()[1])
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    kept = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    folder = f"/tmp/vxr{os.getpid()}"  # Unix sockets need a short path
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={ports[0]}",
         # The agent that starts jobs: where another Ray of this machine has its default port, there would be none.
         f"--dashboard-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}",
         "--num-cpus=4", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1",
         f"--temp-dir={folder}"],
        env={**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def wait_for_job_server(address: str) -> None:
    from ray.job_submission import JobSubmissionClient

    end = time.monotonic() + 300
    while True:
        try:
            JobSubmissionClient(address).list_jobs()
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def settings(folder: Path, *overrides: str):
    with initialize_config_module("verl_ext.configs", version_base=None):
        return compose("compare", [f"root={folder}/runs", "launcher=ray", "poll_s=0.5", "at_once=2", *overrides])


def test_runs_are_jobs_of_ray(ray_address, tmp_path, capsys):
    wait_for_job_server(ray_address)
    command = (sys.executable, str(Path(__file__).parent / "cut_off_program.py"))
    config = settings(
        tmp_path, "recipes=[x,y]", "seeds=[0]", f"ray.address={ray_address}", "ray.runtime_env={env_vars:{GIVEN:here}}"
    )
    assert run(config, command) == 1
    first = capsys.readouterr().out
    assert "x, seed 0: done" in first and "y, seed 0: FAILED (FAILED, exit code 1)" in first and "cut off" in first
    log = tmp_path / "runs" / "x-seed0" / "job.log"
    assert "from step 0 with here" in log.read_text()
    assert read_note(log.parent)["job"]["launcher"] == "ray"

    assert run(config, command) == 0
    second = capsys.readouterr().out
    assert "x, seed 0: done" in second and "y, seed 0: goes on as job" in second and second.count(" as job") == 1
    assert "from step 2" in (tmp_path / "runs" / "y-seed0" / "job.log").read_text()
    assert json.loads((tmp_path / "runs" / "report" / "comparison.json").read_text())["recipes"].keys() == {"x", "y"}


def test_no_job_server_is_said(tmp_path):
    from verl_ext.launch.jobs import JobServerError

    with pytest.raises(JobServerError, match="ray.address=http://127.0.0.1:9: no job server of Ray answers there"):
        run(settings(tmp_path, "recipes=[x]", "seeds=[0]", "ray.address=http://127.0.0.1:9"), ("false",))
