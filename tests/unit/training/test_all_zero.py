"""Rewards that are all zero are warned of with sample answers; what is unscored is counted by name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from verl_ext.rollout.outcomes import OutcomeRule
from verl_ext.rollout.sessions import GroupRequest, SessionReply, scored_reply
from verl_ext.training import rollout_backend as backend_module
from verl_ext.training.all_zero import AllZeroWatch, NoGradientWatch, Sample, StepTally
from verl_ext.training.collector import Collector
from verl_ext.training.rollout_backend import TransferQueueBackend


def reply(uid="a", session=0, correct=False, **fields):
    score = None if correct is None else float(correct)
    rows = [] if correct is None else [(f"{uid}_{session}_0", {})]
    return SessionReply(uid, session, correct=correct, score=score, rows=rows, **fields)


def tally(*replies):
    result = StepTally()
    for one in replies:
        result.add(one)
    return result


ZERO, RIGHT = tally(reply()), tally(reply(), reply(correct=True))


def test_warns_after_n_steps_and_then_after_twice_as_many():
    watch = AllZeroWatch(3)
    assert [step for step in range(1, 25) if watch.is_due(ZERO)] == [3, 6, 12, 24]


def test_one_right_answer_starts_the_count_anew():
    watch = AllZeroWatch(2)
    steps = [ZERO, RIGHT, ZERO, ZERO, ZERO, RIGHT, ZERO, ZERO]
    assert [watch.is_due(step) for step in steps] == [False, False, False, True, False, False, False, True]


def test_unscored_steps_count_and_steps_without_an_answer_do_not():
    watch = AllZeroWatch(2)
    unscored = tally(reply(correct=None, error="deadline"))
    nothing = tally(reply(correct=None, failed=True), reply(correct=None, aborted=True))
    assert [watch.is_due(step) for step in (unscored, nothing, unscored)] == [False, False, True]
    assert not any(AllZeroWatch(None).is_due(ZERO) for _ in range(100))


def test_what_is_unscored_is_counted_by_name():
    counted = tally(
        reply(correct=None, error="deadline"),
        reply(correct=None, error="deadline"),
        reply(correct=None),
        reply(correct=None, failed=True, error="the session gave no tokens"),
        reply(correct=True),
    )
    assert counted.metrics() == {"unscored/deadline": 2.0, "unscored/no_score": 1.0}
    assert (counted.right, counted.wrong) == (1, 0)


@pytest.mark.parametrize(
    ("scored", "error"),
    [
        ((None, {"acc": None, "unscored": "memory"}), "memory"),
        ((None, {}), "no_score"),
        ((float("nan"), {"acc": 1.0}), "score_is_nan"),
        ((1.0, {"acc": [1]}), "acc_is_list"),
        ((None, {"unscored": "took too long: 3 s"}), "took_too_long_3_s"),
        ((None, "no dictionary"), "no_score"),
        ((0.0, {"acc": False, "unscored": None}), ""),
    ],
)
def test_a_reply_carries_the_rewards_own_word(scored, error):
    output = SimpleNamespace(prompt_ids=[1], response_ids=[2], extra_fields={}, reward_score=None)
    answer = scored_reply(GroupRequest("a", 0, 1, {}), 0, [output], scored, 1, OutcomeRule())
    assert answer.error == error and (answer.correct is None) == bool(error)


def test_samples_are_of_different_groups():
    counted = tally(reply("a", 0, True), reply("a", 1), reply("a", 2), reply("b", 5), reply("c", 0))
    assert [(one.uid, one.session) for one in counted.kept["wrong"]] == [("a", 1), ("b", 5)]
    assert [(one.uid, one.session) for one in counted.kept["right"]] == [("a", 0)] and not counted.kept["unscored"]


def test_the_message_shows_the_answers_end_on_one_line_and_is_bounded():
    watch = AllZeroWatch(1)
    step = tally(reply(), reply(correct=None, error="deadline"))
    assert watch.is_due(step)
    hostile = "x" * 100_000 + "\n\x1b[2J the answer is 34"
    text = watch.message(step, [Sample(hostile, hostile, "34", {"acc": False, "pred": "[INVALID]"})])
    assert "in 1 steps in a row" in text and "1 were wrong and 1 unscored (1 deadline)" in text
    assert "the answer is 34'" in text and "expected '34'" in text and "[INVALID]" in text
    assert "\x1b" not in text and len(text) < 2000 and len(text.splitlines()) == 4


class Prompts:
    dataset = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens))))

    def fetch(self, row):
        content = [{"role": "system", "content": "think"}, {"role": "user", "content": f"sum {row}"}]
        return {"raw_prompt": content, "reward_model": {"ground_truth": str(row)}}


@pytest.fixture
def collector(monkeypatch):
    """The part of a collector that watches rewards, over a backend whose rows are given here."""
    stored = {"a_0_0": "Answer 3", "b_0_0": "Answer 4"}

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id == "train" and select_fields == ["responses", "extra_fields"]
        rows = [torch.tensor([*map(ord, stored[key])]) for key in keys]
        tokens = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return {"responses": tokens, "extra_fields": [{"reward_extra_info": {"pred": "[INVALID]"}} for _ in keys]}

    monkeypatch.setattr(backend_module.tq, "kv_batch_get", kv_batch_get)
    collector = object.__new__(Collector)
    collector.all_zero, collector.no_gradient = AllZeroWatch(2), NoGradientWatch(2)
    collector.settings = SimpleNamespace(answers=False)
    collector.backend = TransferQueueBackend(Prompts(), 1.0)
    collector.backend.manager = SimpleNamespace(generate_round=lambda groups, step, deadline: collector.replies)

    def step(number, replies, no_gradient=True):
        collector.replies = replies
        collector.backend.begin_step(number)
        groups = [SimpleNamespace(uid=uid, prompt=row) for row, uid in enumerate("ab")]
        collector.backend.generate([SimpleNamespace(group=group, first=0, n=1) for group in groups])
        collector._watch_rewards(no_gradient)

    collector.step = step
    return collector


def test_the_collector_warns_with_what_is_in_the_queue(collector, caplog):
    caplog.set_level(logging.WARNING, logger="verl_ext.training.collector")
    wrong = [reply("a"), reply("b")]
    collector.step(1, wrong)
    assert not caplog.records
    collector.step(2, wrong)
    [record] = caplog.records
    text = record.getMessage()
    for part in ("2 steps in a row", "'sum 0'", "'Answer 3'", "'sum 1'", "'Answer 4'", "expected '1'", "[INVALID]"):
        assert part in text
    collector.step(3, [reply("a"), reply("b", correct=True)])
    collector.step(4, wrong)
    assert len(caplog.records) == 1


def test_answers_of_each_verdict_are_kept_for_people(collector, monkeypatch):
    collector.settings.answers = True
    lost = reply("b", correct=None, error="deadline", answer=[*map(ord, "x" * 3000 + "no end")])
    collector.step(1, [reply("a", correct=True), lost])
    right, unscored = (answer.record(1) for answer in collector.answers)
    assert right == {"step": 1, "verdict": "right", "prompt": "sum 0", "answer": "Answer 3", "truth": "'0'",
                     "reward": "{'pred': '[INVALID]'}"}  # fmt: skip
    assert (unscored["verdict"], unscored["reward"]) == ("unscored", "'deadline'")
    assert len(unscored["answer"]) == 2000 and unscored["answer"].endswith("xxno end")
    collector.step(2, [reply("a", correct=None, failed=True), reply("b", correct=None, failed=True)])
    assert collector.answers == []


def test_a_step_ends_also_where_no_sample_can_be_read(collector, caplog, monkeypatch):
    def broken(**_):
        raise RuntimeError("no such key")

    monkeypatch.setattr(backend_module.tq, "kv_batch_get", broken)
    for number in (1, 2):
        collector.step(number, [reply("a"), reply("b")])
    assert ["no sample answers" in r.getMessage() or "2 steps in a row" in r.getMessage() for r in caplog.records] == [
        True,
        True,
    ]


def test_steps_whose_right_answers_teach_nothing_are_warned_of_in_the_words_of_the_policy(collector, caplog):
    caplog.set_level(logging.WARNING, logger="verl_ext.training.collector")
    right = [reply("a", correct=True), reply("b", correct=True)]
    for number in range(1, 5):
        collector.step(number, right)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("no gradient in" in text and "every answer was right" in text for text in messages)
    assert "2 steps in a row" in messages[0] and "4 steps in a row" in messages[1]
    # A mixed step starts the count anew; groups that are right or wrong throughout teach nothing together, either.
    collector.step(5, [reply("a"), reply("b", correct=True)], no_gradient=False)
    collector.step(6, [reply("a"), reply("b", correct=True)])
    assert len(caplog.records) == 2
    collector.step(7, [reply("a"), reply("b", correct=True)])
    assert "all answers to a prompt scored alike (1 right, 1 wrong)" in caplog.records[-1].getMessage()


def test_prompts_that_are_too_long_are_counted_once_a_prompt():
    long = {"correct": None, "failed": True, "too_long": True}
    counted = tally(*(reply(uid, session, **long) for uid in "ab" for session in (0, 1)))
    assert counted.metrics() == {"prompts_too_long": 2.0}
