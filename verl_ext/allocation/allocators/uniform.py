"""The same number of rollouts for every prompt: GRPO."""

from __future__ import annotations

from ..groups import Group, Request, Verdict
from ..registry import register_allocator
from .allocator import Allocator


@register_allocator("uniform")
class Uniform(Allocator):
    """``stop.groups`` prompts x ``group_size`` rollouts in one round; every group is trained on, saturated ones too."""

    @property
    def needs_rounds(self) -> None:
        return None  # everything is asked for at once

    def ask(self, ctx) -> list[Request]:
        if ctx.round > 1:
            return []
        groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // self.group_size))
        return [ctx.request(group, self.group_size) for group in groups]

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            group.verdict = Verdict.COMMIT
        return list(ctx.groups)
