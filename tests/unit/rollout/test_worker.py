"""A rollout worker in this process: what one session does wrong is that session's alone."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from tests.unit.training.in_process import SMALL, Queue, Rewards, Worker, right
from verl_ext.rollout import worker as worker_module
from verl_ext.rollout.lengths import PromptTooLong, end_tokens, refuse_long_prompts
from verl_ext.rollout.sessions import GroupRequest
from verl_ext.testing.fake_engine import FakeEngineSettings
from verl_ext.testing.fake_run import FakePrompts, fake_config

ROW, SESSIONS = 1, 4
END = 7


class Odd(Worker):
    """A worker that changes the outputs of session 1."""

    change = staticmethod(lambda outputs: outputs)

    async def _run_session(self, group, session, sampling_params, global_steps):
        outputs = await super()._run_session(group, session, sampling_params, global_steps)
        return self.change(outputs) if session == 1 else outputs


class Noting(Rewards):
    """Notes the extra_info that each answer's reward is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    async def scores(self, batch):
        self.given += list(batch.non_tensor_batch["extra_info"])
        return await super().scores(batch)


@pytest.fixture
def made(monkeypatch):
    queue = Queue(monkeypatch)

    def make(change=None, rewards=None, *overrides):
        made = Odd(fake_config([*SMALL, *overrides]), reward_workers=[rewards or Rewards()])
        made.set_model(FakeEngineSettings())
        made.change, made.queue = change or Odd.change, queue
        return made

    return make


def group(row=ROW):
    return GroupRequest("s1g1", 0, SESSIONS, FakePrompts(8)[row])


def round_of(worker):
    return asyncio.run(worker.generate_round([group()], 1, 60.0))


def emptied(outputs):
    return [outputs[0].model_copy(update={"response_ids": [], "response_mask": []}), *outputs]


FAULTS = [
    ("first output empty", emptied, "output 0 of the session's 2 has no tokens"),
    ("last output empty", lambda outputs: emptied(outputs)[::-1], "output 1 of the session's 2 has no tokens"),
    ("nothing", lambda outputs: [], "the session gave no output"),
    ("None", lambda outputs: [None], "the session gave no output"),
    ("a text", lambda outputs: ["seven", *outputs], "output 0 of the session is a str"),
    ("a short mask", lambda outputs: [outputs[0].model_copy(update={"response_mask": [1]})], "a response_mask of 1"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("change", "said"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_session_whose_outputs_are_no_trajectory_fails_alone(made, change, said):
    worker = made(change)
    replies = round_of(worker)
    assert [reply.failed for reply in replies] == [False, True, False, False] and said in replies[1].error
    assert [reply.correct for reply in replies if not reply.failed] == [right(ROW, session) for session in (0, 2, 3)]
    assert sorted(worker.queue.rows["train"]) == ["s1g1_0_0", "s1g1_2_0", "s1g1_3_0"]


def test_a_session_whose_rows_cannot_be_made_fails_alone(made, monkeypatch):
    build = worker_module.row_fields

    def breaks(worker, output, fields):
        if fields["session_id"] == 1:
            raise ValueError("images that do not fit the prompt")
        return build(worker, output, fields)

    monkeypatch.setattr(worker_module, "row_fields", breaks)
    worker = made()
    replies = round_of(worker)
    assert [reply.failed for reply in replies] == [False, True, False, False] and "do not fit" in replies[1].error
    assert replies[1].response_tokens > 0 and sorted(worker.queue.rows["train"])[1] == "s1g1_2_0"


@pytest.mark.parametrize(("last", "mask", "truncated"), [(END, 1, False), (2, 1, True), (END, 0, True)])
def test_a_response_that_ends_with_its_last_token_is_not_truncated(made, last, mask, truncated):
    """A tool's tokens (mask 0) end nothing."""

    def longest(outputs):
        length = worker.rollout_config.response_length
        ids = (outputs[0].response_ids[:2] + [2] * length)[: length - 1] + [last]
        return [outputs[0].model_copy(update={"response_ids": ids, "response_mask": [1] * (length - 1) + [mask],
                                              "response_logprobs": [-0.1] * length})]  # fmt: skip

    rewards = Noting()
    worker = made(longest, rewards, "data.max_response_length=9")
    worker._end_tokens = frozenset({END})
    assert [reply.truncated for reply in round_of(worker)] == [False, truncated, False, False]
    assert [info["truncated"] for info in rewards.given] == [False, truncated, False, False]


def test_the_tokens_that_end_a_response_are_the_tokenizers_and_the_models():
    configuration = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[3, 4]))
    assert end_tokens(SimpleNamespace(eos_token_id=5), configuration) == {3, 4, 5}
    assert end_tokens(SimpleNamespace(eos_token_id=None), SimpleNamespace(generation_config=None)) == frozenset()
    assert end_tokens(None, None) == frozenset()


def test_the_reward_is_told_training_from_validation(made):
    rewards = Noting()
    worker = made(None, rewards)
    round_of(worker)
    assert [info["validate"] for info in rewards.given] == [False] * SESSIONS
    rewards.given.clear()
    prompt = FakePrompts(8)[ROW] | {"uid": "v", "global_steps": 1, "__rollout_n__": 2}
    asyncio.run(worker._run_prompt(prompt, {}, {"validate": True}))
    assert [info["validate"] for info in rewards.given] == [True] * 2
    assert worker.queue.tags["val"]["v"] == {"status": "finished"}
    assert set(worker.queue.rows["val"]) == {"v_0_0", "v_1_0"}


# ------------------------------------------------ prompts that are too long


class Loop(AgentLoopBase):
    """verl's agent loop, as far as it caps prompts."""

    def __init__(self, longest):
        self.rollout_config = SimpleNamespace(prompt_length=longest)

    async def run(self, *_, **__):
        return self._cap_text_prompt_length(list(range(50)))


@pytest.mark.bad_input
def test_an_agent_loop_refuses_a_prompt_that_verl_would_cut():
    assert asyncio.run(Loop(16).run()) == list(range(34, 50)), "verl's own: its last 16 tokens"
    loop = Loop(16)
    refuse_long_prompts(loop)
    with pytest.raises(PromptTooLong, match="50 tokens, data.max_prompt_length=16; accepted: .*data.truncation=left"):
        asyncio.run(loop.run())
    loop.rollout_config.prompt_length = 50
    assert asyncio.run(loop.run()) == list(range(50))


def test_a_group_whose_prompt_is_too_long_fails_for_that_reason_and_is_named_once(made, caplog):
    worker = made()

    async def refuses(*_):
        raise PromptTooLong("its prompt has 50 tokens")

    worker._run_session = refuses
    logger = logging.getLogger("verl_ext")
    logger.addHandler(caplog.handler)
    try:
        replies = round_of(worker)
    finally:
        logger.removeHandler(caplog.handler)
    assert all(reply.failed and reply.too_long for reply in replies)
    assert caplog.text.count("is left out: its prompt has 50 tokens") == 1
    assert not worker.queue.rows.get("train")


@pytest.mark.parametrize("truncation", ["error", "left", "right"])
def test_only_a_cut_that_was_asked_for_is_made(made, monkeypatch, truncation):
    """`left` is what verl's agent loop does, whatever the setting says."""
    worker = made(None, None, f"data.truncation={truncation}")
    worker.tokenizer = worker.processor = worker.hf_model_type = worker.dataset_cls = None
    worker.tools = []
    monkeypatch.setattr(worker_module.hydra.utils, "instantiate", lambda **_: Loop(16))
    loop = worker._agent_loop("single_turn_agent")
    if truncation == "left":
        assert len(asyncio.run(loop.run())) == 16
    else:
        with pytest.raises(PromptTooLong):
            asyncio.run(loop.run())
