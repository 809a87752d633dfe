"""Every selector with every allocator and every down-sampler, through ``collect`` on a simulated population.

``Trial.step`` checks each step: the ledger adds up, budgets hold, no rollout is lost, no prompt enters a step twice.
"""

import functools
import itertools

import numpy as np
import pytest

from verl_ext.allocation import SettingError, check_composition, make_allocator, make_downsampler, make_selector
from verl_ext.allocation.registry import allocators, downsamplers, selectors
from verl_ext.allocation.selectors import Cero
from verl_ext.testing import Trial, decisions, same

STEPS, GROUPS, SIZE, KEEP = 50, 2, 6, 2
SELECTORS = {
    "shuffled": {},
    "dps": {"candidates": 4},
    "mopps": {"candidates": 4, "forget": 0.8},
    "greso": {},
    "cero": {"rounds": STEPS},
}
ALLOCATORS = {
    "uniform": {},
    "dynamic_sampling": {"gen_multiple": 1.5},
    "sara": {"probe": 3},
    "pilot_commit": {"n_pilot": 2, "p_lower": 0.3, "p_upper": 0.8, "gen_multiple": 2.0, "max_staleness": 1},
    "knapsack": {"most": 2 * SIZE, "history_min": 3},
    "reinforce_ada": {"chunk": 2},
    "hora": {},
    "marginal_signal": {},
    "vip": {},
}
# Other settings that change how the parts meet.
SELECTORS_TOO = {
    "cero: epochs": {"rounds": 4, "schedule": "epoch", "budget": 500, "explore": 0.2},
    "cero: published price": {"rounds": STEPS, "price": "dual", "dual": "virtual"},
    "dps: soft": {"candidates": 4, "censored": "soft"},
}
ALLOCATORS_TOO = {
    "sara: carry over, audits": {"probe": 3, "commit": "stop", "max_staleness": 1, "audit_fraction": 0.5},
    "sara: own priors": {"carry_prior": True, "chunk": 1, "max_staleness": 1},
    "pilot_commit: within the step": {"n_pilot": 3, "binding": False, "max_staleness": 0, "n_pilot_kept": 2},
    "pilot_commit: SPEED-RL": {"n_pilot": 2, "p_lower": 0.001, "p_upper": 0.999, "p_solve": None},
    "dynamic_sampling: carry over": {"gen_multiple": "auto", "max_staleness": 1},
}
ALL_SELECTORS, ALL_ALLOCATORS = SELECTORS | SELECTORS_TOO, ALLOCATORS | ALLOCATORS_TOO
DOWNSAMPLERS = downsamplers.names()
RATES = np.random.default_rng(1).beta(0.5, 0.5, 40)


@functools.cache
def settings(selector, allocator, downsampler):
    parts = (
        make_selector(selector.partition(":")[0], **ALL_SELECTORS[selector]),
        make_allocator(allocator.partition(":")[0], group_size=SIZE, **ALL_ALLOCATORS[allocator]),
        make_downsampler(downsampler, **({} if downsampler == "none" else {"keep": KEEP})),
    )
    check_composition(*parts)
    return [(type(part), part.settings) for part in parts]


def make(*rules, rates=RATES, **faults):
    selector, allocator, downsampler = (rule(given) for rule, given in settings(*rules))
    return Trial(
        rates, selector=selector, allocator=allocator, downsampler=downsampler, groups=GROUPS,
        rollouts=5 * GROUPS * SIZE, seed=3, **faults,
    )  # fmt: skip


def run(steps, *rules, every=1, **faults):
    """A run, and beside it one resumed from its state before each step, which decides alike.

    With ``every=1`` the second goes on from its own state; else it makes only each ``every``-th step.
    """
    one, twin = make(*rules, **faults), make(*rules, **faults)
    trained = 0
    for number in range(1, steps + 1):
        state = (twin if every == 1 else one).state_dict()
        twin = make(*rules, **faults)
        twin.load_state_dict(state)
        assert same(twin.state_dict(), state)
        collected = one.step(number)
        if number % every == 0:
            assert decisions(collected) == decisions(twin.step(number))
            assert same(one.state_dict(), twin.state_dict())
        trained += len(collected.groups)
        oldest = getattr(one.allocator.settings, "max_staleness", 0)
        assert all(number - 1 - group.version <= oldest for group in collected.groups), "a stale group is trained on"
    assert one.ledger.issued <= steps * 5 * GROUPS * SIZE
    if isinstance(one.selector, Cero):
        chosen = one.selector.settings
        assert one.ledger.issued <= (chosen.budget or chosen.rounds * GROUPS * SIZE), "CERO overspends"
    return one, trained


# Every selector with every allocator, and each of both with every down-sampler.
COVERING = [
    (selector, allocator, DOWNSAMPLERS[(i + 2 * j) % len(DOWNSAMPLERS)])
    for i, selector in enumerate(ALL_SELECTORS)
    for j, allocator in enumerate(ALL_ALLOCATORS)
]


def test_the_subset_covers_all_pairs_and_every_rule_is_there():
    assert set(SELECTORS) == set(selectors.names()) and set(ALLOCATORS) == set(allocators.names())
    for these, those in ((0, 1), (0, 2), (1, 2)):
        names = (list(ALL_SELECTORS), list(ALL_ALLOCATORS), DOWNSAMPLERS)
        pairs = {(row[these], row[those]) for row in COVERING}
        assert pairs == set(itertools.product(names[these], names[those]))


@pytest.mark.parametrize("selector, allocator, downsampler", COVERING)
def test_fifty_steps(selector, allocator, downsampler):
    """With flaky rollouts, over several epochs of the pool; fewer steps for the other settings."""
    steps = STEPS if selector in SELECTORS and allocator in ALLOCATORS else 12
    one, trained = run(steps, selector, allocator, downsampler, every=4, failing=0.05, unscorable=0.05)
    assert trained >= steps // 4, f"{trained} groups trained on in {steps} steps"
    fates = one.ledger.rollouts_by_fate
    assert fates["failed"] and fates["unscored"]
    assert downsampler == "none" or fates["down_sampled"]


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_complete_product(selector):
    for allocator, downsampler in itertools.product(ALLOCATORS, DOWNSAMPLERS):
        _, trained = run(3, selector, allocator, downsampler)
        assert trained, (allocator, downsampler)


@pytest.mark.parametrize("selector", [*SELECTORS, "cero: epochs"])
@pytest.mark.parametrize("rate", [0.0, 1.0, np.nan])
def test_it_ends_on_dead_data(selector, rate):
    """All hopeless, all solved, or never scored: steps end, and end in no rollout in flight or group of no use."""
    for allocator in ALL_ALLOCATORS:
        one = make(selector, allocator, "max_variance", rates=np.full(9, rate))
        for number in range(1, 4):
            collected = one.step(number)
            assert not any(group.mixed for group in collected.groups)
            assert not np.isnan(rate) or not collected.kept
        waits = one.ledger.waiting
        assert waits == 0, f"{allocator}: {waits} rollouts of dead prompts wait"


@pytest.mark.parametrize("allocator", ALL_ALLOCATORS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_shaped_scores_decide_nothing(selector, allocator):
    """Scores shaped by length: the same prompts, requests and verdicts, and no group of one outcome in the batch."""
    plain, shaped = make(selector, allocator, "none"), make(selector, allocator, "none", shaping=0.9)
    for number in range(1, 7):
        one, other = plain.step(number), shaped.step(number)
        if "n_pilot_kept" not in ALL_ALLOCATORS[allocator]:  # where ties among rewards draw on the step's chance
            assert decided(one) == decided(other)
        scores = [outcome.score for group in other.groups for outcome in group.outcomes]
        assert len(set(scores)) > 2 or not scores, "nothing was shaped"
        assert allocator in TRAINS_ON_ALL or all(group.mixed for group in other.groups)


TRAINS_ON_ALL = ("uniform", "knapsack", "reinforce_ada", "hora", "marginal_signal", "vip")


def decided(collected):
    return [(g.uid, g.prompt, g.requested, g.verdict, g.fate) for g in collected.started], collected.rounds


@pytest.mark.bad_input
@pytest.mark.parametrize("selector, allocator, downsampler, problem", [
    (("shuffled", {}), ("uniform", {}), ("random", {"keep": 9}),
     "downsampler.keep=9; accepted: at most 8, the most rollouts that Uniform trains on of a group"),
    (("shuffled", {}), ("sara", {"commit": "stop"}), ("max_variance", {"keep": 5}),
     "downsampler.keep=5; accepted: at most 4, the most rollouts that Sara"),
    (("shuffled", {}), ("pilot_commit", {"group_size": 16, "n_pilot": 8, "n_pilot_kept": 2}), ("random", {"keep": 11}),
     "downsampler.keep=11; accepted: at most 10"),
    (("shuffled", {}), ("knapsack", {"most": 20}), ("random", {"keep": 21}),
     "downsampler.keep=21; accepted: at most 20"),
    *(((name, {"rounds": 5} if name == "cero" else {}), ("sara", {"effective": "spread"}), ("none", {}),
       f"allocator.effective='spread'; accepted: outcome with the selector {name.capitalize()}")
      for name in ("cero", "dps", "greso", "mopps")),
    (("cero", {"rounds": 10, "budget": 79}), ("sara", {}), ("none", {}),
     "selector.budget=79; accepted: 80 or more: one group of allocator.group_size=8 in each of "
     "allocation.selector.rounds=10"),
])  # fmt: skip
def test_what_cannot_be_combined_is_refused(selector, allocator, downsampler, problem):
    parts = [
        build(part[0], **part[1])
        for build, part in ((make_selector, selector), (make_allocator, allocator), (make_downsampler, downsampler))
    ]
    with pytest.raises(SettingError) as error:
        check_composition(*parts)
    assert str(error.value).startswith(f"allocation.{problem}")


@pytest.mark.parametrize("selector, allocator, downsampler", [
    (("shuffled", {}), ("knapsack", {"most": 20}), ("random", {"keep": 20})),  # groups larger than group_size
    (("shuffled", {}), ("sara", {"commit": "stop"}), ("max_variance", {"keep": 4})),
    (("shuffled", {}), ("sara", {"effective": "spread"}), ("max_variance", {"keep": 4})),
    (("cero", {"rounds": 10, "budget": 80}), ("sara", {}), ("none", {})),
])  # fmt: skip
def test_what_is_at_the_limit_is_accepted(selector, allocator, downsampler):
    check_composition(
        make_selector(selector[0], **selector[1]),
        make_allocator(allocator[0], **allocator[1]),
        make_downsampler(downsampler[0], **downsampler[1]),
    )


def test_a_rule_of_the_wrong_kind_is_refused():
    rule = make_selector("shuffled")
    with pytest.raises(SettingError, match="allocator.name='Shuffled'; accepted: a subclass of .*Allocator"):
        check_composition(rule, rule, make_downsampler("none"))
