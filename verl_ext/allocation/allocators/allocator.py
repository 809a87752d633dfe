"""What an allocator is: it asks for rollouts round by round and decides which groups enter the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...typed_settings import refused, require
from ..groups import Group, Outcome, Request, Verdict
from ..metric import Metric
from ..state import check_keys

if TYPE_CHECKING:
    from ..context import StepContext


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings every allocator has."""

    group_size: int = 8
    """Rollouts of a finished group (k). 8 is what SARA and the selectors it is compared with use."""
    tolerance: float = 1e-6
    """Difference between a group's highest and lowest score that counts as none: a group of one kind of outcome within
    it is saturated, its deviation and its advantages are exactly 0, and no near tie is blown up to full size."""

    def __post_init__(self) -> None:
        require(self.group_size >= 2, "allocation.allocator.group_size", self.group_size, "an integer of 2 or more")
        require(0 <= self.tolerance < float("inf"), "allocation.allocator.tolerance", self.tolerance,
                "a number of 0 or more")  # fmt: skip

    def resolve(self, name: str, value: Any) -> None:
        """Give a setting that is ``auto`` its value: sizes follow ``group_size``, so that a rule fits any recipe."""
        if getattr(self, name) == "auto":
            object.__setattr__(self, name, value)  # frozen, and still being made


class Allocator:
    """Asks and decides. Subclass, set ``Settings``, register a name.

    A step is: ``begin_step``; then rounds of ``ask`` and ``tell``, until ``ask`` returns nothing or the rounds are
    used up; then ``finish``. A group has no more than one request in a round. With ``rounds: streaming`` there are no
    rounds: ``ask`` comes again after every group whose request is complete, the others being in flight.
    """

    Settings: type = AllocatorSettings

    METRICS: ClassVar[Mapping[str, Metric]] = {}
    """What ``metrics`` gives, by name."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._numbers: dict[str, float] = {}

    @property
    def group_size(self) -> int:
        """Rollouts of a finished group."""
        return self.settings.group_size

    @property
    def largest_group(self) -> int:
        """Most scored rollouts that a group of the batch can have before down-sampling. More than ``group_size`` where
        groups vary in size, less where some of a group's rollouts are never trained on."""
        return self.group_size

    @property
    def least_rounds(self) -> int:
        """Fewest rounds a step needs; `allocation.max_rounds` below it is refused."""
        return 1

    @property
    def needs_rounds(self) -> str | None:
        """Why ``ask`` cannot be called with groups in flight, so that ``rounds: streaming`` is refused; None: it can.

        Such an ``ask`` passes over groups with sessions pending, keeps to ``ctx.rounds_of(group)``, and leaves in the
        budget what those in flight may still need."""
        return "its ask is written for whole rounds"

    @property
    def readmits(self) -> bool:
        """Whether retired prompts come back once every prompt is retired; else the run ends there."""
        return False

    def check_carry(self) -> None:
        """Refuse ``allocation.async.carry`` above 0; a rule that can go on over the update refuses what stands in its
        way, or nothing. It takes up the groups of ``ctx.groups`` in its ``begin_step``, plans for ``ctx.wanted``
        groups, leaves nothing to be aborted, and ``finish`` gives the first of :meth:`whole`.

        Raises:
            SettingError: the setting, and what is accepted.
        """
        raise refused("allocation.async.carry", "above 0", f"0 with {type(self).__name__}: it decides on whole steps")

    def whole(self, ctx: StepContext) -> list[Group]:
        """Carrying: the groups that a batch could have now, the oldest first."""
        return [group for group in ctx.live if group.verdict is Verdict.COMMIT and not group.pending]

    def begin_step(self, ctx: StepContext) -> None:
        """A step begins. Groups kept waiting are taken up here, with ``ctx.resume(group)``; the selector has not
        begun the step yet, so that no prompt can be admitted."""

    def ask(self, ctx: StepContext) -> list[Request]:
        """This round's requests, at most ``ctx.budget_left`` rollouts; empty ends the step."""
        raise NotImplementedError

    def tell(self, outcomes: Sequence[Outcome], ctx: StepContext) -> None:
        """Outcomes of this round, recorded in their groups already; the whole round or a part of it, in any order."""

    def unwanted(self, ctx: StepContext) -> list[Group]:
        """Streaming: groups in flight whose outcomes are not needed any more; they are aborted. Asked after ``ask``."""
        return []

    def finish(self, ctx: StepContext) -> list[Group]:
        """The batch: at most ``ctx.target_groups`` groups, none with sessions pending."""
        raise NotImplementedError

    def waiting(self, ctx: StepContext) -> list[Group]:
        """Groups to keep for a later step; asked after ``finish``."""
        return []

    def most_waiting(self, target_groups: int) -> int:
        """Most rollouts that wait between two steps: what storage must hold beside those of a step."""
        return 0

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, each described in ``METRICS``."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to make the same decisions."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, strictly."""
        check_keys(type(self).__name__, state, ())
