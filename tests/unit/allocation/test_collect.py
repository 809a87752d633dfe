"""What holds for every step, whatever the rule, the data and the faults."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, check_step, decisions, examples, u_shaped
from verl_ext.allocation import (
    Fate,
    Outcome,
    RoundError,
    SettingError,
    StepContext,
    Verdict,
    load_state,
    rng_for,
    save_state,
)
from verl_ext.allocation.allocators import Uniform
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.testing import Trial


@st.composite
def rules(draw):
    """Name and settings of an allocator."""
    size = draw(st.integers(2, 9))
    name = draw(st.sampled_from(["uniform", "dynamic_sampling", "sara"]))
    chosen = {"group_size": size}
    if name == "dynamic_sampling":
        chosen["refill"] = draw(st.sampled_from(["waves", "one_for_one"]))
        chosen["gen_multiple"] = draw(st.sampled_from([1, 3, 0.5, "auto"]))
    if name == "sara":
        chosen |= {
            "probe": draw(st.integers(2, size)),
            "commit": draw(st.sampled_from(["top_up", "stop"])),
            "chunk": draw(st.none() | st.integers(1, size)),
            "window": draw(st.just("adaptive") | st.integers(1, 12)),
            "margin": draw(st.sampled_from([0.0, -0.1, 0.5])),
            "alpha": draw(st.sampled_from([1.0, 0.3])),
            "beta": draw(st.sampled_from([1.0, 0.3, 2.0])),
        }
    return name, chosen


POPULATIONS = {
    "u_shaped": lambda n, rng: rng.beta(0.3, 0.4, n),
    "solved": lambda n, rng: np.ones(n),
    "hopeless": lambda n, rng: np.zeros(n),
    "unscorable": lambda n, rng: np.full(n, np.nan),
    "middling": lambda n, rng: np.full(n, 0.5),
    "partly_unscorable": lambda n, rng: np.where(rng.random(n) < 0.4, np.nan, rng.beta(0.5, 0.5, n)),
}


@st.composite
def runs(draw):
    name, chosen = draw(rules())
    seed = draw(st.integers(0, 999))
    rates = POPULATIONS[draw(st.sampled_from(sorted(POPULATIONS)))](
        draw(st.integers(1, 60)), np.random.default_rng(seed)
    )
    keep = draw(st.none() | st.integers(2, 5))
    return Run(
        rates,
        name,
        settings=chosen,
        downsampler="max_variance" if keep else "none",
        keep=keep,
        groups=draw(st.integers(1, 6)),
        rollouts=draw(st.none() | st.integers(chosen["group_size"], 120)),
        max_rounds=draw(st.integers(2, 8)),
        seed=seed,
        unscorable=draw(st.sampled_from([0, 0, 0.3])),
        failing=draw(st.sampled_from([0, 0, 0.3])),
        shaping=draw(st.sampled_from([0.0, 0.5])),
    )


@settings(max_examples=examples(90))
@given(run=runs())
def test_every_step_holds(run):
    logging.disable(logging.WARNING)
    try:
        for step in range(4):
            collected = run.step(step)
            check_step(run, collected, run.ledger.step_record(step))
            _check_groups(run, collected)
    finally:
        logging.disable(logging.NOTSET)


def _check_groups(run, collected):
    chosen, size = run.allocator.settings, run.allocator.group_size
    whole = getattr(chosen, "commit", "top_up") == "top_up"
    for group in collected.groups:
        if whole:
            assert group.requested == size, "a half-filled group"
        assert group.mixed or type(run.allocator) is Uniform
    for group in collected.started:
        if whole and group.verdict is Verdict.COMMIT and group.fate is not Fate.SURPLUS:
            assert group.requested == size, "committed and left half-filled"
    keep = run.downsampler.keep
    per_group = [sum(o.group == group.uid for o in collected.kept) for group in collected.groups]
    assert all(n >= 2 for n in per_group)
    if keep:
        assert all(n == min(keep, group.trials) for n, group in zip(per_group, collected.groups, strict=True))
    else:
        assert per_group == [group.trials for group in collected.groups]


class Faulty:
    """A backend that breaks its round in one way."""

    def __init__(self, inner, fault, round_number):
        self.inner, self.fault, self.round_number = inner, fault, round_number

    def generate(self, requests):
        self.round_number -= 1
        outcomes = self.inner.generate(requests)
        if self.round_number:
            return outcomes
        if self.fault == "raises":
            raise ConnectionError("engine gone")
        if self.fault == "interrupted":
            raise KeyboardInterrupt
        if self.fault == "loses one":
            return outcomes[1:]
        if self.fault == "loses all":
            return []
        if self.fault == "tells twice":
            return [*outcomes, outcomes[0]]
        if self.fault == "unknown group":
            return [*outcomes[:-1], Outcome("nobody", 0, True, 1.0, 1, 1)]
        last = outcomes[-1]
        return [*outcomes[:-1], Outcome(last.group, last.session + 50, True, 1.0, 1, 1)]


FAULTS = {
    "raises": ConnectionError,
    "interrupted": KeyboardInterrupt,
    "loses one": RoundError,
    "loses all": RoundError,
    "tells twice": RoundError,
    "unknown group": RoundError,
    "never asked": RoundError,
}


@settings(max_examples=examples(60))
@given(run=runs(), fault=st.sampled_from(sorted(FAULTS)), round_number=st.integers(1, 3))
def test_the_ledger_adds_up_when_a_round_breaks(run, fault, round_number):
    logging.disable(logging.WARNING)
    try:
        faulty = Faulty(run.backend, fault, round_number)
        try:
            run.step(0, faulty)
        except FAULTS[fault]:
            assert faulty.round_number <= 0
            assert run.ledger.rollouts_by_fate["trained"] == 0
            lost = run.ledger.rollouts_by_fate["failed"] + run.ledger.rollouts_by_fate["aborted"]
            assert lost == run.ledger.issued > 0
        else:
            assert faulty.round_number > 0, f"{fault} went unseen"
        run.ledger.check()
        assert run.ledger.in_flight == run.ledger.undecided == 0
        run.ledger.step_record(0)
        check_step(run, run.step(1), run.ledger.step_record(1))
    finally:
        logging.disable(logging.NOTSET)


def test_missing_sessions_are_named():
    run = Run([0.5] * 8, "uniform", settings={"group_size": 3}, groups=2)
    with pytest.raises(RoundError, match=r"1 sessions did not come back: s0g0 \[0\]"):
        run.step(0, Faulty(run.backend, "loses one", 1))
    assert run.ledger.rollouts_by_fate["failed"] == 1 and run.ledger.rollouts_by_fate["aborted"] == 5


@settings(max_examples=examples(60))
@given(run=runs(), seed=st.integers(0, 999))
def test_outcomes_in_parts_and_out_of_order_give_the_same_verdicts(run, seed):
    """The loop's own steps by hand, with each round's outcomes whole, then shuffled and cut."""
    random = np.random.default_rng(seed)

    def drive(cut):
        allocator, selector = run.allocator, run.selector
        run.load_state_dict(start)
        decided = []
        for step in range(3):
            run.pool.begin_step()
            selector.begin_step(step, run.pool)
            budget = run.stop.budget(allocator.group_size)
            ctx = StepContext(step, selector, run.ledger, run.stop.groups, budget, run.max_rounds, rng_for(0))
            ctx.round = 1
            allocator.begin_step(ctx)
            while ctx.round <= run.max_rounds and (requests := allocator.ask(ctx)):
                ctx.issue(requests)
                for part in cut(run.backend.generate(requests)):
                    ctx.record(part)
                    allocator.tell(part, ctx)
                ctx.round += 1
            batch = [group.uid for group in allocator.finish(ctx)]
            decided.append((batch, [(g.uid, g.prompt, g.requested, g.verdict, g.fate) for g in ctx.groups]))
        return decided, allocator.metrics(), allocator.state_dict()

    def pieces(outcomes):
        shuffled = [outcomes[i] for i in random.permutation(len(outcomes))]
        while shuffled:
            n = int(random.integers(1, len(shuffled) + 1))
            yield shuffled[:n]
            shuffled = shuffled[n:]

    start = run.state_dict()
    assert drive(lambda outcomes: [outcomes]) == drive(pieces)


@pytest.mark.parametrize("name", ["uniform", "dynamic_sampling", "sara"])
@pytest.mark.parametrize("stopped", [1, 2, 4])
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path, name, stopped):
    def fresh():
        extra = {"gen_multiple": "auto"} if name == "dynamic_sampling" else {}
        rates = u_shaped(0.35, 32 if name == "uniform" else 150)
        return Run(
            rates, name, settings={"group_size": 8, **extra}, groups=6, seed=4, keep=4,
            downsampler="max_variance", unscorable=0.05, failing=0.05,
        )  # fmt: skip

    whole, broken = fresh(), fresh()
    expected = [(decisions(whole.step(step)), whole.ledger.step_record(step)) for step in range(7)]
    found = [(decisions(broken.step(step)), broken.ledger.step_record(step)) for step in range(stopped)]
    save_state(tmp_path, broken.state_dict())
    resumed = fresh()
    resumed.load_state_dict(load_state(tmp_path))
    found += [(decisions(resumed.step(step)), resumed.ledger.step_record(step)) for step in range(stopped, 7)]
    assert found == expected
    assert resumed.pool.epoch >= 1, "the run crosses an epoch's edge"


def test_same_seed_same_decisions_and_another_seed_others():
    def run(seed):
        made = Run(u_shaped(0.35, 400), groups=6, seed=seed, keep=4, downsampler="max_variance")
        return [decisions(made.step(step)) for step in range(3)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("population", ["solved", "hopeless", "unscorable"])
@pytest.mark.parametrize("name", ["dynamic_sampling", "sara"])
def test_dead_data_ends_with_a_warning(caplog, name, population):
    rates = POPULATIONS[population](500, None)
    run = Run(rates, name, groups=4, settings={"group_size": 8})
    with caplog.at_level(logging.WARNING, "verl_ext.allocation"):
        collected = run.step(0)
    assert collected.short_by == 4 and not collected.kept and collected.rounds <= 8
    assert collected.rollouts <= 6 * 4 * 8
    assert len(collected.dropped) == collected.rollouts
    assert "0 of 4 groups" in caplog.text and "stop.rollouts" in caplog.text
    unscored = collected.rollouts if population == "unscorable" else 0
    assert f"0 mixed, {collected.rollouts} rollouts, {unscored} of them without a score" in caplog.text
    fates = {f for f, n in run.ledger.rollouts_by_fate.items() if n}
    expected = "filtered" if name == "dynamic_sampling" else "abandoned"
    assert fates == ({"unscored"} if population == "unscorable" else {expected})


def test_a_small_pool_ends_short_without_a_prompt_twice(caplog):
    run = Run([0.0, 1.0, 0.5], "dynamic_sampling", groups=4, settings={"group_size": 4})
    collected = run.step(0)
    assert len(collected.started) == 3 and collected.short_by >= 3
    assert "no more prompts" in caplog.text


@pytest.mark.parametrize("rollouts, level", [(32, logging.INFO), (40, logging.WARNING)])
def test_a_step_that_ends_on_the_budget_of_uniform_sampling_is_no_warning(caplog, rollouts, level):
    """4 groups of 8: that SARA fills fewer groups from it is by design. A larger budget is meant to be enough."""
    caplog.set_level(logging.INFO, "verl_ext.allocation")
    collected = Run(np.tile([0.0, 0.5], 200), groups=4, rollouts=rollouts).step(0)
    assert 0 < len(collected.groups) < 4
    assert [record.levelno for record in caplog.records if "rollouts are left" in record.getMessage()] == [level]
    dead = Run(np.zeros(200), groups=4, rollouts=rollouts).step(0)
    assert not dead.groups and caplog.records[-1].levelno == logging.WARNING


def test_rounds_that_run_out_and_a_pool_that_is_retired_are_said(caplog):
    run = Run([0.0] * 500, "dynamic_sampling", groups=4, max_rounds=2, settings={"group_size": 4, "gen_multiple": 1})
    collected = run.step(0)
    assert collected.rounds == 2 and collected.short_by == 4 and collected.rollouts < 6 * 4 * 4
    assert "allocation.max_rounds=2 is used up" in caplog.text
    for row in range(500):
        run.pool.retire(row)
    empty = run.step(1)
    assert (empty.rounds, empty.rollouts, empty.short_by) == (0, 0, 4)
    assert "step 1: 0 of 4 groups: every prompt of the pool is retired" in caplog.text


@pytest.mark.parametrize("readmit", [False, True])
def test_a_pool_of_solved_prompts_ends_or_comes_back_where_asked(caplog, readmit):
    settings = {"group_size": 8, "n_pilot": 4, "retire_after": 1, "readmit": readmit}
    run = Run([1.0] * 12, "pilot_commit", groups=2, settings=settings)
    pilots = [len(run.step(step).started) for step in range(6)]
    assert pilots == ([12] * 6 if readmit else [12, 0, 0, 0, 0, 0])
    assert run.pool.all_retired is not readmit
    assert caplog.text.count("all 12 are brought back") == (6 if readmit else 0)


def test_groups_without_signal_in_the_batch_are_reported():
    run = Run([0.0] * 6 + [1.0] * 3, "uniform", groups=9, settings={"group_size": 4})
    assert run.step(0).metrics["batch_effective_share"] == 0.0
    mixed = Run([0.0] * 6 + [0.5] * 3, "uniform", groups=9, settings={"group_size": 64})
    collected = mixed.step(0)
    assert collected.metrics["batch_effective_share"] == 3 / 9 and collected.metrics["groups"] == 9
    assert collected.metrics["fate/trained"] == 9 * 64, "the rows that the loss is a mean over"


def test_shaped_scores_decide_nothing():
    shaped = Run([0.0] * 60, "dynamic_sampling", groups=4, settings={"group_size": 4}, shaping=0.9)
    assert shaped.step(0).groups == []


def test_a_budget_below_one_group_is_refused():
    with pytest.raises(SettingError, match=r"allocation.stop.rollouts=7; accepted: at least group_size=8"):
        Run([0.5] * 9, "uniform", groups=1, rollouts=7)
    with pytest.raises(SettingError, match=r"allocation.stop.groups=0"):
        Run([0.5], groups=0)
    with pytest.raises(SettingError, match=r"allocation.max_rounds=1; accepted: 2 or more"):
        Run([0.5] * 9, max_rounds=1)


@pytest.mark.bad_input
@pytest.mark.parametrize("value", ["abc", None, True, 2.5])
def test_max_rounds_that_is_no_integer_is_refused(value):
    with pytest.raises(SettingError, match=rf"allocation.max_rounds={value!r}; accepted: an integer of 1 or more"):
        Run([0.5] * 9, "uniform", groups=1, max_rounds=value)


def test_groups_with_too_few_rows_are_filtered():
    run = Run([0.5] * 40, "uniform", groups=8, settings={"group_size": 3}, unscorable=0.6, seed=2)
    collected = run.step(0)
    thin = [group for group in collected.started if group.trials < 2]
    assert thin and all(group.fate is Fate.FILTERED for group in thin)
    assert collected.short_by == len(thin)
    fates = run.ledger.rollouts_by_fate
    assert fates["filtered"] == sum(group.trials for group in thin)
    assert fates["unscored"] == sum(group.returned - group.trials for group in collected.started)


def test_metrics_and_the_gap_between_rounds():
    run = Run(u_shaped(0.35, 400), groups=8)
    collected = run.step(0)
    metrics = collected.metrics
    assert all(type(value) is float for value in metrics.values())
    assert metrics["batch_effective_share"] == 1.0 and metrics["rounds"] == collected.rounds >= 2
    assert metrics["rollouts"] == sum(value for name, value in metrics.items() if name.startswith("fate/"))
    assert metrics["tokens"] == sum(value for name, value in metrics.items() if name.startswith("fate_tokens/"))
    assert 0 < metrics["round_gap_s"] <= metrics["round_gap_max_s"] < metrics["driver_s"] < 0.5
    assert "round_gap_s" not in Run([0.5] * 9, "uniform", groups=2).step(0).metrics


def test_the_simulated_backend_is_a_pure_function():
    run = Run([0.3] * 50, "uniform", groups=50, settings={"group_size": 40})
    outcomes = [o for group in run.step(0).started for o in group.outcomes]
    assert np.mean([o.correct for o in outcomes]) == pytest.approx(0.3, abs=0.03)
    again = Run([0.3] * 50, "uniform", groups=50, settings={"group_size": 40}).step(0)
    assert [o for group in again.started for o in group.outcomes] == outcomes
    later = Run([0.3] * 50, "uniform", groups=50, settings={"group_size": 40}).step(1)
    assert [o.correct for group in later.started for o in group.outcomes] != [o.correct for o in outcomes]
    assert np.mean([o.response_tokens for o in outcomes]) == pytest.approx(400, rel=0.05)
    with pytest.raises(ValueError, match="success_rates"):
        SimulatedBackend([1.5])


def test_a_rule_that_asks_for_no_more_is_no_warning(caplog):
    """It offers a batch of prompts once, and trains on those that it commits to."""

    class Mixed(Uniform):
        def finish(self, ctx):
            return [group for group in super().finish(ctx) if group.mixed]

    caplog.set_level(logging.INFO, "verl_ext.allocation")
    run = Trial(np.tile([0.0, 0.5], 200), allocator=Mixed(Uniform.Settings(group_size=8)), groups=8)
    collected = run.collect(0, run.backend)
    assert 0 < len(collected.groups) < 8
    assert [(r.levelno, "asks for no more" in r.getMessage()) for r in caplog.records] == [(logging.INFO, True)]
