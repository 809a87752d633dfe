"""The rollout server of Hugging Face models, on the tiny policy: its answers, its log-probs, and requests cut off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from verl_ext.rollout.hf_decoder import Request, Sampling, decode
from verl_ext.tiny.policy_store import SHIPPED
from verl_ext.tiny.tokens import END_ID

ENDS = frozenset({END_ID})


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


def request(text: str, most: int = 3, **sampling) -> Request:
    return Request(list(text.encode()), Sampling(**sampling), most)


def alone(model, row: Request) -> list[float]:
    """Log-probs of the row's tokens by one pass over it alone, without padding, cache or warpers of transformers'."""
    with torch.inference_mode():
        logits = model(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1]
    logits = logits / (row.sampling.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_those_of_a_pass_over_each_row_alone(model, temperature):
    torch.manual_seed(0)
    texts = ("1+2=", "9+8+7+6=", "5+5+5=", "9+9+9+9+9+9+9+9=") * 4
    rows = [request(text, temperature=temperature) for text in texts]
    ended: list[Request] = []
    decode(model, rows, ENDS, ended.append)
    assert len(ended) == len(set(map(id, ended))) == len(rows)
    for row in rows:
        assert 1 <= len(row.tokens) <= 3 and END_ID not in row.tokens[:-1]
        assert len(row.tokens) == 3 or row.tokens[-1] == END_ID
        assert row.log_probs == pytest.approx(alone(model, row), abs=2e-4)
    if temperature == 0:
        assert all(row.tokens == rows[place % 4].tokens for place, row in enumerate(rows))


def test_tokens_are_drawn_with_their_probabilities(model):
    torch.manual_seed(1)
    rows = [request("9+8+7=", most=1) for _ in range(4000)]
    decode(model, rows, ENDS, lambda row: None)
    with torch.inference_mode():
        p = model(torch.tensor([rows[0].prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([row.tokens[0] for row in rows]), minlength=len(p))
    likely = p * 4000 > 20
    chi_square = (((counts - p * 4000) ** 2) / (p * 4000))[likely].sum()
    assert likely.sum() >= 2 and chi_square < 2 * likely.sum() + 15


def test_top_k_and_top_p_leave_the_most_probable():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert Sampling(top_k=1).log_probs(logits).exp()[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    kept = logits[0, :2].softmax(-1)
    assert Sampling(top_p=0.8).log_probs(logits).exp()[0].tolist() == pytest.approx([*kept.tolist(), 0.0, 0.0])
    assert Sampling(top_k=-1).log_probs(logits).exp()[0].tolist() == pytest.approx(logits[0].softmax(-1).tolist())


def test_a_parameter_that_would_change_the_answers_is_refused():
    assert Sampling.read({"temperature": 0.5, "logprobs": True, "repetition_penalty": 1.0}) == Sampling(0.5)
    with pytest.raises(ValueError, match="min_p=0.1: .*accepts temperature, top_p, top_k"):
        Sampling.read({"min_p": 0.1})
    with pytest.raises(ValueError, match="repetition_penalty=1.2"):
        Sampling.read({"repetition_penalty": 1.2})


@pytest.fixture
def server(model, monkeypatch):
    """A server without Ray; its model answers slowly where `slow` is set."""
    from verl_ext.rollout import hf_server

    monkeypatch.setattr(hf_server, "omega_conf_to_dataclass", lambda config: config)
    monkeypatch.setattr(hf_server, "get_device_name", lambda: "cpu")
    rollout = SimpleNamespace(
        dtype="float32", max_model_len=24, response_length=3, max_num_seqs=8, free_cache_engine=True
    )
    settings = SimpleNamespace(
        local_path=SHIPPED, hf_config=model.config, trust_remote_code=False, generation_config=None,
        tokenizer=SimpleNamespace(eos_token_id=END_ID),
    )  # fmt: skip
    return hf_server.HFServer(rollout, settings)


async def test_requests_of_both_samplings_and_more_than_a_batch_are_all_answered(server):
    asked = [
        server.generate(list(b"1+2="), {"temperature": t, "logprobs": t == 1.0}, f"{t}-{i}")
        for i in range(20)
        for t in (0.0, 1.0)
    ]
    outputs = await asyncio.gather(*asked)
    greedy, drawn = outputs[::2], outputs[1::2]
    assert all(output.token_ids == greedy[0].token_ids and output.log_probs is None for output in greedy)
    assert all(len(output.log_probs) == len(output.token_ids) for output in drawn)
    assert {output.stop_reason for output in outputs} == {"completed"} and not server._entries


async def test_an_aborted_request_ends_with_what_it_has_and_the_others_go_on(server, monkeypatch):
    forward, steps = server.model.forward, asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(server, "_ends", frozenset())

    def slow(*args, **kwargs):
        loop.call_soon_threadsafe(steps.set)
        import time

        time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(server.model, "forward", slow)
    asked = {n: asyncio.create_task(server.generate([49], {"max_tokens": 20}, n)) for n in "abcdefghij"}
    await steps.wait()
    assert server._waiting == ["i", "j"]
    await server.abort_requests(["b", "j", "unknown"])
    b, j, a = await asked["b"], await asked["j"], await asked["a"]
    assert b.stop_reason == j.stop_reason == "aborted" and j.token_ids == [] and 0 < len(b.token_ids) < 20
    assert a.stop_reason == "completed" and len(a.token_ids) == 20
    assert len((await asked["i"]).token_ids) == 20


async def test_requests_that_come_while_weights_change_wait(server):
    await server.abort_all_requests()
    waiting = asyncio.create_task(server.generate([49], {}, "later"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await server.resume_generation()
    assert (await waiting).stop_reason == "completed"


async def test_new_weights_have_to_be_whole(server):
    weights = {name: weight + 1 for name, weight in server.model.state_dict().items()}
    halves = sorted(weights)
    await server.load_weights({name: weights[name] for name in halves[::2]})
    with pytest.raises(ValueError, match="weights that did not come: model"):
        await server.end_update(3)
    await server.load_weights({name: weights[name] for name in halves[::2]})
    await server.load_weights({name: weights[name] for name in halves[1::2]})
    await server.end_update(3)
    assert server.global_steps == 3
    assert all(torch.equal(weight, weights[name]) for name, weight in server.model.state_dict().items())
    with pytest.raises(KeyError, match="does not have: lora_A"):
        await server.load_weights({"lora_A": torch.zeros(1)})


async def test_what_it_cannot_do_is_refused_by_name(server):
    with pytest.raises(ValueError, match=r"text alone; it was given \['image_data'\]"):
        await server.generate([1], {}, "r", image_data=["picture"])
    with pytest.raises(ValueError, match="24 tokens leaves no room in rollout.max_model_len=24"):
        await server.generate([1] * 24, {}, "r")
    (output,) = await asyncio.gather(server.generate([49] * 23, {}, "r"))
    assert len(output.token_ids) == 1
