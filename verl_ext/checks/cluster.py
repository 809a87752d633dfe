# SPDX-License-Identifier: Apache-2.0
"""Checks that need the cluster: CPUs, accelerators, placement groups, and this package on every node.

With too few logical CPUs or accelerators, verl 0.9.1 hangs silently at the start: it waits for its placement groups for
ever. These checks say within seconds what is missing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.launch.join_cluster import cluster_address

from .async_modes import replica_ranks
from .data import files_of
from .findings import Checks, Problems, Seen, deadline

_ENGINE = "rollout_pool_"


def check_cluster(config: DictConfig, checks: Checks, seconds: float) -> None:
    """All checks on the cluster that `main_ppo` would run on; starts Ray where it is not running.

    Args:
        seconds: to wait for Ray (twice as long, on a busy machine), and then for all answers together.
    """
    if checks.run("ray", _start, config, 2 * seconds) is None:
        return
    end = time.monotonic() + seconds
    needs = Needs.of(config)
    checks.run("cpus", _cpus, needs)
    checks.run("accelerators", _accelerators, needs)
    with _placement(needs) as groups:
        checks.run("placement", _placed, groups, seconds / 2)
        checks.run("nodes", _nodes, config, end - time.monotonic())


@dataclasses.dataclass(frozen=True)
class Needs:
    """Logical resources that a run reserves, as verl 0.9.1 and TransferQueue 0.1.11 ask for them."""

    resource: str
    """What Ray calls an accelerator: GPU, NPU."""
    pools: dict[str, list[int]]
    """Resource pool -> processes on each of its nodes; a process takes one accelerator."""
    cpus_a_process: int
    """CPUs of a process's bundle: one for each worker group that may share it."""
    cpus_a_rank: int
    """As `cpus_a_process`, of a rank of an engine apart from the trainer."""
    queue_cpus: int
    """TransferQueue's controller and storage units, one CPU each."""

    @classmethod
    def of(cls, config: DictConfig) -> Needs:
        from verl.plugin.platform import get_platform
        from verl.single_controller.ray.base import ResourcePoolManager

        trainer, reward = config.trainer, config.reward.reward_model
        pools = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
        if reward.enable_resource_pool:
            pools["reward_pool"] = [reward.n_gpus_per_node] * reward.nnodes
        distillation = config.get("distillation")
        if distillation is not None and distillation.get("enabled", False):
            pools["teacher_pool"] = [distillation.n_gpus_per_node] * distillation.nnodes
        if trainer.v1.trainer_mode.endswith("separate_async"):
            rollout, ranks = config.actor_rollout_ref.rollout, replica_ranks(config)
            on_a_node = min(rollout.n_gpus_per_node, ranks)
            for number in range(rollout.nnodes * rollout.n_gpus_per_node // ranks):
                pools[f"{_ENGINE}{number}"] = [on_a_node] * (ranks // on_a_node)
        units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units") or 0
        shared = next(f.default for f in dataclasses.fields(ResourcePoolManager) if f.name == "max_colocate_count")
        return cls(get_platform().ray_resource_name(), pools, shared, 2, 1 + units)

    @property
    def accelerators(self) -> int:
        return sum(map(sum, self.pools.values()))

    @property
    def cpus(self) -> int:
        """Reserved for the whole run, and one that every other actor needs to be started."""
        processes = sum(sum(nodes) * self.bundle(pool)["CPU"] for pool, nodes in self.pools.items())
        return processes + self.queue_cpus + 1

    def bundle(self, pool: str) -> dict[str, int]:
        """What a process of a pool reserves."""
        cpus = self.cpus_a_rank if pool.startswith(_ENGINE) else self.cpus_a_process
        return {"CPU": cpus, self.resource: 1}


def _start(config: DictConfig, seconds: float) -> Seen:
    import ray

    from verl_ext.launch.ray_start import start_ray

    place = "started here:" if cluster_address(config) is None else "connected to"
    with deadline(seconds, "starting Ray, or connecting to it,"):
        start_ray(config)
    nodes = _alive()
    return Seen(f"Ray {ray.__version__}, {place} a cluster of {len(nodes)} node(s)", True)


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _free(resource: str) -> tuple[float, float]:
    import ray

    return ray.available_resources().get(resource, 0), ray.cluster_resources().get(resource, 0)


def _cpus(needs: Needs) -> Seen:
    free, total = _free("CPU")
    kinds = [f"{sum(nodes)} processes x {needs.bundle(pool)['CPU']}" for pool, nodes in needs.pools.items()]
    parts = f"{', '.join(kinds)}, {needs.queue_cpus} for TransferQueue, 1 to start other actors with"
    if free < needs.cpus:
        raise Problems(
            f"CPUs: {needs.cpus} needed ({parts}), {free:g} of the cluster's {total:g} are free: the run would wait "
            f"for ever; logical CPUs are set by ray_kwargs.ray_init.num_cpus where Ray is started here, or by "
            f"ray start --num-cpus, and needed by trainer.n_gpus_per_node, trainer.nnodes and "
            f"transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )
    return Seen(f"{needs.cpus} logical CPUs needed ({parts}), {free:g} of {total:g} free")


def _accelerators(needs: Needs) -> Seen:
    free, total = _free(needs.resource)
    if free < needs.accelerators:
        raise Problems(
            f"accelerators: {needs.accelerators} {needs.resource} needed (trainer.n_gpus_per_node x trainer.nnodes, "
            f"and those of reward.reward_model and of engines with a pool of their own), {free:g} of the cluster's "
            f"{total:g} are free"
        )
    return Seen(f"{needs.accelerators} {needs.resource} needed, {free:g} of {total:g} free")


@contextmanager
def _placement(needs: Needs) -> Iterator[dict[str, Any]]:
    """The placement groups of a run, by a name that says what each is for; removed at the end."""
    from ray.util.placement_group import placement_group, remove_placement_group

    groups = {}
    try:
        for pool, nodes in needs.pools.items():
            for number, processes in enumerate(nodes):
                bundle = needs.bundle(pool)
                name = f"{pool}, node {number}: {processes} x {bundle} on one node"
                groups[name] = placement_group([dict(bundle)] * processes, strategy="STRICT_PACK")
        queue = [{"CPU": 1}] * needs.queue_cpus
        groups[f"TransferQueue: {needs.queue_cpus} x {{'CPU': 1}}"] = placement_group(queue, strategy="SPREAD")
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


def _placed(groups: dict[str, Any], seconds: float) -> Seen:
    import ray

    ready = {group.ready(): name for name, group in groups.items()}
    _, late = ray.wait(list(ready), num_returns=len(ready), timeout=max(1.0, seconds))
    if late:
        raise Problems(
            *(f"placement: no room for {ready[reference]} within {seconds:.0f} s" for reference in late),
            f"placement: the nodes have {'; '.join(_resources(node) for node in _alive())}",
        )
    return Seen(f"{len(groups)} placement groups found room: {'; '.join(groups)}")


def _resources(node: dict[str, Any]) -> str:
    kinds = {name: value for name, value in node["Resources"].items() if name in ("CPU", "GPU", "NPU")}
    return f"{node['NodeManagerAddress']} {kinds}"


def _nodes(config: DictConfig, seconds: float) -> Seen:
    """This package, verl and the local files, asked for on every node beside the placement groups."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = _make_probe()([])
    model = config.actor_rollout_ref.model.path
    paths = [path for path in (model, *files_of(config, "data.train_files")) if path.startswith(("/", "~"))]
    asked = {}
    for node in _alive():
        place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        cpus = 1 if node["Resources"].get("CPU", 0) else 0
        probe = ray.remote(num_cpus=cpus, max_retries=0)(_make_probe()).options(scheduling_strategy=place)
        asked[probe.remote(paths)] = node["NodeManagerAddress"]
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=max(5.0, seconds))
    problems = [
        f"node {asked[reference]}: no answer; it has no CPU left beside the placement groups, or cannot set up the "
        f"runtime environment"
        for reference in late
    ]
    for reference in done:
        address = asked[reference]
        try:
            found = ray.get(reference)
        except Exception as error:
            problems.append(f"node {address}: {' '.join(str(error).split())[:500]}")
            continue
        problems += _differences(address, here, found)
    for reference in late:
        ray.cancel(reference, force=True)
    if problems:
        raise Problems(*problems)
    return Seen(f"verl_ext {here['verl_ext']} and verl {here['verl']} on all {len(asked)} node(s)")


def _differences(address: str, here: dict[str, Any], found: dict[str, Any]) -> list[str]:
    problems = []
    for package in ("verl_ext", "verl"):
        if found[package] is None:
            problems.append(f"node {address}: {package} cannot be imported; install it on every node")
        elif found[package] != here[package]:
            problems.append(f"node {address}: {package} is {found[package]}, here {here[package]}")
    if found["verl_ext"] == here["verl_ext"] and found["source"] != here["source"]:
        problems.append(f"node {address}: verl_ext is {found['verl_ext']} as here, but its source differs")
    problems += [f"node {address}: {path} does not exist there" for path in found["missing"]]
    return problems


def _make_probe():
    """A function that travels by value: on a node without this package it must still be able to say so."""

    def probe(paths: list[str]) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os

        found: dict[str, Any] = {"missing": [path for path in paths if not os.path.exists(os.path.expanduser(path))]}
        for package in ("verl_ext", "verl"):
            spec = importlib.util.find_spec(package)
            try:
                found[package] = importlib.metadata.version(package) if spec else None
            except importlib.metadata.PackageNotFoundError:
                found[package] = "of unknown version (not installed, but on the path)"
        spec, digest = importlib.util.find_spec("verl_ext"), hashlib.blake2b(digest_size=16)
        for folder in sorted(spec.submodule_search_locations) if spec else []:
            # An editable install reaches configs/ and recipes/ by links; a wheel holds them.
            for parent, folders, names in os.walk(folder, followlinks=True):
                folders.sort()
                for name in sorted(names):
                    if name.endswith((".py", ".yaml")):
                        digest.update(os.path.relpath(os.path.join(parent, name), folder).encode())
                        with open(os.path.join(parent, name), "rb") as file:
                            digest.update(file.read())
        found["source"] = digest.hexdigest()
        return found

    return probe
