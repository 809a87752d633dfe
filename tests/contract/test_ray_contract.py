"""What is relied upon inside Ray, beside its public interface; a clear failure here when Ray changes it."""

from __future__ import annotations

import inspect

import ray
from ray._private.state import GlobalState, actors
from ray._raylet import InnerGcsClient

from verl_ext.launch.join_cluster import JOB_CONFIG


def test_the_table_of_actors_is_kept_by_the_head():
    """`verl_ext.launch.node_watch`: which nodes the run has actors on, also without a dashboard."""
    assert "job_id" in inspect.signature(actors).parameters
    source = inspect.getsource(GlobalState._gen_actor_info)
    for name in ('"Address"', '"IPAddress"', '"NodeID"', '"State"'):
        assert name in source


def test_a_head_can_be_asked_for_its_nodes_without_a_node_of_ones_own():
    """`verl_ext.launch.join`."""
    # The methods of `GcsClient` are those of this class.
    assert callable(InnerGcsClient.get_all_node_info)


def test_where_a_submitted_job_finds_its_runtime_environment():
    """`verl_ext.launch.join_cluster`."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert RAY_JOB_CONFIG_JSON_ENV_VAR == JOB_CONFIG


def test_a_joined_cluster_refuses_what_starts_one():
    """Why `join_cluster` drops these arguments."""
    source = inspect.getsource(inspect.unwrap(ray.init))
    assert "When connecting to an existing cluster, num_cpus" in source
