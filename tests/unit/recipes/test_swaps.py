"""Every rule in the place of another, by that one override: in each family of recipes and in the simulation."""

import itertools
import logging
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.unit.checks.check_configs import config_with
from verl_ext import configs
from verl_ext.checks.allocation_settings import check_config
from verl_ext.simulate import run as simulate

CONFIGS = Path(next(iter(configs.__path__)))
KINDS = ("selector", "allocator", "downsampler")
FILES = [(kind, path.stem) for kind in KINDS for path in sorted((CONFIGS / "allocation" / kind).glob("*.yaml"))]
SWAPS = [f"allocation/{kind}={rule}" for kind, rule in FILES]
RECIPES = sorted(
    f"{path.parent.name}/{path.stem}" for path in (CONFIGS / "recipe").glob("*/*.yaml") if path.stem != "base"
)
FAMILIES = sorted({recipe.partition("/")[0] for recipe in RECIPES})


def test_every_family_has_the_plain_recipe():
    assert {f"{family}/grpo" for family in FAMILIES} <= set(RECIPES)


@pytest.mark.parametrize("family, swap", list(itertools.product(FAMILIES, SWAPS)))
def test_every_rule_fits_into_every_family(family, swap):
    kind, rule = swap.removeprefix("allocation/").split("=")
    settings, budget = check_config(config_with(f"recipe={family}/grpo", swap))
    assert getattr(settings, kind)["name"] == {"speed_rl": "pilot_commit", "ar3po": "reinforce_ada"}.get(rule, rule)
    assert budget.rollouts >= budget.prompts


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "pods" in recipe or "ada" in recipe])
@pytest.mark.parametrize("downsampler", [rule for kind, rule in FILES if kind == "downsampler"])
def test_every_downsampler_keeps_as_many_rollouts_as_the_recipe_says(recipe, downsampler):
    config = config_with(f"recipe={recipe}")
    swapped, _ = check_config(config_with(f"recipe={recipe}", f"allocation/downsampler={downsampler}"))
    assert swapped.downsampler.get("keep") in (None, config.allocation.downsampler.keep)


@pytest.mark.parametrize("selector", [rule for kind, rule in FILES if kind == "selector"])
def test_the_budget_of_cero_is_that_of_the_run(selector):
    overrides = ["recipe=dapo_math_17k/cero", f"allocation/selector={selector}"]
    settings, _ = check_config(config_with(*overrides))
    assert settings.stop.run_rollouts == 256_000
    assert settings.selector.get("budget", 256_000) == 256_000


@pytest.mark.long
@pytest.mark.parametrize("recipe, swap", [
    (recipe, swap) for i, recipe in enumerate(RECIPES) for j, swap in enumerate(SWAPS)
    if swap.startswith("allocation/allocator") and (i + j) % 4 == 0
    and not recipe.endswith("_async")  # verl's own modes have no allocator, and not every one goes on over the update
])  # fmt: skip
def test_no_recipe_keeps_settings_of_the_allocator_that_was_swapped_out(recipe, swap):
    """A quarter of all pairs of recipe and allocator, each several times. Rounds are whole: some recipes stream,
    and an allocator that cannot is refused there by name."""
    check_config(config_with(f"recipe={recipe}", swap, "allocation.rounds=barrier"))


@pytest.mark.parametrize("swap", SWAPS)
def test_every_rule_fits_into_the_simulation(swap):
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)
    small = ["prompts=300", "steps=3", "batch=8", "held_out=50", "topics=5"]
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("simulate", overrides=[swap, *(f"simulation.{setting}" for setting in small)])
    result = simulate(config)
    assert result["rollouts"] > 0
