"""The contract of down-samplers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np

from verl_ext.allocation.downsamplers import DownSampler
from verl_ext.allocation.groups import Group, Outcome
from verl_ext.allocation.registry import make_allocator

from .common import DATA, check_fresh, rates_of
from .trial import Trial, decisions, explained


def _group(scores: list[float | None], aside: tuple[int, ...] = ()) -> Group:
    """A group with these scores; None: not scored, or failed where the session is odd."""
    group = Group("g0", 0, 1, requested=len(scores))
    for session, score in enumerate(scores):
        failed = score is None and session % 2 == 1
        correct = None if score is None else score > 0
        group.add(Outcome("g0", session, correct, score, 10, 0 if failed else 20, failed))
    group.set_aside(aside)
    return group


_GROUPS = {
    "no rollouts": _group([]),
    "nothing scored": _group([None] * 6),
    "one scored rollout": _group([None, None, 1.0]),
    "right and wrong": _group([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    "all alike": _group([1.0] * 9),
    "graded, huge and negative scores": _group([0.5, -1e9, 1e9, 0.1 + 0.2, 0.3, -0.25, 7.0, 1e-9, 0.0]),
    "some unscored and failed": _group([1.0, None, None, 0.0, 1.0, 1.0, None, None, 0.0, 1.0, 0.0, 0.0]),
    "some set aside": _group([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], aside=(0, 3, 8)),
}


def downsampler_contract(
    make_downsampler: Callable[[], DownSampler], *, groups: int = 3, steps: int = 3, seed: int = 0
) -> None:
    """Put a down-sampler through everything the loop relies on.

    On groups of every shape, empty ones included: it gives sessions that are scored and not set aside, each once and in
    order, at most ``keep`` of them and at least two where two are there; it leaves the group as it was; and it decides
    the same with the same ``rng``, or with none, whatever the state of the global generators. In runs of ``collect``
    the ledger adds up.

    Args:
        make_downsampler: makes a fresh down-sampler, e.g. ``lambda: make_downsampler("random", keep=4)``.
        groups: groups of the batch.
        steps: steps of each run.
        seed: of the simulated data.

    Raises:
        AssertionError: saying what does not hold, where.
    """
    rule = check_fresh(make_downsampler, DownSampler)
    keep = rule.keep
    assert keep is None or isinstance(keep, int) and keep >= 1, f"keep is {keep!r}; null or 1 or more is right"
    for name, group in _GROUPS.items():
        with explained(f"on a group with {name}"):
            _one_group(make_downsampler, group, keep, seed)
    for data in DATA:
        rates, faults = rates_of(data, groups, seed)

        def trial(rates=rates, faults=faults) -> Trial:
            allocator = make_allocator("uniform", group_size=9)
            return Trial(
                rates, allocator=allocator, downsampler=make_downsampler(), groups=groups, seed=seed, **faults
            )  # fmt: skip

        one, two = trial(), trial()
        for number in range(1, steps + 1):
            with explained(f"on {data}, step {number}"):
                collected = one.step(number)
                for group in collected.groups:
                    n = sum(outcome.group == group.uid for outcome in collected.kept)
                    assert keep is None or n <= keep, f"{n} rollouts of a group are kept, with keep={keep}"
                assert decisions(collected) == decisions(two.step(number)), "the same seed decides otherwise"


def _one_group(make: Callable[[], DownSampler], group: Group, keep: int | None, seed: int) -> None:
    before = copy.deepcopy(group)
    for rng in (lambda: np.random.default_rng(seed), lambda: None):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the point is to catch rules that use it
        chosen = list(make().select(group, rng()))
        random.seed(2)
        np.random.seed(2)  # noqa: NPY002
        again = list(make().select(group, rng()))
        assert chosen == again, f"the same rng gives {chosen} and {again}"
        may = [outcome.session for outcome in group.trainable]
        wrong = sorted(set(chosen) - set(may))
        assert not wrong, f"sessions {wrong} are kept, which are not scored, set aside or not of the group"
        assert chosen == sorted(set(chosen)), f"sessions {chosen}: each once, in order"
        assert keep is None or len(chosen) <= keep, f"{len(chosen)} rollouts are kept, with keep={keep}"
        least = min(2, len(may), len(may) if keep is None else keep)
        assert len(chosen) >= least, f"{len(chosen)} of {len(may)} rollouts are kept; a group needs {least}"
        unchanged = all(
            getattr(group, name) == getattr(before, name)
            for name in ("outcomes", "verdict", "fate", "successes", "trials", "requested", "_aside")
        )
        assert unchanged, "select changed the group"
