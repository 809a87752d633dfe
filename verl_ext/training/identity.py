# SPDX-License-Identifier: Apache-2.0
"""What a saved state of the rules must agree with for the resumed run to be the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import verl_ext
from verl_ext.training.batch import StepBudget
from verl_ext.training.training_settings import TrainingSettings


def identity(settings: TrainingSettings, budget: StepBudget, data: Mapping[str, Any]) -> dict[str, Any]:
    """What is known before the data is read, by the names of the settings.

    Args:
        data: verl's settings of it.
    """
    return {
        "version of verl_ext": verl_ext.__version__,
        "data.seed": data.get("seed"),
        "data.shuffle": data.get("shuffle", True),
        "allocation.selector": settings.selector,
        "allocation.allocator": settings.allocator,
        "allocation.downsampler": settings.downsampler,
        "allocation.outcome": asdict(settings.outcome),
        "allocation.seed": settings.seed,
        "allocation.rounds": settings.rounds,
        "allocation.max_rounds": settings.max_rounds,
        "allocation.async": asdict(settings.async_),
        "allocation.give_up_after": settings.give_up_after,
        "allocation.stop.groups": budget.prompts,
        "allocation.stop.rollouts": budget.rollouts,
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """Each setting that differs, by name, with both values."""
    found = []
    for key in [*now, *(key for key in saved if key not in now)]:
        before, here = saved.get(key), now.get(key)
        if isinstance(before, Mapping) and isinstance(here, Mapping):
            found += differences(before, here, f"{name}{key}.")
        elif before != here:
            found.append(f"{name}{key}: saved {before!r}, now {here!r}")
    return found


def other_run(folder: object, differing: list[str]) -> str:
    """The refusal of a resume."""
    return (
        f"the allocation state in {folder} does not fit this run ({'; '.join(differing)}); "
        f"resume with the same settings, or set allocation.resume=fresh to start the rules anew"
    )
