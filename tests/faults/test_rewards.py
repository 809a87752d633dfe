"""Rewards that misbehave, through verl's own reward workers: unscored is not wrong, and the rest is unaffected."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import psutil
import pytest

from tests.integration.fake_stack import clear, clear_all, left_in_transfer_queue

pytestmark = [pytest.mark.faults, pytest.mark.ray]

GROUPS, SIZE = 8, 8
RECIPE = (
    "recipe=cpu/grpo", "allocation.stop.groups=8", "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)  # fmt: skip
FAKE = {"logit_mean": 0.0, "logit_std": 1.0, "mean_tokens": 2.0}


@pytest.fixture(scope="module")
def tokens(stack):
    """Tokens of "1" and of "0"."""
    from verl.utils import hf_tokenizer

    tokenizer = hf_tokenizer(stack.config.actor_rollout_ref.model.path)
    one, zero = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "10")
    return {"right_token": one, "wrong_token": zero}


class Step:
    """One step of uniform rollouts on eight prompts, whose reward does what it is told."""

    def __init__(self, stack, tokens, mode) -> None:
        from verl_ext.testing.fake_engine import FakeEngineSettings

        stack.mode_file.write_text(json.dumps(mode))
        self.fake = FakeEngineSettings(**FAKE, **tokens)
        self.collector = stack.collector(*RECIPE, prompts=GROUPS, **FAKE, **tokens)
        self.outcomes = []
        generate = self.collector.backend.generate

        def logged(requests):
            outcomes = generate(requests)
            self.outcomes += outcomes
            return outcomes

        self.collector.backend.generate = logged

    def run(self) -> None:
        """Run it, and check what must hold in any case."""
        began = time.monotonic()
        meta, self.metrics = self.collector.sample(1)
        self.seconds = time.monotonic() - began
        self.record = self.collector.ledger_record
        self.fates = self.record["fates"]
        assert sum(self.fates.values()) == self.collector.ledger_record["issued"] == GROUPS * SIZE
        assert self.fates["trained"] == len(meta.keys) == len(left_in_transfer_queue())
        clear(meta)
        for outcome in self.outcomes:
            if outcome.correct is not None:
                assert outcome.correct == self.engine_says(outcome), "a score that is not the answer's own"

    def engine_says(self, outcome) -> bool:
        """Whether the fake engine's answer was right."""
        from verl_ext.testing.fake_engine import _rng, latent_rate

        prompts = self.collector.prompts
        row = self.collector.backend._prompt_of[outcome.group]
        text = str(prompts.fetch(row)["raw_prompt"])
        _, luck = _rng(self.fake.seed, text, outcome.group, outcome.session).random(2)
        return bool(luck < latent_rate(self.fake, text))

    def fails(self, kind, message) -> float:
        """It stops with this error, and the ledger adds up; returns the seconds."""
        began = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            self.collector.sample(1)
        self.error = str(caught.value)
        ledger = self.collector.allocation.ledger
        ledger.check()
        record = self.record = ledger.step_record(1)
        assert record["issued"] == sum(record["fates"].values()) == GROUPS * SIZE and record["in_flight"] == 0
        clear_all()
        return time.monotonic() - began


@pytest.fixture
def step(stack, tokens, monkeypatch):
    """A step whose reward is in a mode."""

    def make(**mode) -> Step:
        made = Step(stack, tokens, mode)
        backend = made.collector.backend
        backend._prompt_of = {}
        outgoing = backend._outgoing

        def noted(requests):
            backend._prompt_of |= {request.group.uid: request.group.prompt for request in requests}
            return outgoing(requests)

        backend._outgoing = noted
        return made

    yield make
    clear_all()


DROPPED = {
    "raise": "the reward raises",
    "raise_timeout": "the reward raises",  # no reason to replace the worker
    "none": "the reward returns None",
    "nan": "the reward returns NaN",
    "inf": "the reward returns inf",
    "text": "the reward returns a text",
}


@pytest.mark.parametrize("what, row", DROPPED.items(), ids=list(DROPPED))
def test_answers_that_get_no_score_are_dropped_with_a_count(step, fault, what, row):
    run = step(what=what)
    run.run()
    for outcome in run.outcomes:
        assert (outcome.correct is None) == (outcome.response_tokens == 2) and not outcome.failed
    assert run.fates["unscored"] == sum(o.response_tokens == 2 for o in run.outcomes) > 0
    assert run.fates["trained"] == GROUPS * SIZE - run.fates["unscored"] and run.fates["failed"] == 0
    assert run.seconds < 30
    fault.saw(f"{run.fates['unscored']} of {GROUPS * SIZE} unscored, {run.fates['trained']} trained on", run.record)


@pytest.mark.parametrize("what, row", [
    ("bare", "the reward returns a bare float"), ("signs", "the reward returns +1 and -1"),
])  # fmt: skip
def test_plain_numbers_are_read(step, fault, what, row):
    run = step(what=what, all=True)
    run.run()
    assert run.fates["trained"] == GROUPS * SIZE and all(o.correct is not None for o in run.outcomes)
    right = sum(o.correct for o in run.outcomes)
    assert 0 < right < GROUPS * SIZE
    assert {o.score for o in run.outcomes} == ({0.0, 1.0} if what == "bare" else {-1.0, 1.0})
    fault.saw(f"{right} right, {GROUPS * SIZE - right} wrong, as the engine's answers were; none unscored", run.record)


@pytest.mark.parametrize("what, message, row", [
    ("graded", "allocation.outcome.threshold", "the reward returns a graded value"),
    ("unnamed", r"allocation.outcome.key\): keys seen \['score', 'style'\]", "the reward names no correctness"),
])  # fmt: skip
def test_what_cannot_be_read_as_right_or_wrong_stops_the_run(step, fault, what, message, row):
    from verl_ext.rollout.outcomes import OutcomeError

    run = step(what=what, all=True)
    seconds = run.fails(OutcomeError, message)
    fault.saw(f"OutcomeError after {seconds:.1f} s: {run.error[:110]}", run.record)


@pytest.mark.parametrize("what, row", [
    ("hang", "the reward hangs"), ("hold", "the reward hangs and holds its process"),
])  # fmt: skip
def test_an_answer_whose_reward_hangs_is_unscored_and_its_worker_replaced(step, fault, what, row):
    run = step(what=what, prompt="3")
    run.run()
    hung = [o for o in run.outcomes if o.correct is None]
    assert len(hung) == run.fates["unscored"]
    assert 0 < len(hung) < SIZE and len({o.group for o in hung}) == 1 and all(o.response_tokens == 2 for o in hung)
    assert run.fates["trained"] == GROUPS * SIZE - len(hung)
    # The reward works again: on the worker that took the other's place.
    after = step(what="plain")
    after.run()
    assert after.fates["trained"] == GROUPS * SIZE
    fault.saw(
        f"{len(hung)} unscored after {run.seconds:.0f} s, {run.fates['trained']} trained on; the next step whole",
        run.record,
    )


@pytest.mark.row("the reward hangs on every answer")
def test_a_reward_that_never_answers_stops_the_run(step, fault):
    from verl_ext.rollout.reward_calls import MOST_IN_A_ROW, RewardError

    run = step(what="hang", all=True)
    seconds = run.fails(RewardError, f"for {MOST_IN_A_ROW} answers in a row.*allocation.reward_deadline_s=8")
    after = step(what="plain")
    after.run()
    assert after.fates["trained"] == GROUPS * SIZE
    fault.saw(f"RewardError after {seconds:.0f} s: {run.error[:80]}", run.record)


@pytest.mark.row("a reward worker is killed")
def test_a_reward_worker_that_is_killed_is_replaced(step, fault):
    def scoring():
        mine = psutil.Process().children(recursive=True)
        return [p for p in mine if p.is_running() and " ".join(p.cmdline()[:1]).startswith("ray::RewardLoopWorker")]

    run = step(what="slow", all=True)
    killed = []

    def kill():
        time.sleep(1.5)
        for process in scoring():
            process.kill()
            killed.append(process.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    run.run()
    thread.join()
    assert killed
    assert run.fates["trained"] == GROUPS * SIZE and run.fates["unscored"] == 0
    fault.saw(
        f"{len(killed)} killed while scoring; all {GROUPS * SIZE} answers scored after {run.seconds:.0f} s", run.record
    )


def test_the_engines_answers_are_of_two_tokens_often_enough():
    """Or the tests above would inject nothing."""
    lengths = np.random.default_rng(0).geometric(1.0 / FAKE["mean_tokens"], 10_000)
    assert 0.2 < (lengths == 2).mean() < 0.3
