"""What runs inside verl's load balancer to count a group by its sessions; imports nothing, so that it loads at once."""

from __future__ import annotations

from typing import Any


def take_server(balancer: Any, key: str, sessions: int) -> tuple[str, Any]:
    """Runs inside verl's load balancer, which counts a request as one: the server for a group, counted by its sessions.

    A key's earlier server, which may still have the prompt in its cache, is kept only where it has no more to do than
    the least loaded one would have with these sessions: reading a prompt again takes less time than waiting.
    """
    loads, before = balancer._inflight_requests, balancer._request_id_to_server.get(key)
    if before in loads and loads[before] > min(loads.values()) + sessions:
        del balancer._request_id_to_server[key]
    for _ in range(sessions):
        server = balancer.acquire_server(key)
    return server


def give_back(balancer: Any, server_id: str, sessions: int) -> None:
    """Runs inside verl's load balancer: so many sessions of a server have ended."""
    for _ in range(sessions):
        balancer.release_server(server_id)
