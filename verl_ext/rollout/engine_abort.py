"""What runs inside verl's rollout servers to abort single requests; imports nothing, so that it loads there at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

ENGINES = ("vllm", "hf")
"""Rollout backends that can be told to end single requests."""

_under_way: set[Future] = set()  # the event loop keeps no hold of its tasks


def abort_in_engine(server: Any, request_ids: list[str]) -> None:
    """The engine ends these requests, each with an output of what it has generated; it passes over unknown ones.

    verl 0.9.1's own `abort_request` looks a request up by the name it was sent with, which vLLM 0.28 keeps under a name
    of its own, and so finds none; `AsyncLLM.abort` knows both. Ray calls this outside of the event loop that the engine
    lives in, which the engine's own task knows.
    """
    handler = server.engine.output_handler
    if handler is None:
        return  # it has had no request yet
    call = asyncio.run_coroutine_threadsafe(server.engine.abort(request_ids), handler.get_loop())
    _under_way.add(call)
    call.add_done_callback(_under_way.discard)
