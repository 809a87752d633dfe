"""A pilot of every prompt, then the rest of the step's rollouts divided by what the pilots say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...typed_settings import require
from ..groups import Group, Request, Verdict
from .allocator import Allocator, AllocatorSettings
from .greedy import largest_gains


@dataclass(frozen=True)
class PilotedSettings(AllocatorSettings):
    """Settings of rules that pilot.

    Groups differ in size: ``group_size`` is their mean. ``stop.groups`` prompts share ``stop.groups`` x ``group_size``
    rollouts, so a batch has no more rows than one of equal groups, but a single group may have ``most``.
    """

    pilot: int | Literal["auto"] = "auto"
    """Rollouts of every prompt in the first round; auto: a part of ``group_size`` that the rule chooses."""
    most: int | Literal["auto"] = "auto"
    """Most rollouts of a prompt; auto: a multiple of ``group_size``, so that storage can be planned."""

    def choose(self, pilot: int, most: int) -> None:
        """Give ``pilot`` and ``most`` these values where they are ``auto``, and check them."""
        self.resolve("pilot", pilot)
        self.resolve("most", most)
        require(1 <= self.pilot <= self.group_size, "allocation.allocator.pilot", self.pilot,
                f"auto, or an integer in [1, group_size={self.group_size}]")  # fmt: skip
        require(self.most >= self.group_size, "allocation.allocator.most", self.most,
                f"auto, or an integer of group_size={self.group_size} or more")  # fmt: skip


class Piloted(Allocator):
    """Pilots, then waves: each gives out half of what is left, the last one all of it, the largest gains first.

    Every group is trained on. A saturated one adds nothing to the gradient, but its tokens count in the mean that the
    loss is: without them the gradient of a step with few mixed groups, mostly noise, is scaled up.
    """

    Settings: type = PilotedSettings
    waves = 2
    """Rounds of a step, pilots included."""

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def least_rounds(self) -> int:
        return 2

    @property
    def needs_rounds(self) -> str | None:
        return "what is left after the pilots is divided over all prompts at once"

    def gains(self, groups: list[Group], most: int) -> np.ndarray:
        """(groups, most): what each further rollout adds; falling."""
        raise NotImplementedError

    def ask(self, ctx) -> list[Request]:
        settings = self.settings
        if ctx.round == 1:
            groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // settings.pilot))
            return [ctx.request(group, settings.pilot) for group in groups]
        waves = min(self.waves, ctx.max_rounds)
        groups = [group for group in ctx.groups if group.verdict is Verdict.CONTINUE]  # not given up
        if ctx.round > waves or not groups:
            return []
        left = len(groups) * self.group_size - sum(group.requested for group in groups)
        left = min(left, ctx.budget_left)
        gains = self.gains(groups, settings.most)
        room = settings.most - np.array([group.requested for group in groups])
        gains[np.arange(settings.most) >= room[:, None]] = -np.inf
        counts = largest_gains(gains, left if ctx.round == waves else (left + 1) // 2, ctx.rng)
        return [ctx.request(group, n) for group, n in zip(groups, counts.tolist(), strict=True) if n]

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            group.verdict = Verdict.COMMIT
        sizes = [group.requested for group in ctx.groups] or [0]
        self._numbers |= {"largest_group": float(max(sizes)), "smallest_group": float(min(sizes))}
        return list(ctx.groups)
