"""What runs inside verl's vLLM server to abort single requests; imports nothing, so that it loads there at once."""

from __future__ import annotations

import asyncio
from typing import Any

_under_way: set[asyncio.Future] = set()  # the event loop keeps no hold of its tasks


def abort_in_engine(server: Any, request_ids: list[str]) -> None:
    """The engine ends these requests, each with an output of what it has generated; it passes over unknown ones.

    verl 0.9.1's own `abort_request` looks a request up by the name it was sent with, which vLLM 0.28 keeps under a name
    of its own, and so finds none; `AsyncLLM.abort` knows both.
    """
    task = asyncio.ensure_future(server.engine.abort(request_ids))
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
