"""The contracts for outside rules: every rule of the package passes them, and each fault they name is found."""

import numpy as np
import pytest

from verl_ext.allocation import (
    Allocator,
    AllocatorSettings,
    DownSampler,
    Fate,
    Selector,
    SelectorSettings,
    Verdict,
    make_allocator,
    make_downsampler,
    make_selector,
)
from verl_ext.allocation.allocators import Uniform
from verl_ext.allocation.downsamplers import KeepSettings
from verl_ext.allocation.registry import allocators, downsamplers, selectors
from verl_ext.allocation.state import check_keys
from verl_ext.testing import allocator_contract, downsampler_contract, selector_contract
from verl_ext.testing.common import check_fresh

ALLOCATORS = [
    ("uniform", {}),
    ("dynamic_sampling", {"gen_multiple": "auto", "max_staleness": 1}),
    ("dynamic_sampling", {"refill": "one_for_one"}),
    ("dynamic_sampling", {"gen_multiple": "greso"}),
    ("sara", {}),
    ("sara", {"commit": "stop", "max_staleness": 2, "audit_fraction": 0.5}),
    ("sara", {"carry_prior": True, "chunk": 1}),
    ("sara", {"effective": "spread"}),
    ("pilot_commit", {"group_size": 8, "n_pilot": 3}),
    ("pilot_commit", {"group_size": 8, "n_pilot": 4, "n_pilot_kept": 2, "retire_after": 2}),
    ("pilot_commit", {"group_size": 8, "n_pilot": 4, "binding": False, "max_staleness": 0}),
    ("knapsack", {"most": 24, "history_min": 4}),
    ("reinforce_ada", {"group_size": 8, "chunk": 3}),
    ("hora", {}),
    ("hora", {"group_size": 6, "pilot": 3, "most": 9}),
    ("marginal_signal", {}),
    ("marginal_signal", {"group_size": 6, "pilot": 3, "most": 9, "waves": 2, "room": 0.0, "cost": "tokens"}),
    ("vip", {}),
    ("vip", {"least": 2, "forget": 1.0}),
    ("vip", {"estimator": "dr_grpo"}),
]
SELECTORS = [
    ("shuffled", {}),
    ("dps", {}),
    ("dps", {"censored": "soft"}),
    ("mopps", {"forget": 0.8}),
    ("greso", {}),
    ("cero", {"rounds": 8}),
    ("cero", {"rounds": 8, "schedule": "epoch", "budget": 600}),
    ("cero", {"rounds": 8, "schedule": "epoch", "budget": 600, "dual": "virtual"}),
    ("cero", {"rounds": 8, "price": "dual"}),
]


@pytest.mark.parametrize("name, settings", ALLOCATORS)
def test_every_allocator_passes(name, settings):
    allocator_contract(lambda: make_allocator(name, **settings), groups=2, steps=4)


@pytest.mark.parametrize("name, settings", SELECTORS)
def test_every_selector_passes(name, settings):
    selector_contract(lambda: make_selector(name, **settings), groups=2, steps=3)


@pytest.mark.parametrize("name", downsamplers.names())
def test_every_downsampler_passes(name):
    downsampler_contract(lambda: make_downsampler(name, **({} if name == "none" else {"keep": 4})))


def test_no_rule_is_left_out():
    ours = [set(registry.names()) for registry in (allocators, selectors)]
    assert [{name for name, _ in rules} for rules in (ALLOCATORS, SELECTORS)] == ours


class Plain(Uniform):
    """Uniform with room for a fault."""

    def __init__(self, settings=None):
        super().__init__(settings or AllocatorSettings(group_size=4))
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        check_keys("plain", state, ("seen",))
        self.seen = state["seen"]


class Overspends(Plain):
    def ask(self, ctx):
        return [ctx.request(group, 4) for group in ctx.admit(3)] if ctx.round == 1 else []


class NeverEnds(Plain):
    def ask(self, ctx):
        groups = list(ctx.groups) or ctx.admit(min(3, ctx.budget_left))
        return [ctx.request(group, 1) for group in groups[: ctx.budget_left]]


class Forgets(Plain):
    """Decides by what it has seen, and does not save it."""

    def ask(self, ctx):
        self.seen += ctx.round == 1
        return super().ask(ctx) if self.seen < 3 else []

    def state_dict(self):
        return {"seen": 0}


class Global(Plain):
    def ask(self, ctx):
        np.random.random()
        return super().ask(ctx) if np.random.random() < 0.5 else []


class Shares(Plain):
    def __init__(self):
        super().__init__()
        self.seen = np.zeros(3)

    def ask(self, ctx):
        self.seen += 1
        return super().ask(ctx)


class Lenient(Plain):
    def load_state_dict(self, state):
        self.seen = state.get("seen", 0)


class Hasty(Plain):
    """Judges a group by the part of it that is back."""

    def tell(self, outcomes, ctx):
        for outcome in outcomes:
            group = ctx.group(outcome.group)
            if group.verdict is Verdict.CONTINUE:
                group.verdict = Verdict.COMMIT if outcome.correct else Verdict.ABANDON

    def finish(self, ctx):
        return [group for group in ctx.groups if group.verdict is Verdict.COMMIT]


class KeepsOut(Plain):
    """Trains on groups it has no verdict on."""

    def tell(self, outcomes, ctx):
        pass

    def finish(self, ctx):
        return list(ctx.groups)


class Hoards(Plain):
    """Keeps groups waiting without saying how many, for ever."""

    def waiting(self, ctx):
        return [group for group in ctx.groups if group.uid not in self.batch]

    def finish(self, ctx):
        batch = super().finish(ctx)[:1]
        self.batch = {group.uid for group in batch}
        return batch


class Assumes(Plain):
    """Divides by what it sees."""

    def finish(self, ctx):
        for group in ctx.groups:
            group.successes / group.trials
        return super().finish(ctx)


@pytest.mark.parametrize("rule, problem", [
    (Overspends, "asks for 12 rollouts with 4 left"),
    (NeverEnds, "has 8 rollouts; at most 4"),
    (Forgets, "decides otherwise: groups"),
    (Global, "decides otherwise"),
    (Shares, "state_dict() shares what later steps change"),
    (Lenient, "differs in the keys ['unheard of']"),
    (Hasty, "in parts and out of order: other decisions"),
    (KeepsOut, "is trained on with the verdict"),
    (Hoards, "rollouts wait for a later step; most_waiting says 0"),
    (Assumes, "on never scored, step 1: ZeroDivisionError"),
])  # fmt: skip
def test_faulty_allocators_are_found(rule, problem):
    with pytest.raises(AssertionError) as error:
        allocator_contract(rule, steps=3)
    assert problem in str(error.value), str(error.value)


class InOrder(Selector):
    """All prompts in order, with room for a fault."""

    def __init__(self):
        super().__init__(SelectorSettings())

    def select(self, n):
        rows = self.rows(n)
        self.pool.mark_offered(rows)
        return rows

    def rows(self, n):
        return np.flatnonzero(self.pool.eligible())[:n].tolist()


class TooMany(InOrder):
    def rows(self, n):
        return super().rows(n + 1)


class Unmarked(InOrder):
    def select(self, n):
        return self.rows(n)


class Retired(InOrder):
    def rows(self, n):
        return [row for row in range(len(self.pool)) if not self.pool._in_step[row]][:n]


class Boundless(InOrder):
    def step_budget(self, groups, group_size, rollouts):
        return rollouts + 1


class Dice(InOrder):
    def rows(self, n):
        rows = np.flatnonzero(self.pool.eligible())
        return np.random.permutation(rows)[:n].tolist()


class Remembers(InOrder):
    """Offers unseen prompts first, and forgets which when resumed."""

    def begin_step(self, step, pool):
        super().begin_step(step, pool)
        if not hasattr(self, "visits"):
            self.visits = np.zeros(len(pool))

    def observe(self, row, successes, trials, group_size):
        self.visits[row] += 1

    def rows(self, n):
        free = np.flatnonzero(self.pool.eligible())
        return free[np.argsort(self.visits[free], kind="stable")][:n].tolist()


class AnyPool(Remembers):
    """Takes the state of any pool."""

    def state_dict(self):
        return {"visits": self.visits.copy()} if hasattr(self, "visits") else {}

    def load_state_dict(self, state):
        check_keys("any pool", state, state and ("visits",))
        if state:
            self.visits = state["visits"].copy()


@pytest.mark.parametrize("rule, problem", [
    (TooMany, "select(2) gave 3 prompts"),
    (Unmarked, "was given but not marked"),
    (Retired, "row 0 is retired and cannot be offered"),
    (Boundless, "step_budget gave 1001 of 1000"),
    (Dice, "decides otherwise"),
    (Remembers, "decides otherwise"),
    (AnyPool, "is taken for a pool of 2"),
])  # fmt: skip
def test_faulty_selectors_are_found(rule, problem):
    with pytest.raises(AssertionError) as error:
        selector_contract(rule, steps=2)
    assert problem in str(error.value), str(error.value)


def test_a_selector_without_a_fault_passes():
    selector_contract(InOrder, steps=2)


class Keeps(DownSampler):
    Settings = KeepSettings

    def __init__(self):
        super().__init__(KeepSettings(keep=3))

    def select(self, group, rng=None):
        return self.of([outcome.session for outcome in group.trainable], group)

    def of(self, sessions, group):
        return sessions[:3]


class Everything(Keeps):
    def of(self, sessions, group):
        return sessions


class Backwards(Keeps):
    def of(self, sessions, group):
        return sessions[:3][::-1]


class Untrainable(Keeps):
    def of(self, sessions, group):
        return [outcome.session for outcome in group.outcomes][:3]


class Miser(Keeps):
    def of(self, sessions, group):
        return sessions[:1]


class Random(Keeps):
    def of(self, sessions, group):
        return sorted(np.random.permutation(sessions).astype(int).tolist()[:3])


class Marks(Keeps):
    def of(self, sessions, group):
        group.fate = Fate.TRAINED
        return super().of(sessions, group)


@pytest.mark.parametrize("rule, problem", [
    (Everything, "9 rollouts are kept, with keep=3"),
    (Backwards, "each once, in order"),
    (Untrainable, "which are not scored"),
    (Miser, "1 of 9 rollouts are kept; a group needs 2"),
    (Random, "the same rng gives"),
    (Marks, "select changed the group"),
])  # fmt: skip
def test_faulty_downsamplers_are_found(rule, problem):
    with pytest.raises(AssertionError) as error:
        downsampler_contract(rule)
    assert problem in str(error.value), str(error.value)


def test_a_factory_that_hands_out_the_same_rule_is_refused():
    rule = Plain()
    with pytest.raises(AssertionError, match="new rule each time"):
        check_fresh(lambda: rule, Allocator)
    with pytest.raises(AssertionError, match="no subclass of verl_ext.allocation.Selector"):
        check_fresh(Plain, Selector)
