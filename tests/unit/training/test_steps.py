"""Steps of the collector, its rollout worker included: whose rows, whose scores, what is left out and what is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import ray

from tests.unit.training.in_process import Queue, Rewards, collector, right, score
from verl_ext.allocation.groups import Fate
from verl_ext.rollout.engine_client import GroupLLMClient
from verl_ext.rollout.outcomes import OutcomeRule
from verl_ext.rollout.sessions import PROGRESS, GroupRequest, scored_reply
from verl_ext.rollout.worker import AllocatedAgentLoopManager, RoundError
from verl_ext.training.collector import NoUpdate

IN_PARTS = ("recipe=cpu/sara", "allocation.allocator.probe=4", "allocation.allocator.chunk=1")


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def rounds_of(manager, uid):
    return sum(uid in asked for asked in manager.requests)


@pytest.mark.parametrize("fail_share", [0.0, 0.1])
def test_every_row_is_its_own_rollouts_after_three_rounds(queue, fail_share):
    """Prompt, answer, score and correctness under one key, for answers that end in any order, some never."""
    run = collector(*IN_PARTS, fake={"fail_share": fail_share})
    prompt_of = run.backend._prompt
    noted = {}
    forget = run.backend.forget
    run.backend.forget = lambda outcomes: noted.update(prompt_of) or forget(outcomes)
    meta, _ = run.sample(1)
    assert set(queue.rows["train"]) == set(meta.keys) and len(meta.keys) >= 8 * 6
    for key, tag in zip(meta.keys, meta.tags, strict=True):
        uid, session, index = key.split("_")
        row, stored = noted[uid], queue.rows["train"][key]
        row, session = run.prompts.dataset_row[row], int(session)
        assert (stored["uid"], stored["session_id"], index) == (uid, session, "0")
        assert stored["responses"].tolist()[:2] == [1000 + row, session]
        assert str(stored["reward_model"]["ground_truth"]) == str(row)
        assert stored["rm_scores"].tolist() == [*[0.0] * (tag["response_len"] - 1), pytest.approx(score(row, session))]
        assert tag["response_len"] == len(stored["responses"]) and tag["prompt_len"] == len(stored["prompts"])
    trained = {key.split("_")[0] for key in meta.keys}
    assert sum(rounds_of(run.backend.manager, uid) >= 3 for uid in trained) >= 3
    assert bool(run.ledger_record["fates"]["failed"]) == bool(fail_share)


def test_a_group_that_lost_rollouts_is_judged_by_those_that_came_back(queue):
    run = collector("recipe=cpu/grpo", fake={"fail_share": 0.3})
    meta, metrics = run.sample(1)
    fates = run.ledger_record["fates"]
    assert fates["failed"] == metrics["allocation/fate/failed"] > 0
    assert fates["trained"] == len(meta.keys) == 64 - fates["failed"]
    rewards = {}
    for key in meta.keys:
        rewards.setdefault(key.split("_")[0], []).append(float(queue.rows["train"][key]["rm_scores"].sum()))
    assert min(map(len, rewards.values())) < 8
    for uid, scores in rewards.items():
        assert run.statistics[uid].n == len(scores)
        assert run.statistics[uid].mean == pytest.approx(sum(scores) / len(scores))


def test_the_reward_is_told_which_answers_were_cut_off_and_decides_what_they_count_as(queue):
    """Of a group, each answer by its own length; unscored ones are neither trained on nor part of the statistics."""
    told = []

    class Refuses(Rewards):
        async def scores(self, batch):
            results = await super().scores(batch)
            for result, answer, info in zip(
                results, batch.batch["responses"].tolist(), batch.non_tensor_batch["extra_info"], strict=True
            ):
                told.append((sum(token != 0 for token in answer[2:]) + 2, info["truncated"]))
                if info["truncated"]:
                    result["reward_score"] = None
            return results

    run = collector("recipe=cpu/grpo", "data.max_response_length=6", rewards=Refuses())
    meta, _ = run.sample(1)
    assert len(told) == 64 and all(cut == (length >= 6) for length, cut in told)
    fates, cut = run.ledger_record["fates"], sum(cut for _, cut in told)
    assert 0 < cut == fates["unscored"] and fates["trained"] == len(meta.keys) == 64 - cut
    assert sum(statistics.n for statistics in run.statistics.values()) == 64 - cut


def test_a_short_batch_is_trained_and_one_of_nothing_is_skipped_and_counted(queue):
    """Of 9 prompts a third are mixed: 3 groups of the 8 wanted; of 2 prompts that are never mixed, none."""
    few = collector("recipe=cpu/sara", prompts=9)
    meta, metrics = few.sample(1)
    assert metrics["allocation/groups"] == 3 and metrics["allocation/short_by"] == 5
    assert len(meta.keys) == 24 == few.ledger_record["fates"]["trained"] and metrics["allocation/skipped_updates"] == 0
    none = collector("recipe=cpu/sara", prompts=2)
    for step in (1, 2):
        with pytest.raises(NoUpdate) as skipped:
            none.sample(step)
        assert skipped.value.metrics["allocation/skipped_updates"] == step
    assert none.allocation.ledger.rollouts_by_fate[Fate.TRAINED.value] == 0


def test_too_few_rows_for_the_mini_batches_are_skipped_not_trained(queue):
    one = collector("recipe=cpu/sara_pods", "allocation.downsampler.keep=2", "allocation.stop.groups=1", prompts=3)
    one.budget = one.budget.__class__(**(one.budget.__dict__ | {"mini_batches": 3}))
    with pytest.raises(NoUpdate, match="2 rows to train on, fewer than the 3 mini-batches"):
        one.sample(1)
    fates = one.ledger_record["fates"]
    assert fates["skipped"] == 2 and fates["trained"] == 0 and not queue.rows["train"]


def test_versions_of_the_weights_are_updates_made_not_steps(queue, monkeypatch):
    """A step without an update leaves the weights as they were; so do the rounds of a step."""
    run = collector(*IN_PARTS, prompts=96)
    seen, collect = [], run.allocation.collect

    def noted(step, backend, **given):
        seen.append((step, given["policy_version"]))
        return collect(step, backend, **given)

    monkeypatch.setattr(run.allocation, "collect", noted)
    run.sample(1)
    budget, run.budget = run.budget, run.budget.__class__(**(run.budget.__dict__ | {"mini_batches": 1000}))
    with pytest.raises(NoUpdate):
        run.sample(2)
    run.budget = budget
    run.sample(3)
    assert len(run.backend.manager.requests) > 3 * 2
    assert seen == [(1, 0), (2, 1), (3, 1)]


def test_nothing_of_a_step_is_left_on_the_driver_but_counts(queue):
    """What comes back of a rollout is as small for a long answer as for a short one, and nothing of it is kept."""

    def size(tokens):
        output = SimpleNamespace(prompt_ids=[1] * tokens, response_ids=[2] * tokens, extra_fields={}, reward_score=None)
        reply = scored_reply(GroupRequest("a", 0, 1, {}), 0, [output], (1.0, {"acc": True}), 1, OutcomeRule())
        assert len(reply.rows) == 1
        return len(pickle.dumps(reply))

    assert size(30_000) <= size(1) + 32
    run = collector(*IN_PARTS)
    for step in (1, 2):
        run.sample(step)
        assert run.backend._rows == {} and run.backend._prompt == {}


def test_everything_retired_ends_the_run(queue):
    run = collector("recipe=cpu/sara", prompts=9).allocation
    assert not run.finished
    for row in range(8):
        run.pool.retire(row)
    assert not run.finished
    run.pool.retire(8)
    assert run.finished
    waiting, run.ledger.waiting = run.ledger.waiting, 3
    assert not run.finished, "groups that wait can still be trained on"
    run.ledger.waiting = waiting
    run.stop = dataclasses.replace(run.stop, run_rollouts=1)
    run.pool.readmit()
    assert not run.finished
    run.ledger.issued = 1
    assert run.finished


def test_a_prompt_of_validation_that_never_ends_is_given_up(queue):
    """Validation waits until every prompt has its mark: one whose sessions hang gets it at the deadline."""
    run = collector("allocation.val_deadline_s=0.2", fake={"hang_prompt": "'prompt 5'"})
    worker = run.backend.manager.worker
    for row, status in ((4, "finished"), (5, "failure")):
        prompt = {**run.prompts.dataset[row], "uid": f"v{row}", "global_steps": 1, "__rollout_n__": 3}
        asyncio.run(worker._run_prompt(prompt, {}, {"validate": True}))
        assert queue.tags["val"][f"v{row}"] == {"status": status}
    assert sorted(queue.rows["val"]) == [f"v4_{session}_0" for session in range(3)], "as many as the prompt asks for"
    for session in range(3):
        stored = queue.rows["val"][f"v4_{session}_0"]
        assert float(stored["rm_scores"].sum()) == pytest.approx(float(right(4, session)) - session / 100)


def test_sessions_past_their_deadline_are_ended_in_the_engine(queue):
    """An engine goes on with a request whose session was only cancelled; what it generated until then is counted."""

    class Client(GroupLLMClient):
        def __init__(self):
            self._leases, self.told, self.end = {}, [], asyncio.Event()

        @asynccontextmanager
        async def group(self, uid, sessions, global_steps):
            yield

        async def abort(self, uids):
            self.told += uids
            self.end.set()
            return True

    async def hangs(group, session, *_):
        PROGRESS.get().prompt_tokens = 3
        await worker.llm_client.end.wait()
        PROGRESS.get().response_tokens = 5 + session

    async def ask():
        worker.llm_client = Client()
        request = GroupRequest("s1g0", 0, 2, run.prompts.dataset[0])
        return await worker._run_group(request, {}, 1, 0.05)

    run = collector()
    worker = run.backend.manager.worker
    worker._run_session = hangs
    replies = asyncio.run(ask())
    assert worker.llm_client.told == ["s1g0"]
    assert [(reply.failed, reply.prompt_tokens, reply.response_tokens) for reply in replies] == [
        (True, 3, 5), (True, 3, 6)
    ]  # fmt: skip
    assert "did not end within 0.05 s" in replies[0].error


def test_a_worker_that_never_answers_is_an_error_that_names_deadline_and_groups(monkeypatch):
    manager = object.__new__(AllocatedAgentLoopManager)
    manager.agent_loop_workers = [SimpleNamespace(generate_round=SimpleNamespace(remote=lambda *_: object()))]
    monkeypatch.setattr(AllocatedAgentLoopManager, "answers_within", lambda self, deadline_s: 7.0)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([], calls))
    with pytest.raises(RoundError, match=r"within 7 s .*allocation.deadline_s=3 s.*groups waiting: s1g0, s1g1"):
        manager.generate_round([GroupRequest("s1g0", 0, 2, {}), GroupRequest("s1g1", 0, 2, {})], 1, 3.0)


@pytest.mark.parametrize("recipe", ["grpo", "sara"])
def test_prompts_that_the_engine_refuses_do_not_end_a_run(queue, recipe):
    run = collector(f"recipe=cpu/{recipe}", "allocation.give_up_after=2", prompts=48)
    run.backend.manager.worker.refused = refused = frozenset(range(0, 48, 10))
    for step in range(1, 25):
        _, metrics = run.sample(step)
    assert metrics["allocation/prompts_given_up"] == len(refused) == run.allocation.pool.metrics()["retired"]
