# SPDX-License-Identifier: Apache-2.0
"""A simulated run: `collect`, as in training, with a population or a recorded table for a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from verl_ext.allocation import (
    Collected,
    Ledger,
    PromptPool,
    Stop,
    collect,
    make_allocator,
    make_downsampler,
    make_selector,
    rng_for,
)
from verl_ext.runs.outcome_records import read_record

from .backend import SimulatedBackend
from .population import effective_share, make_population
from .replay import ReplayBackend
from .settings import WorldSettings
from .streaming import SimulatedStream
from .updates import Learner


@dataclass(frozen=True)
class Rules:
    """The three parts by name and settings, and when a step is full: what ``allocation`` says."""

    selector: Mapping[str, Any] = field(default_factory=lambda: {"name": "shuffled"})
    allocator: Mapping[str, Any] = field(default_factory=lambda: {"name": "uniform"})
    downsampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    rollouts: int | None = None
    """Most rollouts a step; null: 6 x batch x group_size."""
    max_rounds: int = 8
    """Rounds a step may take; streaming: requests of one prompt."""
    rounds: Literal["barrier", "streaming"] = "barrier"
    """Whole rounds, or each prompt's next request as soon as its own rollouts are back."""


class Simulation:
    """A run, step by step.

    Args:
        population: uniform | u_shaped | all_solved | all_hopeless | recorded.
        world: prompts, steps and what training does.
        rules: selector, allocator, down-sampler.
        seed: of all; the same seed gives the same run.

    Raises:
        SimulationError, SettingError, RecordError: a setting that cannot be, by name.
    """

    def __init__(self, population: str, world: WorldSettings, rules: Rules, seed: int = 0) -> None:
        self.world, self.rules, self.seed = world, rules, seed
        self.allocator = make_allocator(**rules.allocator)
        self.selector = make_selector(**rules.selector)
        self.downsampler = make_downsampler(**rules.downsampler)
        self.stop = Stop(world.batch, rules.rollouts)
        self.ledger = Ledger()
        self.step = 0
        """Steps made, warm-up included."""
        self.population = self._learner = None
        if population == "recorded":
            self.backend: Any = ReplayBackend(read_record(world.record), seed, frozen=world.frozen)
            self.pool = PromptPool(self.backend.keys, seed=seed)
        else:
            self._populate(population)
        timed = world.slots is not None or rules.rounds == "streaming"
        self.engine = SimulatedStream(self.backend, slots=world.slots) if timed else None
        """The backend with a clock, a token a second; None where time plays no part."""

    def _populate(self, population: str) -> None:
        world, seed = self.world, self.seed
        rng = rng_for(seed, "population")
        self.population = make_population(
            population, world.prompts, world.held_out, world.topics, rng,
            share=world.effective_share, mean=world.mean, group_size=self.allocator.group_size,
        )  # fmt: skip
        if not world.frozen:
            self._learner = Learner(self.population, world, rng_for(seed, "drift"))
        length = world.length
        self.backend = SimulatedBackend(
            self.population.rates(), seed, mean_tokens=length.mean_tokens, wrong_factor=length.wrong_factor,
            sigma=length.sigma, max_tokens=length.max_tokens,
        )  # fmt: skip
        self.pool = PromptPool([str(row) for row in range(world.prompts)], seed=seed)

    def advance(self) -> Collected:
        """One step: collect, then update the population."""
        self.step += 1
        if isinstance(self.backend, ReplayBackend):
            self.backend.begin_step()
        collected = collect(
            step=self.step, allocator=self.allocator, selector=self.selector, pool=self.pool,
            downsampler=self.downsampler, backend=self.engine or self.backend, ledger=self.ledger, stop=self.stop,
            rounds=self.rules.rounds, max_rounds=self.rules.max_rounds, rng=rng_for(self.seed, "collect", self.step),
        )  # fmt: skip
        if self._learner is not None and collected.groups:
            self._learner.update(*_trained_on(collected))
            self.backend.success_rates = self.population.rates()
        self.backend.policy_version = self.step
        return collected

    def accuracy(self) -> float | None:
        """Mean success rate of the held-out prompts; of a recorded table, of its prompts' outcomes."""
        if self.population is not None:
            return self.population.accuracy()
        rates = self.backend.rates()
        return float(np.nanmean(rates)) if not np.isnan(rates).all() else None

    def effective_share(self) -> float:
        """P(a group is mixed) over the pool as it is now; NaN for a recorded table, where success rates are latent."""
        if self.population is None:
            return float("nan")
        return effective_share(self.population.rates(), self.allocator.group_size)


def _trained_on(collected: Collected) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row of the pool, right answers and rollouts of each group, over the rollouts that reach the update."""
    at = {group.uid: i for i, group in enumerate(collected.groups)}
    right, rows = [0] * len(at), [0] * len(at)
    for outcome in collected.kept:
        i = at[outcome.group]
        rows[i] += 1
        right[i] += bool(outcome.correct)
    return np.array([group.prompt for group in collected.groups]), np.array(right), np.array(rows)


def simulate(population: str, world: WorldSettings, rules: Rules, seed: int = 0) -> dict[str, Any]:
    """Run it all.

    Returns:
        Over the counted steps: ``rollouts``, ``tokens``, ``effective_groups`` (mixed groups trained on),
        ``rollouts_per_effective_group`` (None without any), ``rounds_per_step``, ``ledger`` (rollouts and tokens by
        fate, and what waits at the end), ``accuracy`` (held-out, at the end), ``curve`` (by step: rollouts and tokens
        so far, held-out accuracy, effective share of the pool), ``short_steps``, ``settings``. With a clock also
        ``seconds``, a token a second, and with ``slots`` their ``idle_share``.
    """
    run = Simulation(population, world, rules, seed)
    for _ in range(world.warmup_steps):
        run.advance()
    before = run.ledger.step_record(run.step)
    since, busy = (run.engine.now, run.engine.busy) if run.engine else (0.0, 0.0)
    rollouts = tokens = effective = rounds = short = 0
    curve = [_point(run, 0, 0, 0)]
    fates = {"fates": dict.fromkeys(before["fates"], 0), "fate_tokens": dict.fromkeys(before["fates"], 0)}
    last = before
    for number in range(1, world.steps + 1):
        collected = run.advance()
        last = run.ledger.step_record(run.step)
        rollouts += collected.rollouts
        tokens += collected.tokens
        rounds += collected.rounds
        short += collected.short_by > 0
        effective += sum(group.mixed for group in collected.groups)
        for kind, counts in fates.items():
            for fate, n in last[kind].items():
                counts[fate] += n
        curve.append(_point(run, number, rollouts, tokens))
    result = {
        "rollouts": rollouts,
        "tokens": tokens,
        "effective_groups": effective,
        "rollouts_per_effective_group": rollouts / effective if effective else None,
        "rounds_per_step": rounds / world.steps,
        "ledger": {
            "issued": rollouts,
            "tokens": tokens,
            **fates,
            "waiting": last["waiting"],
            "waiting_tokens": last["waiting_tokens"],
            "waiting_before": before["waiting"],
            "waiting_tokens_before": before["waiting_tokens"],
        },
        "accuracy": curve[-1]["accuracy"],
        "short_steps": short,
        "prompts": len(run.pool),
        "curve": curve,
    }
    if isinstance(run.backend, ReplayBackend):
        result["reused_rollouts"] = run.backend.reused
    if run.engine is not None:
        seconds = result["seconds"] = run.engine.now - since
        if world.slots is not None and seconds:
            result["idle_share"] = 1 - (run.engine.busy - busy) / (seconds * world.slots)
    return result


def _point(run: Simulation, step: int, rollouts: int, tokens: int) -> dict[str, Any]:
    share = run.effective_share()
    return {
        "step": step,
        "rollouts": rollouts,
        "tokens": tokens,
        "accuracy": run.accuracy(),
        "effective_share": None if np.isnan(share) else share,
    }
