"""Groups that go on from step to step, and their saved state: columns of numbers, 30 bytes a rollout, no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .groups import Fate, Group, Outcome, Verdict
from .state import StateError, check_keys

if TYPE_CHECKING:
    from .context import StepContext

_FAILED, _TRUNCATED, _ASIDE = 1, 2, 4
_GROUP = ("prompt", "offered_at", "version", "requested", "returned")
_OUTCOME = {
    "session": np.int16,
    "correct": np.int8,  # -1: not scored
    "score": np.float64,
    "prompt_tokens": np.int32,
    "response_tokens": np.int32,
    "flags": np.uint8,
    "policy_version": np.int32,
    "span": np.int16,  # versions from the lowest to the highest
    "rows": np.int32,
}


class WaitingGroups:
    """Groups that are kept from one step to the next: by an allocator, or in flight over the update.

    Args:
        max_staleness: versions of the weights that a group may wait; an older one is dropped (fate stale) when the step
            begins, before it can be used.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.groups: list[Group] = []
        """Waiting between two steps; within a step, and after one that broke off, empty."""
        self.stale = 0
        """Groups dropped at the beginning of this step."""
        self.restored = False
        """They come from a saved state, and what was in flight of them no longer is."""

    def resume(self, ctx: StepContext) -> list[Group]:
        """Take all up in the step that begins; returns those that are not stale, in their order."""
        waiting, self.groups = self.groups, []
        fresh = []
        for group in waiting:
            ctx.resume(group)
            if ctx.lag(group) > self.max_staleness:
                group.verdict, group.fate = Verdict.ABANDON, Fate.STALE
            else:
                fresh.append(group)
        self.stale = len(waiting) - len(fresh)
        return fresh

    def state_dict(self) -> dict[str, Any] | None:
        """Counts and outcomes; None where nothing waits."""
        return pack_groups(self.groups) if self.groups else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over a saved state."""
        self.groups = [] if state is None else unpack_groups(state)
        self.restored = True


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """State of groups; which of their sessions are in flight is part of it."""
    outcomes = [(group, outcome) for group in groups for outcome in group.outcomes]
    columns = {
        "correct": [-1 if o.correct is None else int(o.correct) for _, o in outcomes],
        "score": [0.0 if o.score is None else o.score for _, o in outcomes],
        "flags": [
            _FAILED * o.failed + _TRUNCATED * o.truncated + _ASIDE * (g._aside >> o.session & 1) for g, o in outcomes
        ],
    }
    columns["span"] = [0 if o.last_version is None else o.last_version - o.policy_version for _, o in outcomes]
    for name in ("session", "prompt_tokens", "response_tokens", "policy_version", "rows"):
        columns[name] = [getattr(outcome, name) for _, outcome in outcomes]
    state: dict[str, Any] = {name: np.array(columns[name], kind) for name, kind in _OUTCOME.items()}
    numbers = [(g.prompt, g.offered_at, g.version, g.requested, g.returned) for g in groups]
    for name, column in zip(_GROUP, np.array(numbers, np.int64).reshape(-1, len(_GROUP)).T, strict=True):
        state[name] = column.copy()
    state["uid"] = [group.uid for group in groups]
    state["verdict"] = [group.verdict.value for group in groups]
    return state


def unpack_groups(state: Mapping[str, Any]) -> list[Group]:
    """The groups of a state made by :func:`pack_groups`.

    Raises:
        StateError: keys differ, or the columns do not fit together.
    """
    check_keys("waiting groups", state, (*_GROUP, *_OUTCOME, "uid", "verdict"))
    numbers = [np.asarray(state[name]).tolist() for name in _GROUP]
    columns = [np.asarray(state[name]).tolist() for name in _OUTCOME]
    sizes = {len(column) for column in (*numbers, state["uid"], state["verdict"])}
    if len(sizes) != 1 or {len(column) for column in columns} != {sum(numbers[4])}:
        raise StateError(f"state of waiting groups: {sum(numbers[4])} rollouts came back; columns do not fit")
    rollouts = zip(*columns, strict=True)
    groups = []
    for uid, verdict, prompt, step, version, requested, returned in zip(
        state["uid"], state["verdict"], *numbers, strict=True
    ):
        group = Group(uid, prompt, step, requested=requested, verdict=Verdict(verdict), version=version)
        for _ in range(returned):
            session, correct, score, prompt_tokens, response_tokens, flags, version, span, rows = next(rollouts)
            scored = correct >= 0
            group.add(
                Outcome(
                    uid, session, bool(correct) if scored else None, score if scored else None, prompt_tokens,
                    response_tokens, bool(flags & _FAILED), bool(flags & _TRUNCATED), version, rows,
                    last_version=version + span if span else None,
                )
            )  # fmt: skip
            if flags & _ASIDE:
                group.set_aside([session])
        groups.append(group)
    return groups
