"""What a selector is: it decides which prompts are offered next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..metric import Metric
from ..prompt_pool import PromptPool
from ..state import check_keys


@dataclass(frozen=True)
class SelectorSettings:
    """A selector without settings."""


class Selector:
    """Chooses rows of the pool. Subclass, set ``Settings``, register a name."""

    Settings: type = SelectorSettings

    METRICS: ClassVar[Mapping[str, Metric]] = {}
    """What ``metrics`` gives, by name."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._numbers: dict[str, float] = {}
        self.pool: PromptPool | None = None

    @property
    def finished(self) -> str | None:
        """Why no step of the run can be offered anything more, e.g. a budget of its own is issued; None: one can."""
        return None

    def begin_step(self, step: int, pool: PromptPool) -> None:
        """A step begins; the pool has forgotten what the last one was offered."""
        self.pool = pool

    def step_budget(self, groups: int, group_size: int, rollouts: int) -> int:
        """Rollouts this step may issue; once a step, after ``begin_step`` and before any ``select``.

        A selector with a budget of its own returns less than ``rollouts``. The allocator is held to it as to
        ``stop.rollouts``, so that the budget holds whatever the allocator does with the prompts it gets.

        Args:
            groups: groups of the batch.
            group_size: rollouts of a finished group, the most one prompt gets.
            rollouts: what ``stop`` allows.
        """
        return rollouts

    def select(self, n: int) -> list[int]:
        """Up to ``n`` rows not offered in this step yet; fewer when there are no more."""
        raise NotImplementedError

    def issued(self, prompt_row: int, rollouts: int) -> None:
        """``rollouts`` more of a prompt are generated: what is spent, also where nothing of it can be scored."""

    def observe(self, prompt_row: int, successes: int, trials: int, group_size: int) -> None:
        """The scored outcomes of a group, once and whole, at the end of the step that decides it, abandoned or not.

        A group that waits for a later step is observed then. One that went stale or was cut off while generating is
        never observed: what became of it says nothing about its prompt. ``trials`` below ``group_size`` is a censored
        observation (an abandoned prefix), not a small group; it may be 0 where nothing could be scored.
        """

    def end_step(self) -> None:
        """The step's outcomes are all observed."""

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, each described in ``METRICS``."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to make the same choices."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, strictly."""
        check_keys(type(self).__name__, state, ())
