"""The client that sends the sessions of a group to one server."""

import asyncio
import random
from types import SimpleNamespace

from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_ext.rollout.balancing import give_back, take_server
from verl_ext.rollout.engine_client import GroupLLMClient


def test_what_verl_hangs_on_its_client_is_kept():
    """The tokenizer, without which traces hold no text."""
    client = LLMServerClient(config=OmegaConf.create({}), load_balancer_handle=object())
    client.tokenizer = object()
    group_client = GroupLLMClient.wrap(client)
    assert type(group_client) is GroupLLMClient and group_client._leases == {}
    assert group_client.tokenizer is client.tokenizer
    assert group_client.config is client.config and group_client._load_balancer is client._load_balancer


def test_a_client_of_another_class_is_left_as_it_is():
    client = FullyAsyncLLMServerClient(config=OmegaConf.create({}))
    assert GroupLLMClient.wrap(client) is client


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


def client_of(server, workers):
    """The client of one of so many workers, and a load balancer with one server."""
    balancer = GlobalRequestLoadBalancer({"s": server})

    def call(function, *args):
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(function(balancer, *args))
        return answer

    rollout = {"name": "vllm", "max_num_seqs": 64, "agent": {"num_workers": workers}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    handle = SimpleNamespace(__ray_call__=Remote(call))
    return GroupLLMClient(config=config, load_balancer_handle=handle), balancer


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
