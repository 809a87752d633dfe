"""The recipes of the laboratory: three rules, the groups of a step and its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from verl_ext.typed_settings import refused

STEP = 256
"""Rollouts a step of every recipe of the table, so that all make as many updates of the same rollouts."""


@dataclass(frozen=True)
class Recipe:
    """What `allocation` says in training."""

    name: str
    """As written in ``recipes=``."""
    allocator: Mapping[str, Any] = field(default_factory=lambda: {"name": "uniform"})
    """Allocator and its settings."""
    selector: Mapping[str, Any] = field(default_factory=lambda: {"name": "shuffled"})
    """Selector and its settings; the value ``steps`` becomes the number of steps of the run."""
    downsampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    """Down-sampler and its settings."""
    groups: int = 32
    """stop.groups (B)."""
    group_size: int = 8
    """Rollouts of a finished group (k)."""
    rollouts: int | None = STEP
    """stop.rollouts; null: 6 B k."""
    max_rounds: int = 8
    """allocation.max_rounds."""


def _recipe(name: str, **parts: Any) -> Recipe:
    rules = {kind: {"name": value} if isinstance(value, str) else value
             for kind, value in parts.items() if kind in ("allocator", "selector", "downsampler")}  # fmt: skip
    return Recipe(name, **{**parts, **rules})


_MOPPS = {"name": "mopps", "candidates": 2, "forget": 0.8, "spacing": 0.0}
_PILOT = {"name": "pilot_commit", "n_pilot": 8, "p_lower": 0.125, "p_upper": 0.75}
_CERO = {"name": "cero", "rounds": "steps"}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        _recipe("grpo"),
        _recipe("grpo_128x2", groups=128, group_size=2),
        _recipe("grpo_64x4", groups=64, group_size=4),
        _recipe("grpo_16x16", groups=16, group_size=16),
        _recipe("grpo_8x32", groups=8, group_size=32),
        _recipe("grpo_4x64", groups=4, group_size=64),
        _recipe("dapo", allocator="dynamic_sampling", rollouts=9 * STEP),
        _recipe("sara", allocator="sara", groups=64),
        _recipe("sara_full", allocator="sara", rollouts=None),
        _recipe("sara_8x32", allocator="sara", groups=8, group_size=32),
        _recipe("pilot_commit_8x32", allocator=_PILOT, groups=8, group_size=32, rollouts=None),
        _recipe("knapsack", allocator={"name": "knapsack", "most": 32, "history_min": 2}),
        _recipe("reinforce_ada", allocator={"name": "reinforce_ada", "group_size": 16, "chunk": 4}, group_size=16,
                downsampler={"name": "max_variance", "keep": 8}),
        _recipe("ar3po", allocator={"name": "reinforce_ada", "leave": "positive"}),
        _recipe("ar3po_48x8", allocator={"name": "reinforce_ada", "leave": "positive"}, groups=48),
        _recipe("pods_16x32", groups=16, group_size=32, downsampler={"name": "max_variance", "keep": 8}, rollouts=None),
        _recipe("hora", allocator={"name": "hora", "pilot": 2}),
        _recipe("hora_64x4", allocator={"name": "hora", "pilot": 2, "most": 32}, groups=64, group_size=4),
        _recipe("vip_64x4", allocator="vip", groups=64, group_size=4),
        _recipe("marginal_signal", allocator="marginal_signal", groups=96, group_size=4),
        _recipe("greso", selector="greso"),
        _recipe("greso_64x4", selector="greso", groups=64, group_size=4),
        _recipe("greso_sara", selector="greso", allocator="sara", groups=64),
        _recipe("cero", selector=_CERO),
        _recipe("cero_sara", selector=_CERO, allocator="sara", groups=64),
        _recipe("mopps", selector=_MOPPS),
        _recipe("mopps_64x4", selector=_MOPPS, groups=64, group_size=4),
        _recipe("dps", selector={"name": "dps", "candidates": 2, "spacing": 0.0}),
        _recipe("dps_sara", selector={"name": "dps", "candidates": 2, "spacing": 0.0}, allocator="sara", groups=64),
    )
}  # fmt: skip


def find_recipe(text: str) -> Recipe:
    """A recipe of the table, with settings changed: ``sara``, ``sara+allocator.probe:6+groups:48``.

    Raises:
        SettingError: there is no such recipe or setting.
    """
    name, *changes = text.split("+")
    if name not in RECIPES:
        raise refused(
            "recipes", text, "one of " + ", ".join(RECIPES) + "; changed by +allocator.probe:6, +groups:64 ..."
        )
    recipe = replace(RECIPES[name], name=text)
    for change in changes:
        path, found, value = change.replace("=", ":", 1).partition(":")
        part, _, setting = path.partition(".")
        plain = ("groups", "group_size", "rollouts", "max_rounds")
        if not found or (part not in ("allocator", "selector", "downsampler") if setting else part not in plain):
            raise refused("recipes", text, "+allocator.<setting>=, +selector.<setting>=, +downsampler.<setting>=, "
                               "or + one of " + ", ".join(f"{p}=" for p in plain))  # fmt: skip
        parsed = yaml.safe_load(value)
        if not setting:
            recipe = replace(recipe, **{part: parsed})
        elif setting == "name":
            recipe = replace(recipe, **{part: {"name": parsed}})
        else:
            recipe = replace(recipe, **{part: {**getattr(recipe, part), setting: parsed}})
    return recipe
