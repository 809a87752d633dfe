"""A client that sends all sessions of a group to one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

_LEASE: ContextVar[tuple[str, Any] | None] = ContextVar("verl_ext_server_lease", default=None)


class GroupLLMClient(LLMServerClient):
    """Sends all sessions of a group to the server that the load balancer gave for the group.

    One exchange with the (single, shared) load balancer a group instead of two a rollout, and the sessions of a group
    share their prompt in one server's prefix cache. Outside a group it is verl's own client.
    """

    @classmethod
    def wrap(cls, client: LLMServerClient) -> LLMServerClient:
        """The group client of `client`; a client of another class (async modes, a user's own) is left as it is."""
        if type(client) is not LLMServerClient:
            return client
        return cls(config=client.config, load_balancer_handle=client._load_balancer)

    @asynccontextmanager
    async def group(self, uid: str) -> AsyncIterator[None]:
        """Tasks created inside go to one server; it is given back on leaving."""
        lease = await super()._acquire_server(uid)
        token = _LEASE.set(lease)
        try:
            yield
        finally:
            _LEASE.reset(token)
            super()._release_server(lease[0], request_id=uid)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        lease = _LEASE.get()
        return lease if lease is not None else await super()._acquire_server(request_id, **extra)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if _LEASE.get() is None:
            super()._release_server(server_id, request_id=request_id)
