# SPDX-License-Identifier: Apache-2.0
"""A clean stop on SIGTERM: the process that was started asks the trainer, an actor, which ends after its step.

The two speak through the key-value store of Ray's head, which the trainer's node can reach whatever files it sees.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

_NAMESPACE = b"verl_ext"
_PATIENCE_S = 5.0


class StopRequest:
    """Whether a stop was asked for, and whether the trainer would see it; one of each a Ray job."""

    def __init__(self) -> None:
        import ray

        job = ray.get_runtime_context().get_job_id()
        self._asks, self._asked = f"asks/{job}".encode(), f"asked/{job}".encode()

    def trainer_asks(self) -> None:
        """From here on the trainer asks after every step."""
        self._put(self._asks)

    @property
    def is_asked_for(self) -> bool:
        """Whether the trainer is in its loop."""
        return self._has(self._asks)

    def ask(self) -> None:
        """Ask the trainer to end after its step."""
        self._put(self._asked)

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._has(self._asked)

    def _put(self, key: bytes) -> None:
        _store()._internal_kv_put(key, b"1", overwrite=True, namespace=_NAMESPACE)

    def _has(self, key: bytes) -> bool:
        return _store()._internal_kv_exists(key, namespace=_NAMESPACE)


def _store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def ask_trainer_to_stop() -> bool:
    """Ask, from a signal handler; returns whether there is a cluster to ask.

    The asking is done by a thread, since a handler may run inside a call of Ray. Where no step is being made yet, or
    Ray does not answer, the thread sends SIGTERM again, and the second one ends the run at once.
    """
    import sys

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    done = threading.Event()

    def ask() -> None:
        try:
            request = StopRequest()
            if request.is_asked_for:
                request.ask()
                done.set()
        except Exception as error:
            print(f"verl_ext: the trainer could not be asked to stop: {error!r}", flush=True)

    def see_to_it() -> None:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_PATIENCE_S)
        if done.is_set():
            print("verl_ext: SIGTERM: the run ends after this step; a second SIGTERM ends it at once", flush=True)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=see_to_it, daemon=True).start()
    return True
