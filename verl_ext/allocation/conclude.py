"""The end of a step: which groups make the batch, and what becomes of every rollout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .context import StepContext
from .group_statistics import GroupStatistics, group_statistics
from .groups import Fate, Group, Outcome, RoundError, Verdict
from .metric import Metric

if TYPE_CHECKING:
    from .allocation import Allocation

logger = logging.getLogger(__name__)

_FATES = {
    Fate.TRAINED: ("were trained on", "the more of those issued, the better"),
    Fate.DOWN_SAMPLED: ("the down-sampler left out", ""),
    Fate.ABANDONED: ("belong to groups given up early", "cheap waste: less than whole groups would have cost"),
    Fate.FILTERED: ("belong to whole groups without signal", "few: whole groups in vain are the dearest waste"),
    Fate.SURPLUS: ("were not needed", "0 is best"),
    Fate.STALE: ("waited too long", "0 is best"),
    Fate.UNSCORED: ("the reward gave no score", "0 is best"),
    Fate.FAILED: ("came back without an answer", "0 is best"),
    Fate.ABORTED: ("were cut off while generated", "a few with `rounds: streaming`, else 0"),
    Fate.AUDIT: ("were made to check what was abandoned", "the share that `audit_fraction` asks for"),
    Fate.SKIPPED: ("were in a batch too small for an update", "0 is best"),
}


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
    """Groups kept for a later step, those in flight included."""
    statistics: dict[str, GroupStatistics] = field(default_factory=dict)
    """By uid of ``groups``, over all scored rollouts of the group, also those that do not reach the update: what
    ``normalise_over: group`` puts into the advantage."""


class Sorted:
    """The rollouts of a step by their fate."""

    def __init__(self) -> None:
        self.trained: list[Group] = []
        self.dropped: list[Outcome] = []
        self.by_fate: dict[Fate, list[Outcome]] = {fate: [] for fate in Fate}

    def train(self, group: Group, chosen: Sequence[Outcome]) -> None:
        """The group is in the batch, with these of its rollouts."""
        group.fate = Fate.TRAINED
        self.trained.append(group)
        self.by_fate[Fate.TRAINED].extend(chosen)
        taken = {outcome.session for outcome in chosen}
        self._drop([outcome for outcome in group.outcomes if outcome.session not in taken], Fate.DOWN_SAMPLED)

    def leave(self, group: Group, fate: Fate) -> None:
        """The group is not trained on."""
        group.fate = fate
        self._drop(group.outcomes, fate)

    def _drop(self, outcomes: Sequence[Outcome], fate: Fate) -> None:
        """Failed and aborted come before unscored, unscored before the group's fate; what was aborted for being stale
        is stale."""
        for outcome in outcomes:
            if outcome.failed or outcome.aborted:
                cut = fate if fate is Fate.STALE else Fate.ABORTED
                self.by_fate[Fate.FAILED if outcome.failed else cut].append(outcome)
                continue
            self.dropped.append(outcome)
            self.by_fate[fate if outcome.correct is not None else Fate.UNSCORED].append(outcome)


def conclude(run: Allocation, ctx: StepContext, rounds: int, min_group_rows: int) -> Collected:
    """End a step: observe, choose, settle, report.

    Args:
        rounds: rounds made.
        min_group_rows: rows a group needs to be trained on.

    Raises:
        RoundError: the allocator keeps groups that it cannot keep.
    """
    batch, waiting = run.allocator.finish(ctx), run.allocator.waiting(ctx)
    _check_batch(ctx, batch, waiting)
    batch = [group for group in batch if not group.given_up]
    for group in ctx.groups:
        if group.given_up:
            group.verdict = run.failures.give_up(group, ctx.step)
    if ctx.carry:
        taken = {group.uid for group in batch}
        run.flight.groups = waiting = [group for group in ctx.live if group.uid not in taken]
    _observe(run, ctx, waiting)
    found = _choose(run, ctx, batch, min_group_rows)
    _settle(run, ctx, found, batch, waiting)
    return _report(run, ctx, found, waiting, rounds)


def _check_batch(ctx: StepContext, batch: Sequence[Group], waiting: Sequence[Group]) -> None:
    seen: set[str] = set()
    for group in (*batch, *waiting):
        if not ctx.has(group) or group.uid in seen or group.pending:
            raise RoundError(
                f"step {ctx.step}: group {group.uid!r} cannot be kept: it is of another step, kept twice, or has "
                f"{group.pending} sessions pending"
            )
        seen.add(group.uid)
    if len(batch) > ctx.target_groups:
        raise RoundError(f"step {ctx.step}: a batch of {len(batch)} groups where {ctx.target_groups} are wanted")


def _observe(run: Allocation, ctx: StepContext, waiting: Sequence[Group]) -> None:
    """Show the selector every group that is decided, once and whole; one that waits is shown when it has waited.

    A group that went stale or was cut off is no result of its prompt, and is never shown."""
    run.pool.look_at([group.prompt for group in ctx.groups if group.offered_at == ctx.step])
    undecided = {group.uid for group in waiting}
    for group in ctx.groups:
        if group.uid not in undecided and group.fate is not Fate.STALE and not group.cut_off:
            run.selector.observe(group.prompt, group.successes, group.trials, run.allocator.group_size)
    run.selector.end_step()


def _choose(run: Allocation, ctx: StepContext, batch: Sequence[Group], min_group_rows: int) -> Sorted:
    """Down-sample the groups of the batch."""
    found = Sorted()
    for group in batch:
        sessions = set(run.downsampler.select(group, ctx.rng))
        chosen = [outcome for outcome in group.trainable if outcome.session in sessions]
        if len(chosen) < min_group_rows:
            found.leave(group, Fate.FILTERED)
        else:
            found.train(group, chosen)
    return found


def _settle(run: Allocation, ctx: StepContext, found: Sorted, batch: Sequence[Group], waiting: Sequence[Group]) -> None:
    """Give every other rollout its fate, enter all in the ledger, and tell the pool which prompts are out."""
    kept = {group.uid for group in (*batch, *waiting)}
    for group in waiting:
        run.ledger.wait(group.outcomes)
    for group in ctx.groups:
        if group.uid not in kept:
            found.leave(group, _fate_of(group))
        if group.verdict is Verdict.RETIRE:
            run.pool.retire(group.prompt)
        elif group.verdict is Verdict.DEFER and run.pool.offered(group.prompt):
            run.pool.defer(group.prompt)  # unless the next epoch has begun since
    for fate, outcomes in found.by_fate.items():
        run.ledger.settle(outcomes, fate)
    run.ledger.check()


def _fate_of(group: Group) -> Fate:
    """The fate of the scored rollouts of a group outside the batch."""
    if group.fate is not None:
        return group.fate
    return Fate.SURPLUS if group.verdict in (Verdict.COMMIT, Verdict.CONTINUE) else Fate.ABANDONED


def _report(run: Allocation, ctx: StepContext, found: Sorted, waiting: Sequence[Group], rounds: int) -> Collected:
    short_by = ctx.target_groups - len(found.trained)
    if short_by > 0:
        _warn(run, ctx, rounds, len(found.trained))
    if run.pool.all_retired and run.allocator.readmits:
        run.pool.readmit()
        logger.warning("step %d: every prompt is retired: all %d are brought back", ctx.step, len(run.pool))
    return Collected(
        kept=found.by_fate[Fate.TRAINED],
        dropped=found.dropped,
        groups=found.trained,
        short_by=short_by,
        rounds=rounds,
        rollouts=ctx.issued,
        tokens=run.ledger.tokens - ctx.tokens_before,
        metrics=_metrics(run, ctx, found, len(waiting), rounds),
        started=ctx.groups,
        waiting=list(waiting),
        statistics={group.uid: group_statistics(group, run.allocator.settings.tolerance) for group in found.trained},
    )


def _warn(run: Allocation, ctx: StepContext, rounds: int, trained: int) -> None:
    """Say why the batch is short; as information only where the rule is made so: it asks for no more, or has spent a
    budget of no more than uniform sampling's."""
    level = logging.WARNING
    if run.pool.all_retired:
        why = "every prompt of the pool is retired"
    elif ctx.exhausted:
        why = "the selector has no more prompts for this step"
    elif rounds >= ctx.max_rounds and not ctx.streaming:
        why = f"allocation.max_rounds={ctx.max_rounds} is used up"
    elif trained and ctx.budget_left >= run.allocator.group_size:
        level, why = logging.INFO, "the allocator asks for no more"
    else:
        if trained and ctx.budget <= ctx.target_groups * run.allocator.group_size:
            level = logging.INFO
        why = (
            f"{ctx.budget_left} of the step's {ctx.budget} rollouts are left "
            "(allocation.stop.rollouts, or the selector's share if less)"
        )
    mixed = sum(group.mixed for group in ctx.groups)
    unscored = sum(not (o.scored or o.aborted) for group in ctx.groups for o in group.outcomes)
    logger.log(
        level, "step %d: %d of %d groups: %s; %d prompts started, %d mixed, %d rollouts, %d of them without a score",
        ctx.step, trained, ctx.target_groups, why, len(ctx.groups), mixed, ctx.issued, unscored,
    )  # fmt: skip


METRICS = {
    "groups": Metric("groups in the batch", "groups", "`stop.groups` is best"),
    "short_by": Metric("groups missing from the batch", "groups", "0 is best"),
    "batch_effective_share": Metric("groups of the batch with a right and a wrong answer", "share",
                                    "1 is best: all others have advantage 0"),
    "groups_started": Metric("prompts that were offered", "groups"),
    "effective_share": Metric("prompts offered that were mixed", "share", "of the data; low: too easy or too hard"),
    "selector/offered_mixed": Metric("prompts offered that were mixed", "prompts", "high is good"),
    "selector/offered_solved": Metric("prompts offered, all answers right", "prompts", "many: too easy"),
    "selector/offered_failed": Metric("prompts offered, all answers wrong", "prompts", "many: too hard"),
    "groups_waiting": Metric("groups kept for a later step", "groups"),
    "groups_given_up": Metric("groups of which no rollout came back", "groups", "0 is best"),
    "prompts_given_up": Metric("prompts that left since none of their rollouts ever came back", "prompts", "0 is best"),
    "rounds": Metric("rounds that generated; streaming, most requests of a group", "rounds",
                     "few: each waits for its slowest answer"),
    "rollouts": Metric("rollouts issued since the run began", "rollouts", "the axis to compare runs by"),
    "tokens": Metric("tokens generated since the run began", "tokens", "the axis to compare runs by"),
    "step_rollouts": Metric("rollouts issued in the step", "rollouts"),
    "step_tokens": Metric("tokens generated in the step", "tokens"),
    **{
        f"fate/{fate.value}": Metric(f"rollouts of the step that {text}", "rollouts", reading)
        for fate, (text, reading) in _FATES.items()
    },
    "fate_tokens/*": Metric("tokens of the rollouts of each of these fates", "tokens"),
}  # fmt: skip
"""As they are in the log; ``Collected.metrics`` has the rollouts and tokens of the step without ``step_``, and the sums
as ``rollouts_total`` and ``tokens_total``."""


ASYNC_METRICS = {
    "async/lag/*": Metric("groups of the batch that lag so many versions of the weights", "groups"),
    "async/lag_mean": Metric("versions that the batch's groups lag, mean", "versions", "0: on policy"),
    "async/lag_max": Metric("the same, most", "versions", "at most `allocation.async.max_lag`"),
    "async/stale_groups": Metric("groups that were too old when the step began, and dropped", "groups", "0 is best"),
    "async/spliced": Metric("rollouts of the batch whose tokens are of more than one version", "rollouts"),
    "async/in_flight": Metric("rollouts in flight when the step ends", "rollouts"),
    "async/groups_in_flight": Metric("groups with rollouts in flight when the step ends", "groups"),
}
"""Of what goes on over the update, with ``allocation.async.carry``."""


def _metrics(run: Allocation, ctx: StepContext, found: Sorted, waiting: int, rounds: int) -> dict[str, float]:
    trained, ledger = found.trained, run.ledger
    fresh = [group for group in ctx.groups if group.offered_at == ctx.step]
    offered = {
        "offered_solved": sum(0 < group.trials == group.successes for group in fresh),
        "offered_failed": sum(group.successes == 0 < group.trials for group in fresh),
        "offered_mixed": sum(group.mixed for group in fresh),
    }
    metrics = {
        "batch_effective_share": sum(group.mixed for group in trained) / len(trained) if trained else 0.0,
        "groups": float(len(trained)),
        "groups_started": float(len(fresh)),
        "groups_waiting": float(waiting),
        "groups_given_up": float(sum(group.given_up for group in ctx.groups)),
        "prompts_given_up": float(run.failures.out),
        "effective_share": sum(group.mixed for group in fresh) / len(fresh) if fresh else 0.0,
        "short_by": float(ctx.target_groups - len(trained)),
        "rounds": float(rounds),
        "rollouts": float(ctx.issued),
        "tokens": float(ledger.tokens - ctx.tokens_before),
        "rollouts_total": float(ledger.issued),
        "tokens_total": float(ledger.tokens),
    }
    for fate, outcomes in found.by_fate.items():
        metrics[f"fate/{fate.value}"] = float(len(outcomes))
        metrics[f"fate_tokens/{fate.value}"] = float(sum(outcome.response_tokens for outcome in outcomes))
    if ctx.max_lag is not None:
        lags = [ctx.lag(group) for group in trained]
        spliced = [o for o in found.by_fate[Fate.TRAINED] if o.last_version not in (None, o.policy_version)]
        metrics |= {f"async/lag/{lag}": float(lags.count(lag)) for lag in range(ctx.max_lag + 1)} | {
            "async/lag_mean": sum(lags) / len(lags) if lags else 0.0,
            "async/lag_max": float(max(lags, default=0)),
            "async/stale_groups": float(run.flight.stale),
            "async/spliced": float(len(spliced)),
            "async/in_flight": float(ledger.in_flight),
            "async/groups_in_flight": float(sum(group.pending > 0 for group in run.flight.groups)),
        }
    chosen = run.pool.coverage() | offered | run.selector.metrics()
    for part, numbers in (("", run.allocator.metrics()), ("selector/", chosen), ("pool/", run.pool.metrics())):
        metrics.update({part + name: float(value) for name, value in numbers.items()})
    return metrics
