"""A simulated run that is checked after every step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl_ext.allocation import (
    Collected,
    Fate,
    Outcome,
    PromptPool,
    Stop,
    Verdict,
    make_allocator,
    make_downsampler,
    make_selector,
)
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.simulation.simulation import Simulation

Cut = Callable[[list[Outcome]], Iterator[list[Outcome]]]


class Trial(Simulation):
    """A simulated run that is checked after every step.

    Args:
        rates: success rate of each prompt; NaN: it can never be scored.
        selector, allocator, downsampler: rules; None: ``shuffled``, ``uniform``, ``none``.
        groups, rollouts: when a step stops.
        streaming: steps stream (``rounds: streaming``), the engine's answers taking as long as they are.
        faults: of the simulated engine: ``unscorable``, ``failing``, ``shaping``.
    """

    def __init__(
        self,
        rates: Sequence[float] | np.ndarray,
        *,
        selector: Any = None,
        allocator: Any = None,
        downsampler: Any = None,
        groups: int = 3,
        rollouts: int | None = None,
        max_rounds: int = 8,
        seed: int = 0,
        streaming: bool = False,
        **faults: float,
    ) -> None:
        super().__init__(
            PromptPool([f"prompt-{i}" for i in range(len(rates))], seed=seed),
            make_selector("shuffled") if selector is None else selector,
            make_allocator("uniform") if allocator is None else allocator,
            make_downsampler("none") if downsampler is None else downsampler,
            Stop(groups, rollouts),
            rounds="streaming" if streaming else "barrier",
            max_rounds=max_rounds,
            seed=seed,
            backend=SimulatedBackend(rates, seed, **faults),
        )

    def step(self, number: int | None = None, backend: Any = None) -> Collected:
        """One step, and all that must hold of it.

        Raises:
            AssertionError: something does not.
            Exception: what ``collect`` raises.
        """
        with _quiet():
            collected = super().step(number, backend)
        self._check(collected)
        return collected

    def step_in_parts(self, number: int, cut: Cut) -> Collected:
        """One step in which each round's outcomes are told in the parts that ``cut`` makes of them."""
        ctx = self.begin_step(number)
        rounds = 0
        while ctx.round <= self.max_rounds and (requests := self.allocator.ask(ctx)):
            ctx.issue(requests)
            for part in cut(list(self.backend.generate(requests))):
                ctx.record(part)
                self.allocator.tell(part, ctx)
            rounds = ctx.round
            ctx.round += 1
        with _quiet():
            return self.end_step(ctx, rounds)

    def _check(self, collected: Collected) -> None:
        record = self.ledger.step_record(0)
        most = self.stop.budget(self.allocator.group_size)
        issued = sum(record["fates_total"].values()) + record["waiting"]
        _equal(record["in_flight"], 0, "rollouts in flight after the step")
        _equal(record["issued_total"], issued, "rollouts ever issued, against those with a fate or waiting")
        _equal(record["issued"], collected.rollouts, "rollouts of the step in the ledger")
        assert collected.rollouts <= most, f"{collected.rollouts} rollouts issued with a budget of {most}"
        assert collected.rounds <= self.max_rounds, f"{collected.rounds} rounds of {self.max_rounds}"
        prompts = [group.prompt for group in collected.started]
        assert len(prompts) == len(set(prompts)), f"a prompt was offered twice in the step: {sorted(prompts)}"
        self._check_groups(collected)
        self._check_partition(collected)
        for name, value in collected.metrics.items():
            assert isinstance(value, (int, float)) and math.isfinite(value), f"metric {name}={value!r}"

    def _check_groups(self, collected: Collected) -> None:
        allocator = self.allocator
        most = max(allocator.group_size, allocator.largest_group)
        for group in collected.started:
            assert group.requested <= most, (
                f"group {group.uid} has {group.requested} rollouts; at most {most} (group_size, or largest_group)"
            )
            assert group.pending == 0, f"group {group.uid} ended the step with {group.pending} sessions pending"
        for group in collected.groups:
            assert group.verdict is Verdict.COMMIT, f"group {group.uid} is trained on with the verdict {group.verdict}"
            n = len(group.trainable)
            assert n <= allocator.largest_group, f"group {group.uid}: {n} rollouts; largest_group says less"
        waiting = sum(group.returned for group in collected.waiting)
        most = allocator.most_waiting(self.stop.groups)
        assert waiting <= most, f"{waiting} rollouts wait for a later step; most_waiting says {most}"

    def _check_partition(self, collected: Collected) -> None:
        """Every rollout with a trajectory is kept, dropped or waiting, and only one of these."""
        outcomes = [outcome for group in collected.started for outcome in group.outcomes]
        everything = [(o.group, o.session) for o in outcomes if not (o.failed or o.aborted)]
        kept = [(o.group, o.session) for o in collected.kept]
        parts = kept + [(o.group, o.session) for o in collected.dropped]
        parts += [(o.group, o.session) for g in collected.waiting for o in g.outcomes if not o.failed]
        _equal(sorted(parts), sorted(everything), "rollouts kept, dropped or waiting, against those that came back")
        for outcome in collected.kept:
            assert outcome.scored, f"session {outcome.session} of group {outcome.group} is trained on without a score"
        trained = sum(group.fate is Fate.TRAINED for group in collected.started)
        _equal(len(collected.groups), trained, "groups with the fate trained")


def decisions(collected: Collected) -> tuple[Any, ...]:
    """Everything a step decided."""
    return (
        [(g.uid, g.prompt, g.requested, g.verdict, g.fate) for g in collected.started],
        [(o.group, o.session) for o in collected.kept],
        [g.uid for g in collected.waiting],
        collected.rounds,
        collected.rollouts,
    )


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, arrays to the last bit."""
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        both = isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys()
        return both and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(one == other)


def difference(one: Any, other: Any, path: str = "") -> str:
    """The first place in which two states differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                return f"{path}[{key!r}] is in only one of them"
            if not same(one[key], other[key]):
                return difference(one[key], other[key], f"{path}[{key!r}]")
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{path} is {one.dtype}{one.shape} and {other.dtype}{other.shape}"
        at = np.flatnonzero(one.ravel() != other.ravel())[:1]
        return f"{path} differs at {at}: {one.ravel()[at]} and {other.ravel()[at]}"
    return f"{path} is {one!r} and {other!r}"


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Whatever goes wrong inside is an AssertionError that says where."""
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{where}: {what}") from error


def _equal(seen: Any, wanted: Any, what: str) -> None:
    assert seen == wanted, f"{what}: {seen} where {wanted} is right"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the loop's warnings of short batches, which the data here is meant to bring about."""
    logger = logging.getLogger("verl_ext.allocation.conclude")
    level, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = level
