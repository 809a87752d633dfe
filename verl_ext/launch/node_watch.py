# SPDX-License-Identifier: Apache-2.0
"""End the run, and name the node, when a node of the run is lost.

Without this, a run can hang after losing a node: a rollout worker counts the lost engine's sessions as failed and goes
on, and a transfer to a lost TransferQueue unit never returns (TransferQueue 0.1.11, verl 0.9.1).
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class NodeLostError(RuntimeError):
    """A node on which the run had actors is gone; the message names it and says how to go on."""


_POLL_S = 3.0
_GRACE_S = 10.0
"""Seconds that the run has to come to an end of its own, after the loss was seen."""
_SEEN_WITHIN_S = 30.0
"""Seconds within which Ray declares a node dead after its actors died or its connections broke."""
_LOOKS_LOST = re.compile(
    "ActorDiedError|ActorUnavailableError|NodeDiedError|OwnerDiedError|WorkerCrashedError"
    "|DistBackendError|gloo|NCCL|Connection (reset|closed|refused)|Broken pipe"
)
"""In an error: an actor or a rank that may have gone with its node. Gloo's and NCCL's come first, within a second."""


class NodeWatch:
    """A thread that watches the nodes on which this Ray job has actors."""

    def __init__(self, on_loss: Callable[[], None], poll_s: float = _POLL_S, grace_s: float = _GRACE_S) -> None:
        self._on_loss, self._poll_s, self._grace_s = on_loss, poll_s, grace_s
        self._used: dict[str, str] = {}
        self._stop = threading.Event()
        self.lost: list[str] = []
        self._thread = threading.Thread(target=self._run, name="verl_ext-node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * self._poll_s)

    def look(self) -> list[str]:
        """Addresses of lost nodes. A node that never had an actor of this run does not count."""
        for address, node, alive in _actors():
            if alive:
                self._used[node] = address
        dead = {node["NodeID"] for node in _nodes() if not node["Alive"]}
        self.lost = sorted(address for node, address in self._used.items() if node in dead)
        return self.lost

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                lost = self.look()
            except Exception:  # Ray is being shut down, or its head is gone: the run ends without us
                continue
            if lost:
                print(f"verl_ext: {loss(lost)}", flush=True)
                if not self._stop.wait(self._grace_s):
                    self._on_loss()
                return


def loss(addresses: list[str]) -> str:
    """The message that a user reads."""
    return (
        f"node {', '.join(addresses)} was lost, on which the run had actors: the run ends. The same command goes on "
        "from the last checkpoint (trainer.resume_mode=auto), on as many ranks as before"
    )


def _nodes() -> list[dict[str, Any]]:
    import ray

    return ray.nodes()


def _actors() -> list[tuple[str, str, bool]]:
    """(address, node, alive) of this job's actors, from Ray's head itself: the public listing needs the dashboard."""
    import ray
    from ray._private.state import actors

    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    found = []
    for actor in actors(job_id=job).values():
        place = actor["Address"]
        if place["NodeID"]:
            found.append((place["IPAddress"], place["NodeID"], actor["State"] == "ALIVE"))
    return found


@contextmanager
def watched_nodes() -> Iterator[NodeWatch | None]:
    """End the block with an error when a node is lost. Ray must be running. On a single node nothing is watched.

    Raises:
        NodeLostError: instead of whatever error the lost node caused in the block.
    """
    if threading.current_thread() is not threading.main_thread() or sum(n["Alive"] for n in _nodes()) < 2:
        yield None
        return

    def interrupt(number: int, frame: Any) -> None:
        # The one exception that ray.get lets through from a signal handler (Ray 2.60).
        if inside:
            raise KeyboardInterrupt

    inside = True
    previous = signal.signal(signal.SIGUSR1, interrupt)
    watch = NodeWatch(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    watch.start()
    try:
        yield watch
    except BaseException as error:
        inside = False
        if not watch.lost and _LOOKS_LOST.search(f"{type(error).__name__} {error}"):
            _wait_for_loss(watch)
        if watch.lost:
            raise NodeLostError(loss(watch.lost)) from error
        raise
    finally:
        inside = False
        watch.stop()
        signal.signal(signal.SIGUSR1, previous)


def _wait_for_loss(watch: NodeWatch) -> None:
    """Wait for Ray to notice a lost node: its actors and connections fail before Ray declares the node dead."""
    end = time.monotonic() + _SEEN_WITHIN_S
    while not watch.lost and time.monotonic() < end:
        with suppress(Exception):
            watch.look()
        time.sleep(0.5)
