"""What any rule with state is held to: repeatable, resumable, strict about what it loads."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from verl_ext.allocation.state import StateError, load_state, save_state

from .trial import Trial, decisions, difference, explained, same

MakeTrial = Callable[[], Trial]

# Name: success rate of every prompt (None: spread from 0 to 1), faults of the engine, prompts a group of the batch.
DATA: dict[str, tuple[float | None, dict[str, float], int]] = {
    "prompts of all success rates": (None, {}, 16),
    "flaky: a fifth of the rollouts fail, a fifth cannot be scored": (None, {"failing": 0.2, "unscorable": 0.2}, 16),
    "all solved": (1.0, {}, 16),
    "all hopeless": (0.0, {}, 16),
    "never scored": (float("nan"), {}, 16),
    "a third of the prompts is refused": (None, {"refusing": 0.3}, 16),
    "fewer prompts than groups": (None, {}, 0),
}


def rates_of(name: str, groups: int, seed: int) -> tuple[np.ndarray, dict[str, float]]:
    """Success rates and faults of one of ``DATA``."""
    rate, faults, prompts = DATA[name]
    size = max(1, prompts * groups if prompts else groups - 1)
    rates = np.random.default_rng(seed).beta(0.5, 0.5, size) if rate is None else np.full(size, rate)
    return rates, faults


def check_fresh(make: Callable[[], Any], base: type) -> Any:
    """The factory makes rules of the right kind, a new one each time; returns one."""
    one, other = make(), make()
    assert isinstance(one, base), f"{type(one).__name__} is no subclass of verl_ext.allocation.{base.__name__}"
    assert one is not other, "the factory must make a new rule each time it is called"
    assert isinstance(getattr(one, "Settings", None), type), f"{type(one).__name__}.Settings is no dataclass"
    return one


def check_repeats_and_resumes(make_trial: MakeTrial, part: str, steps: int) -> None:
    """Two runs with one seed decide alike, though the second is stopped and resumed before every step.

    Args:
        part: ``selector`` or ``allocator``, the rule in question.
    """
    one, two = make_trial(), make_trial()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, steps + 1):
            with explained(f"step {number}, stopped and resumed before it"):
                saved = two.state_dict()
                if number <= 2:  # from memory after that: waiting for the disk takes longer than all the rest
                    save_state(folder, saved)
                two = make_trial()
                two.load_state_dict(load_state(folder) if number <= 2 else saved)
                loaded = getattr(two, part).state_dict()
                assert same(loaded, saved[part]), (
                    f"state_dict() after load_state_dict is not what was loaded: {difference(saved[part], loaded)}"
                )
                kept = getattr(one, part).state_dict()
                before = copy.deepcopy(kept)
                # A rule must draw from its own streams: these differ between the two runs.
                _unseed(1)
                first = one.step(number)
                _unseed(2)
                second = two.step(number)
                assert decisions(first) == decisions(second), (
                    "a run with the same seed, resumed from its state, decides otherwise: "
                    f"{_first_difference(decisions(first), decisions(second))}"
                )
                assert same(kept, before), "state_dict() shares what later steps change; return copies"
                here, there = one.state_dict(), two.state_dict()
                assert same(here, there), f"equal decisions, and yet another state: {difference(here, there)}"


def check_strict(trial: Trial, make: Callable[[], Any], part: str) -> None:
    """A state with a key too many or too few is refused."""
    state = getattr(trial, part).state_dict()
    altered = [{**state, "unheard of": 1}] + [
        {key: value for key, value in state.items() if key != missing} for missing in state
    ]
    empty = make().state_dict().keys()
    for wrong in altered:
        if wrong.keys() == empty != state.keys():
            continue  # the state of a rule that has not begun
        differing = sorted(set(wrong) ^ set(state))
        try:
            make().load_state_dict(wrong)
        except StateError:
            continue
        raise AssertionError(f"load_state_dict took a state that differs in the keys {differing}; raise StateError")


def check_broken_step(trial: Trial, steps: int) -> None:
    """A step whose engine fails leaves the rule fit for the next one."""

    class Broken(RuntimeError):
        pass

    class BreaksOff:
        rounds = 0

        def generate(self, requests):
            self.rounds += 1
            if self.rounds > breaks_in:
                raise Broken
            return trial.backend.generate(requests)

    for number in range(1, steps + 1):
        with explained(f"step {number}, after a step that broke off"):
            if number % 2:
                trial.step(number)
                continue
            breaks_in = number // 2 % 2
            try:
                trial.step(number, BreaksOff())
            except Broken:
                trial.ledger.check()
                trial.ledger.step_record(number)


def _unseed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the point is to catch rules that use it


def _first_difference(one: Any, other: Any) -> str:
    for name, a, b in zip(("groups", "kept", "waiting", "rounds", "rollouts"), one, other, strict=True):
        if a == b:
            continue
        if isinstance(a, list):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{name}[{at}] is {a[at:][:1]} and {b[at:][:1]}"
        return f"{name} is {a} and {b}"
    return "nothing"
