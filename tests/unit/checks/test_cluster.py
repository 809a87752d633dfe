"""What a run reserves of a cluster, and what is said where that is more than there is; the cluster is stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_ext.checks import cluster
from verl_ext.checks.cluster import Needs, _accelerators, _cpus, _placed
from verl_ext.checks.findings import Problems
from verl_ext.testing.fake_run import fake_config


@pytest.fixture
def needs(monkeypatch):
    import verl.plugin.platform as platform

    monkeypatch.setattr(platform, "get_platform", lambda: SimpleNamespace(ray_resource_name=lambda: "GPU"))

    def of(*overrides):
        return Needs.of(fake_config(["recipe=cpu/sara", *overrides]))

    return of


@pytest.mark.parametrize(("overrides", "accelerators", "cpus"), [
    ((), 1, 3 + 2 + 1),
    (("trainer.n_gpus_per_node=4", "trainer.nnodes=2"), 8, 8 * 3 + 2 + 1),
    (("transfer_queue.backend.SimpleStorage.num_data_storage_units=8",), 1, 3 + 9 + 1),
    (("reward.reward_model.enable_resource_pool=True", "reward.reward_model.n_gpus_per_node=2",
      "reward.reward_model.nnodes=3"), 7, 7 * 3 + 2 + 1),
    (("recipe=cpu/grpo_separate_async",), 2, 3 + 2 + 2 + 1),
    (("recipe=cpu/grpo_separate_async", "actor_rollout_ref.rollout.nnodes=4",
      "actor_rollout_ref.rollout.n_gpus_per_node=2",
      "actor_rollout_ref.rollout.tensor_model_parallel_size=4"), 9, 3 + 8 * 2 + 2 + 1),
])  # fmt: skip
def test_what_a_run_reserves(needs, overrides, accelerators, cpus):
    found = needs(*overrides)
    assert (found.accelerators, found.cpus) == (accelerators, cpus)


def test_one_cpu_less_than_needed_is_said_and_as_many_as_needed_are_enough(needs, monkeypatch):
    """verl would wait for its placement groups without an end."""
    found = needs("trainer.n_gpus_per_node=2")
    monkeypatch.setattr(cluster, "_free", lambda resource: {"CPU": (8, 16), "GPU": (1, 4)}[resource])
    with pytest.raises(Problems) as short:
        _cpus(found)
    said = str(short.value)
    assert "CPUs: 9 needed (2 processes x 3, 2 for TransferQueue, 1 to start" in said
    assert "8 of the cluster's 16 are free" in said and "ray_kwargs.ray_init.num_cpus" in said
    with pytest.raises(Problems, match="accelerators: 2 GPU needed .*1 of the cluster's 4 are free"):
        _accelerators(found)
    monkeypatch.setattr(cluster, "_free", lambda resource: (9, 9))
    _cpus(found)
    _accelerators(found)


def test_room_in_all_but_on_no_single_node_is_said(monkeypatch):
    import ray

    class Group:
        def ready(self):
            return self

    late, done = Group(), Group()
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([done], [late]))
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 4.0, "GPU": 1.0, "memory": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    with pytest.raises(Problems) as short:
        _placed({"global_pool, node 0: 2 on one node": late, "TransferQueue": done}, 5.0)
    said = str(short.value)
    assert "no room for global_pool, node 0: 2 on one node within 5 s" in said
    assert "10.0.0.7 {'CPU': 4.0, 'GPU': 1.0}" in said and "no room for TransferQueue" not in said
