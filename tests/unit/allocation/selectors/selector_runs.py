"""Runs of collect with any selector, and a selector driven by hand."""

from __future__ import annotations

import numpy as np

from tests.unit.allocation.helpers import Run, keys
from verl_ext.allocation import PromptPool, make_selector


class SelectorRun(Run):
    """A run of collect with a selector by name."""

    def __init__(self, rates, selector="cero", allocator="uniform", **rest):
        super().__init__(rates, allocator, selector=selector, **rest)


class ByHand:
    """A selector's calls in the order collect makes them, with every rollout executed as asked."""

    def __init__(self, name, prompts, groups=4, group_size=8, **settings):
        self.pool = PromptPool(keys(prompts))
        self.selector = make_selector(name, **settings)
        self.groups, self.group_size, self.number = groups, group_size, 0
        self.given = np.zeros(prompts)

    def begin(self, rollouts=10**9):
        self.number += 1
        self.pool.begin_step()
        self.selector.begin_step(self.number, self.pool)
        return self.selector.step_budget(self.groups, self.group_size, rollouts)

    def step(self, outcome=None, want=None):
        """One step of full groups; ``outcome(row)`` gives (successes, trials), None observes nothing."""
        left = self.begin() // self.group_size
        rows = self.selector.select(min(left, self.groups if want is None else want))
        for row in rows:
            self.selector.issued(row, self.group_size)
            self.given[row] += self.group_size
            if outcome is not None:
                self.selector.observe(row, *outcome(row), self.group_size)
        self.selector.end_step()
        return rows


def same_state(one, other):
    """Whether two state dicts are equal to the last bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) if isinstance(one[name], np.ndarray) else one[name] == other[name]
        for name in one
    )
