"""What aborting single requests stands on in Ray, verl and vLLM."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

pytest.importorskip("verl.trainer.ppo.v1.trainer_base")

from verl_ext.rollout.engine_abort import abort_in_engine  # noqa: E402
from verl_ext.rollout.engine_client import GroupLLMClient, SessionAborted  # noqa: E402
from verl_ext.rollout.sessions import PROGRESS, Progress  # noqa: E402


def test_vllm_aborts_by_the_name_a_request_was_sent_with():
    from vllm.v1.engine.async_llm import AsyncLLM

    parameters = inspect.signature(AsyncLLM.abort).parameters
    assert list(parameters) == ["self", "request_id", "internal"] and parameters["internal"].default is False
    assert inspect.iscoroutinefunction(AsyncLLM.abort)
    assert "self.output_handler: asyncio.Task | None" in inspect.getsource(AsyncLLM)


def test_verls_own_abort_still_looks_requests_up_by_that_name():
    """When verl mends this, its method can be called instead of ours."""
    import verl

    source = (Path(verl.__file__).parent / "workers/rollout/vllm_rollout/vllm_async_server.py").read_text()
    assert "request_states.get(request_id)" in source
    assert "self.engine.output_processor.abort_requests([request_id])" in source
    assert 'stop_reason = "aborted"' in source, "an aborted request ends with what it has generated"
    assert "request_id=request_id" in source


class Engine:
    def __init__(self):
        self.ended = []
        self.output_handler = asyncio.current_task()

    async def abort(self, request_ids):
        await asyncio.sleep(0)
        self.ended += request_ids


class Server:
    """Stands for a handle of verl's server: its `generate` runs until the engine is told."""

    def __init__(self):
        self.engine, self.names = Engine(), []
        outer = self

        class Generate:
            async def remote(self, request_id, **kwargs):
                from verl.workers.rollout.replica import TokenOutput

                outer.names.append(request_id)
                tokens = 0
                while request_id not in outer.engine.ended:
                    await asyncio.sleep(0.001)
                    tokens += 1
                return TokenOutput(token_ids=[7] * tokens, stop_reason="aborted")

        class Call:
            async def remote(self, function, *args):
                await asyncio.to_thread(function, outer, *args)  # as Ray does: outside of the event loop

        self.generate = Generate()
        self.__ray_call__ = Call()


class Balancer:
    """verl's load balancer with one server, called as Ray does."""

    def __init__(self, server):
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        self.inner = GlobalRequestLoadBalancer({"one": server})
        self.__ray_call__ = self

    def remote(self, function, *args):
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(function(self.inner, *args))
        return answer


@pytest.fixture
async def client():
    from omegaconf import OmegaConf

    server = Server()
    rollout = {"name": "vllm", "max_num_seqs": 64, "agent": {"num_workers": 1}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    made = GroupLLMClient(config=config, load_balancer_handle=Balancer(server))
    made.server = server
    return made


async def session(client, progress):
    PROGRESS.set(progress)
    return await client.generate("r", prompt_ids=[1, 2, 3], sampling_params={})


async def test_the_client_ends_the_requests_of_a_group_and_of_no_other(client):
    def begin(progress):
        return [asyncio.create_task(session(client, p)) for p in progress]

    one, other = [Progress(), Progress()], [Progress()]
    async with client.group("a", 2, 1):
        tasks = begin(one)
        async with client.group("b", 1, 1):
            rest = begin(other)
            await asyncio.sleep(0.02)
            assert await client.abort(["a"])
            await asyncio.wait(tasks, timeout=5)
            assert all(task.done() for task in tasks) and not any(task.done() for task in rest)
            assert all(p.prompt_tokens == 3 and p.response_tokens > 0 for p in one)
            assert await client.abort(["a", "b", "unknown"])
            await asyncio.wait(rest, timeout=5)
        with pytest.raises(SessionAborted):
            await session(client, Progress())
    assert sorted(client.server.engine.ended) == sorted([*client.server.names, *client.server.names[:2]])
    assert len(client.server.names) == 3, "no turn is begun after the abort"


async def test_an_engine_that_is_not_vllm_is_not_told(client):
    client.config.actor_rollout_ref.rollout.name = "sglang"
    assert not await client.abort(["a"])


async def test_the_abort_runs_to_its_end_inside_the_server():
    server = Server()
    await asyncio.to_thread(abort_in_engine, server, ["x"])
    await asyncio.sleep(0.1)
    assert server.engine.ended == ["x"]


def test_what_verl_keeps_for_control_calls_is_what_the_client_leaves():
    from types import SimpleNamespace

    from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

    def calls(max_num_seqs):
        return RolloutReplica.max_concurrency.fget(SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs)))

    assert calls(4096) - CONTROL_METHOD_CONCURRENCY == 4096 and calls(64) == 1000


def test_ray_runs_a_function_on_an_actor():
    import ray

    assert "fn(self, *args, **kwargs)" in inspect.getsource(inspect.getmodule(ray.actor))
    assert "__ray_call__" in inspect.getsource(ray.actor)
