# SPDX-License-Identifier: Apache-2.0
"""Join a Ray cluster that was started elsewhere, instead of starting one on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.launch.cleanup import RUN_ID

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable in which Ray hands a submitted job its runtime environment (Ray 2.60)."""

_START_ONLY = ("num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard")
"""Arguments of `ray.init` that start a cluster, and are refused (or ignored) where one is joined."""


class ClusterError(ValueError):
    """A setting that does not work on the cluster that the run joins; the message names it and what is accepted."""


def cluster_address(config: DictConfig) -> str | None:
    """Address of the cluster that the run will join; None where it starts Ray itself.

    As `ray.init` finds it: ``ray_kwargs.ray_init.address``, else ``RAY_ADDRESS``, which Ray sets for submitted jobs,
    else the cluster that `ray start` started or joined on this machine.
    """
    given = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS") or _started_here()
    return None if given in (None, "", "local") else str(given)


def _started_here() -> str | None:
    """Address that `ray start` left on this machine (Ray 2.60); `ray stop` takes it away."""
    from ray._private.utils import read_ray_address

    return read_ray_address()


def job_runtime_env() -> dict[str, Any]:
    """The runtime environment that this process was submitted with; empty where it was not."""
    return json.loads(os.environ.get(JOB_CONFIG) or "{}").get("runtime_env") or {}


def job_variables() -> set[str]:
    """Names of the environment variables that the user gave the job."""
    return set(job_runtime_env().get("env_vars") or ())


def join_cluster(config: DictConfig) -> str | None:
    """Make the configuration fit the cluster that is joined; does nothing where the run starts Ray itself.

    - Arguments of ``ray_kwargs.ray_init`` that only start a cluster are dropped: Ray refuses them.
    - ``trainer.default_local_dir`` becomes absolute: the trainer is an actor that may run on another node, elsewhere.

    Returns:
        The cluster's address, or None.

    Raises:
        ClusterError: a relative ``trainer.default_local_dir`` in a job with a working_dir, whose folder Ray deletes.
    """
    address = cluster_address(config)
    if address is None:
        return None
    with open_dict(config):
        ray_init = config.setdefault("ray_kwargs", {}).setdefault("ray_init", {})
        for name in _START_ONLY:
            ray_init.pop(name, None)
        ours = ray_init.setdefault("runtime_env", {}).setdefault("env_vars", {})
        # Marks the run's processes for `run_guard`: here they are not children of this one.
        ours.update({name: os.environ[name] for name in (RUN_ID, "SPT_NOENV") if name in os.environ})
        config.trainer.default_local_dir = _absolute(config.trainer.default_local_dir, job_runtime_env())
    return address


def _absolute(folder: str, job_env: dict[str, Any]) -> str:
    if os.path.isabs(os.path.expanduser(folder)) or "://" in folder:
        return os.path.expanduser(folder)
    if job_env.get("working_dir"):
        raise ClusterError(
            f"trainer.default_local_dir={folder!r} is relative, and this job runs in Ray's copy of its working_dir, "
            "deleted after the job; accepted: an absolute path on a file system that all nodes see"
        )
    return str(Path(folder).absolute())
