"""Which selectors, allocators and down-samplers cannot be combined, and why."""

from __future__ import annotations

from typing import Any

from .allocators import Allocator, Sara
from .downsamplers import DownSampler
from .selectors import Cero, Dps, Greso, Mopps, Selector
from .settings import SettingError

# They learn which prompts have right and wrong answers.
_BY_OUTCOME = (Cero, Dps, Greso, Mopps)


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
            raise SettingError(f"{kind}.name", _name(part), f"a subclass of verl_ext.allocation.{base.__name__}")
    keep, largest = downsampler.keep, allocator.largest_group
    if keep is not None and keep > largest:
        most = f"at most {largest}, the most rollouts that {_name(allocator)} trains on of a group"
        raise SettingError("downsampler.keep", keep, most)
    if isinstance(allocator, Sara) and allocator.settings.effective == "spread" and isinstance(selector, _BY_OUTCOME):
        raise SettingError(
            "allocator.effective", "spread",
            f"outcome with the selector {_name(selector)}, which learns from right and wrong answers and would avoid "
            "prompts whose scores differ but which are never right; or spread with allocation/selector=shuffled",
        )  # fmt: skip
    if isinstance(selector, Cero) and selector.settings.budget is not None:
        least = selector.settings.rounds * allocator.group_size
        if selector.settings.budget < least:
            raise SettingError(
                "selector.budget", selector.settings.budget,
                f"{least} or more: one group of allocator.group_size={allocator.group_size} in each of "
                f"selector.rounds={selector.settings.rounds}",
            )  # fmt: skip


def _name(rule: Any) -> str:
    return type(rule).__name__
