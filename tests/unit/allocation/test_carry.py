"""Groups that go on over the update: a simulated engine whose answers take random times, and a clock."""

import functools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.write_metrics import is_described
from tests.unit.allocation.helpers import examples, u_shaped
from tests.unit.allocation.test_streaming import Logged, Replayed, StreamRun
from verl_ext.allocation import Fate, SettingError, Verdict, load_state, make_allocator, save_state
from verl_ext.allocation.compose import Async
from verl_ext.allocation.registry import allocators
from verl_ext.simulation.simulation import Simulation

SMALL = u_shaped(0.35, size=400)
RULES = {
    "uniform": ("uniform", {}),
    "sara": ("sara", {}),
    "sara: stop": ("sara", {"commit": "stop"}),
    "sara: one at a time": ("sara", {"chunk": 1}),
    "sara: own priors": ("sara", {"carry_prior": True}),
    "sara: window": ("sara", {"window": 9}),
    "dynamic_sampling: auto": ("dynamic_sampling", {"gen_multiple": "auto"}),
    "dynamic_sampling: one for one": ("dynamic_sampling", {"refill": "one_for_one"}),
    "reinforce_ada": ("reinforce_ada", {"group_size": 8, "chunk": 2}),
    "pilot_commit": ("pilot_commit", {"group_size": 8, "n_pilot": 4, "p_solve": None}),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="verl_ext.allocation")


def carrying(rule, carry=0.5, max_lag=2, rates=SMALL, **kwargs):
    name, given_settings = RULES[rule]
    return StreamRun(rates, name, settings=given_settings, async_=Async(carry, max_lag), **kwargs)


described = functools.cache(is_described)


class Watched:
    """What a selector is shown."""

    def __init__(self, run):
        self.seen, observe = [], run.selector.observe

        def note(prompt, successes, trials, size):
            self.seen.append((prompt, successes, trials))
            observe(prompt, successes, trials, size)

        run.selector.observe = note


def adds_up(run, collected, record):
    """A step's books, and what it leaves behind."""
    assert record["issued"] == collected.rollouts <= run.stop.budget(run.allocator.group_size)
    assert record["issued_total"] == sum(record["fates_total"].values()) + record["in_flight"] + record["waiting"]
    assert record["tokens_total"] == sum(record["fate_tokens_total"].values()) + record["waiting_tokens"]
    assert all(described(name) for name in collected.metrics if name.startswith("async/"))
    flight = run.flight.groups
    assert record["in_flight"] == sum(group.pending for group in flight) == collected.metrics["async/in_flight"]
    assert record["waiting"] == sum(group.returned for group in flight)
    assert collected.waiting == flight and all(group.live for group in flight)
    assert len(collected.groups) + collected.short_by == run.stop.groups >= len(collected.groups)
    for group in collected.groups:
        assert group.fate is Fate.TRAINED and group.pending == 0
        assert (collected.metrics["async/lag_max"]) <= run.async_.max_lag
    assert len(flight) + len(collected.groups) <= (run.async_.max_lag + 1) * run.stop.groups
    everything = {(o.group, o.session) for g in collected.started for o in g.outcomes if not o.failed and not o.aborted}
    kept = {(o.group, o.session) for o in collected.kept}
    dropped = {(o.group, o.session) for o in collected.dropped}
    waiting = {(o.group, o.session) for g in flight for o in g.outcomes if not o.failed}
    assert kept | dropped | waiting == everything
    assert len(kept) + len(dropped) + len(waiting) == len(everything)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=examples(5))
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 9),
    carry=st.sampled_from([0.2, 0.5, 1.0]),
    max_lag=st.integers(1, 3),
    slots=st.sampled_from([None, 5, 20]),
    faults=st.sampled_from([{}, {"failing": 0.1, "unscorable": 0.1}, {"refusing": 0.2}]),
)
def test_everything_adds_up_and_groups_are_shown_once_and_whole(rule, seed, groups, carry, max_lag, slots, faults):
    run = carrying(rule, carry, max_lag, groups=groups, seed=seed, latencies=seed, slots=slots, **faults)
    watched = Watched(run)
    trained, offered, decided = set(), {}, []
    for number in range(1, 7):
        collected = run.step(number)
        adds_up(run, collected, run.ledger.step_record(number))
        assert not trained & {group.uid for group in collected.groups}, "a group is trained on once"
        trained |= {group.uid for group in collected.groups}
        offered |= {group.uid: group for group in collected.started}
        flight = {group.uid for group in run.flight.groups}
        decided += [g for g in collected.started if g.uid not in flight and g.fate is not Fate.STALE]
        aborted = [o for g in collected.started for o in g.outcomes if o.aborted]
        assert all(offered[o.group].fate is Fate.STALE for o in aborted), "nothing else is cut off"
    assert watched.seen == [(g.prompt, g.successes, g.trials) for g in decided]
    assert len({g.uid for g in decided}) == len(decided)


@pytest.mark.parametrize("rule", RULES)
def test_slow_groups_are_awaited_before_they_are_too_old(rule):
    run = carrying(rule, carry=1.0, max_lag=1, groups=6, latencies=3, slots=30)
    stale = 0
    for number in range(1, 12):
        collected = run.step(number)
        stale += collected.metrics["async/stale_groups"]
        assert all(run.steps - 1 - g.version <= 1 for g in collected.groups)
    assert stale <= 2, "undecided groups that got nothing in a step, at most"


def test_a_group_beyond_max_lag_is_stale_and_no_result_of_its_prompt():
    run = carrying("uniform", carry=1.0, max_lag=1, groups=4, latencies=3)
    run.step(1)
    old = list(run.flight.groups)
    assert any(group.pending for group in old)
    for group in old:
        group.version -= 2
    watched = Watched(run)
    collected = run.step(2)
    record = run.ledger.step_record(2)
    assert [group.fate for group in old] == [Fate.STALE] * 4 == [g.fate for g in collected.started[:4]]
    assert record["fates"]["stale"] == 32 and record["fates"]["aborted"] == 0
    assert not {group.prompt for group in old} & {prompt for prompt, *_ in watched.seen}
    assert collected.metrics["async/stale_groups"] == 4 and collected.short_by == 0


def test_without_carry_it_is_the_loop_that_it_was():
    for rule in ("uniform", "sara", "dynamic_sampling: auto"):
        name, given_settings = RULES[rule]
        one = StreamRun(SMALL, name, settings=given_settings, latencies=5)
        two = carrying(rule, carry=0.0, latencies=5)
        for number in (1, 2, 3):
            assert one.step(number).kept == two.step(number).kept
            assert one.ledger.step_record(number) == two.ledger.step_record(number)
            assert not two.flight.groups


@pytest.mark.parametrize("rule", ["uniform", "sara", "dynamic_sampling: one for one", "reinforce_ada", "pilot_commit"])
def test_more_is_made_in_the_same_time(rule):
    """Long-tailed answers: with half a batch in hand over the update, a step does not wait for its tail."""
    seconds = {}
    for carry in (0.0, 0.5):
        if rule == "pilot_commit" and not carry:
            continue
        run = carrying(rule, carry, 4, rates=u_shaped(0.35, size=3000), groups=24, latencies=1)
        effective = 0
        for number in range(1, 13):
            effective += sum(group.mixed for group in run.step(number).groups)
        seconds[carry] = run.engine.now / effective
    assert rule == "pilot_commit" or seconds[0.5] < 0.75 * seconds[0.0]


@pytest.mark.parametrize("rule", ["uniform", "sara", "sara: own priors", "dynamic_sampling: auto", "reinforce_ada",
                                  "pilot_commit"])  # fmt: skip
def test_a_resumed_run_asks_for_the_same_sessions_and_decides_the_same(rule, tmp_path):
    """The engine answers the same, and in the order recorded."""
    def fresh():
        return carrying(rule, 1.0, 4, groups=6, latencies=5, seed=3)

    one = fresh()
    for number in (1, 2, 3):
        one.step(number)
    pending = {group.uid: group.missing() for group in one.flight.groups if group.pending}
    assert pending
    save_state(tmp_path, one.state_dict())
    two = fresh()
    two.load_state_dict(load_state(tmp_path))
    assert two.state_dict().keys() == one.state_dict().keys()
    for number in (4, 5):
        logged = Logged(one.engine)
        first = one.step(number, logged)
        replayed = Replayed(logged.log)
        second = two.step(number, replayed)
        again = [(uid, first_, n) for uid, first_, n in replayed.asked if number == 4][: len(pending)]
        if number == 4:
            assert {uid: list(range(at, at + n)) for uid, at, n in again} == pending
            replayed.asked = replayed.asked[len(pending) :]
        assert replayed.asked == logged.asked
        assert first.kept == second.kept and first.metrics.keys() == second.metrics.keys()
        assert one.ledger.step_record(number)["fates_total"] == two.ledger.step_record(number)["fates_total"]


def test_a_step_that_breaks_off_loses_what_was_in_flight_and_no_count():
    run = carrying("sara", groups=6, latencies=5)
    run.step(1)
    assert run.flight.groups
    run.ledger.step_record(1)
    run.engine.next = lambda: (_ for _ in ()).throw(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        run.step(2)
    assert run.ledger.in_flight == run.ledger.undecided == run.ledger.waiting == 0 and not run.flight.groups
    run.ledger.check()


@pytest.mark.parametrize("rate", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("rule", RULES)
def test_dead_data_ends(rule, rate):
    for prompts in (40, 3):
        run = carrying(rule, rates=np.full(prompts, rate))
        for number in (1, 2, 3):
            collected = run.step(number)
            adds_up(run, collected, run.ledger.step_record(number))
            assert not any(group.mixed for group in collected.groups)


def test_pilots_of_one_version_are_committed_in_the_next():
    run = carrying("pilot_commit", carry=1.0, groups=8, latencies=2)
    versions = set()
    for number in range(1, 6):
        collected = run.step(number)
        versions |= {len({o.policy_version for o in g.outcomes}) for g in collected.groups}
        assert all(g.verdict is Verdict.COMMIT and g.requested == 8 for g in collected.groups)
    assert versions == {1, 2}


class Separate(StreamRun):
    """Engines of their own: the next step is collected during the update."""

    def __init__(self, *args, update_s, **kwargs):
        super().__init__(*args, **kwargs)
        self.update_s, self.separate = update_s, True


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10**6), carry=st.sampled_from([0.25, 1.0]), max_lag=st.integers(1, 3),
       update_s=st.sampled_from([0.1, 3.0, 50.0]),
       rule=st.sampled_from(["sara", "uniform", "pilot_commit"]))  # fmt: skip
def test_engines_of_their_own_keep_the_lag(seed, carry, max_lag, update_s, rule):
    name, given_settings = RULES[rule]
    run = Separate(SMALL, name, settings=given_settings, groups=6, async_=Async(carry, max_lag), seed=seed,
                   latencies=seed, slots=40, update_s=update_s)  # fmt: skip
    for number in range(1, 9):
        collected = run.step(number)
        adds_up(run, collected, run.ledger.step_record(number))
        assert all(0 <= number - 1 - g.version <= max_lag for g in collected.groups)
        for group in collected.groups:
            assert all(group.version <= o.policy_version <= number - 1 for o in group.outcomes)
        assert run.generating in (number - 1, number - 2)
    assert update_s < 1 or run.generating == 7, "the weights of the last update are under way"


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "given_settings", "why"), [
    ("hora", {}, "async.carry='above 0'; accepted: 0 with Hora"),
    ("knapsack", {}, "async.carry='above 0'; accepted: 0 with Knapsack"),
    ("dynamic_sampling", {}, "async.carry='above 0'; accepted: 0: .*use gen_multiple=auto"),
    ("sara", {"audit_fraction": 0.1}, "audit_fraction=0.1; accepted: 0 with allocation.async.carry"),
    ("sara", {"max_staleness": 1}, "max_staleness=1; accepted: 0 with allocation.async.carry"),
    ("pilot_commit", {"flush": True}, "flush=True; accepted: false with allocation.async.carry"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused(name, given_settings, why):
    with pytest.raises(SettingError, match=why):
        StreamRun(SMALL, name, settings=given_settings, async_=Async(0.5))


@pytest.mark.bad_input
def test_settings_are_refused_by_name():
    with pytest.raises(SettingError, match="async.max_lag=0; accepted: an integer of 1 or more"):
        Async(0.0, 0)
    with pytest.raises(SettingError, match=r"async.carry=3; accepted: a number in \[0, allocation.async.max_lag=2\]"):
        Async(3, 2)
    with pytest.raises(SettingError, match="async.carry=0.5; accepted: 0 with allocation.rounds=barrier"):
        StreamRun(SMALL, "sara", rounds="barrier", async_=Async(0.5))
    with pytest.raises(SettingError, match="allocation.async.cary=1; accepted: the settings carry, max_lag"):
        Simulation.from_settings({"stop": {"groups": 4}, "async": {"cary": 1}}, ["a"], backend=None)
    made = Simulation.from_settings(
        {"stop": {"groups": 4}, "rounds": "streaming", "async": {"carry": 1}}, ["a", "b"], backend=None
    )
    assert made.async_ == Async(1.0, 4)


def test_every_rule_either_carries_or_says_why_not():
    can = {name for name, _ in RULES.values()}
    for name in allocators.names():
        if allocators.get(name).__module__.startswith("verl_ext.") and name not in can:
            with pytest.raises(SettingError, match="decides on whole steps"):
                make_allocator(name).check_carry()
