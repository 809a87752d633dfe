"""The contract of selectors."""

from __future__ import annotations

from collections.abc import Callable

from verl_ext.allocation.registry import make_allocator
from verl_ext.allocation.selectors.selector import Selector
from verl_ext.allocation.state import StateError

from .common import DATA, check_broken_step, check_fresh, check_repeats_and_resumes, check_strict, rates_of
from .trial import Trial, explained

# One round and full groups; several rounds and censored groups; groups that wait for the next step and retired prompts.
_ALLOCATORS = {
    "uniform": {},
    "sara": {},
    "pilot_commit": {"group_size": 8, "n_pilot": 3, "p_lower": 0.2, "p_upper": 0.7},
}


def selector_contract(make_selector: Callable[[], Selector], *, groups: int = 3, steps: int = 5, seed: int = 0) -> None:
    """Put a selector through everything the loop relies on.

    It never gives more prompts than asked for, nor one that is retired, deferred, in hand or offered in the step
    already, and it marks what it gives as offered; it comes to an end; its budget lies between nothing and what it is
    allowed. Under ``uniform``, ``sara`` and ``pilot_commit``, on data of all kinds: the ledger adds up, the same seed
    chooses the same whatever the state of the global generators, and so does a run resumed before any step. State with
    other keys, and, where a selector keeps state by prompt, state of another pool, is refused; the step after one that
    broke off works.

    Args:
        make_selector: makes a fresh selector, e.g. ``lambda: make_selector("dps")``.
        groups: groups of the batch.
        steps: steps of each run.
        seed: of the simulated data.

    Raises:
        AssertionError: saying what does not hold, where.
    """
    check_fresh(make_selector, Selector)

    def trial(allocator: str, data: str = "prompts of all success rates", **changes) -> Trial:
        rates, faults = rates_of(data, groups, seed)
        rule = make_allocator(allocator, **_ALLOCATORS[allocator])
        return Trial(
            rates, selector=make_selector(), allocator=rule, **{"groups": groups, "seed": seed, **faults, **changes}
        )  # fmt: skip

    with explained("offering all there is"):
        _by_hand(trial("uniform"), groups)
    for allocator in _ALLOCATORS:
        for data in DATA:
            run = trial(allocator, data)
            for number in range(1, steps + 1):
                with explained(f"with {allocator} on {data}, step {number}"):
                    run.step(number)
        with explained(f"with {allocator}"):
            check_repeats_and_resumes(lambda rule=allocator: trial(rule), "selector", steps)
            check_broken_step(trial(allocator), 2 * steps)
    run = trial("uniform")
    run.step(1)
    check_strict(run, make_selector, "selector")
    _other_pool(run, trial("uniform", "fewer prompts than groups"))


def _by_hand(run: Trial, groups: int) -> None:
    """One step after another, offering all there is, with a third of the prompts out of reach."""
    selector, pool, size = run.selector, run.pool, run.allocator.group_size
    prompts = len(pool)
    retired, deferred, held = range(0, prompts, 9), range(1, prompts, 9), range(2, prompts, 9)
    for row in retired:
        pool.retire(row)
    for number in (1, 2, 3):
        pool.begin_step()
        epoch = pool.epoch
        for row in held:
            pool.hold(row)
        for row in deferred:
            pool.defer(row)
        selector.begin_step(number, pool)
        share = selector.step_budget(groups, size, 1000)
        assert isinstance(share, int) and 0 <= share <= 1000, f"step_budget gave {share!r} of 1000 rollouts"
        offered: list[int] = []
        for _ in range(2 * prompts):
            rows = selector.select(2)
            if not rows:
                break
            assert len(rows) <= 2, f"select(2) gave {len(rows)} prompts"
            for row in rows:
                assert row not in offered, f"step {number}: prompt {row} is offered twice"
                assert row not in retired, f"step {number}: prompt {row} is offered, which is retired"
                assert row not in held, f"step {number}: prompt {row} is offered, whose group waits in hand"
                early = row in deferred and pool.epoch == epoch
                assert not early, f"step {number}: prompt {row} is offered, which is deferred"
                assert not pool.eligible()[row], (
                    f"step {number}: prompt {row} was given but not marked; use pool.take or pool.mark_offered"
                )
                offered.append(row)
        else:
            raise AssertionError(f"step {number}: select goes on after {2 * prompts} calls on {prompts} prompts")
        for row in offered:
            selector.issued(row, size)
            selector.observe(row, row % 3, row % 5 and size, size)
        selector.end_step()


def _other_pool(run: Trial, other: Trial) -> None:
    """A state with an array as long as the pool belongs to that pool."""
    state = run.selector.state_dict()
    if not any(len(run.pool) in getattr(value, "shape", ()) for value in state.values()):
        return
    try:
        other.selector.load_state_dict(state)
        other.step(1)
    except StateError:
        return
    raise AssertionError(f"state of {len(run.pool)} prompts is taken for a pool of {len(other.pool)}; raise StateError")
