"""SARA's verdicts against the definition in fractions, its costs against closed forms, its windows and reserves."""

from fractions import Fraction

import numpy as np
import pytest

from tests.unit.allocation.helpers import Run, u_shaped
from tests.unit.allocation.test_posterior import urn
from verl_ext.allocation import Fate, SettingError, Verdict, make_allocator, sara_verdicts
from verl_ext.allocation.allocators.sara_rule import ABANDON, COMMIT, CONTINUE, sara_rule
from verl_ext.allocation.allocators.window import CommitRate, adaptive_wave


def defined(s, n, r, size, tau, alpha, beta):
    """The verdict by definition, with tau a fraction."""
    if 0 < s < n:
        return COMMIT
    reachable = n + size - r
    if r == size or reachable < 2:
        return ABANDON
    return ABANDON if n > 0 and urn(s, n, reachable, alpha, beta) < tau else CONTINUE


@pytest.mark.parametrize(
    "size, tau", [(8, Fraction(9, 20)), (8, Fraction(5, 9)), (5, Fraction(1, 3)), (3, Fraction(1, 4))]
)
@pytest.mark.parametrize("prior", [(1, 1), (Fraction(1, 2), Fraction(1, 2)), (2, 1)])
def test_verdicts_by_definition(size, tau, prior):
    cases = [(s, n, r) for r in range(size + 1) for n in range(r + 1) for s in range(n + 1)]
    s, n, r = np.array(cases).T
    found = sara_verdicts(s, n, size, tau=float(tau), alpha=float(prior[0]), beta=float(prior[1]), returned=r)
    assert found.dtype == np.int8
    assert found.tolist() == [defined(*case, size, tau, *prior) for case in cases]


@pytest.mark.parametrize("prior", [(1.0, 1.0), (0.12, 0.12), (0.5, 3.0)])
def test_a_probe_is_where_pure_prefixes_end(prior):
    for size in (2, 3, 8, 17):
        for probe in range(2, size + 1):
            n = np.arange(1, size + 1)
            for s in (np.zeros_like(n), n):
                codes = sara_verdicts(s, n, size, probe=probe, alpha=prior[0], beta=prior[1])
                assert (codes == np.where(n >= probe, ABANDON, CONTINUE)).all()
            rule = sara_rule(size, probe, None, *prior)
            assert rule.more(0, 0, 0) == probe == rule.longest
            if size > probe > 2:
                assert rule.more(0, 1, 1) == rule.more(1, 1, 1) == probe - 1


def test_lost_rollouts_shorten_the_group_that_can_be_reached():
    # 4 back, 1 of them scored: of the 5 trials still reachable 4 remain, p_eff = 4/6 > 5/9
    assert sara_verdicts([0], [1], 8, returned=[4]).tolist() == [CONTINUE]
    assert sara_verdicts([0], [2], 8, returned=[6]).tolist() == [ABANDON]  # 2/5
    assert sara_verdicts([0], [0], 8, returned=[6]).tolist() == [CONTINUE]  # tau is not applied without evidence
    assert sara_verdicts([0], [0], 8, returned=[7]).tolist() == [ABANDON]  # one trial cannot be mixed
    with pytest.raises(ValueError, match="returned <= group_size=8"):
        sara_verdicts([0], [9], 8)
    with pytest.raises(ValueError, match="accepted: integers"):
        sara_verdicts([0.5], [1], 8)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"probe": 1}, r"allocation.allocator.probe=1; accepted: an integer in \[2, group_size=8\]"),
        ({"probe": 9}, "allocation.allocator.probe=9"),
        ({"probe": "half"}, "allocation.allocator.probe=.half."),
        ({"probe": 4, "tau_low": 0.3}, "means a probe of 6"),
        ({"probe": None, "tau_low": 1.0}, "allocation.allocator.tau_low=1.0"),
        ({"probe": None, "tau_low": 0.78}, r"a number in \(0, 0.777778\]"),
        ({"probe": None, "tau_low": 0.45, "alpha": 0.12, "beta": 0.12}, r"a number in \(0, 0.246"),
        ({"alpha": 0.0}, "allocation.allocator.alpha=0.0"),
        ({"chunk": 0}, "allocation.allocator.chunk=0"),
        ({"window": 0}, "allocation.allocator.window=0"),
        ({"group_size": 1}, "allocation.allocator.group_size=1"),
        ({"margin": -1.0}, "allocation.allocator.margin=-1.0"),
    ],
)
def test_settings_are_checked_by_name(settings, named):
    with pytest.raises(SettingError, match=named):
        make_allocator("sara", **settings)


def test_probe_and_tau_together_if_they_agree():
    make_allocator("sara", probe=4, tau_low=0.45)
    make_allocator("sara", probe=None, tau_low=7 / 9)  # a tie: n* = 2


@pytest.mark.parametrize("rate, top_up, stop", [(0.0, 4, 4), (0.05, 4.74, 3.76), (0.2, 6.36, 3.20), (0.5, 7.50, 2.75)])
def test_rollouts_per_started_prompt(rate, top_up, stop):
    """E[N | p] = k - (k - n*) A_4(p) for top_up, 1 + A_1 + A_2 + A_3 for stop in chunks of one."""
    for settings, expected in ({"commit": "top_up"}, top_up), ({"commit": "stop", "chunk": 1}, stop):
        run = Run(np.full(3000, rate), groups=3000, rollouts=24_000, settings={"window": 3000, **settings})
        collected = run.step(0)
        assert len(collected.started) == 3000
        assert collected.rollouts / 3000 == pytest.approx(expected, abs=0.06)


def test_predicted_and_realised_shares():
    rates = np.random.default_rng(0).random(6000)  # the uniform prior is right
    run = Run(rates, groups=6000, rollouts=48_000, settings={"window": 6000})
    collected = run.step(0)
    metrics = run.allocator.metrics()
    assert metrics["p_eff_predicted"] == pytest.approx(0.6)  # 1 - 2 B(1, 5)
    assert metrics["p_eff_realised"] == pytest.approx(0.6, abs=0.02)
    assert metrics["p_eff_abandoned"] == pytest.approx(4 / 9)
    assert collected.metrics["p_eff_realised"] == metrics["p_eff_realised"]
    skewed = make_allocator("sara", probe=3, alpha=2.0, beta=0.5)
    expected = 1 - (2 / 2.5) * (3 / 3.5) * (4 / 4.5) - (0.5 / 2.5) * (1.5 / 3.5) * (2.5 / 4.5)
    assert skewed._predicted == pytest.approx(expected)


def test_surplus_is_dropped_before_its_top_up():
    run = Run(np.full(400, 0.5), groups=10, rollouts=2000, settings={"window": 100})
    collected = run.step(0)
    surplus = [group for group in collected.started if group.fate is Fate.SURPLUS]
    assert len(collected.groups) == 10 and len(surplus) > 50 and collected.rounds == 2
    assert all(group.requested == 4 and group.verdict is Verdict.COMMIT for group in surplus)
    assert collected.rollouts == 100 * 4 + 10 * 4
    assert [g.uid for g in collected.groups] == [g.uid for g in collected.started if g.verdict is Verdict.COMMIT][:10]


@pytest.mark.parametrize("commit", ["top_up", "stop"])
@pytest.mark.parametrize("rollouts", [8, 9, 21, 64, 100])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_reserve_keeps_groups_whole(commit, rollouts, chunk):
    given = {"commit": commit, "chunk": chunk, "reserve": 1e6}
    run = Run(np.full(400, 0.5), groups=50, rollouts=rollouts, settings=given)
    collected = run.step(0)
    assert collected.rollouts <= rollouts
    sizes = {8} if commit == "top_up" else {3, 4}
    assert collected.groups and {group.requested for group in collected.groups} <= sizes
    assert not [g for g in collected.started if g.fate is Fate.SURPLUS]
    unused = rollouts - collected.rollouts
    assert unused < max(sizes) or collected.rounds == 8


@pytest.mark.parametrize("size, share", [(8, 0.2), (8, 0.6), (16, 0.35)])
def test_the_budget_of_uniform_sampling_is_spent_in_few_rounds(size, share):
    """A wave reserves the top-ups that are likely, not all that are possible: half the rounds, at the same cost."""
    rates, found = u_shaped(share, 6000, group_size=size), {}
    for reserve in (2.0, 1e6):
        given = {"group_size": size, "reserve": reserve}
        run = Run(rates, groups=64, rollouts=64 * size, max_rounds=12, settings=given)
        run.step(0)
        steps = [run.step(number) for number in range(1, 9)]
        effective = sum(len(step.groups) for step in steps)
        assert sum(step.rollouts for step in steps) > 0.97 * 8 * 64 * size
        assert all(group.requested == size for step in steps for group in step.groups)
        committed = [g for step in steps if step.short_by for g in step.started if g.verdict is Verdict.COMMIT]
        without = sum(group.requested < size for group in committed)  # for which no budget was left
        found[reserve] = np.mean([step.rounds for step in steps]), sum(s.rollouts for s in steps) / effective, without
    (rounds, cost, without), (rounds_worst, cost_worst, _) = found[2.0], found[1e6]
    assert rounds <= 4.7 and rounds <= 0.8 * rounds_worst
    assert cost == pytest.approx(cost_worst, rel=0.03)
    assert without <= 0.02 * effective


@pytest.mark.parametrize("max_rounds", [2, 3, 4, 5])
def test_small_chunks_still_leave_a_round_for_the_top_up(max_rounds):
    run = Run(u_shaped(0.35, 2000), groups=12, max_rounds=max_rounds, settings={"chunk": 1})
    for step in range(4):
        collected = run.step(step)
        assert collected.groups and all(group.requested == 8 for group in collected.groups)
        mixed = [group for group in collected.started if group.mixed]
        assert all(group.requested == 8 or group.fate is Fate.SURPLUS for group in mixed)
        assert all(g.verdict is not Verdict.CONTINUE or collected.short_by == 0 for g in collected.started)


def test_waves_are_sized_by_what_is_missing():
    assert adaptive_wave(10, 0.25, 1, 10) == 40
    assert adaptive_wave(10, 0.25, 2, 10, margin=0.1) == 44
    assert adaptive_wave(10, 0.25, 3, 10) == 52 and adaptive_wave(10, 0.25, 4, 10) == 68
    assert adaptive_wave(10, 0.0, 1, 10) == 80 and adaptive_wave(10, 1e-300, 1, 10, cap=3) == 30
    assert adaptive_wave(0, 0.25, 1, 10) == 0 and adaptive_wave(0.01, 0.9, 1, 10) == 1


def test_the_commit_rate_learns_within_a_step_and_over_steps():
    rate = CommitRate(0.6)
    assert rate.now == 0.6
    rate.begin_step()
    rate.resolved(92, 23)
    assert rate.now == pytest.approx((23 + 8 * 0.6) / 100) and rate.over_steps == 0.6
    rate.end_step()
    assert rate.over_steps == pytest.approx((23 + 8 * 0.6) / 100)
    copy = CommitRate(0.6)
    copy.load_state_dict(rate.state_dict())
    assert copy.now == rate.now


def test_half_resolved_waves_do_not_count():
    run = Run(np.full(200, 0.5), groups=20, settings={"chunk": 2, "commit": "stop", "window": 30})
    resolved, seen = [], []
    run.allocator._rate.resolved = lambda prompts, commits: resolved.append((prompts, commits))
    generate = run.backend.generate
    run.backend.generate = lambda requests: (seen.append(list(resolved)), generate(requests))[1]
    collected = run.step(0)
    first = collected.started[:30]
    assert 0 < sum(len({o.correct for o in group.outcomes[:2]}) == 2 for group in first) < 20
    assert seen == [[], []]  # two rounds; when the second was planned, wave one had commits and undecided groups
    assert resolved[0] == (30, sum(group.mixed for group in first))


def cost(name, rates, steps=12, max_rounds=8, **settings):
    run = Run(rates, name, groups=128, rollouts=60_000, max_rounds=max_rounds, settings={"group_size": 8, **settings})
    collected = [run.step(step) for step in range(steps)]
    assert all(one.short_by == 0 for one in collected[1:])
    effective = sum(len(one.groups) for one in collected)
    return sum(one.rollouts for one in collected) / effective, np.mean([one.rounds for one in collected])


def test_costs_on_a_frozen_u_shaped_population():
    rates = u_shaped(0.35)
    sara, rounds = cost("sara", rates)
    stop, _ = cost("sara", rates, commit="stop")
    refill, _ = cost("dynamic_sampling", rates, refill="one_for_one", max_rounds=60)
    waves, _ = cost("dynamic_sampling", rates, gen_multiple=1, max_rounds=60)
    auto, auto_rounds = cost("dynamic_sampling", rates, gen_multiple="auto")
    assert refill == pytest.approx(8 / 0.35, rel=0.03)
    assert 0.84 <= sara / refill <= 0.94  # .873 without any waste
    assert 0.72 <= sara / waves <= 0.83
    assert sara / auto <= 0.94 and auto_rounds <= 2.2
    assert stop / refill <= 0.75
    assert 2.2 <= rounds <= 3.0
