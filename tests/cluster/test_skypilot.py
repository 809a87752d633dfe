"""scripts/skypilot/verl_ext.yaml without a cloud: its run section on two nodes, as SkyPilot starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.nodes import wait_until
from tests.cluster.slurm import REPOSITORY

pytestmark = pytest.mark.cluster

FILE = REPOSITORY / "scripts" / "skypilot" / "verl_ext.yaml"


@pytest.fixture(scope="module")
def task() -> dict:
    return yaml.safe_load(FILE.read_text())


def test_the_sections_are_sound(task):
    for section in ("setup", "run"):
        done = subprocess.run(["bash", "-n"], input=task[section], capture_output=True, text=True)
        assert done.returncode == 0, f"{section}: {done.stderr}"
    given = {*task["envs"], *task["secrets"]}
    assert {"RECIPE", "ARGUMENTS", "RUN", "BUCKET", "COMMAND", "WANDB_API_KEY"} == given


@pytest.mark.skypilot
def test_skypilot_accepts_it(task):
    import sky

    assert sky.Task.from_yaml(str(FILE)).num_nodes == task["num_nodes"]


def start(node, rank: int, nodes, task: dict, arguments: str) -> subprocess.Popen:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VERL_", "SLURM_"))},
        **task["envs"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COMMAND": f"python {REPOSITORY}/tests/cluster/tiny_program.py",
        "ARGUMENTS": arguments,
        "SKYPILOT_NODE_IPS": "\n".join(n.address for n in nodes.nodes),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        # The machines that run this test are small and busy.
        "RAY_ARGUMENTS": "--num-cpus=4 --object-store-memory=100000000 --dashboard-agent-grpc-port=6381 "
        "--dashboard-agent-listen-port=6382 --metrics-export-port=6383 --runtime-env-agent-port=6384",
        "RAY_raylet_start_wait_time_s": "300",
    }
    return node.popen(
        "bash", "-c", task["run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("arguments, status", [("exit=0", 0), ("exit=3", 3)])
def test_it_runs_on_both_nodes_and_passes_the_status(nodes, task, arguments, status):
    started = [start(node, rank, nodes, task, arguments) for rank, node in enumerate(nodes.nodes)]
    outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [status, 0], "\n--- other node\n".join(outputs)
    assert "ran on n1 n2" in outputs[0]
    # Ray's agents end some seconds after their raylet.
    wait_until("no process left", lambda: not [p for node in nodes.nodes for p in node.processes()], 40)
