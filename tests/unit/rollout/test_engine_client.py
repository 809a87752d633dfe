"""The client that sends the sessions of a group to one server."""

import asyncio
import random
from types import SimpleNamespace

from omegaconf import OmegaConf
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_ext.rollout.balancing import give_back, take_server
from verl_ext.rollout.engine_client import GroupAsyncLLMClient, GroupLLMClient, SessionAborted
from verl_ext.rollout.sessions import PROGRESS, Progress


def test_what_verl_hangs_on_its_client_is_kept():
    """The tokenizer, without which traces hold no text."""
    client = LLMServerClient(config=OmegaConf.create({}), load_balancer_handle=object())
    client.tokenizer = object()
    group_client = GroupLLMClient.wrap(client)
    assert type(group_client) is GroupLLMClient and group_client._leases == {}
    assert group_client.tokenizer is client.tokenizer
    assert group_client.config is client.config and group_client._load_balancer is client._load_balancer


def test_a_client_of_another_class_is_left_as_it_is():
    class Own(LLMServerClient):
        pass

    client = Own(config=OmegaConf.create({}))
    assert GroupLLMClient.wrap(client) is client


def test_the_client_of_the_asynchronous_modes_has_one_of_its_own():
    client = FullyAsyncLLMServerClient(config=OmegaConf.create({}), load_balancer_handle=object(), only_hybrid=True)
    group_client = GroupLLMClient.wrap(client)
    assert type(group_client) is GroupAsyncLLMClient and group_client._only_hybrid
    assert group_client._load_balancer is client._load_balancer and group_client._leases == {}


SERVERS = 64


def sessions_by_server(waves, weighted):
    """Sessions that each server gets in each wave; a wave is [(key, sessions)], and all of it ends before the next."""
    balancer = GlobalRequestLoadBalancer({f"s{i}": i for i in range(SERVERS)})
    for wave in waves:
        load = dict.fromkeys(balancer._servers, 0)
        taken = []
        for key, n in wave:
            server_id, _ = take_server(balancer, key, n) if weighted else balancer.acquire_server(key)
            load[server_id] += n
            taken.append((server_id, n if weighted else 1))
        for server_id, n in taken:
            give_back(balancer, server_id, n)
        assert set(balancer._inflight_requests.values()) == {0}
        yield list(load.values())


def most_over_mean(load):
    return max(load) * len(load) / sum(load)


def test_groups_of_every_size_spread_over_the_servers_by_their_sessions():
    random.seed(0)
    waves = [[(f"g{i}", random.choice([4, 8, 48])) for i in range(20 * SERVERS)]]
    (load,), (as_verl,) = sessions_by_server(waves, True), sessions_by_server(waves, False)
    assert most_over_mean(load) < 1.15 < most_over_mean(as_verl)


def test_top_ups_do_not_all_go_where_their_probes_were():
    """SARA's second round is a third of the first one's groups: as they fell, some servers have twice their share."""
    random.seed(0)
    probes = [(f"g{i}@1", 4) for i in range(12 * SERVERS)]
    waves = [probes, random.sample(probes, 4 * SERVERS)]
    _, top_ups = sessions_by_server(waves, True)
    _, as_verl = sessions_by_server(waves, False)
    assert most_over_mean(top_ups) < 1.3 and most_over_mean(as_verl) > 1.8


def test_a_group_stays_with_its_server_where_that_is_no_busier():
    balancer = GlobalRequestLoadBalancer({"a": 1, "b": 2})
    first, _ = take_server(balancer, "g@1", 4)
    other, _ = take_server(balancer, "h@1", 4)
    give_back(balancer, first, 4)
    give_back(balancer, other, 4)
    assert {take_server(balancer, "g@1", 4)[0] for _ in range(2)} == {first}
    assert take_server(balancer, "g@1", 4)[0] == other  # eight sessions more than the other has


class Remote:
    """A method of an actor, here in this process."""

    def __init__(self, call):
        self.remote = call


class Server:
    """A server that answers when it is told to, and keeps the number of requests that it had at once."""

    def __init__(self):
        self.free, self.now, self.most = asyncio.Event(), 0, 0
        self.generate = Remote(self._generate)
        self.__ray_call__ = Remote(self._call)

    async def _generate(self, **kwargs):
        self.now += 1
        self.most = max(self.most, self.now)
        await self.free.wait()
        self.now -= 1
        return SimpleNamespace(token_ids=[1], extra_fields={})

    async def _call(self, function, *args):
        return None


def client_of(server, workers, kind=GroupLLMClient):
    """The client of one of so many workers, and a load balancer with one server."""
    balancer = GlobalRequestLoadBalancer({"s": server})

    def call(function, *args):
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(function(balancer, *args))
        return answer

    rollout = {"name": "vllm", "max_num_seqs": 64, "agent": {"num_workers": workers}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    handle = SimpleNamespace(__ray_call__=Remote(call))
    return kind(config=config, load_balancer_handle=handle), balancer


async def test_a_server_is_never_sent_more_than_leaves_room_for_control_calls():
    server = Server()
    client, balancer = client_of(server, workers=123)  # (1000 - 16) // 123 = 8 each
    async with client.group("g", 20, 1):
        sent = [asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={})) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert (server.now, balancer._inflight_requests["s"]) == (8, 20)
        server.free.set()
        await asyncio.gather(*sent)
    assert server.most == 8 and balancer._inflight_requests["s"] == 0


async def test_sessions_that_are_not_sent_yet_end_at_once_when_their_group_is_aborted():
    server = Server()
    client, _ = client_of(server, workers=123)
    async with client.group("g", 20, 1):
        sent = [asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={})) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert await client.abort(["g"])
        await asyncio.sleep(0.05)
        assert sum(task.cancelled() for task in sent) == 12 and server.now == 8
        server.free.set()
        await asyncio.gather(*sent, return_exceptions=True)
    assert client._permits["s"]._value == 8


class SyncedServer:
    """A server whose weights become those of version 2 while a request is answered: the request ends with what it has.

    Later requests are kept until the weights are there, as verl's server does.
    """

    def __init__(self):
        self.version, self.now, self.most, self.prompts = 1, 0, 0, []
        self.paused, self.resumed, self.generate = asyncio.Event(), asyncio.Event(), Remote(self._generate)
        self.__ray_call__ = Remote(self._call)

    async def _generate(self, prompt_ids, sampling_params, **kwargs):
        self.now, self.most = self.now + 1, max(self.most, self.now + 1)
        self.prompts.append((list(prompt_ids), sampling_params["max_tokens"]))
        try:
            if not self.paused.is_set():
                await self.paused.wait()
                return self._output([7, 7], "aborted")
            await self.resumed.wait()
            return self._output([8], "completed")
        finally:
            self.now -= 1

    def _output(self, tokens, reason):
        return TokenOutput(token_ids=tokens, stop_reason=reason, extra_fields={"global_steps": self.version})

    async def _call(self, function, *args):
        return None

    def sync(self):
        self.version = 2
        self.resumed.set()


async def test_an_answer_goes_on_after_new_weights_and_waits_within_the_bound(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(llm_server.asyncio, "sleep", lambda seconds: sleep(0 if seconds == 1 else seconds))
    server = SyncedServer()
    client, balancer = client_of(server, 123, GroupAsyncLLMClient)
    counted = Progress()
    PROGRESS.set(counted)

    def ask():
        return asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 5}))

    async with client.group("g", 20, 1):
        sent = [ask() for _ in range(20)]
        await sleep(0.05)
        server.paused.set()
        await sleep(0.05)
        assert server.now == 8, "those that wait for the weights leave room for the call that brings them"
        server.sync()
        outputs = await asyncio.gather(*sent)
    assert server.most == 8
    spliced = [output for output in outputs if output.token_ids == [7, 7, 8]]
    assert len(spliced) == 8 and all(output.token_ids == [8] for output in outputs if output not in spliced)
    assert {(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in spliced} == {(1, 2)}
    assert server.prompts.count(([1, 7, 7], 3)) == 8, "the tokens so far are the prompt's, and count against its limit"
    assert (counted.prompt_tokens, counted.response_tokens) == (1, 8 * 3 + 12)


async def test_an_aborted_group_is_not_asked_for_again_after_new_weights(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(llm_server.asyncio, "sleep", lambda seconds: sleep(0 if seconds == 1 else seconds))
    server = SyncedServer()
    client, _ = client_of(server, 1, GroupAsyncLLMClient)
    async with client.group("g", 4, 1):
        sent = [
            asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 5}))
            for _ in range(4)
        ]
        await sleep(0.05)
        await client.abort(["g"])
        server.paused.set()
        ended = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(error) for error in ended] == [SessionAborted] * 4 and len(server.prompts) == 4
