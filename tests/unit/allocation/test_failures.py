"""Prompts that the engine always refuses cost their group, never the run; an engine that is gone ends it."""

import logging

import numpy as np
import pytest

from verl_ext.allocation import Outcome, RoundError, Verdict, make_allocator
from verl_ext.allocation.registry import allocators
from verl_ext.testing import Trial, same

SIZE, GROUPS = 8, 4
SETTINGS = {
    "pilot_commit": {"n_pilot": 4},
    "knapsack": {"most": 16},
    "dynamic_sampling": {"refill": "one_for_one"},
    "reinforce_ada": {"chunk": 2},
}
RULES = [
    *((name, SETTINGS.get(name, {})) for name in allocators.names()),
    ("dynamic_sampling", {"gen_multiple": "auto", "max_staleness": 1}),
    ("sara", {"chunk": 1, "max_staleness": 1, "audit_fraction": 0.2}),
    ("sara", {"commit": "stop"}),
]
RATES = np.random.default_rng(3).beta(0.7, 0.7, 120)


def trial(name, given, **more):
    rule = make_allocator(name, group_size=SIZE, **given)
    return Trial(RATES, **{"allocator": rule, "groups": GROUPS, "seed": 4, "refusing": 0.1, **more})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "given"), RULES)
def test_no_run_is_ended_by_a_tenth_of_refused_prompts(name, given, streaming):
    if streaming and make_allocator(name, group_size=SIZE, **given).needs_rounds:
        pytest.skip("made for whole rounds")
    run = trial(name, given, streaming=streaming, failing=0.02)
    refused = set(np.flatnonzero(run.backend.refused).tolist())
    assert 6 <= len(refused) <= 18
    trained = 0
    for number in range(1, 201):
        collected = run.step(number)
        trained += len(collected.groups)
        asked = [group for group in collected.started if group.prompt in refused and group.requested > 1]
        assert all(group.requests <= 2 and group.verdict in (Verdict.DEFER, Verdict.RETIRE) for group in asked)
        assert collected.metrics["groups_given_up"] >= len(asked)
    assert trained > 200
    out = {row for row in range(len(RATES)) if run.pool._retired[row]}
    assert refused <= out, "asked for in three epochs or more, and still in the pool"
    assert collected.metrics["prompts_given_up"] == len(refused)
    assert not any(group.given_up for group in collected.started)


def test_a_prompt_is_named_once_deferred_and_out_after_so_many_times(caplog):
    run = trial("uniform", {}, groups=40)
    run.failures.give_up_after = 2
    refused = np.flatnonzero(run.backend.refused)
    with caplog.at_level(logging.WARNING, "verl_ext.allocation.failures"):
        for number in range(1, 4):
            run.step(number)
            assert run.pool.epoch == 0
    assert len(caplog.records) == len(refused)
    assert f"prompt prompt-{refused[0]} " in caplog.text and "the engine refuses it" in caplog.text
    assert run.pool._deferred.sum() == len(refused) and not run.pool._retired.any()
    for number in range(4, 8):
        run.step(number)
    assert len(caplog.records) == len(refused)
    assert set(np.flatnonzero(run.pool._retired)) == set(refused) and run.failures.out == len(refused)


def test_a_prompt_that_comes_back_in_between_begins_anew():
    run = trial("uniform", {}, groups=60)
    run.failures.give_up_after = 2
    (row, *_) = np.flatnonzero(run.backend.refused)
    visits = 0
    for number in range(1, 12):
        run.backend.refused[row] = visits != 1  # the second time it answers
        visits += any(group.prompt == row for group in run.step(number).started)
        assert bool(run.pool._retired[row]) == (visits == 4)
    assert visits == 4


def test_an_engine_that_is_gone_ends_the_run_with_its_own_words():
    run = trial("sara", {}, refusing=0.0)
    run.step(1)
    calls = 0

    class Gone:
        def generate(self, requests):
            nonlocal calls
            calls += 1
            return [
                Outcome(r.group.uid, s, None, None, 1, 0, failed=True, error="CUDA error: device lost")
                for r in requests
                for s in r.sessions
            ]

    with pytest.raises(RoundError, match="16 prompts in a row came back; the last failed with: CUDA error: device"):
        for number in range(2, 9):
            run.step(number, Gone())
    assert calls <= 4
    run.ledger.check()
    assert run.ledger.in_flight == run.ledger.undecided == 0


def test_failures_are_part_of_the_state():
    one = trial("uniform", {})
    for number in range(1, 30):
        one.step(number)
    two = trial("uniform", {})
    two.load_state_dict(one.state_dict())
    assert same(one.state_dict(), two.state_dict()) and len(one.state_dict()["failures"]["prompts"])
