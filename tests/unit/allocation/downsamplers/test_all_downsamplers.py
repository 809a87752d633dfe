"""Random, highest and percentile subsets; statistics over whole groups for the advantage."""

import math
import statistics
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run
from verl_ext.allocation import (
    Group,
    Outcome,
    SettingError,
    group_statistics,
    make_allocator,
    make_downsampler,
    max_reward_subset,
    normalised_over,
    percentile_subset,
    reward_statistics,
)
from verl_ext.allocation.registry import allocators

REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, -0.5]), min_size=1, max_size=9)


def group_of(scores, aside=()):
    group = Group("g", 0, 0, requested=len(scores))
    for session, score in enumerate(scores):
        group.add(Outcome("g", session, None if score is None else score > 0.5, score, 1, 1))
    group.set_aside(aside)
    return group


@settings(max_examples=100, deadline=None)
@given(rewards=REWARDS, keep=st.integers(1, 9), seed=st.one_of(st.none(), st.integers(0, 99)))
def test_subsets_by_definition(rewards, keep, seed):
    rng = None if seed is None else np.random.default_rng(seed)
    m, n = min(keep, len(rewards)), len(rewards)
    best = max_reward_subset(rewards, keep, rng)
    assert len(best) == m and (np.diff(best) > 0).all()
    total = max(sum(subset) for subset in combinations(rewards, m))
    assert math.fsum(rewards[i] for i in best) == pytest.approx(total, abs=1e-12)
    middle = percentile_subset(rewards, keep, rng)
    assert len(middle) == m and (np.diff(middle) > 0).all()
    if keep < n:
        ordered = sorted(rewards)
        expected = [ordered[math.floor(n * (2 * i + 1) / (2 * keep))] for i in range(keep)]
        assert sorted(rewards[i] for i in middle) == pytest.approx(expected, abs=1e-12)


def test_a_percentile_subset_is_like_the_whole():
    rewards = np.random.default_rng(0).normal(size=4001)
    kept = rewards[percentile_subset(rewards, 101)]
    for q in (0.1, 0.25, 0.5, 0.9):
        assert np.quantile(kept, q) == pytest.approx(np.quantile(rewards, q), abs=0.05)
    assert kept.mean() == pytest.approx(rewards.mean(), abs=0.01)
    highest = rewards[max_reward_subset(rewards, 101)]
    assert highest.min() == np.sort(rewards)[-101]


@pytest.mark.parametrize("name, among", [("random", [0, 1, 2, 3]), ("max_reward", [1, 2, 3])])
def test_choices_are_by_chance_and_repeat_with_the_seed(name, among):
    rule, group = make_downsampler(name, keep=2), group_of([0.0, 1.0, 1.0, 1.0])
    rng = np.random.default_rng(5)
    drawn = Counter(tuple(rule.select(group, rng)) for _ in range(3000))
    pairs = list(combinations(among, 2))
    assert set(drawn) == set(pairs)
    assert all(abs(n / 3000 - 1 / len(pairs)) < 0.03 for n in drawn.values())
    again = np.random.default_rng(5)
    assert drawn == Counter(tuple(rule.select(group, again)) for _ in range(3000))
    assert rule.select(group) == {"random": [0, 1], "max_reward": [1, 2]}[name]


@pytest.mark.parametrize("name", ["none", "random", "max_reward", "percentile", "max_variance"])
def test_only_trainable_rollouts_are_chosen(name):
    rule = make_downsampler(name, **({} if name == "none" else {"keep": 3}))
    group = group_of([1.0, None, 0.0, 1.0, 0.0, 0.0, 1.0], aside=[0, 4])
    kept = rule.select(group, np.random.default_rng(0))
    assert set(kept) <= {2, 3, 5, 6} and kept == sorted(kept) and len(kept) == (4 if name == "none" else 3)
    assert rule.select(group_of([1.0, None, 0.0])) == [0, 2]


def test_a_rule_that_ignores_what_was_set_aside_does_not_train_on_it():
    class All(type(make_downsampler("none"))):
        def select(self, group, rng=None):
            return [outcome.session for outcome in group.outcomes]

    run = Run(np.full(200, 0.5), "pilot_commit", groups=4, failing=0.1, unscorable=0.1,
              settings={"group_size": 12, "n_pilot": 8, "n_pilot_kept": 3})  # fmt: skip
    run.downsampler = All(run.downsampler.settings)
    collected = run.step(0)
    assert len(collected.groups) == 4
    for group in collected.groups:
        kept = [outcome.session for outcome in collected.kept if outcome.group == group.uid]
        assert sum(session < 8 for session in kept) == 3 and kept == [outcome.session for outcome in group.trainable]


@pytest.mark.parametrize("subset", [max_reward_subset, percentile_subset])
def test_bad_input_is_named(subset):
    with pytest.raises(ValueError, match="nan of rollout 1"):
        subset([0, math.nan, 1], 2)
    with pytest.raises(ValueError, match="keep=0"):
        subset([0, 1], 0)
    with pytest.raises(ValueError, match="shape"):
        subset([[0, 1]], 1)
    with pytest.raises(SettingError, match="normalise_over='all'; accepted: selected | group"):
        make_downsampler("random", keep=2, normalise_over="all")
    with pytest.raises(SettingError, match="keep=1"):
        make_downsampler("percentile", keep=1)


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12))
def test_statistics_are_the_samples(rewards):
    found = reward_statistics(rewards)
    assert found.n == len(rewards)
    assert found.mean == pytest.approx(statistics.fmean(rewards), rel=1e-12, abs=1e-9)
    assert found.std == pytest.approx(statistics.stdev(rewards), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("n, score", [(n, score) for n in (2, 3, 8, 13) for score in (0.95, 0.1, 1 / 3, 1e9 + 0.1)])
def test_a_saturated_group_has_no_advantage_at_all(n, score):
    """Not even by the rounding of a score to float32."""
    found = group_statistics(group_of([score] * n))
    assert found.std == 0 and found.advantage(float(np.float32(score))) == 0 and found.n == n


def test_near_ties_within_the_tolerance_are_ties():
    near = [0.95] * 7 + [0.9501]
    assert group_statistics(group_of(near)).advantage(0.9501) > 2  # n - 1 of n alike: (n - 1) / sqrt(n)
    assert group_statistics(group_of(near), tolerance=1e-3).std == 0
    assert group_statistics(group_of(near), tolerance=1e-5).std > 0
    mixed = [0.4999] * 7 + [0.5001]  # group_of counts what is above one half as right
    assert group_of(mixed).mixed and group_statistics(group_of(mixed), tolerance=1e-3).std > 0
    assert group_of(near).spread == pytest.approx(1e-4) and group_of([None]).spread == 0
    dr_grpo = group_statistics(group_of([0.0, 0.4, 0.2]))
    assert dr_grpo.advantage(0.4, divide_by_std=False) == pytest.approx(0.2)
    assert dr_grpo.advantage(0.4) == pytest.approx(0.2 / (0.2 + 1e-6))


@pytest.mark.parametrize("name", [name for name in allocators.names() if name != "best_of_probes"])
def test_tolerance_is_a_setting_of_every_allocator(name):
    rule = make_allocator(name, group_size=8, tolerance=0.01)
    run = Run(np.full(60, 0.5), name, groups=4, settings={"group_size": 8, "tolerance": 0.01})
    generate = run.backend.generate

    def nearly_alike(requests):
        outcomes = generate(requests)
        for outcome in outcomes:
            outcome.score = 1.0 + 0.001 * (outcome.session % 3) if outcome.correct else 0.001 * (outcome.session % 3)
        return outcomes

    run.backend.generate = nearly_alike
    seen = 0
    for number in range(3):
        collected = run.step(number)
        for group in collected.groups:
            assert (collected.statistics[group.uid].std == 0) == group.saturated
            seen += 1
    assert rule.settings.tolerance == 0.01 and seen
    with pytest.raises(SettingError, match="allocator.tolerance=-1.0"):
        make_allocator(name, tolerance=-1.0)


def test_statistics_of_equal_few_and_bad_rewards():
    assert reward_statistics([0.1] * 3) == reward_statistics(iter([0.1, 0.1, 0.1]))
    assert (reward_statistics([0.1] * 3).mean, reward_statistics([0.1] * 3).std) == (0.1, 0.0)  # no float residue
    assert reward_statistics([2.0]).std == 0.0
    assert reward_statistics([]).n == 0 and math.isnan(reward_statistics([]).mean)
    with pytest.raises(ValueError, match="reward inf"):
        reward_statistics([0.0, math.inf])
    assert group_statistics(group_of([1.0, None, 0.0], aside=[0])) == reward_statistics([1.0, 0.0])


def test_collected_carries_the_statistics_of_whole_groups():
    # 2 of 64 correct, 16 kept: the advantages differ as worked out in the method's notes
    class TwoRight:
        def generate(self, requests):
            return [Outcome(r.group.uid, s, s < 2, float(s < 2), 1, 1) for r in requests for s in r.sessions]

    run = Run(np.full(9, 0.5), "uniform", "max_variance", groups=3, keep=16, settings={"group_size": 64},
              backend=TwoRight())  # fmt: skip
    collected = run.step(0)
    assert list(collected.statistics) == [group.uid for group in collected.groups]
    for group in collected.groups:
        whole = collected.statistics[group.uid]
        kept = reward_statistics(o.score for o in collected.kept if o.group == group.uid)
        assert (whole.n, kept.n, whole.mean, kept.mean) == (64, 16, 2 / 64, 2 / 16)
        before = [(r - whole.mean) / whole.std for r in (1, 0)]
        after = [(r - kept.mean) / kept.std for r in (1, 0)]
        assert before == pytest.approx([5.52, -0.18], abs=0.01) and after == pytest.approx([2.56, -0.37], abs=0.01)
        assert 2 * after[0] + 14 * after[1] == pytest.approx(0, abs=1e-12)
        assert 2 * before[0] + 14 * before[1] == pytest.approx(8.55, abs=0.01)


def test_whose_statistics_the_advantage_uses():
    uniform, ada = make_allocator("uniform"), make_allocator("reinforce_ada")
    none, whole = make_downsampler("none"), make_downsampler("max_variance", keep=4, normalise_over="group")
    assert normalised_over(uniform, none) == "selected"
    assert normalised_over(uniform, make_downsampler("random", keep=4)) == "selected"
    assert normalised_over(uniform, whole) == "group"
    assert normalised_over(ada, none) == "group"
    assert normalised_over(make_allocator("reinforce_ada", normalise_over="selected"), none) == "selected"
