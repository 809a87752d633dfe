"""The CPU recipe on a real Ray cluster of two nodes, by `ray job submit`; a node lost; a resume on the other."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.real_stack]

RUN = (
    sys.executable,
    "-m",
    "verl_ext.main_ppo",
    "recipe=cpu/sara",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)


def ranks(node):
    """How many FSDP ranks and vLLM engines run on a node."""
    names = [line.split(" ", 1)[1] for line in node.processes()]
    return sum("ray::WorkerDict" in name for name in names), sum("VLLM::EngineCore" in name for name in names)


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def saved(folder: Path) -> int:
    path = folder / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def test_both_nodes_train_one_is_lost_and_the_other_goes_on(alone, shared, request):
    nodes = request.getfixturevalue("nodes")
    first, second = nodes[0], nodes[1]
    folder = shared / "run"
    working_dir = shared / "working_dir"
    working_dir.mkdir()
    runtime_env = {
        # A folder that travels to every node, and a variable that the platform sets too: the user's is kept.
        "working_dir": str(working_dir),
        "env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    arguments = (*RUN, f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    with RayCluster(shared / "two", first, (second,)) as cluster:
        job = cluster.submit(
            "two", *arguments, "trainer.nnodes=2", "trainer.total_training_steps=200", runtime_env=runtime_env
        )
        cluster.wait_for(job, "two steps saved", lambda: saved(folder) >= 2, 900)
        assert [ranks(first), ranks(second)] == [(1, 1), (1, 1)]
        second.kill()
        killed = time.monotonic()
        state = cluster.end(job, 300)
        print(f"the job ended {time.monotonic() - killed:.0f} s after the node", flush=True)
        log = cluster.job_logs(job)
        assert state == "FAILED", log[-6000:]
        assert f"node {second.address} was lost" in log, log[-6000:]
    assert not [p for p in first.processes() if "VLLM" in p], "an engine was left behind"
    before = saved(folder)
    assert steps(folder)[-1] in (before, before + 1)

    # One node with two slots: as many ranks as the checkpoint has.
    with RayCluster(shared / "one", first, slots=2) as cluster:
        more = before + 2
        job = cluster.submit(
            "one", *arguments, "trainer.nnodes=1", "trainer.n_gpus_per_node=2", f"trainer.total_training_steps={more}"
        )
        assert cluster.end(job, 900) == "SUCCEEDED", cluster.job_logs(job)[-8000:]
        log = cluster.job_logs(job)
        assert "The ledger adds up" in log, log[-4000:]
    assert steps(folder) == list(range(1, more + 1))
    assert saved(folder) == more
