"""The loop without rounds: a group's next request leaves as soon as its own rollouts are scored.

Within a step and its budget, as the rounds are, but no engine idles for the slowest answer of a round. After every
group whose request is complete the allocator is told and asked again; requests in flight that it does not want any
more, the batch having its groups, are aborted: fate aborted, their tokens counted.

With ``allocation.async.carry`` nothing is aborted when the batch has its groups: the step ends there, and what is in
hand goes on in the next one (docs/asynchronous.md). A step waits for groups that the next one would find too old, so
that slow answers are never thrown away for being slow.

A group's verdict is a function of its own outcomes, and the same as with rounds. Which groups make the batch is not:
with rounds it goes by the order of admission, here by that of arrival, so that among more prompts than are needed those
with short answers are preferred. Decisions are a function of the seed and of the order in which groups come back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .groups import Fate, Group, Outcome, Request, RoundError

if TYPE_CHECKING:
    from .allocators.allocator import Allocator
    from .context import StepContext

logger = logging.getLogger(__name__)


class StreamingBackend(Protocol):
    """Whatever generates and scores rollouts, with many groups in flight."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to generate; returns at once."""

    def next(self) -> Sequence[Outcome]:
        """Wait until a request is complete: the outcomes of all its sessions, of one group.

        Raises:
            Exception: nothing is in flight, or what is does not come back.
        """

    def abort(self, groups: Sequence[Group]) -> Sequence[Outcome]:
        """Cut off the requests in flight of these groups: an outcome of each of their sessions.

        Those of a request that was complete before it could be cut off are ordinary outcomes; those of the others are
        ``aborted``, all of them, with the tokens generated so far.
        """


def stream(
    ctx: StepContext, allocator: Allocator, backend: StreamingBackend, restored: bool = False
) -> tuple[int, float]:
    """Ask, submit and tell until nothing is in flight and nothing more is asked for; or, carrying, the batch is full.

    Args:
        restored: what is in flight was so when the run's state was saved: it is asked for again.

    Returns:
        Most requests of one group, and the seconds spent waiting for the backend.

    Raises:
        RoundError: a request or an outcome does not fit.
        Exception: whatever the backend raises; what is in flight is aborted.
    """
    in_flight = {group.uid: group for group in ctx.groups if group.pending}
    waited = 0.0
    try:
        if restored and in_flight:
            backend.submit([Request.again(group) for group in in_flight.values()])
        while True:
            requests = allocator.ask(ctx)
            ctx.round = 2
            if requests:
                ctx.issue(requests)
                in_flight.update((request.group.uid, request.group) for request in requests)
                backend.submit(requests)
            stale = [group for group in in_flight.values() if group.fate is Fate.STALE]
            if not in_flight or not stale and ctx.carry and _full(ctx, allocator):
                return max((group.requests for group in ctx.groups), default=0), waited
            unwanted = stale + [group for group in allocator.unwanted(ctx) if group.uid in in_flight]
            since = time.perf_counter()
            outcomes = backend.abort(unwanted) if unwanted else backend.next()
            waited += time.perf_counter() - since
            _record(ctx, outcomes, unwanted)
            for uid in {outcome.group for outcome in outcomes}:
                in_flight.pop(uid, None)
            cut = {outcome.group for outcome in outcomes if outcome.aborted} | {group.uid for group in stale}
            whole = [outcome for outcome in outcomes if outcome.group not in cut]
            if whole:
                allocator.tell(whole, ctx)
    except BaseException:
        if in_flight:
            _clear(backend, list(in_flight.values()))
        raise


def _full(ctx: StepContext, allocator: Allocator) -> bool:
    """The batch has its groups, and none in flight would be too old for the next one."""
    if len(allocator.whole(ctx)) < ctx.target_groups:
        return False
    return not any(group.pending and ctx.lag(group) >= ctx.max_lag for group in ctx.live)


def _record(ctx: StepContext, outcomes: Sequence[Outcome], unwanted: Sequence[Group]) -> None:
    """Enter what came back: of the groups aborted, or of one group, all sessions that were in flight."""
    ctx.record(outcomes)
    uids = {outcome.group for outcome in outcomes}
    if unwanted and uids != {group.uid for group in unwanted}:
        missing = sorted({group.uid for group in unwanted} - uids)
        raise RoundError(f"step {ctx.step}: groups {missing[:8]} were aborted and did not come back, or others did")
    if len(uids) != 1 and not unwanted:
        raise RoundError(f"step {ctx.step}: outcomes of {len(uids)} groups came back where those of one were due")
    late = {uid: ctx.group(uid).missing() for uid in uids if ctx.group(uid).pending}
    if late:
        raise RoundError(
            f"step {ctx.step}: {sum(map(len, late.values()))} sessions did not come back with their groups: "
            + ", ".join(f"{uid} {sessions}" for uid, sessions in list(late.items())[:8])
        )


def _clear(backend: StreamingBackend, groups: list[Group]) -> None:
    """A step breaks off: leave nothing running, whatever has become of the backend."""
    try:
        backend.abort(groups)
    except Exception as error:
        logger.warning("%d groups in flight could not be aborted after an error: %r", len(groups), error)
