"""The client that sends the sessions of a group to one server."""

from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

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
