"""One run of the laboratory: `Allocation` and its rules, as in training, around a real policy and real gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from verl_ext.allocation import Allocation, AllocationSettings, Collected, Stop, normalised_over
from verl_ext.allocation.registry import selectors
from verl_ext.lab.engine import Engine
from verl_ext.lab.policies import base_policy, success_rates
from verl_ext.lab.recipes import STEP, Recipe
from verl_ext.lab.tasks import TASKS, make_task
from verl_ext.lab.update import Trainer, UpdateSettings, rows_of
from verl_ext.typed_settings import refused


@dataclass(frozen=True)
class LabSettings:
    """What all runs of a comparison share."""

    task: str = "balanced"
    """balanced | sparse | impossible | skills | long | graded."""
    hopeless: float | None = None
    """Share of the training prompts that no answer is right for; null: .2 of `impossible`, else none."""
    rollouts: int = 16384
    """The run ends with the step that brings its rollouts to this number."""
    train_size: int = 1024
    """Training prompts."""
    held_out: int = 256
    """Held-out prompts."""
    eval_every: int = 1024
    """Rollouts between two evaluations."""
    device: str = "cpu"
    """cpu | cuda."""
    update: UpdateSettings = field(default_factory=UpdateSettings)
    """The update, by verl's names."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise refused("lab.task", self.task, "one of " + ", ".join(TASKS))
        if self.hopeless is not None and not 0 <= self.hopeless < 1:
            raise refused("lab.hopeless", self.hopeless, "null or a number in [0, 1)")
        for name in ("rollouts", "train_size", "held_out", "eval_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise refused(f"lab.{name}", value, "an integer of 1 or more")


class Watch:
    """Counts what a run does to its prompts."""

    def __init__(self, levels: np.ndarray) -> None:
        self.levels = levels
        size = int(levels.max()) + 1
        self.offers, self.rollouts = np.zeros(len(levels), int), np.zeros(len(levels), int)
        self.last_step = np.zeros(len(levels), int)
        self.last_offer = np.full(len(levels), -(10**9))
        self.longest = np.zeros(len(levels), int)
        self.effective = np.zeros(size, int)
        self.offered = 0

    def see(self, step: int, collected: Collected) -> None:
        """Count a step."""
        for group in collected.started:
            row = group.prompt
            self.longest[row] = max(self.longest[row], step - self.last_step[row])
            self.last_step[row], self.last_offer[row] = step, self.offered
            self.offered += 1
            self.offers[row] += 1
            self.rollouts[row] += group.requested
        for group in collected.groups:
            self.effective[self.levels[group.prompt]] += group.mixed

    def record(self, step: int) -> dict[str, Any]:
        """The counts, as the output has them."""
        by_level = [self.levels == level for level in range(len(self.effective))]
        return {
            "distinct_share": float((self.last_offer >= self.offered - len(self.levels)).mean()),
            "prompts_offered": int((self.offers > 0).sum()),
            "offers": self.offered,
            "longest_unseen_steps": int(np.maximum(self.longest, step - self.last_step).max()),
            "offers_by_level": [int(self.offers[m].sum()) for m in by_level],
            "rollouts_by_level": [int(self.rollouts[m].sum()) for m in by_level],
            "effective_groups_by_level": self.effective.tolist(),
            "prompts_by_offers": np.bincount(self.offers).tolist(),
        }


def allocation_settings(recipe: Recipe, steps: int, seed: int) -> AllocationSettings:
    """A recipe as training's `allocation` would have it.

    Raises:
        SettingError: a setting that cannot be, by name.
    """
    selector = {k: steps if v == "steps" else v for k, v in recipe.selector.items()}
    if any(f.name == "seed" for f in fields(selectors.settings_type(selector["name"]))):
        selector.setdefault("seed", seed)
    return AllocationSettings(
        selector=selector,
        allocator={"group_size": recipe.group_size, **recipe.allocator},
        downsampler=recipe.downsampler,
        stop=Stop(recipe.groups, recipe.rollouts),
        max_rounds=recipe.max_rounds,
        seed=seed,
    )


def run(recipe: Recipe, settings: LabSettings, policy_seed: int, seed: int) -> dict[str, Any]:
    """Train one policy once.

    Returns:
        JSON values: ``curve`` [[rollouts, held-out success], ...], beside it ``curve_tokens``, ``curve_steps`` and
        ``curve_by_level``; ``rollouts``, ``tokens``, ``steps``, ``optimizer_steps``, ``effective_groups``, ``fates``,
        what :class:`Watch` counts, and ``seconds``.
    """
    start = time.perf_counter()
    task = make_task(settings.task, settings.train_size, settings.held_out, settings.hopeless)
    steps = max(1, settings.rollouts // STEP)
    allocation = Allocation.from_settings(
        allocation_settings(recipe, steps, seed), [str(row) for row in range(len(task.prompts))]
    )
    policy = base_policy(task, policy_seed, device=settings.device)
    engine = Engine(policy, task.prompts, task.score, task.max_tokens, seed)
    trainer = Trainer(policy, settings.update, task.prompts, task.max_tokens)
    ledger = allocation.ledger
    over = normalised_over(allocation.allocator, allocation.downsampler)
    watch = Watch(task.levels)
    curve, curve_tokens, curve_steps, curve_by_level = [], [], [], []
    step = rounds = idle = 0

    masks = [task.held_out_levels == level for level in range(int(task.held_out_levels.max()) + 1)]

    def evaluate() -> None:
        rates = success_rates(policy, task.held_out).numpy()
        curve.append([ledger.issued, float(rates.mean())])
        curve_tokens.append(ledger.tokens)
        curve_steps.append(step)
        curve_by_level.append([round(float(rates[mask].mean()), 4) if mask.any() else None for mask in masks])

    evaluate()
    while ledger.issued < settings.rollouts and idle < 3:
        step += 1
        before = ledger.issued
        collected = allocation.collect(step, engine)
        rounds += collected.rounds
        idle = idle + 1 if ledger.issued == before else 0
        watch.see(step, collected)
        if collected.kept:
            trainer.update(rows_of(collected, engine.trajectories, over, settings.update))
            engine.refresh(step)
        engine.keep({group.uid for group in collected.waiting})
        if ledger.issued // settings.eval_every > before // settings.eval_every:
            evaluate()
    if curve[-1][0] != ledger.issued:
        evaluate()
    effective = int(watch.effective.sum())
    return {
        "recipe": recipe.name, "task": settings.task, "hopeless": settings.hopeless, "policy": policy_seed,
        "seed": seed, "rollouts": ledger.issued, "tokens": ledger.tokens, "steps": step, "rounds": rounds,
        "optimizer_steps": trainer.optimizer_steps, "effective_groups": effective,
        "rollouts_per_effective_group": ledger.issued / effective if effective else None,
        "fates": ledger.step_record(step)["fates"], **watch.record(step),
        "curve": curve, "curve_tokens": curve_tokens, "curve_steps": curve_steps, "curve_by_level": curve_by_level,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
