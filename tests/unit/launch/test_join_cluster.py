# SPDX-License-Identifier: Apache-2.0
"""What a configuration becomes where the run joins a Ray cluster; what a cluster lacks; when a node counts as lost."""

import json
import os

import pytest
from omegaconf import OmegaConf

from verl_ext.launch import node_watch, ray_start, ready
from verl_ext.launch.cleanup import RUN_ID
from verl_ext.launch.join_cluster import JOB_CONFIG, ClusterError, cluster_address, join_cluster


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `ray start` notes its cluster
    monkeypatch.setattr(ray_start, "wait_for_head", lambda head, seconds: "10.0.0.9")
    for name in ("RAY_ADDRESS", JOB_CONFIG, RUN_ID, "SPT_NOENV"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def config(folder="outputs/a/b", **env_vars):
    return OmegaConf.create({
        "ray_kwargs": {"ray_init": {"num_cpus": 32, "num_gpus": 1, "include_dashboard": False,
                                    "runtime_env": {"env_vars": env_vars}}},
        "trainer": {"default_local_dir": folder},
    })  # fmt: skip


def test_a_run_of_its_own_is_left_as_it_is(no_cluster):
    given = config()
    assert join_cluster(given) is None and given == config()
    no_cluster.setenv("RAY_ADDRESS", "local")
    assert cluster_address(given) is None


def test_a_cluster_that_was_started_on_this_machine_is_joined(no_cluster, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    given = config()
    assert join_cluster(given) == "10.0.0.1:6379" and "num_cpus" not in given.ray_kwargs.ray_init
    given = config()
    given.ray_kwargs.ray_init.address = "local"
    assert join_cluster(given) is None and given.ray_kwargs.ray_init.num_cpus == 32
    no_cluster.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster_address(config()) == "10.0.0.2:6379"


def test_what_starts_a_cluster_is_dropped_and_the_folder_absolute(no_cluster, tmp_path):
    no_cluster.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    no_cluster.setenv(RUN_ID, "abc")
    no_cluster.chdir(tmp_path)
    given = config(VERL_PLATFORM="cpu")
    assert join_cluster(given) == "10.0.0.1:6379"
    assert OmegaConf.to_container(given.ray_kwargs.ray_init) == {
        "runtime_env": {"env_vars": {"VERL_PLATFORM": "cpu", RUN_ID: "abc"}}
    }
    assert given.trainer.default_local_dir == str(tmp_path / "outputs/a/b")


def test_variables_of_the_job_win(no_cluster):
    import ray

    from verl_ext.launch.ray_start import start_ray

    mine = {"TRANSFER_QUEUE_ENABLE": "1", "PYTHONHASHSEED": "7", "VLLM_BATCH_INVARIANT": "0", "MY_OWN": "x"}
    no_cluster.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    no_cluster.setenv("PYTHONHASHSEED", "7")
    no_cluster.setenv(JOB_CONFIG, json.dumps({"runtime_env": {"env_vars": mine}}))
    calls = []
    no_cluster.setattr(ray, "init", lambda **given: calls.append(given))
    given = OmegaConf.merge(config("/shared/run", VERL_PLATFORM="cpu", MY_OWN="y"), {
        "actor_rollout_ref": {"rollout": {"full_determinism": False}}, "trainer": {"logger": ["console"]},
        "reward": {"reward_model": {"enable": False}},
    })  # fmt: skip
    start_ray(given)
    assert given.trainer.default_local_dir == "/shared/run"
    ours = calls[0]["runtime_env"]["env_vars"]
    assert not set(ours) & set(mine) and ours["VERL_PLATFORM"] == "cpu" and "NCCL_DEBUG" in ours


@pytest.mark.parametrize("address, mine, seen", [(None, None, "1000"), (None, "7", "7"), ("10.0.0.1:6379", None, None)])
def test_what_ray_notes_of_tasks_is_bounded_where_ray_is_started_here(no_cluster, address, mine, seen):
    import ray

    from verl_ext.launch.ray_start import MOST_TASKS, start_ray

    no_cluster.setenv(MOST_TASKS, mine or "x")
    if mine is None:
        no_cluster.delenv(MOST_TASKS)
    if address:
        no_cluster.setenv("RAY_ADDRESS", address)
    noted = []
    no_cluster.setattr(ray, "init", lambda **given: noted.append(os.environ.get(MOST_TASKS)))
    start_ray(OmegaConf.merge(config("/shared/run"), {
        "actor_rollout_ref": {"rollout": {"full_determinism": False}}, "trainer": {"logger": ["console"]},
        "reward": {"reward_model": {"enable": False}},
    }))  # fmt: skip
    assert noted == [seen]


def test_a_relative_folder_in_a_working_dir_is_refused(no_cluster):
    no_cluster.setenv("RAY_ADDRESS", "auto")
    no_cluster.setenv(JOB_CONFIG, json.dumps({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}))
    with pytest.raises(
        ClusterError, match="trainer.default_local_dir='outputs/a/b' is relative.*accepted: an absolute"
    ):
        join_cluster(config())
    for folder in ("/shared/run", "hdfs://cluster/run"):
        join_cluster(given := config(folder))
        assert given.trainer.default_local_dir == folder


def node(address, gpus, alive=True, identifier=None):
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"GPU": gpus, "CPU": 4.0},
            "NodeID": identifier or address}  # fmt: skip


def test_a_cluster_is_whole_when_every_node_offers_its_slots():
    nodes = [node("b", 8.0), node("a", 8.0), node("c", 4.0), node("d", 8.0, alive=False)]
    assert ready.whole(nodes, 8) == ["a", "b"]
    assert ready.describe(nodes) == "b: 8 GPU, 4 CPU; a: 8 GPU, 4 CPU; c: 4 GPU, 4 CPU; d: dead"


def test_only_nodes_with_actors_of_the_run_count_as_lost(monkeypatch):
    actors = [("a", "a", True), ("b", "b", True)]
    nodes = [node("a", 1), node("b", 1), node("idle", 1)]
    monkeypatch.setattr(node_watch, "_actors", lambda: actors)
    monkeypatch.setattr(node_watch, "_nodes", lambda: nodes)
    watch = node_watch.NodeWatch(lambda: None)
    assert watch.look() == []
    nodes[2] = node("idle", 1, alive=False)
    assert watch.look() == []
    actors[1] = ("b", "b", False)
    assert watch.look() == [], "an actor may end on a node that lives"
    nodes[1] = node("b", 1, alive=False)
    assert watch.look() == ["b"] and "node b was lost" in node_watch.loss(watch.lost)


def test_a_loss_ends_the_block_with_its_own_error(monkeypatch):
    import time

    nodes = [node("a", 1), node("b", 1)]
    monkeypatch.setattr(node_watch, "_actors", lambda: [("b", "b", True)])
    monkeypatch.setattr(node_watch, "_nodes", lambda: nodes)
    monkeypatch.setattr(node_watch, "_POLL_S", 0.01)
    original = node_watch.NodeWatch
    monkeypatch.setattr(node_watch, "NodeWatch", lambda on_loss: original(on_loss, 0.01, 0.05))
    # hangs
    with pytest.raises(node_watch.NodeLostError, match="node b was lost.*resume_mode=auto"), node_watch.watched_nodes():
        time.sleep(0.05)
        nodes[1] = node("b", 1, alive=False)
        time.sleep(30)
    # ends for another reason
    nodes[1] = node("b", 1)
    with pytest.raises(ZeroDivisionError), node_watch.watched_nodes():
        raise ZeroDivisionError
    # one node: nothing is watched
    nodes.pop()
    with node_watch.watched_nodes() as watch:
        assert watch is None


class ActorDiedError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        RuntimeError("ray::WorkerDict\n[gloo/transport/tcp/pair.cc] Read error [10.0.0.2]: Connection reset by peer"),
        RuntimeError("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356"),
        RuntimeError("ConnectionResetError: [Errno 104] Connection reset by peer"),
    ],
    ids=["actor", "gloo", "nccl", "connection"],
)
def test_a_run_that_ends_before_ray_knows_of_the_node_waits_for_it(monkeypatch, error):
    import threading
    import time

    nodes = [node("a", 1), node("b", 1)]
    monkeypatch.setattr(node_watch, "_actors", lambda: [("b", "b", True)])
    monkeypatch.setattr(node_watch, "_nodes", lambda: nodes)
    monkeypatch.setattr(node_watch, "_POLL_S", 0.01)
    with pytest.raises(node_watch.NodeLostError, match="node b was lost") as raised, node_watch.watched_nodes():
        time.sleep(0.05)
        threading.Timer(0.3, lambda: nodes.__setitem__(1, node("b", 1, alive=False))).start()
        raise error
    assert raised.value.__cause__ is error
    # The nodes are all there: the error stands.
    nodes[1] = node("b", 1)
    monkeypatch.setattr(node_watch, "_SEEN_WITHIN_S", 0.1)
    with pytest.raises(type(error)) as raised, node_watch.watched_nodes():
        raise error
    assert raised.value is error
