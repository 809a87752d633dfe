"""Reinforce-Ada (the sequential form): rounds of rollouts for each prompt until it has enough of both outcomes.

"Reinforce-Ada: An Adaptive Sampling Framework for Reinforce-Style LLM Training", arXiv 2510.04996. With
``leave: positive`` and no down-sampler it is the adaptive rollout of AR3PO, arXiv 2509.25808, without its reuse of
right answers of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...typed_settings import require
from ..groups import Group, Outcome, Request, Verdict
from ..metric import Metric
from ..registry import register_allocator
from .allocator import Allocator, AllocatorSettings


@dataclass(frozen=True)
class ReinforceAdaSettings(AllocatorSettings):
    """Settings of Reinforce-Ada.

    Groups differ in size: ``group_size`` is the largest, where a prompt never leaves (published: 4 rounds of 8), so a
    batch has at most ``stop.groups`` x ``group_size`` rows. The published rule then trains on 4 of each: compose it
    with the down-sampler ``max_variance``, ``keep: 4``, which on outcomes of 0 and 1 takes two of each where it can;
    batches are then of equal groups. Published with ``algorithm.norm_adv_by_std_in_grpo=False``.
    """

    group_size: int = 32
    """Most rollouts of a prompt."""
    chunk: int | Literal["auto"] = "auto"
    """Rollouts a round of a prompt that has not left yet; auto: a quarter of ``group_size``, 8 of 32 as published."""
    leave: Literal["balanced", "positive"] = "balanced"
    """``balanced``: a prompt leaves with floor(m/2) correct and m - floor(m/2) wrong rollouts, m = ``wanted``;
    ``positive``: with one correct rollout."""
    wanted: int | Literal["auto"] = "auto"
    """m, the rollouts of a prompt that the update is to have; auto: 4, or ``group_size`` where it is smaller."""
    normalise_over: Literal["selected", "group"] = "group"
    """Whose mean and standard deviation the advantage uses: ``group``, of all scored rollouts of the prompt (as
    published); ``selected``, of those that reach the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("chunk", max(1, self.group_size // 4))
        self.resolve("wanted", min(4, self.group_size))
        require(1 <= self.chunk <= self.group_size, "allocation.allocator.chunk", self.chunk,
                f"an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(2 <= self.wanted <= self.group_size, "allocation.allocator.wanted", self.wanted,
                f"an integer in [2, group_size={self.group_size}]")  # fmt: skip


@register_allocator("reinforce_ada")
class ReinforceAda(Allocator):
    """``stop.groups`` prompts; every group is trained on, those that never left too.

    Prompts are admitted only as far as the budget covers a chunk of each. Where it ends before ``group_size`` or the
    rounds do, those still active get no more, in the order of admission (streaming: of arrival).
    """

    Settings = ReinforceAdaSettings

    def __init__(self, settings: ReinforceAdaSettings) -> None:
        super().__init__(settings)
        self._left = self._active = 0

    @property
    def needs_rounds(self) -> None:
        return None  # every prompt goes on by its own outcomes

    def check_carry(self) -> None:
        """Nothing stands in its way: a prompt that never leaves is for the batch when it has ``group_size``."""

    def begin_step(self, ctx) -> None:
        self._left = 0

    def ask(self, ctx) -> list[Request]:
        chunk = self.settings.chunk
        active = [group for group in ctx.groups if group.verdict is Verdict.CONTINUE and not group.pending]
        active = [group for group in active if ctx.rounds_of(group) > 0]
        if ctx.round == 1:
            active += ctx.admit(min(ctx.wanted - len(ctx.live), ctx.budget_left // chunk - len(active)))
        requests, left = [], ctx.budget_left
        for group in active:
            n = min(chunk, self.group_size - group.requested, left)
            if n > 0:
                requests.append(ctx.request(group, n))
                left -= n
        return requests

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        for uid in dict.fromkeys(outcome.group for outcome in outcomes):
            group = ctx.group(uid)
            if group.pending or group.given_up:
                continue
            if self._leaves(group):
                group.verdict = Verdict.COMMIT
                self._left += 1
            elif ctx.carry and group.requested == self.group_size:
                group.verdict = Verdict.COMMIT

    def finish(self, ctx) -> list[Group]:
        if not ctx.carry:
            for group in ctx.groups:
                group.verdict = Verdict.COMMIT
        batch = self.whole(ctx)[: ctx.target_groups]
        self._active = len(batch) - self._left
        return batch

    METRICS = {
        "prompts_left": Metric("prompts that had enough of both outcomes", "prompts"),
        "prompts_never_left": Metric("prompts that never had", "prompts", "many: rounds are spent in vain"),
    }

    def metrics(self) -> dict[str, float]:
        """Prompts that left, and those that never had enough of both outcomes."""
        return {"prompts_left": float(self._left), "prompts_never_left": float(self._active)}

    def _leaves(self, group: Group) -> bool:
        correct, wrong = group.successes, group.trials - group.successes
        if self.settings.leave == "positive":
            return correct >= 1
        half = self.settings.wanted // 2
        return correct >= half and wrong >= self.settings.wanted - half
