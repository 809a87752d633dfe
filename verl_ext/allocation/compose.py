"""What an allocation is composed of: three rules, and when a step is full. Checked once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..typed_settings import SettingError, attempt, is_whole, refused, require, require_all
from .allocators import Allocator, Sara
from .downsamplers import DownSampler
from .registry import make_allocator, make_downsampler, make_selector
from .selectors import Cero, Dps, Greso, Mopps, Selector

# They learn which prompts have right and wrong answers.
_BY_OUTCOME = (Cero, Dps, Greso, Mopps)
# What GRPO does.
SHUFFLED, UNIFORM, NONE = {"name": "shuffled"}, {"name": "uniform"}, {"name": "none"}


class Rules(NamedTuple):
    """The three rules of an allocation."""

    selector: Selector
    allocator: Allocator
    downsampler: DownSampler

    def fresh(self) -> Rules:
        """The same rules before their first step."""
        return Rules(*(type(rule)(rule.settings) for rule in self))


@dataclass(frozen=True)
class Stop:
    """When a step is full, and when a run has enough."""

    groups: int | None = None
    """Groups of the batch (B). In training, null: data.train_batch_size; elsewhere it must be given."""

    rollouts: int | None = None
    """Most rollouts a step may issue; null: 6 x groups x group_size, so that dead data cannot run away."""

    run_rollouts: int | None = None
    """The run ends, saved and validated, with the step that brings its rollouts to this number; null: after
    trainer.total_training_steps alone. Rules are compared at equal rollouts, not at equal steps."""

    def __post_init__(self) -> None:
        require_all(
            *(
                (value is None or value >= 1, f"allocation.stop.{name}", value, "null or an integer of 1 or more")
                for name, value in vars(self).items()
            )
        )

    def budget(self, group_size: int) -> int:
        """Rollouts a step may issue."""
        return 6 * self.groups * group_size if self.rollouts is None else self.rollouts


@dataclass(frozen=True)
class Async:
    """What goes on over the update, instead of being awaited or aborted. See docs/asynchronous.md."""

    carry: float = 0.0
    """Groups in hand beyond the batch when a step ends, in units of ``stop.groups``: they go on in the next step, those
    in flight as they are. 0: a step begins and ends with none. A quarter to a half takes away the tail of a step."""

    max_lag: int = 4
    """Versions of the weights that a group of the batch may lag. Prompts are admitted as far as all in hand can be
    trained on within it, and a step waits for what is about to be too old; what is all the same is ``stale``."""

    def __post_init__(self) -> None:
        require_all(
            (self.max_lag >= 1, "allocation.async.max_lag", self.max_lag, "an integer of 1 or more"),
            (
                0 <= self.carry <= max(1, self.max_lag), "allocation.async.carry", self.carry,
                f"a number in [0, allocation.async.max_lag={self.max_lag}]",
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class AllocationSettings:
    """All that decides where rollouts go; what :class:`~.allocation.Allocation` is made from."""

    selector: Mapping[str, Any] = field(default_factory=lambda: dict(SHUFFLED))
    """Name and settings of the rule that chooses which prompts are offered."""

    allocator: Mapping[str, Any] = field(default_factory=lambda: dict(UNIFORM))
    """Name and settings of the rule that decides how many rollouts each group gets, and when."""

    downsampler: Mapping[str, Any] = field(default_factory=lambda: dict(NONE))
    """Name and settings of the rule that chooses which rollouts of a group reach the update."""

    stop: Stop = field(default_factory=Stop)
    """When a step is full, and when the run has enough."""

    rounds: Literal["barrier", "streaming"] = "barrier"
    """barrier: whole rounds; streaming: a prompt's next request leaves as soon as its own rollouts are scored, and what
    is undecided when the batch is full is aborted."""

    max_rounds: int = 8
    """Rounds a step may take (streaming: requests of one prompt); every rule ends within them, short if need be."""

    async_: Async = field(default_factory=Async)
    """``async``: what goes on over the update."""

    give_up_after: int | None = 3
    """Times in a row that none of a prompt's rollouts came back, each time in another epoch, after which the prompt
    leaves the pool; null: never. A group without a single rollout is given up for its step."""

    seed: int = 0
    """Seed of all of the rules' randomness; with the data seed it makes a run's decisions repeatable."""

    def __post_init__(self) -> None:
        require_all(*self._checks())

    def _checks(self) -> list[tuple[bool, str, Any, str]]:
        return [
            (self.max_rounds >= 1, "allocation.max_rounds", self.max_rounds, "an integer of 1 or more"),
            (
                self.give_up_after is None or self.give_up_after >= 1,
                "allocation.give_up_after", self.give_up_after, "null or an integer of 1 or more",
            ),
            (self.seed >= 0, "allocation.seed", self.seed, "an integer of 0 or more"),
        ]  # fmt: skip

    @cached_property
    def rules(self) -> Rules:
        """The three rules, made and checked once. They are patterns: a run takes :meth:`Rules.fresh` ones.

        Raises:
            SettingError: naming every setting of theirs that is not accepted, or what cannot be combined.
        """
        rules = make_rules(self.selector, self.allocator, self.downsampler)
        check_rounds(rules.allocator, self.rounds, self.max_rounds, self.async_)
        return rules


def make_rules(selector: Any = SHUFFLED, allocator: Any = UNIFORM, downsampler: Any = NONE) -> Rules:
    """Make three rules from name and settings of each, and see that they can be combined.

    Raises:
        SettingError: naming every setting that is not accepted.
    """
    problems: list[str] = []
    rules = [
        attempt(problems, _make, kind, make, given)
        for kind, make, given in (
            ("selector", make_selector, selector),
            ("allocator", make_allocator, allocator),
            ("downsampler", make_downsampler, downsampler),
        )
    ]
    if problems:
        raise SettingError(*problems)
    check_composition(*rules)
    return Rules(*rules)


def _make(kind: str, make: Any, given: Any) -> Any:
    if not isinstance(given, Mapping) or "name" not in given:
        raise refused(f"allocation.{kind}", given, f"a rule's name and settings; choose one with allocation/{kind}=...")
    return make(**given)


def check_rounds(allocator: Allocator, rounds: str, max_rounds: int, async_: Async | None = None) -> None:
    """Refuse a way of going through a step, or from one to the next, that the allocator cannot go.

    Raises:
        SettingError: ``rounds``, ``max_rounds`` or ``async.carry``, and what is accepted.
    """
    require(rounds in ("barrier", "streaming"), "allocation.rounds", rounds, "barrier | streaming")
    require(is_whole(max_rounds, 1), "allocation.max_rounds", max_rounds, "an integer of 1 or more")
    carry = 0.0 if async_ is None else async_.carry
    if carry:
        require(rounds == "streaming", "allocation.async.carry", carry, f"0 with allocation.rounds={rounds}")
        allocator.check_carry()
    elif rounds == "streaming" and (reason := allocator.needs_rounds) is not None:
        raise refused("allocation.rounds", rounds, f"barrier with {_name(allocator)}: {reason}")
    least = allocator.least_rounds
    require(max_rounds >= least, "allocation.max_rounds", max_rounds, f"{least} or more with {_name(allocator)}, which "
            "asks again after it has seen outcomes")  # fmt: skip


def check_composition(selector: Any, allocator: Any, downsampler: Any) -> None:
    """Refuse three rules that contradict each other. Everything that is not refused here can be combined.

    - A rule that is not of its kind: every part must subclass its base class.
    - ``keep`` above the largest group the allocator makes: nothing would ever be dropped.
    - SARA with ``effective: spread`` inside a selector that learns from right and wrong answers: a prompt whose scores
      differ but which is never right has signal for the one, and is avoided by the other as hopeless.
    - A budget of CERO's below one group a round: some rounds could issue nothing at all.

    Args:
        selector, allocator, downsampler: the rules, as made by the registry.

    Raises:
        SettingError: naming one setting, its value and what is accepted with the other rules.
    """
    for part, kind, base in (
        (selector, "selector", Selector),
        (allocator, "allocator", Allocator),
        (downsampler, "downsampler", DownSampler),
    ):
        if not isinstance(part, base):
            raise refused(f"allocation.{kind}.name", _name(part), f"a subclass of verl_ext.allocation.{base.__name__}")
    keep, largest = downsampler.keep, allocator.largest_group
    if keep is not None and keep > largest:
        most = f"at most {largest}, the most rollouts that {_name(allocator)} trains on of a group"
        raise refused("allocation.downsampler.keep", keep, most)
    if isinstance(allocator, Sara) and allocator.settings.effective == "spread" and isinstance(selector, _BY_OUTCOME):
        raise refused(
            "allocation.allocator.effective", "spread",
            f"outcome with the selector {_name(selector)}, which learns from right and wrong answers and would avoid "
            "prompts whose scores differ but which are never right; or spread with allocation/selector=shuffled",
        )  # fmt: skip
    if isinstance(selector, Cero) and selector.settings.budget is not None:
        least = selector.settings.rounds * allocator.group_size
        if selector.settings.budget < least:
            raise refused(
                "allocation.selector.budget", selector.settings.budget,
                f"{least} or more: one group of allocator.group_size={allocator.group_size} in each of "
                f"allocation.selector.rounds={selector.settings.rounds}",
            )  # fmt: skip


def _name(rule: Any) -> str:
    return type(rule).__name__
