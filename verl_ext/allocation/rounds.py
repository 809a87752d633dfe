"""Whole rounds: every rollout that is asked for comes back before anything more is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .groups import Outcome, Request, RoundError

if TYPE_CHECKING:
    from .allocators.allocator import Allocator
    from .context import StepContext


class Backend(Protocol):
    """Whatever generates and scores rollouts."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """One synchronous round: exactly one outcome for every session asked for, in any order."""


def whole_rounds(ctx: StepContext, allocator: Allocator, backend: Backend) -> tuple[int, float, list[float]]:
    """Ask, generate and tell until nothing is asked for, or the step's rounds are used up.

    Returns:
        Rounds that generated, seconds spent in the backend, and seconds between two rounds.

    Raises:
        RoundError: a round does not fit together.
        Exception: whatever the backend raises.
    """
    gaps: list[float] = []
    generating, back = 0.0, None
    for number in range(1, ctx.max_rounds + 1):
        ctx.round = number
        requests = allocator.ask(ctx)
        if not requests:
            return number - 1, generating, gaps
        ctx.issue(requests)
        sent = time.perf_counter()
        if back is not None:
            gaps.append(sent - back)
        outcomes = backend.generate(requests)
        back = time.perf_counter()
        generating += back - sent
        ctx.record(outcomes)
        late = {request.group.uid: request.group.missing() for request in requests if request.group.pending}
        if late:
            raise RoundError(
                f"round {number} of step {ctx.step}: {sum(map(len, late.values()))} sessions did not come back: "
                + ", ".join(f"{uid} {sessions}" for uid, sessions in list(late.items())[:8])
            )
        allocator.tell(outcomes, ctx)
    return ctx.max_rounds, generating, gaps
