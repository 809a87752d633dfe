"""A step's rollouts divided over its prompts in one round, by what earlier visits say of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..groups import Group, Request, Verdict
from ..state import check_keys
from .allocator import Allocator


class Divided(Allocator):
    """``stop.groups`` prompts share ``stop.groups`` x ``group_size`` rollouts exactly; every group is trained on.

    Its settings have ``most``, the most rollouts of a prompt. Of every prompt seen a tuple of numbers is kept.
    """

    number: type = float
    """Type of what is kept of a prompt."""
    numbers: int
    """How many numbers are kept of a prompt."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._seen: dict[int, tuple] = {}

    @property
    def largest_group(self) -> int:
        return self.settings.most

    @property
    def needs_rounds(self) -> None:
        return None  # everything is asked for at once

    @property
    def fewest(self) -> int:
        """Least rollouts of a prompt."""
        return self.settings.least

    def divide(self, prompts: list[int], total: int, rng: np.random.Generator) -> np.ndarray:
        """Rollouts of each prompt, ``fewest`` to ``most``, summing to ``total``."""
        raise NotImplementedError

    def learn(self, group: Group) -> None:
        """A prompt's outcomes, one of them scored at least; enters them into ``_seen``."""
        raise NotImplementedError

    def ask(self, ctx) -> list[Request]:
        if ctx.round > 1:
            return []
        groups = ctx.admit(min(ctx.target_groups, ctx.budget_left // self.fewest))
        if not groups:
            return []
        total = min(ctx.budget_left, len(groups) * self.group_size)
        sizes = self.divide([group.prompt for group in groups], total, ctx.rng)
        self._numbers |= {"largest_group": float(sizes.max()), "smallest_group": float(sizes.min())}
        return [ctx.request(group, n) for group, n in zip(groups, sizes.tolist(), strict=True)]

    def finish(self, ctx) -> list[Group]:
        for group in ctx.groups:
            group.verdict = Verdict.COMMIT
            if group.trials:
                self.learn(group)
        return list(ctx.groups)

    def state_dict(self) -> dict[str, Any]:
        """8 bytes a number kept, and as many for the row, of every prompt seen."""
        kept = np.array(list(self._seen.values()), self.number).reshape(-1, self.numbers)
        return {"prompts": np.array(list(self._seen), np.int64), "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(type(self).__name__, state, ("prompts", "kept"))
        rows, kept = np.asarray(state["prompts"]).tolist(), np.asarray(state["kept"], self.number).tolist()
        self._seen = {row: tuple(numbers) for row, numbers in zip(rows, kept, strict=True)}
