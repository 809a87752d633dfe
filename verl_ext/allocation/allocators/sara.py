"""SARA: probe a few rollouts, commit to mixed groups, abandon those unlikely to become mixed.

"Early Verdicts, Better Budgets: Sequential Adaptive Rollout Allocation for Compute-Efficient RLVR", arXiv 2607.26253.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..groups import Fate, Group, Outcome, Request, Verdict
from ..registry import register_allocator
from ..settings import require
from ..state import check_keys
from ..waiting import WaitingGroups
from .audit import Audit
from .base import Allocator
from .sara_judges import make_judge
from .sara_rule import ABANDON, COMMIT
from .sara_settings import SaraSettings
from .window import CommitRate, adaptive_wave

__all__ = ["Sara", "SaraSettings"]


@register_allocator("sara")
class Sara(Allocator):
    """Sequential adaptive allocation, one decision a group and round.

    A step never ends with a half-filled group: a fresh prompt is admitted only if the budget covers its worst case
    beside everything promised to those already running, and only if rounds for its probe and its top-up remain.
    Committed groups beyond the batch get no top-up: they are dropped, or wait with ``max_staleness`` above 0.

    Streaming, a group is topped up or probed on as soon as its own rollouts are scored, as many prompts are kept in
    flight as the commit rate says are missing (``window``: so many), and the undecided ones are aborted when enough
    have committed; audits are waited for.
    """

    Settings = SaraSettings

    def __init__(self, settings: SaraSettings) -> None:
        super().__init__(settings)
        self._judge = make_judge(settings)
        self._top_up = settings.commit == "top_up"
        self._worst = settings.group_size if self._top_up else self._judge.longest
        self._predicted = self._judge.predicted
        self._rate = CommitRate(self._predicted)
        self._waiting = WaitingGroups(settings.max_staleness)
        self._audit = Audit(settings.audit_fraction)
        self._numbers: dict[str, float] = {}

    @property
    def largest_group(self) -> int:
        return self._worst

    @property
    def least_rounds(self) -> int:
        return 1 + self._top_up

    @property
    def needs_rounds(self) -> None:
        return None  # every group goes on by its own outcomes

    def begin_step(self, ctx) -> None:
        require(
            ctx.max_rounds >= self.least_rounds,
            "max_rounds", ctx.max_rounds, "2 or more with allocation.allocator.commit=top_up: a probe, then its top-up",
        )  # fmt: skip
        self._rate.begin_step()
        self._audit.begin_step()
        self._carried = len(self._waiting.resume(ctx))  # committed already: first in ctx.groups
        self._waves = 0
        self._need = ctx.target_groups
        self._open: list[list[Group]] = []  # waves with undecided groups
        self._abandoned: list[float] = []  # effective probability of each abandoned group

    def ask(self, ctx) -> list[Request]:
        self._resolve(ctx)
        undecided = [group for wave in self._open for group in wave if group.verdict is Verdict.CONTINUE]
        running = [group for group in undecided if group.pending]  # streaming only
        promised = sum(max(0, self._worst - group.requested) for group in running)
        committed, requests = self._commit(ctx, ctx.budget_left - promised)
        self._need = need = ctx.target_groups - len(committed)
        left = ctx.budget_left - promised - sum(request.n for request in requests)
        if need <= 0:  # whatever is undecided is surplus
            return requests + self._audits(left, ctx) if requests else []
        for group in undecided:
            if group.pending:
                continue
            rounds = ctx.rounds_of(group) - self._top_up  # in which a probe may still run
            n = self._chunk(self._judge.more(group), rounds)
            if rounds < 1 or n > left:  # only rollouts without a score can make a probe longer than was planned
                group.verdict = Verdict.ABANDON
                continue
            requests.append(ctx.request(group, n))
            left -= max(n, self._worst - group.requested)
        if requests:
            audits = self._audits(left, ctx)
            requests += audits
            left -= sum(request.n for request in audits)
        rounds = ctx.rounds_left - self._top_up
        if rounds < 1:
            return requests
        undecided = [group for group in undecided if group.verdict is Verdict.CONTINUE]
        wave = ctx.admit(min(self._size(need, len(undecided), ctx), max(0, left) // self._worst))
        if wave:
            self._judge.start(wave)
            probes = [ctx.request(group, self._chunk(self._judge.more(group), rounds)) for group in wave]
            if not requests:
                requests = self._audits(left - self._worst * len(wave), ctx)
            requests += probes
            self._waves += 1
            self._open.append(wave)
        return requests

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        told = [ctx.group(uid) for uid in {outcome.group: None for outcome in outcomes}]
        told = [group for group in told if group.verdict is Verdict.CONTINUE and not group.pending]
        if not told:
            return
        abandoned = []
        for group, code in zip(told, self._judge.verdicts(told).tolist(), strict=True):
            if code == COMMIT:
                group.verdict = Verdict.COMMIT
            elif code == ABANDON:
                group.verdict = Verdict.ABANDON
                abandoned.append(group)
                if group.returned == self.group_size and group.trials:
                    group.fate = Fate.FILTERED
        p_eff = self._judge.p_eff(abandoned).tolist()
        self._abandoned += p_eff
        for group, predicted in zip(abandoned, p_eff, strict=True):
            if group.requested < self.group_size:
                self._audit.abandoned(group, predicted)

    def unwanted(self, ctx) -> list[Group]:
        if self._need > 0:
            return []
        return [group for wave in self._open for group in wave if group.verdict is Verdict.CONTINUE and group.pending]

    def finish(self, ctx) -> list[Group]:
        self._resolve(ctx)
        self._rate.end_step()
        mixed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT]
        full = [g for g in mixed if g.fate is None and (not self._top_up or g.requested == self.group_size)]
        batch = full[: ctx.target_groups]
        if self.settings.max_staleness:
            taken = {group.uid for group in batch}
            self._waiting.groups = [g for g in mixed if g.fate is None and g.uid not in taken]
        waits = {group.uid for group in self._waiting.groups}
        self._audit.end_step(self._judge.effective)
        self._judge.end_step([group for group in ctx.groups if group.uid not in waits])
        fresh = sum(group.offered_at == ctx.step for group in mixed)
        decided = fresh + len(self._abandoned)
        lags = [ctx.lag(group) for group in batch]
        self._numbers = {
            "commit_rate": fresh / decided if decided else 0.0,
            "commit_rate_running": self._rate.over_steps,
            "p_eff_predicted": self._predicted,
            "p_eff_realised": fresh / decided if decided else 0.0,
            "p_eff_abandoned": math.fsum(self._abandoned) / len(self._abandoned) if self._abandoned else 0.0,
            "abandoned_groups": float(len(self._abandoned)),
            "surplus_groups": float(len(mixed) - len(batch) - len(waits)),
            "waves": float(self._waves),
            **self._audit.metrics(),
        }
        if self.settings.max_staleness:
            self._numbers["carried_groups"] = float(self._carried)
            self._numbers["stale_groups"] = float(self._waiting.stale)
            self._numbers["lag_mean"] = sum(lags) / len(lags) if lags else 0.0
            self._numbers["lag_max"] = float(max(lags, default=0))
        if self.settings.effective == "spread":  # the loop counts by outcomes, and would see no signal here
            effective = sum(map(self._judge.effective, batch))
            self._numbers["batch_effective_share"] = effective / len(batch) if batch else 0.0
        return batch

    def waiting(self, ctx) -> list[Group]:
        return list(self._waiting.groups)

    def most_waiting(self, target_groups: int) -> int:
        """A wave's worth of probes, or of whole groups where one is."""
        if not self.settings.max_staleness:
            return 0
        cap, window = math.ceil(self.settings.cap * target_groups), self.settings.window
        return (cap if window == "adaptive" else window) * self._judge.longest

    def metrics(self) -> dict[str, float]:
        """``p_eff_predicted`` is the prior's probability that a prompt is mixed within its probe, ``p_eff_realised``
        the share that was; ``p_eff_abandoned`` is what the prior says of the abandoned groups, on average: the
        predicted share of false abandonments, which ``p_eff_audited`` measures where there are audits."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rate": self._rate.state_dict(),
            "waiting": self._waiting.state_dict(),
            "audit": self._audit.state_dict(),
            "judge": self._judge.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("sara", state, ("rate", "waiting", "audit", "judge"))
        self._rate.load_state_dict(state["rate"])
        self._waiting.load_state_dict(state["waiting"])
        self._audit.load_state_dict(state["audit"])
        self._judge.load_state_dict(state["judge"])

    def _commit(self, ctx, left: int) -> tuple[list[Group], list[Request]]:
        """Committed groups that are for the batch, and the top-ups they still need; drops what is beyond the batch.

        Of ``left`` a part is reserved for fresh groups, but none for those that waited."""
        committed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT and group.fate is None]
        if not self._top_up:
            return committed, []
        full = [group for group in committed if group.requested == self.group_size]
        rest = [group for group in committed if group.requested < self.group_size]
        room = max(0, ctx.target_groups - len(full))
        if not self.settings.max_staleness:
            for group in rest[room:]:
                group.fate = Fate.SURPLUS
        requests: list[Request] = []
        for group in rest[:room]:
            n = self.group_size - group.requested
            if n <= left:
                full.append(group)
                requests.append(ctx.request(group, n))
                left -= n
        return full, requests

    def _audits(self, left: int, ctx) -> list[Request]:
        """The rest of the groups drawn for audit, as far as ``left`` goes; those beyond it stay abandoned."""
        requests = []
        for group in self._audit.draw(ctx.groups, ctx.rng):
            n = self.group_size - group.requested
            if n <= left:
                group.fate = Fate.AUDIT
                self._audit.started(group)
                requests.append(ctx.request(group, n))
                left -= n
        return requests

    def _resolve(self, ctx) -> None:
        """Enter waves that are decided whole into the commit rate; streaming, every prompt that is."""
        still_open = []
        for wave in self._open:
            if ctx.streaming:
                rest = [group for group in wave if group.verdict is Verdict.CONTINUE]
                committed = sum(group.verdict is Verdict.COMMIT for group in wave)
                self._rate.decided(len(wave) - len(rest), committed)
                still_open += [rest] if rest else []
            elif any(group.verdict is Verdict.CONTINUE for group in wave):
                still_open.append(wave)
            else:
                self._rate.resolved(len(wave), sum(group.verdict is Verdict.COMMIT for group in wave))
        self._open = still_open

    def _chunk(self, more: int, rounds: int) -> int:
        """Rollouts of a probe to ask now, so that ``more`` are back when the rounds for probing end."""
        chunk = more if self.settings.chunk is None else min(self.settings.chunk, more)
        return max(chunk, -(-more // max(1, rounds)))

    def _size(self, need: int, undecided: int, ctx) -> int:
        settings, running = self.settings, undecided if ctx.streaming else 0
        if settings.window != "adaptive":
            return max(0, settings.window - running)
        rate = self._rate.pooled if ctx.streaming else self._rate.now
        size = adaptive_wave(
            need - rate * undecided, rate, 1 if ctx.streaming else self._waves + 1, ctx.target_groups,
            margin=settings.margin, growth=settings.growth, cap=settings.cap,
        )  # fmt: skip
        return min(size, max(0, math.ceil(settings.cap * ctx.target_groups) - running))
