"""Collection without rounds, on a simulated engine whose answers take random times."""

import logging
import random
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, check_step, examples, u_shaped
from verl_ext.allocation import Fate, RoundError, SettingError, Verdict, make_allocator
from verl_ext.allocation.compose import check_rounds
from verl_ext.allocation.registry import allocators
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.simulation.streaming_backend import SimulatedStream

SMALL = u_shaped(0.35, size=300)
RULES = {
    "uniform": ("uniform", {}),
    "sara": ("sara", {}),
    "sara: stop": ("sara", {"commit": "stop"}),
    "sara: one at a time": ("sara", {"chunk": 1}),
    "sara: window": ("sara", {"window": 7}),
    "sara: audits, carry over": ("sara", {"audit_fraction": 0.5, "max_staleness": 1, "margin": 0.3}),
    "sara: own priors": ("sara", {"carry_prior": True}),
    "sara: spread": ("sara", {"effective": "spread"}),
    "dynamic_sampling: auto": ("dynamic_sampling", {"gen_multiple": "auto", "max_staleness": 1}),
    "dynamic_sampling: one for one": ("dynamic_sampling", {"refill": "one_for_one"}),
    "knapsack": ("knapsack", {"most": 8}),
    "vip": ("vip", {"most": 8}),
    "reinforce_ada": ("reinforce_ada", {"group_size": 8, "chunk": 2}),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="verl_ext.allocation")


class Latencies:
    """Seconds of an answer, by seed, group and session: heavy-tailed, and the same whenever it is asked for."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, outcome):
        luck = random.Random(hash((self.seed, zlib.crc32(outcome.group.encode()), outcome.session)))
        return luck.lognormvariate(0, 1.5)


class StreamRun(Run):
    """A run whose steps stream."""

    def __init__(self, *args, latencies=0, slots=None, **kwargs):
        super().__init__(*args, **{"rounds": "streaming", **kwargs})
        self.engine = SimulatedStream(self.backend, Latencies(latencies), slots)


def checked(run, number):
    collected = run.step(number)
    record = run.ledger.step_record(number)
    for group in collected.started:
        assert group.requests <= run.max_rounds
        aborted = [o for o in group.outcomes if o.aborted]
        assert not aborted or group.verdict is Verdict.CONTINUE and group not in collected.waiting
    aborted = [o for g in collected.started for o in g.outcomes if o.aborted]
    assert record["fates"]["aborted"] == len(aborted)
    assert record["fate_tokens"]["aborted"] == sum(o.response_tokens for o in aborted)
    everything = [o for g in collected.started for o in g.outcomes if not o.failed and not o.aborted]
    parts = collected.kept + collected.dropped + [o for g in collected.waiting for o in g.outcomes if not o.failed]
    assert sorted((o.group, o.session) for o in parts) == sorted((o.group, o.session) for o in everything)
    return collected, record


def verdicts(collected):
    """By prompt, of the groups of this step that are decided."""
    return {
        g.prompt: (g.verdict, [(o.session, o.correct) for o in g.outcomes])
        for g in collected.started
        if g.verdict is not Verdict.CONTINUE
    }


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=examples(6))
@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    latencies=st.integers(0, 10**6),
    groups=st.integers(1, 9),
    slots=st.sampled_from([None, 3, 20]),
    faults=st.sampled_from([{}, {"failing": 0.1, "unscorable": 0.1}, {"unscorable": 0.6}]),
)
def test_everything_adds_up(rule, data, seed, latencies, groups, slots, faults):
    name, given_settings = RULES[rule]
    size = make_allocator(name, **given_settings).group_size
    rollouts = data.draw(st.sampled_from([None, size, 3 * size + 1, groups * size]))
    run = StreamRun(
        SMALL, name, groups=groups, rollouts=rollouts, seed=seed, latencies=latencies, slots=slots,
        settings=given_settings, **faults,
    )  # fmt: skip
    for number in (1, 2):
        collected, record = checked(run, number)
        assert collected.rollouts == record["issued"] <= run.stop.budget(size)
        assert record["in_flight"] == 0
        assert record["issued_total"] == sum(record["fates_total"].values()) + record["waiting"]
        assert record["tokens_total"] == sum(record["fate_tokens_total"].values()) + record["waiting_tokens"]
        for group in collected.groups:
            assert group.fate is Fate.TRAINED and group.pending == 0
        if not faults and collected.short_by:
            assert run.stop.budget(size) - collected.rollouts < size, "there was budget for another prompt"
        if name == "sara" and collected.short_by == 0 and collected.groups:
            committed = [g for g in collected.started if g.verdict is Verdict.COMMIT and g.fate is Fate.TRAINED]
            assert len(committed) == groups


@pytest.mark.parametrize("rule", ["sara", "sara: stop", "sara: one at a time", "sara: spread",
                                  "dynamic_sampling: auto", "reinforce_ada"])  # fmt: skip
@settings(max_examples=examples(4))
@given(seed=st.integers(0, 10**6), latencies=st.integers(0, 10**6),
       faults=st.sampled_from([{}, {"failing": 0.1, "unscorable": 0.2}]))  # fmt: skip
def test_verdicts_are_those_of_the_barrier_given_the_same_outcomes(rule, seed, latencies, faults):
    name, given_settings = RULES[rule]
    rates = SMALL[::3]
    # with rounds, every prompt is started in the first, so that none is without a verdict
    everything = {"window": len(rates)} if name == "sara" else {}
    barrier = Run(rates, name, groups=len(rates), seed=seed, settings={**given_settings, **everything}, **faults)
    stream = StreamRun(rates, name, groups=12, seed=seed, latencies=latencies, settings=given_settings, **faults)
    by_rounds, by_arrival = verdicts(barrier.step(1)), verdicts(checked(stream, 1)[0])
    assert by_arrival and by_arrival.keys() <= by_rounds.keys()
    surplus = 0
    for prompt, (verdict, outcomes) in by_arrival.items():
        wanted, all_outcomes = by_rounds[prompt]
        assert verdict is wanted
        surplus += len(outcomes) < len(all_outcomes)
        assert outcomes == all_outcomes[: len(outcomes)]
    assert surplus == 0 or name == "sara", "a committed group beyond the batch gets no top-up"


def test_uniform_trains_on_the_same_as_with_rounds():
    barrier, stream = Run(SMALL, "uniform"), StreamRun(SMALL, "uniform")
    one, two = barrier.step(1), stream.step(1)
    assert one.kept == two.kept and one.rollouts == two.rollouts == 32
    assert two.metrics["fate/aborted"] == 0


class Replayed:
    """Answers as a stream did before, in its order: no clock."""

    def __init__(self, log):
        self.log = list(log)
        self.asked = []

    def submit(self, requests):
        self.asked += [(r.group.uid, r.first, r.n) for r in requests]

    def next(self):
        kind, outcomes = self.log.pop(0)
        assert kind == "next"
        return outcomes

    def abort(self, groups):
        kind, outcomes = self.log.pop(0)
        assert kind == "abort" and {g.uid for g in groups} == {o.group for o in outcomes}
        return outcomes


class Logged:
    def __init__(self, stream):
        self.stream, self.log, self.asked = stream, [], []

    def submit(self, requests):
        self.asked += [(r.group.uid, r.first, r.n) for r in requests]
        self.stream.submit(requests)

    def next(self):
        self.log.append(("next", self.stream.next()))
        return self.log[-1][1]

    def abort(self, groups):
        self.log.append(("abort", self.stream.abort(groups)))
        return self.log[-1][1]


@pytest.mark.parametrize("rule", ["sara", "sara: audits, carry over", "dynamic_sampling: auto"])
def test_the_same_order_of_arrival_brings_the_same_decisions(rule):
    name, given_settings = RULES[rule]
    one, two = (StreamRun(SMALL, name, groups=8, settings=given_settings, latencies=5) for _ in range(2))
    for number in (1, 2, 3):
        logged = Logged(one.engine)
        first = one.step(number, logged)
        replayed = Replayed(logged.log)
        second = two.step(number, replayed)
        assert logged.asked == replayed.asked
        assert first.kept == second.kept
        assert [(g.uid, g.verdict, g.fate, g.requested) for g in first.started] == [
            (g.uid, g.verdict, g.fate, g.requested) for g in second.started
        ]


def test_the_order_of_arrival_matters():
    """Which groups make the batch is not the barrier's business here: it goes by who is back first."""
    batches = {tuple(g.uid for g in StreamRun(SMALL, "sara", groups=8, latencies=i).step(1).groups) for i in range(5)}
    assert len(batches) > 1


def test_undecided_requests_are_aborted_and_their_tokens_counted():
    run = StreamRun(SMALL, "sara", groups=8, settings={"margin": 1.0})
    seen = []
    run.selector.observe = lambda prompt, *counts: seen.append(prompt)
    collected, record = checked(run, 1)
    assert record["fates"]["aborted"] > 0 and 0 < record["fate_tokens"]["aborted"]
    whole_groups = [g.prompt for g in collected.started if not any(o.aborted for o in g.outcomes)]
    assert seen == whole_groups, "a group that was cut off is no result of its prompt"
    whole = SimulatedBackend(SMALL, 0)
    assert collected.metrics["fate/aborted"] == record["fates"]["aborted"] and whole.rollouts == 0
    assert not any(o.aborted for o in collected.dropped), "they have no trajectory to free"


def test_it_takes_less_time_than_rounds_and_fewer_or_about_as_many_rollouts():
    """In virtual time, long-tailed answers on slots that the first wave fills."""
    times, rollouts = {}, {}
    for mode in ("barrier", "streaming"):
        run = StreamRun(u_shaped(0.35, size=3000), "sara", groups=32, slots=256, latencies=1, rounds=mode)
        for number in range(1, 7):
            run.step(number)
        times[mode], rollouts[mode] = run.engine.now, run.ledger.issued
    assert times["streaming"] < 0.85 * times["barrier"]
    assert rollouts["streaming"] < 1.1 * rollouts["barrier"]


@pytest.mark.parametrize("rate", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("rule", RULES)
def test_dead_data_ends(rule, rate):
    name, given_settings = RULES[rule]
    for prompts in (40, 3):
        run = StreamRun(np.full(prompts, rate), name, settings=given_settings)
        for number in (1, 2):
            collected, record = checked(run, number)
            assert not any(group.mixed for group in collected.groups)
            assert record["in_flight"] == record["waiting"] == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "given_settings", "why"), [
    ("pilot_commit", {"group_size": 8, "n_pilot": 4}, "whole wave"),
    ("dynamic_sampling", {}, "use gen_multiple=auto or refill=one_for_one"),
])  # fmt: skip
def test_rules_that_need_whole_rounds_are_refused(name, given_settings, why):
    with pytest.raises(SettingError, match=f"allocation.rounds='streaming'; accepted: barrier with .*{why}"):
        StreamRun(SMALL, name, settings=given_settings)


def test_every_rule_is_judged():
    named = {name for name, _ in RULES.values()} | {"pilot_commit", "dynamic_sampling", "hora", "marginal_signal"}
    ours = {name for name in allocators.names() if allocators.get(name).__module__.startswith("verl_ext.")}
    assert ours == named


def test_a_rule_from_elsewhere_is_refused_until_it_says_that_it_can():
    from verl_ext.allocation import Allocator, AllocatorSettings
    class Elsewhere(Allocator):
        pass

    with pytest.raises(SettingError, match="barrier with Elsewhere: its ask is written for whole rounds"):
        check_rounds(Elsewhere(AllocatorSettings()), "streaming", 8)
    with pytest.raises(SettingError, match="allocation.rounds='stream'; accepted: barrier | streaming"):
        Run(SMALL, rounds="stream")


class Broken(SimulatedStream):
    def __init__(self, backend, how):
        super().__init__(backend)
        self.how, self.calls, self.cleared = how, 0, None

    def next(self):
        outcomes = super().next()
        self.calls += 1
        if self.calls < 3:
            return outcomes
        if self.how == "raises":
            raise OSError("the engine is gone")
        return {"part": outcomes[1:], "nothing": [], "twice": outcomes + outcomes}[self.how]

    def abort(self, groups):
        self.cleared = {group.uid for group in groups}
        return super().abort(groups)


@pytest.mark.parametrize(("how", "error"), [
    ("raises", OSError), ("part", RoundError), ("nothing", RoundError), ("twice", RoundError)])  # fmt: skip
def test_a_broken_step_leaves_nothing_in_flight_and_the_next_one_works(how, error):
    run = StreamRun(SMALL, "sara", groups=8)
    broken = Broken(run.backend, how)
    with pytest.raises(error):
        run.step(1, broken)
    run.ledger.check()
    assert run.ledger.in_flight == run.ledger.undecided == 0
    assert broken.cleared, "what was in flight is aborted"
    run.ledger.step_record(1)
    checked(run, 2)


def test_max_rounds_bounds_the_requests_of_a_group():
    run = StreamRun(SMALL, "sara", groups=8, max_rounds=3, settings={"chunk": 1})
    collected, _ = checked(run, 1)
    assert collected.rounds == 3 == max(group.requests for group in collected.started)


def test_rounds_still_check(monkeypatch):
    """The same run with rounds passes the checks of rounds, so that the helper does not hide what streaming breaks."""
    run = Run(SMALL, "sara", groups=8)
    collected = run.step(1)
    check_step(run, collected, run.ledger.step_record(1))
