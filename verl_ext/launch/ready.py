# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.launch.ready --nodes 4 --slots 8`: wait until a Ray cluster is whole.

verl's placement groups wait silently for a node that never joins; this command says what is missing. Exit status: 0
when all nodes are there, 1 when they are not in time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .join import wait_for_head


def whole(nodes: Iterable[Mapping[str, Any]], slots: int) -> list[str]:
    """The addresses of the living nodes that offer at least ``slots`` of the resource "GPU".

    Args:
        nodes: as `ray.nodes()` lists them.
        slots: accelerators a node, or the CPU platform's virtual slots.
    """
    alive = (node for node in nodes if node["Alive"])
    return sorted(node["NodeManagerAddress"] for node in alive if node["Resources"].get("GPU", 0) >= slots)


def describe(nodes: Iterable[Mapping[str, Any]]) -> str:
    """One short description a node."""
    lines = [
        f"{node['NodeManagerAddress']}: "
        + (
            f"{node['Resources'].get('GPU', 0):g} GPU, {node['Resources'].get('CPU', 0):g} CPU"
            if node["Alive"]
            else "dead"
        )
        for node in nodes
    ]
    return "; ".join(lines) or "none"


def wait(nodes: int, slots: int, timeout_s: float, address: str = "auto") -> list[str]:
    """Wait for the cluster; connects to it for as long as that takes.

    Raises:
        TimeoutError: names the nodes that are there and what was waited for.
        ConnectionError: no Ray is reached at the address.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    head = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if re.fullmatch(r"[^/]+:\d+", head):
        # ray.init holds on to a head that is not there for a minute and more, and keeps a core busy with it.
        try:
            wait_for_head(head, timeout_s)
        except TimeoutError as error:
            raise ConnectionError(str(error)) from error
    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no Ray at {address} within {timeout_s:g} s: {error}") from error
            time.sleep(0.5)
    try:
        while len(found := whole(ray.nodes(), slots)) < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(found)} of {nodes} nodes with {slots} GPU (or virtual slots) each after {timeout_s:g} s; "
                    f"seen: {describe(ray.nodes())}"
                )
            time.sleep(0.5)
        return found
    finally:
        ray.shutdown()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, required=True, help="nodes waited for")
    parser.add_argument("--slots", type=int, required=True, help="GPUs, or virtual slots, that each must offer")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (300)")
    parser.add_argument("--address", default="auto", help="Ray's address; $RAY_ADDRESS by default")
    arguments = parser.parse_args()
    try:
        found = wait(arguments.nodes, arguments.slots, arguments.timeout, arguments.address)
    except (TimeoutError, ConnectionError) as error:
        sys.exit(f"verl_ext.launch.ready: {error}")
    print(f"Ray is up on {len(found)} node(s): {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
