"""The same number of rollouts for every prompt: GRPO."""

from __future__ import annotations

from collections.abc import Sequence

from ..groups import Group, Outcome, Request, Verdict
from ..registry import register_allocator
from .allocator import Allocator


@register_allocator("uniform")
class Uniform(Allocator):
    """``stop.groups`` prompts x ``group_size`` rollouts in one round; every group is trained on, saturated ones too."""

    @property
    def needs_rounds(self) -> None:
        return None  # everything is asked for at once

    def check_carry(self) -> None:
        """Nothing stands in its way."""

    def ask(self, ctx) -> list[Request]:
        if ctx.round > 1:
            return []
        groups = ctx.admit(min(ctx.wanted - len(ctx.live), ctx.budget_left // self.group_size))
        return [ctx.request(group, self.group_size) for group in groups]

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        for uid in dict.fromkeys(outcome.group for outcome in outcomes):
            group = ctx.group(uid)
            if not group.pending and not group.given_up:
                group.verdict = Verdict.COMMIT

    def finish(self, ctx) -> list[Group]:
        return self.whole(ctx)[: ctx.target_groups]
