"""The one loop: rounds of rollouts until the step's batch is full, and what became of each of them.

It knows no engine: the training, the simulated and the replay backend run through the same code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol

import numpy as np

from .allocators.base import Allocator
from .context import StepContext
from .downsamplers.base import DownSampler
from .groups import Fate, Group, Outcome, Request, RoundError, Verdict
from .ledger import Ledger
from .pool import PromptPool
from .selectors.base import Selector
from .settings import require
from .statistics import GroupStatistics, group_statistics
from .streaming import StreamingBackend, check_streaming, stream

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Whatever generates and scores rollouts."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """One synchronous round: exactly one outcome for every session asked for, in any order."""


@dataclass(frozen=True)
class Stop:
    """When a step is full."""

    groups: int
    """Groups of the batch (B)."""
    rollouts: int | None = None
    """Most rollouts a step may issue; None: 6 x groups x group_size, so that dead data cannot run away."""

    def __post_init__(self) -> None:
        require(self.groups >= 1, "stop.groups", self.groups, "an integer of 1 or more")
        require(
            self.rollouts is None or self.rollouts >= 1,
            "stop.rollouts",
            self.rollouts,
            "null or an integer of 1 or more",
        )

    def budget(self, group_size: int) -> int:
        """Rollouts a step may issue."""
        return 6 * self.groups * group_size if self.rollouts is None else self.rollouts


@dataclass
class Collected:
    """What a step's collection gave."""

    kept: list[Outcome]
    """Rollouts to train on, group by group, by session."""
    dropped: list[Outcome]
    """Rollouts with a trajectory that can be freed: neither kept nor waiting."""
    groups: list[Group]
    """The groups of ``kept``, in order."""
    short_by: int
    """Groups missing from the batch."""
    rounds: int
    """Rounds that generated; streaming, most requests of one group."""
    rollouts: int
    """Rollouts issued in the step."""
    tokens: int
    """Response tokens generated in the step."""
    metrics: dict[str, float]
    """Numbers for the log, without prefix."""
    started: list[Group] = field(default_factory=list)
    """All groups of the step, with verdicts and fates."""
    waiting: list[Group] = field(default_factory=list)
    """Groups kept for a later step."""
    statistics: dict[str, GroupStatistics] = field(default_factory=dict)
    """By uid of ``groups``, over all scored rollouts of the group, also those that do not reach the update: what
    ``normalise_over: group`` puts into the advantage."""


def collect(
    *,
    step: int,
    allocator: Allocator,
    selector: Selector,
    pool: PromptPool,
    downsampler: DownSampler,
    backend: Backend | StreamingBackend,
    ledger: Ledger,
    stop: Stop,
    rounds: Literal["barrier", "streaming"] = "barrier",
    max_rounds: int = 8,
    rng: np.random.Generator,
    min_group_rows: int = 2,
    policy_version: int | None = None,
) -> Collected:
    """Collect one step's batch in at most ``max_rounds`` rounds.

    Each round: ask, issue, generate, record, tell. Then every group is shown to the selector, the batch is
    down-sampled, and every rollout gets its fate in the ledger. Ends also on data that is all solved, all hopeless or
    unscorable; a short batch is logged and reported in ``short_by``, not an error.

    With ``rounds="streaming"`` there is no round to wait for: see :mod:`.streaming`.

    Args:
        backend: a :class:`Backend`; streaming, a :class:`~.streaming.StreamingBackend`.
        rounds: ``barrier``, or ``streaming``, in which ``max_rounds`` bounds the requests of one group.
        step: number of the step; with the order of admission it makes the groups' uids, so it must never repeat.
        rng: for ties and for the down-sampler, e.g. ``rng_for(seed, "collect", step)``.
        min_group_rows: a group of which fewer scored rollouts are kept is not trained on (fate filtered).
        policy_version: version of the weights that generate in this step, from which the lag of waiting groups is
            counted; None: ``step - 1``, one update a step.

    Raises:
        SettingError: the budget is below one group, or the allocator cannot be asked with groups in flight.
        RoundError: a round does not fit together.
        Exception: whatever the backend raises. In every case the ledger adds up: what was in flight is failed, what
            had come back is aborted.
    """
    budget = stop.budget(allocator.group_size)
    whole = isinstance(max_rounds, int) and not isinstance(max_rounds, bool)
    require(whole and max_rounds >= 1, "max_rounds", max_rounds, "an integer of 1 or more")
    require(budget >= allocator.group_size, "stop.rollouts", budget, f"at least group_size={allocator.group_size}")
    require(rounds in ("barrier", "streaming"), "rounds", rounds, "barrier | streaming")
    streaming = rounds == "streaming"
    if streaming:
        check_streaming(allocator)
    start = time.perf_counter()
    version = step - 1 if policy_version is None else policy_version
    ctx = StepContext(step, selector, ledger, stop.groups, budget, max_rounds, rng, pool, version, streaming)
    gaps: list[float] = []
    try:
        _begin(ctx, allocator, selector, pool)
        if streaming:
            made, generating = stream(ctx, allocator, backend)
        else:
            made, gaps, generating = _rounds(ctx, allocator, backend)
        collected = _finish(ctx, allocator, selector, pool, downsampler, ledger, made, min_group_rows)
    except BaseException:
        ledger.abort()
        raise
    collected.metrics["generate_s"] = generating
    collected.metrics["driver_s"] = time.perf_counter() - start - generating
    if gaps:
        collected.metrics["round_gap_s"] = median(gaps)
        collected.metrics["round_gap_max_s"] = max(gaps)
    return collected


def _begin(ctx: StepContext, allocator: Allocator, selector: Selector, pool: PromptPool) -> None:
    pool.begin_step()
    ctx.round = 1
    allocator.begin_step(ctx)  # first, so that the selector finds the prompts of waiting groups out of reach
    selector.begin_step(ctx.step, pool)
    ctx.budget = min(ctx.budget, max(0, selector.step_budget(ctx.target_groups, allocator.group_size, ctx.budget)))


def _rounds(ctx: StepContext, allocator: Allocator, backend: Backend) -> tuple[int, list[float], float]:
    gaps: list[float] = []
    generating, back = 0.0, None
    for number in range(1, ctx.max_rounds + 1):
        ctx.round = number
        requests = allocator.ask(ctx)
        if not requests:
            return number - 1, gaps, generating
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
    return ctx.max_rounds, gaps, generating


def _finish(
    ctx: StepContext,
    allocator: Allocator,
    selector: Selector,
    pool: PromptPool,
    downsampler: DownSampler,
    ledger: Ledger,
    rounds: int,
    min_group_rows: int,
) -> Collected:
    batch = allocator.finish(ctx)
    waiting = allocator.waiting(ctx)
    _check_batch(ctx, batch, waiting)
    pool.look_at([group.prompt for group in ctx.groups if group.offered_at == ctx.step])
    _observe(ctx, selector, allocator.group_size, waiting)
    for group in waiting:
        ledger.wait(group.outcomes)
    kept: list[Outcome] = []
    dropped: list[Outcome] = []
    trained: list[Group] = []
    by_fate: dict[Fate, list[Outcome]] = {fate: [] for fate in Fate}
    batch_ids, waiting_ids = {group.uid for group in batch}, {group.uid for group in waiting}
    for group in batch:
        sessions = set(downsampler.select(group, ctx.rng))
        chosen = [outcome for outcome in group.trainable if outcome.session in sessions]
        if len(chosen) < min_group_rows:
            group.fate = Fate.FILTERED
            _sort(group, Fate.FILTERED, by_fate, dropped)
            continue
        group.fate = Fate.TRAINED
        trained.append(group)
        kept.extend(chosen)
        by_fate[Fate.TRAINED].extend(chosen)
        taken = {outcome.session for outcome in chosen}
        rest = [outcome for outcome in group.outcomes if outcome.session not in taken]
        _sort(group, Fate.DOWN_SAMPLED, by_fate, dropped, rest)
    for group in ctx.groups:
        if group.uid not in batch_ids and group.uid not in waiting_ids:
            group.fate = _fate_of(group)
            _sort(group, group.fate, by_fate, dropped)
        if group.verdict is Verdict.RETIRE:
            pool.retire(group.prompt)
        elif group.verdict is Verdict.DEFER and pool.offered(group.prompt):
            pool.defer(group.prompt)  # unless the next epoch has begun since
    for fate, outcomes in by_fate.items():
        ledger.settle(outcomes, fate)
    ledger.check()
    short_by = ctx.target_groups - len(trained)
    if short_by > 0:
        _warn(ctx, pool, rounds, len(trained))
    if pool.all_retired and allocator.readmits:
        pool.readmit()
        logger.warning("step %d: every prompt is retired: all %d are brought back", ctx.step, len(pool))
    return Collected(
        kept=kept,
        dropped=dropped,
        groups=trained,
        short_by=short_by,
        rounds=rounds,
        rollouts=ctx.issued,
        tokens=ledger.tokens - ctx.tokens_before,
        metrics=_metrics(ctx, allocator, selector, pool, ledger, trained, by_fate, rounds, short_by, len(waiting)),
        started=ctx.groups,
        waiting=waiting,
        statistics={group.uid: group_statistics(group) for group in trained},
    )


def _observe(ctx: StepContext, selector: Selector, group_size: int, waiting: Sequence[Group]) -> None:
    """Show the selector every group that is decided, once and whole; one that waits is shown when it has waited.

    A group that went stale or was cut off is no result of its prompt, and is never shown."""
    undecided = {group.uid for group in waiting}
    for group in ctx.groups:
        if group.uid not in undecided and group.fate is not Fate.STALE and not group.cut_off:
            selector.observe(group.prompt, group.successes, group.trials, group_size)
    selector.end_step()


def _check_batch(ctx: StepContext, batch: Sequence[Group], waiting: Sequence[Group]) -> None:
    seen: set[str] = set()
    for group in (*batch, *waiting):
        if ctx._by_uid.get(group.uid) is not group or group.uid in seen or group.pending:
            raise RoundError(
                f"step {ctx.step}: group {group.uid!r} cannot be kept: it is of another step, kept twice, or has "
                f"{group.pending} sessions pending"
            )
        seen.add(group.uid)
    if len(batch) > ctx.target_groups:
        raise RoundError(f"step {ctx.step}: a batch of {len(batch)} groups where {ctx.target_groups} are wanted")


def _fate_of(group: Group) -> Fate:
    """The fate of the scored rollouts of a group outside the batch."""
    if group.fate is not None:
        return group.fate
    return Fate.SURPLUS if group.verdict in (Verdict.COMMIT, Verdict.CONTINUE) else Fate.ABANDONED


def _sort(
    group: Group,
    fate: Fate,
    by_fate: dict[Fate, list[Outcome]],
    dropped: list[Outcome],
    outcomes: Sequence[Outcome] | None = None,
) -> None:
    """Outcomes that are not trained on: failed and aborted come before unscored, unscored before the group's fate."""
    for outcome in group.outcomes if outcomes is None else outcomes:
        if outcome.failed or outcome.aborted:
            by_fate[Fate.FAILED if outcome.failed else Fate.ABORTED].append(outcome)
            continue
        dropped.append(outcome)
        by_fate[fate if outcome.correct is not None else Fate.UNSCORED].append(outcome)


def _warn(ctx: StepContext, pool: PromptPool, rounds: int, trained: int) -> None:
    if pool.all_retired:
        why = "every prompt of the pool is retired"
    elif ctx.exhausted:
        why = "the selector has no more prompts for this step"
    elif rounds >= ctx.max_rounds and not ctx.streaming:
        why = f"allocation.max_rounds={ctx.max_rounds} is used up"
    else:
        why = (
            f"{ctx.budget_left} of the step's {ctx.budget} rollouts are left "
            "(allocation.stop.rollouts, or the selector's share if less)"
        )
    mixed = sum(group.mixed for group in ctx.groups)
    unscored = sum(not (o.scored or o.aborted) for group in ctx.groups for o in group.outcomes)
    logger.warning(
        "step %d: %d of %d groups: %s; %d prompts started, %d mixed, %d rollouts, %d of them without a score",
        ctx.step, trained, ctx.target_groups, why, len(ctx.groups), mixed, ctx.issued, unscored,
    )  # fmt: skip


def _metrics(
    ctx: StepContext,
    allocator: Allocator,
    selector: Selector,
    pool: PromptPool,
    ledger: Ledger,
    trained: Sequence[Group],
    by_fate: dict[Fate, list[Outcome]],
    rounds: int,
    short_by: int,
    waiting: int,
) -> dict[str, float]:
    fresh = [group for group in ctx.groups if group.offered_at == ctx.step]
    started = len(fresh)
    metrics = {
        "batch_effective_share": sum(group.mixed for group in trained) / len(trained) if trained else 0.0,
        "groups": float(len(trained)),
        "groups_started": float(started),
        "groups_waiting": float(waiting),
        "effective_share": sum(group.mixed for group in fresh) / started if started else 0.0,
        "short_by": float(short_by),
        "rounds": float(rounds),
        "rollouts": float(ctx.issued),
        "tokens": float(ledger.tokens - ctx.tokens_before),
        "rollouts_total": float(ledger.issued),
        "tokens_total": float(ledger.tokens),
    }
    for fate, outcomes in by_fate.items():
        metrics[f"fate/{fate.value}"] = float(len(outcomes))
        metrics[f"fate_tokens/{fate.value}"] = float(sum(outcome.response_tokens for outcome in outcomes))
    offered = {
        "offered_solved": sum(0 < group.trials == group.successes for group in fresh),
        "offered_failed": sum(group.successes == 0 < group.trials for group in fresh),
        "offered_mixed": sum(group.mixed for group in fresh),
    }
    chosen = pool.coverage() | offered | selector.metrics()
    for part, numbers in (("", allocator.metrics()), ("selector/", chosen), ("pool/", pool.metrics())):
        metrics.update({part + name: float(value) for name, value in numbers.items()})
    return metrics
