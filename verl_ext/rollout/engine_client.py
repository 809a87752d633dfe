"""A client that sends all sessions of a group to one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

from verl_ext.allocation import RoundError
from verl_ext.rollout.balancing import give_back, take_server
from verl_ext.rollout.engine_abort import ENGINES, abort_in_engine
from verl_ext.rollout.sessions import PROGRESS


@dataclass(eq=False)
class _Lease:
    """The server of a group."""

    server_id: str
    server: Any
    requests: list[str] = field(default_factory=list)
    """The engine's names of the requests sent to it."""
    waiting: set[asyncio.Task] = field(default_factory=set)
    """Sessions that are not sent yet, since the server has as many requests as it may."""
    aborted: bool = False


class SessionAborted(RuntimeError):
    """A session went on after its group had been aborted."""


_LEASE: ContextVar[_Lease | None] = ContextVar("verl_ext_server_lease", default=None)


class GroupLLMClient(LLMServerClient):
    """Sends all sessions of a group to the server that the load balancer gave for the group.

    One exchange with the (single, shared) load balancer a group instead of two a rollout, and the sessions of a group
    share their prompt in one server's prefix cache. Outside a group it is verl's own client.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases: dict[str, _Lease] = {}
        self._permits: dict[str, asyncio.Semaphore] = {}

    @staticmethod
    def wrap(client: LLMServerClient) -> LLMServerClient:
        """The group client of `client`; a client of another class (a user's own) is left as it is."""
        kinds = {LLMServerClient: GroupLLMClient, FullyAsyncLLMServerClient: GroupAsyncLLMClient}
        if (kind := kinds.get(type(client))) is None:
            return client
        group_client = kind(config=client.config, load_balancer_handle=client._load_balancer)
        # Also what verl hangs on its client: the tokenizer, where traces are to hold text.
        vars(group_client).update(vars(client))
        return group_client

    @asynccontextmanager
    async def group(self, uid: str, sessions: int, global_steps: int) -> AsyncIterator[None]:
        """Tasks created inside go to one server; it is given back on leaving."""
        balancer = self._load_balancer.__ray_call__
        # A group that waits for a later step comes back to other loads and an empty cache.
        lease = self._leases[uid] = _Lease(*await balancer.remote(take_server, f"{uid}@{global_steps}", sessions))
        token = _LEASE.set(lease)
        try:
            yield
        finally:
            _LEASE.reset(token)
            del self._leases[uid]
            balancer.remote(give_back, lease.server_id, sessions)

    @asynccontextmanager
    async def _permit(self, lease: _Lease) -> AsyncIterator[None]:
        """Waits until the server has room for another request.

        Ray lets a server's calls wait above its `max_concurrency`, those that abort requests or wake it up among them.
        This worker's share of that number, less what verl keeps for such calls, is the most that it sends to a server.
        """
        rollout = self.config.actor_rollout_ref.rollout
        if lease.server_id not in self._permits:
            calls = RolloutReplica.max_concurrency.fget(SimpleNamespace(config=rollout)) - CONTROL_METHOD_CONCURRENCY
            self._permits[lease.server_id] = asyncio.Semaphore(max(1, calls // rollout.agent.num_workers))
        lease.waiting.add(task := asyncio.current_task())
        try:
            await self._permits[lease.server_id].acquire()
        finally:
            lease.waiting.discard(task)
        try:
            yield
        finally:
            self._permits[lease.server_id].release()

    async def abort(self, uids: Iterable[str]) -> bool:
        """Have the engines end the requests of these groups, each with what it has generated.

        A request that is on its way to its engine is not known there yet: ask again until the sessions have ended.

        Returns:
            Whether there is a way to do so: `ENGINES` alone are told, and only of requests with names of their own.
        """
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.name not in ENGINES:
            return False
        by_server: dict[str, tuple[Any, list[str]]] = {}
        for lease in filter(None, map(self._leases.get, uids)):
            lease.aborted = True
            for task in list(lease.waiting):
                task.cancel()
            by_server.setdefault(lease.server_id, (lease.server, []))[1].extend(lease.requests)
        told = [(server, ids) for server, ids in by_server.values() if ids]
        if rollout.name == "vllm":
            calls = [server.__ray_call__.remote(abort_in_engine, ids) for server, ids in told]
        else:
            calls = [server.abort_requests.remote(ids) for server, ids in told]
        await asyncio.gather(*calls)
        return True

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        """verl's own, but that a server which is gone ends the round.

        The load balancer goes on sending to it, soonest of all since it is never busy, and it can get no new weights.

        Raises:
            RoundError: the server, or the engine in it, died.
            SessionAborted: the group was aborted; a further turn of it is not begun.
        """
        lease, progress = _LEASE.get(), PROGRESS.get()
        if lease is not None and lease.aborted:
            raise SessionAborted(f"request {request_id}: its group was aborted")
        try:
            async with self._permit(lease) if lease is not None else nullcontext():
                output = await super().generate(request_id, **kwargs)
            if progress is not None:
                progress.prompt_tokens = progress.prompt_tokens or len(kwargs["prompt_ids"])
                progress.response_tokens += len(output.token_ids)
            return output
        except (ray.exceptions.ActorDiedError, ray.exceptions.RayTaskError) as error:
            cause = getattr(error, "cause", error)
            if isinstance(error, ray.exceptions.ActorDiedError) or type(cause).__name__ == "EngineDeadError":
                said = str(cause).strip().partition("\n")[0]
                raise RoundError(f"a rollout server died: {type(cause).__name__}: {said}") from error
            raise

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """Inside a group, the server that the group was given."""
        lease = _LEASE.get()
        if lease is None:
            return await super()._acquire_server(request_id, **extra)
        return lease.server_id, lease.server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Inside a group, nothing: its server is given back when all of the group has ended."""
        if _LEASE.get() is None:
            super()._release_server(server_id, request_id=request_id)

    def _vllm_request_id(self, request_id: str) -> str:
        """The engine's name of a request is kept with its group, so that it can be aborted."""
        name = super()._vllm_request_id(request_id)
        if (lease := _LEASE.get()) is not None:
            lease.requests.append(name)
        return name


class GroupAsyncLLMClient(FullyAsyncLLMServerClient, GroupLLMClient):
    """The group client of verl's asynchronous modes: a request that new weights cut short goes on after them.

    verl's part sends prompt and tokens so far again, through the group's part. So each attempt waits for room in the
    server, also one that the server keeps until the weights are there; and after `abort` there is no other attempt.
    """
