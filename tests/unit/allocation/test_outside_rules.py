"""A rule from outside may do anything the interface allows; the ledger adds up, and what it may not do is refused."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, examples
from verl_ext.allocation import Allocator, AllocatorSettings, RoundError, Verdict


class Wanderer(Allocator):
    """Random requests, verdicts and waiting: what any outside rule might do within the interface."""

    Settings = AllocatorSettings

    def __init__(self, seed):
        super().__init__(AllocatorSettings(group_size=6))
        self.random, self.kept_back = np.random.default_rng(seed), []

    def begin_step(self, ctx):
        for group in self.kept_back:
            ctx.resume(group)
        self.kept_back = []

    def ask(self, ctx):
        ctx.admit(int(self.random.integers(0, 4)))
        left, requests = ctx.budget_left, []
        for group in ctx.groups:
            n = int(self.random.integers(0, 1 + max(0, min(left, 6 - group.requested))))
            if n:
                requests.append(ctx.request(group, n))
                left -= n
        return requests

    def tell(self, outcomes, ctx):
        for outcome in outcomes:
            ctx.group(outcome.group).verdict = self.random.choice(np.array(list(Verdict), dtype=object))

    def finish(self, ctx):
        pick = self.random.permutation(len(ctx.groups))[: ctx.target_groups]
        self.batch = {ctx.groups[i].uid for i in pick[::2]}
        return [group for group in ctx.groups if group.uid in self.batch]

    def waiting(self, ctx):
        self.kept_back = [g for g in ctx.groups if g.uid not in self.batch and self.random.random() < 0.4]
        return self.kept_back


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 5), keep=st.none() | st.integers(2, 4))
def test_the_ledger_adds_up_for_random_rules(seed, groups, keep):
    logging.disable(logging.WARNING)
    rates = np.random.default_rng(seed).beta(0.4, 0.4, 400)
    run = Run(
        rates, groups=groups, seed=seed, keep=keep, downsampler="max_variance" if keep else "none",
        failing=0.2, unscorable=0.2,
    )  # fmt: skip
    run.allocator = Wanderer(seed)
    try:
        for step in range(5):
            collected = run.step(step)
            record = run.ledger.step_record(step)
            assert record["waiting"] == sum(group.returned for group in run.allocator.kept_back)
            assert record["issued_total"] == sum(record["fates_total"].values()) + record["waiting"]
            assert record["issued"] == collected.rollouts and record["in_flight"] == 0
    finally:
        logging.disable(logging.NOTSET)


def test_the_selector_sees_every_scored_rollout_once_when_its_group_is_decided():
    run = Run(np.random.default_rng(0).beta(0.4, 0.4, 400), groups=5, seed=3, failing=0.1)
    run.allocator = Wanderer(3)
    seen = {}
    run.selector.observe = lambda row, s, n, size: seen.setdefault(row, []).append((s, n))
    truth = {}
    for step in range(6):
        collected = run.step(step)
        for group in collected.started:
            truth[group.prompt] = [(group.successes, group.trials)]
    for group in collected.waiting:
        del truth[group.prompt]
    assert seen == truth and sum(n for [(_, n)] in truth.values()) > 50


def test_verdicts_reach_the_pool():
    class Judge(Wanderer):
        def tell(self, outcomes, ctx):
            for group in ctx.groups:
                group.verdict = Verdict.RETIRE if group.prompt % 2 else Verdict.DEFER

        def finish(self, ctx):
            self.batch = set()
            return []

        def waiting(self, ctx):
            return []

    run = Run([0.5] * 6, groups=4)
    run.allocator = Judge(0)
    started = {group.prompt for step in range(2) for group in run.step(step).started}
    assert run.pool.metrics()["retired"] == sum(row % 2 for row in started)
    assert run.ledger.rollouts_by_fate["abandoned"] == run.ledger.issued


def test_requests_beyond_the_budget_or_twice_are_refused():
    class Greedy(Wanderer):
        def ask(self, ctx):
            return [ctx.request(group, 6) for group in ctx.admit(9)]

    class Twice(Wanderer):
        def ask(self, ctx):
            return [ctx.request(group, 1) for group in ctx.admit(1) * 2]

    for rule, problem in ((Greedy, "54 rollouts with 12 left"), (Twice, "one request a group and round")):
        run = Run([0.5] * 20, groups=2, rollouts=12)
        run.allocator = rule(0)
        with pytest.raises(RoundError, match=problem):
            run.step(0)
        run.ledger.check()
        assert run.ledger.issued == 0
