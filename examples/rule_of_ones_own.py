# SPDX-License-Identifier: Apache-2.0
"""A rule of one's own in one file: every prompt gets two rollouts, and the mixed ones are completed.

    python examples/rule_of_ones_own.py

docs/adding_a_rule.md shows the same as a package that verl_ext finds by name in training.
"""

from verl_ext.allocation import Allocator, AllocatorSettings, Verdict, register_allocator
from verl_ext.testing import allocator_contract


@register_allocator("two_then_all")
class TwoThenAll(Allocator):
    """Two rollouts of each prompt; those with one right and one wrong get the rest of their group."""

    Settings = AllocatorSettings

    def ask(self, ctx):
        if ctx.round == 1:
            prompts = min(ctx.target_groups, ctx.budget_left // self.group_size)
            return [ctx.request(group, 2) for group in ctx.admit(prompts)]
        mixed = [group for group in ctx.groups if group.mixed and group.verdict is Verdict.CONTINUE]
        for group in mixed:
            group.verdict = Verdict.COMMIT
        return [ctx.request(group, self.group_size - 2) for group in mixed]

    def finish(self, ctx):
        for group in ctx.groups:
            if group.verdict is Verdict.CONTINUE:
                group.verdict = Verdict.ABANDON
        return [group for group in ctx.groups if group.verdict is Verdict.COMMIT]


def main():
    """Hold the rule to what the loop relies on: budgets, the ledger, resuming, data that is all wrong or all right."""
    allocator_contract(lambda: TwoThenAll(AllocatorSettings(group_size=8)))
    print("two_then_all keeps the contract")


if __name__ == "__main__":
    main()
