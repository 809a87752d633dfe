"""A run that was stopped and resumed is the run that was not stopped, for every rule and several compositions.

Through ``collect`` and the state on disk, without Ray: the same prompts, requests, verdicts, ledger lines, cumulative
counts and metrics, wherever it is stopped: once, twice, at an epoch's edge, or killed in the middle of a step.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_ext.allocation import PromptPool, Stop, make_allocator, make_downsampler, make_selector
from verl_ext.allocation.registry import allocators, selectors
from verl_ext.allocation.state import load_state, save_state
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.simulation.simulation import Simulation
from verl_ext.testing import same

STEPS, GROUPS, SIZE, PROMPTS = 6, 2, 6, 8
SELECTORS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "dps": {"candidates": 4},
    "mopps": {"candidates": 4, "forget": 0.8},
    "greso": {},
    "cero": {"rounds": STEPS},
}
ALLOCATORS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dynamic_sampling": {"gen_multiple": 1.5},
    "sara": {"probe": 3},
    "pilot_commit": {"n_pilot": 2, "p_lower": 0.3, "p_upper": 0.8, "gen_multiple": 2.0, "max_staleness": 1},
    "knapsack": {"most": 2 * SIZE, "history_min": 3},
    "reinforce_ada": {"chunk": 2},
    "hora": {},
    "marginal_signal": {},
    "vip": {},
}
CARRY = {"probe": 3, "max_staleness": 2, "carry_prior": True}
COMPOSED = {
    "cero, sara that carries over, PODS": (
        ("cero", {"rounds": STEPS, "budget": STEPS * 20, "explore": 0.2}),
        ("sara", CARRY), ("max_variance", {"keep": 2}),
    ),
    "cero by epochs, published price": (
        ("cero", {"rounds": 4, "schedule": "epoch", "budget": 300, "price": "dual", "dual": "virtual"}),
        ("pilot_commit", ALLOCATORS["pilot_commit"]), ("none", {}),
    ),
    "dps, sara that carries over and audits, random rows": (
        ("dps", {"candidates": 4, "censored": "soft"}),
        ("sara", {"probe": 3, "commit": "stop", "max_staleness": 1, "audit_fraction": 0.5}), ("random", {"keep": 2}),
    ),
    "greso, dynamic sampling that carries over": (
        ("greso", {}), ("dynamic_sampling", {"gen_multiple": "auto", "max_staleness": 1}), ("percentile", {"keep": 3}),
    ),
    "pilot_commit within the step": (
        ("shuffled", {}),
        ("pilot_commit", {"n_pilot": 3, "binding": False, "max_staleness": 0, "n_pilot_kept": 2}), ("none", {}),
    ),
}  # fmt: skip
EVERY = (
    {name: ((name, given), ("sara", {"probe": 3}), ("none", {})) for name, given in SELECTORS.items()}
    | {f"shuffled, {name}": (("shuffled", {}), (name, given), ("none", {})) for name, given in ALLOCATORS.items()}
    | COMPOSED
)
TIMES = ("generate_s", "driver_s", "round_gap_s", "round_gap_max_s")


class Killed(BaseException):
    """The process is gone: nothing is handled, nothing is tidied up."""


class Run(Simulation):
    """A simulated run, and a log of all it decided."""

    def __init__(self, rules: str) -> None:
        selector, allocator, downsampler = EVERY[rules]
        rates = np.random.default_rng(1).beta(1.0, 1.5, PROMPTS)
        super().__init__(
            PromptPool([f"prompt-{i}" for i in range(PROMPTS)], seed=5),
            make_selector(selector[0], **selector[1]),
            make_allocator(allocator[0], group_size=SIZE, **allocator[1]),
            make_downsampler(downsampler[0], **downsampler[1]),
            Stop(GROUPS, 5 * GROUPS * SIZE),
            backend=SimulatedBackend(rates, seed=3, failing=0.05, unscorable=0.05),
        )
        self.requests: list[tuple[str, str, int, int]] = []
        self.kill_in_round: int | None = None

    def generate(self, requests):
        """The backend of `collect`."""
        self.round += 1
        if self.round == self.kill_in_round:
            raise Killed
        self.requests += [(r.group.uid, self.pool.keys[r.group.prompt], r.first, r.n) for r in requests]
        return self.backend.generate(requests)

    def step(self, number: int) -> dict[str, Any]:
        """Run one step; everything it decided."""
        self.requests, self.round = [], 0
        collected = super().step(number, self)
        return {
            "requests": self.requests,
            "verdicts": [(g.uid, g.verdict, g.fate, g.successes, g.trials) for g in collected.started],
            "kept": [(o.group, o.session, o.score) for o in collected.kept],
            "waiting": [group.uid for group in collected.waiting],
            "ledger": self.ledger.step_record(number),
            "metrics": {name: value for name, value in collected.metrics.items() if name not in TIMES},
            "epoch": self.pool.epoch,
        }

    @classmethod
    def resumed(cls, rules: str, folder: Path) -> Run:
        """A new run that takes over what is in the folder."""
        run = cls(rules)
        run.load_state_dict(load_state(folder))
        return run


@functools.cache
def straight(rules: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The log of the run that is never stopped, and its state after every step."""
    run = Run(rules)
    return tuple(zip(*[(run.step(number), run.state_dict()) for number in range(1, STEPS + 1)], strict=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    """Nothing waits for the disk, and the warnings of short batches stay out of the way."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    caplog.set_level("ERROR")


def check_alike(run: Run, first: int, rules: str, until: int = STEPS) -> None:
    """Run steps `first` to `until`: everything is as in the run that was never stopped."""
    log, states = straight(rules)
    for number in range(first, until + 1):
        seen = run.step(number)
        for what, wanted in log[number - 1].items():
            assert seen[what] == wanted, f"step {number}: other {what} than in the run that never stopped"
    assert same(run.state_dict(), states[until - 1])


def test_every_rule_is_there():
    assert set(SELECTORS) == set(selectors.names()) and set(ALLOCATORS) == set(allocators.names())


@pytest.mark.parametrize("rules", EVERY)
def test_stopped_once_after_any_step(rules, tmp_path):
    for after in range(1, STEPS):
        save_state(tmp_path, straight(rules)[1][after - 1])
        check_alike(Run.resumed(rules, tmp_path), after + 1, rules)


@pytest.mark.parametrize("rules", EVERY)
def test_stopped_twice(rules, tmp_path):
    run = Run(rules)
    for first, last in ((1, 2), (3, 3), (4, STEPS)):
        check_alike(run, first, rules, last)
        save_state(tmp_path, run.state_dict())
        run = Run.resumed(rules, tmp_path)


@pytest.mark.parametrize("rules", EVERY)
def test_killed_in_the_middle_of_a_step(rules, tmp_path):
    """Steps after the last save are lost, the one that broke off included, and are made again exactly."""
    for saved, killed, in_round in ((1, 2, 2), (3, 5, 1)):
        run = Run(rules)
        for number in range(1, killed):
            run.step(number)
            if number == saved:
                save_state(tmp_path, run.state_dict())
        run.kill_in_round = in_round
        try:
            run.step(killed)  # a step that takes fewer rounds ends, and is lost all the same
        except Killed:
            pass
        check_alike(Run.resumed(rules, tmp_path), saved + 1, rules)


def test_epochs_end_within_a_step_and_between_two():
    """So that the stops above are at an epoch's edge, before it and behind it."""
    epochs = {rules: [line["epoch"] for line in straight(rules)[0]] for rules in EVERY}
    assert epochs["shuffled, uniform"] == [0] * 4 + [1] * 2, "8 prompts, 2 a step: the fourth ends the epoch"
    assert all(numbers[-1] > 0 for rules, numbers in epochs.items() if "shuffled" in rules)
    assert len({tuple(numbers) for numbers in epochs.values()}) > 3


def test_something_waits_over_the_stops():
    """The rules that keep groups between steps do so here, or nothing of them would be tried."""
    for rules in ("shuffled, pilot_commit", *[name for name in COMPOSED if "carries over" in name]):
        assert any(line["waiting"] for line in straight(rules)[0][:-1]), rules
