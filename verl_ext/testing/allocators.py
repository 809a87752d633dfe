"""The contract of allocators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from verl_ext.allocation.allocators.allocator import Allocator
from verl_ext.allocation.groups import Outcome
from verl_ext.allocation.selectors.selector import SelectorSettings
from verl_ext.allocation.selectors.shuffled import Shuffled
from verl_ext.typed_settings import SettingError

from .common import DATA, check_broken_step, check_fresh, check_repeats_and_resumes, check_strict, rates_of
from .trial import Trial, decisions, explained


class _Stingy(Shuffled):
    """A selector with a budget of its own: nothing in one step, a rollout in the next, less than allowed later."""

    def begin_step(self, step, pool):
        super().begin_step(step, pool)
        self.number = step

    def step_budget(self, groups: int, group_size: int, rollouts: int) -> int:
        return (0, 1, group_size, groups * group_size + 1)[self.number % 4]


def allocator_contract(
    make_allocator: Callable[[], Allocator], *, groups: int = 3, steps: int = 5, seed: int = 0
) -> None:
    """Put an allocator through everything the loop relies on.

    On prompts of all success rates, with failing and unscored rollouts, on data that is all solved, all hopeless or
    never scored, and on fewer prompts than the batch has groups: the ledger adds up and no rollout is lost; the step's
    budget is kept, tight or generous, and so is one that the selector makes smaller still; no prompt enters a step
    twice; a step ends within its rounds, and by itself where rounds and budget are plenty; the same seed decides the
    same, whatever the state of NumPy's and Python's global generators; a run resumed before any step decides as one
    that was not stopped; a state with other keys is refused; outcomes told in parts and out of order bring the same
    verdicts; the step after one that broke off works. Where ``needs_rounds`` is None, all that holds of one step also
    holds of one that streams.

    Args:
        make_allocator: makes a fresh allocator, e.g. ``lambda: make_allocator("sara", group_size=8)``.
        groups: groups of the batch.
        steps: steps of each run.
        seed: of the simulated data.

    Raises:
        AssertionError: saying what does not hold, where.
    """
    rule = check_fresh(make_allocator, Allocator)
    size = rule.group_size
    assert isinstance(size, int) and size >= 2, f"group_size is {size!r}; an integer of 2 or more is right"

    def trial(data: str = "prompts of all success rates", **changes) -> Trial:
        rates, faults = rates_of(data, groups, seed)
        return Trial(rates, allocator=make_allocator(), **{"groups": groups, "seed": seed, **faults, **changes})

    for data in DATA:
        run = trial(data)
        for number in range(1, steps + 1):
            with explained(f"on {data}, step {number}"):
                run.step(number)
    if rule.needs_rounds is None:
        _streams(trial, steps, (None, size, groups * size))
    for rollouts in (size, 2 * size - 1, groups * size, 40 * groups * size):
        run = trial(rollouts=rollouts)
        for number in range(1, steps + 1):
            with explained(f"with a budget of {rollouts} rollouts, group_size={size}, step {number}"):
                run.step(number)
    run = trial(selector=_Stingy(SelectorSettings()))
    for number in range(1, 2 * steps):
        with explained(f"inside a selector with a budget of its own, step {number}"):
            run.step(number)
    for max_rounds in (1, 2, 3):
        _few_rounds(trial, max_rounds, steps)
    for data in ("all solved", "all hopeless", "never scored"):
        _ends_by_itself(trial, data, groups)
    for data in list(DATA)[:2]:
        with explained(f"on {data}"):
            check_repeats_and_resumes(lambda data=data: trial(data), "allocator", steps)
        _tells_in_parts(lambda data=data: trial(data), data, steps, seed)
    run = trial()
    run.step(1)
    check_strict(run, make_allocator, "allocator")
    check_broken_step(trial(), 2 * steps)


def _streams(trial: Callable[..., Trial], steps: int, budgets: tuple[int | None, ...]) -> None:
    for data in DATA:
        for rollouts in budgets:
            run = trial(data, rollouts=rollouts, streaming=True)
            for number in range(1, steps + 1):
                with explained(f"streaming, on {data}, with a budget of {rollouts} rollouts, step {number}"):
                    run.step(number)


def _few_rounds(trial: Callable[..., Trial], max_rounds: int, steps: int) -> None:
    with explained(f"with max_rounds={max_rounds}"):
        try:
            run = trial(max_rounds=max_rounds)
        except SettingError as error:  # a rule may need more rounds, if it says so
            assert "max_rounds" in str(error), f"it refuses max_rounds={max_rounds} with: {error}"
            return
    for number in range(1, steps + 1):
        with explained(f"with max_rounds={max_rounds}, step {number}"):
            run.step(number)


def _ends_by_itself(trial: Callable[..., Trial], data: str, groups: int) -> None:
    """On a few prompts that never give signal, a step ends long before its rounds and its budget do."""
    run = trial(data, max_rounds=100_000, rollouts=1_000_000)
    prompts = len(run.pool)
    most = prompts * max(run.allocator.group_size, run.allocator.largest_group)
    with explained(f"on {prompts} prompts that are {data}, with rounds and rollouts without end"):
        done = run.step(1)
        assert done.rounds <= most, f"the step took {done.rounds} rounds; {most} ask every prompt for a whole group"


def _tells_in_parts(make_trial: Callable[[], Trial], data: str, steps: int, seed: int) -> None:
    random = np.random.default_rng(seed)

    def whole(outcomes: list[Outcome]) -> Iterator[list[Outcome]]:
        yield outcomes

    def pieces(outcomes: list[Outcome]) -> Iterator[list[Outcome]]:
        shuffled = [outcomes[i] for i in random.permutation(len(outcomes))]
        while shuffled:
            n = int(random.integers(1, 1 + min(len(shuffled), 9)))
            yield shuffled[:n]
            shuffled = shuffled[n:]

    one, two = make_trial(), make_trial()
    for number in range(1, steps + 1):
        with explained(f"on {data}, step {number}, with outcomes told in parts and out of order"):
            first, second = one.step_in_parts(number, whole), two.step_in_parts(number, pieces)
            assert decisions(first) == decisions(second), (
                "other decisions than with whole rounds; in tell, judge a group only when it has nothing pending, and "
                "draw from ctx.rng in ask or finish"
            )
            assert one.allocator.metrics() == two.allocator.metrics(), "other metrics than with whole rounds"
