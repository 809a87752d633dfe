# SPDX-License-Identifier: Apache-2.0
"""A simulated run: the allocation of a training run, with a population or a recorded table for an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from verl_ext.allocation import Allocation, AllocationSettings, Collected, PromptPool, rng_for
from verl_ext.runs.outcome_records import read_record

from .population import Population, effective_share, make_population
from .replay import ReplayBackend
from .simulated_backend import SimulatedBackend
from .simulation_settings import WorldSettings
from .streaming_backend import SimulatedStream
from .updates import Learner


class Simulation(Allocation):
    """An allocation with an engine of its own, that is simulated or replays a recorded table.

    Args:
        rules_and_stop: as for :class:`~verl_ext.allocation.Allocation`.
        backend: gives the outcomes at once.
        engine: the backend with a clock, a token a second; None: one is made where the steps stream, and time plays no
            part where they do not.
        population: prompts whose success rates are the backend's; None: of a recorded table.
        learner: what a batch does to the population; None: nothing changes.
    """

    def __init__(
        self,
        *rules_and_stop: Any,
        backend: SimulatedBackend | ReplayBackend,
        engine: SimulatedStream | None = None,
        population: Population | None = None,
        learner: Learner | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*rules_and_stop, **settings)
        self.backend, self.population, self.learner = backend, population, learner
        self.engine = SimulatedStream(backend) if engine is None and self.rounds == "streaming" else engine
        self.steps = 0
        """Number of the last step."""
        self.update_s, self.separate = 0.0, False
        """Seconds of an update, and whether the engines go on meanwhile, for the next step; else they rest."""
        self._trained_at = 0.0

    @classmethod
    def of_world(
        cls, population: str, world: WorldSettings, settings: AllocationSettings, seed: int = 0
    ) -> Simulation:
        """A run on a population of prompts.

        Args:
            population: uniform | u_shaped | all_solved | all_hopeless | recorded.
            world: prompts, steps, groups of the batch, and what training does.
            settings: rules and rounds; ``stop.groups`` null: ``world.batch``.
            seed: of all; the same seed gives the same run.

        Raises:
            SettingError, RecordError: a setting that cannot be, by name.
        """
        if settings.stop.groups is None:
            settings = replace(settings, stop=replace(settings.stop, groups=world.batch))
        if population == "recorded":
            backend = ReplayBackend(read_record(world.record), seed, frozen=world.frozen)
            keys, made, learner = backend.keys, None, None
        else:
            made = make_population(
                population, world.prompts, world.held_out, world.topics, rng_for(seed, "population"),
                share=world.effective_share, mean=world.mean, group_size=settings.rules.allocator.group_size,
            )  # fmt: skip
            learner = None if world.frozen else Learner(made, world, rng_for(seed, "drift"))
            length = world.length
            backend = SimulatedBackend(
                made.rates(), seed, mean_tokens=length.mean_tokens, wrong_factor=length.wrong_factor,
                sigma=length.sigma, max_tokens=length.max_tokens,
            )  # fmt: skip
            keys = [str(row) for row in range(world.prompts)]
        engine = None if world.slots is None else SimulatedStream(backend, slots=world.slots)
        run = cls.from_settings(
            settings, PromptPool(keys, seed=seed), seed,
            backend=backend, engine=engine, population=made, learner=learner,
        )  # fmt: skip
        run.update_s, run.separate = world.update_s, world.engines == "separate"
        return run

    def step(self, number: int | None = None, backend: Any = None) -> Collected:
        """One step: collect, then update the population.

        Args:
            number: of the step; None: the next one.
            backend: instead of its own engine.
        """
        self.steps = self.steps + 1 if number is None else number
        if self.generating is None:
            self.backend.policy_version = self.steps - 1
        if self.separate and self.generating is None:
            self.generating = self.steps - 1
        if isinstance(self.backend, ReplayBackend):
            self.backend.begin_step()
        collected = self.collect(self.steps, backend or self.engine or self.backend)
        if self.separate:
            self.engine.until(self._trained_at)  # the trainer takes the batch when it has made its last update
            self._trained_at, version = self.engine.now + self.update_s, self.steps
            self.engine.at(self._trained_at, lambda: self._update(collected, version))
        else:
            if self.update_s:
                self.engine.pause(self.update_s)
            self._update(collected, self.steps)
        return collected

    def _update(self, collected: Collected, version: int) -> None:
        """The weights of that version come of the batch, and generate from here on."""
        if self.learner is not None and collected.groups:
            self.learner.update(*_trained_on(collected))
            self.backend.success_rates = self.population.rates()
        if self.separate:
            self.generating = self.backend.policy_version = version

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


def simulate(population: str, world: WorldSettings, settings: AllocationSettings, seed: int = 0) -> dict[str, Any]:
    """Run it all.

    Returns:
        Over the counted steps: ``rollouts``, ``tokens``, ``effective_groups`` (mixed groups trained on),
        ``rollouts_per_effective_group`` (None without any), ``rounds_per_step``, ``ledger`` (rollouts and tokens by
        fate, and what waits at the end), ``accuracy`` (held-out, at the end), ``curve`` (by step: rollouts and tokens
        so far, held-out accuracy, effective share of the pool), ``short_steps``, ``settings``. With a clock also
        ``seconds``, a token a second, and with ``slots`` their ``idle_share``.
    """
    run = Simulation.of_world(population, world, settings, seed)
    for _ in range(world.warmup_steps):
        run.step()
    before = run.ledger.step_record(run.steps)
    since, busy = (run.engine.now, run.engine.busy) if run.engine else (0.0, 0.0)
    rollouts = tokens = effective = rounds = short = 0
    curve = [_point(run, 0, 0, 0)]
    fates = {"fates": dict.fromkeys(before["fates"], 0), "fate_tokens": dict.fromkeys(before["fates"], 0)}
    last = before
    for number in range(1, world.steps + 1):
        collected = run.step()
        last = run.ledger.step_record(run.steps)
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
