"""What holds for every allocator that keeps groups waiting or has groups of varying size, and their YAML files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import verl_ext.configs
from tests.unit.allocation.helpers import Run, check_step, decisions, examples
from verl_ext.allocation import Fate, PromptPool, Verdict, make_allocator, make_downsampler, make_selector
from verl_ext.allocation.registry import allocators, downsamplers

RULES = [
    ("pilot_commit", {"group_size": 8, "n_pilot": 3, "p_lower": 0.2, "p_upper": 0.7}),
    ("pilot_commit", {"group_size": 8, "n_pilot": 4, "n_pilot_kept": 2, "binding": False, "max_staleness": 1,
                      "p_lower": 0.25, "buffer_order": "max_variance", "retire_after": 2}),
    ("pilot_commit", {"group_size": 8, "n_pilot": 4, "buffer_size": 5, "max_staleness": 2, "gen_multiple": 1.5}),
    ("knapsack", {"group_size": 8, "most": 24, "history_min": 4}),
    ("reinforce_ada", {"group_size": 8, "chunk": 3}),
    ("dynamic_sampling", {"max_staleness": 1}),
    ("dynamic_sampling", {"max_staleness": 2, "gen_multiple": "auto"}),
    ("sara", {"max_staleness": 1, "margin": 0.5, "audit_fraction": 0.3}),
    ("sara", {"max_staleness": 3, "window": 17, "chunk": 2, "commit": "stop", "audit_fraction": 0.5}),
    ("sara", {"carry_prior": True, "max_staleness": 1, "chunk": 1, "audit_fraction": 1.0}),
    ("sara", {"effective": "spread", "max_staleness": 1, "probe": None, "tau_low": 0.4}),
]  # fmt: skip


@settings(max_examples=examples(40), deadline=None)
@given(
    rule=st.sampled_from(RULES), size=st.integers(5, 60), groups=st.integers(1, 6), seed=st.integers(0, 10_000),
    factor=st.sampled_from([1, 2.3, 6]), max_rounds=st.integers(2, 8), unscorable=st.sampled_from([0, 0.1, 0.5]),
    failing=st.sampled_from([0, 0.1]), stopped=st.integers(0, 6), downsampler=st.sampled_from(["none", "random"]),
)  # fmt: skip
def test_budgets_ledger_staleness_and_resume(
    rule, size, groups, seed, factor, max_rounds, unscorable, failing, stopped, downsampler
):
    name, extra = rule
    rates = np.random.default_rng(seed).beta(0.4, 0.5, size)

    def fresh():
        return Run(rates, name, downsampler, groups=groups, rollouts=int(factor * groups * 8), max_rounds=max_rounds,
                   keep=3 if downsampler == "random" else None, seed=seed, settings=extra, unscorable=unscorable,
                   failing=failing)  # fmt: skip

    run, twin = fresh(), fresh()
    most = run.allocator.most_waiting(groups)
    for number in range(7):
        if number == stopped:  # the twin is stopped and resumed here
            resumed = fresh()
            resumed.load_state_dict(twin.state_dict())
            twin = resumed
        collected, record = run.step(number), run.ledger.step_record(number)
        assert decisions(collected) == decisions(twin.step(number))
        assert record == twin.ledger.step_record(number)
        if name == "knapsack":  # single groups may be larger than group_size
            assert collected.rollouts == record["issued"] <= groups * 8
            assert max((group.requested for group in collected.started), default=0) <= 24
            run.ledger.check()
        else:
            check_step(run, collected, record)
        assert record["waiting"] == sum(group.returned for group in collected.waiting) <= most
        staleness = getattr(run.allocator.settings, "max_staleness", 0)
        for group in collected.started:
            lag = number - 1 - group.version
            assert lag <= staleness or group.fate is Fate.STALE and group.verdict is Verdict.ABANDON
        assert set(collected.statistics) == {group.uid for group in collected.groups}


CONFIGS = Path(verl_ext.configs.__file__).parent / "allocation"
GIVEN = {"group_size", "keep"}  # follow rollout.n, or have no default


@pytest.mark.parametrize("kind, registry", [("allocator", allocators), ("downsampler", downsamplers)])
def test_every_yaml_mirrors_its_settings(kind, registry):
    files = {path.stem: OmegaConf.load(path) for path in (CONFIGS / kind).glob("*.yaml")}
    for setting_of_another in ("speed_rl", "ar3po"):
        files.pop(setting_of_another, None)
    assert set(files) == {name for name in registry.names() if registry.get(name).__module__.startswith("verl_ext.")}
    for name, config in files.items():
        values = OmegaConf.to_container(config, resolve=False)
        fields = {field.name: field.default for field in dataclasses.fields(registry.settings_type(name))}
        assert values.pop("name") == name
        assert set(values) == set(fields), name
        assert {key: value for key, value in values.items() if key not in GIVEN} == {
            key: value for key, value in fields.items() if key not in GIVEN
        }
        text = (CONFIGS / kind / f"{name}.yaml").read_text()
        assert text.startswith("# ") and text.count("#") >= min(2, 1 + len(fields))


@pytest.mark.parametrize("name, n", [
    ("pilot_commit", 64), ("speed_rl", 16), ("knapsack", 16), ("reinforce_ada", 32), ("sara", 8),
    ("hora", 16), ("vip", 4), ("marginal_signal", 4), ("ar3po", 8),
])  # fmt: skip
def test_configs_compose_into_rules(name, n):
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose(overrides=[f"+allocation/allocator={name}", f"+actor_rollout_ref.rollout.n={n}",
                                    "+allocation/downsampler=percentile", "allocation.downsampler.keep=4"])  # fmt: skip
    rule = make_allocator(**OmegaConf.to_container(config.allocation.allocator, resolve=True))
    assert rule.group_size == n
    assert make_downsampler(**OmegaConf.to_container(config.allocation.downsampler, resolve=True)).keep == 4
    if name == "speed_rl":
        assert rule.settings.commit == 12 and rule.settings.p_solve is None
        assert [rule.settings.in_band(s, 4) for s in range(5)] == [False, True, True, True, False]
    if name == "ar3po":
        assert (rule.settings.chunk, rule.settings.leave) == (2, "positive")


def test_a_held_prompt_does_not_end_the_offers_of_an_epoch():
    pool = PromptPool([f"prompt-{i}" for i in range(5)])
    pool.begin_step()
    pool.take(5)
    for epoch in (1, 1, 2, 2):  # row 3 waits for several steps, over an epoch's edge
        pool.begin_step()
        pool.hold(3)
        taken = pool.take(2)
        assert len(taken) == 2 and 3 not in taken and pool.epoch == epoch and not pool.offered(3)
    pool.begin_step()
    assert 3 in pool.take(5)


def test_a_deferral_ends_with_the_epoch_that_the_prompt_was_offered_in():
    """A step over the edge: the prompts of the old epoch are back in the new one, those of the new one are not."""
    run = Run(np.zeros(10), "pilot_commit", groups=1, rollouts=32 + 8, max_rounds=8,
              settings={"group_size": 8, "n_pilot": 4, "gen_multiple": 1.0})  # fmt: skip
    first, second, third = ([group.prompt for group in run.step(number).started] for number in range(3))
    assert len(first) == len(second) == len(third) == 8 and sorted(first + second[:2]) == list(range(10))
    left = set(range(10)) - set(second[2:])  # of the second epoch, the old epoch's last two among them
    assert set(second[:2]) < left == set(third[:4]) and run.pool.epoch == 2


def test_a_selector_finds_waiting_prompts_out_of_reach():
    """Also one that looks at the pool when its step begins."""

    class Eager(type(make_selector("shuffled"))):
        def begin_step(self, step, pool):
            super().begin_step(step, pool)
            self.candidates = np.flatnonzero(pool.eligible()).tolist()

        def select(self, n):
            rows, self.candidates = self.candidates[:n], self.candidates[n:]
            self.pool.mark_offered(rows)
            return rows

    run = Run(np.full(30, 0.5), "pilot_commit", groups=2, settings={"group_size": 8, "n_pilot": 4})
    run.selector = Eager(run.selector.settings)
    for number in range(12):
        check_step(run, run.step(number), run.ledger.step_record(number))
    observed = []
    run.selector.observe = lambda *args: observed.append(args)
    held = {group.prompt for group in run.allocator._waiting.groups}
    collected = run.step(12)
    still = {group.prompt for group in collected.waiting if group.offered_at != 12}
    assert held and still and not still & {row for row, *_ in observed}  # a group that waits is not decided yet
    assert all(trials > 0 for _, _, trials, _ in observed)


WAITING = {
    "pilot_commit": {"group_size": 8, "n_pilot": 4, "max_staleness": 1, "buffer_size": 5},
    "sara": {"max_staleness": 1, "margin": 0.5},
    "dynamic_sampling": {"max_staleness": 1},
}


@pytest.mark.parametrize("name", WAITING)
def test_a_selector_sees_a_group_once_and_whole_when_it_is_decided(name):
    """A probe that waits and its top-up are one observation; a stale group is none."""
    run = Run(np.random.default_rng(0).beta(0.6, 0.6, 300), name, groups=4, settings=WAITING[name], seed=2)
    seen = []
    run.selector.observe = lambda *args: seen.append(args)
    waited = stale = 0
    for number in range(25):
        seen.clear()
        collected = run.step(number)
        undecided = {group.uid for group in collected.waiting}
        decided = [g for g in collected.started if g.uid not in undecided and g.fate is not Fate.STALE]
        assert seen == [(g.prompt, g.successes, g.trials, 8) for g in decided]
        waited += sum(group.offered_at != number for group in decided)
        stale += sum(group.fate is Fate.STALE for group in collected.started)
    assert waited > 10, "no group waited"
    assert name != "pilot_commit" or stale, "no group went stale"
