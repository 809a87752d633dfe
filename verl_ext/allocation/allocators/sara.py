"""SARA: probe a few rollouts, commit to mixed groups, abandon those unlikely to become mixed.

"Early Verdicts, Better Budgets: Sequential Adaptive Rollout Allocation for Compute-Efficient RLVR", arXiv 2607.26253.
Its verdicts are in :mod:`.sara_rule`; here is where the rollouts go: probes in waves, top-ups, audits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...typed_settings import require
from ..groups import Fate, Group, Outcome, Request, Verdict
from ..metric import WAITING, Metric
from ..registry import register_allocator
from ..state import check_keys
from ..waiting import WaitingGroups
from .allocator import Allocator, AllocatorSettings
from .audit import AUDITED, Audit
from .sara_rule import ABANDON, COMMIT, make_judge
from .window import CommitRate, adaptive_wave


@dataclass(frozen=True)
class SaraSettings(AllocatorSettings):
    """Settings of SARA.

    The guarantee that an abandoned group would have been effective with probability below tau is conditional on the
    prior being right; on a U-shaped population the uniform prior over-predicts that probability three- to sixfold.
    ``top_up`` costs fewer rollouts per effective group than uniform sampling only if P(effective | abandoned) is at
    most e (k - n*) / k, e being the effective share; it reverses above e of about 0.65. ``stop`` always costs fewer.
    """

    probe: int | Literal["auto"] | None = "auto"
    """n*, the length of a pure prefix at which a group is abandoned; the primary knob. auto: 4, or ``group_size`` where
    it is smaller, or what ``tau_low`` says where that is given (then null means the same)."""
    tau_low: float | None = None
    """Abandon where the probability of becoming mixed is below this, strictly. It does not carry over to another
    ``group_size``: at 64, 0.45 means a probe of 35. Given together with a number for ``probe`` only if they agree."""
    chunk: int | None = None
    """Rollouts a round while probing; null: the whole probe. With ``top_up`` smaller chunks only add rounds."""
    window: int | Literal["adaptive"] = "adaptive"
    """Prompts of a wave. ``adaptive``: what is missing over the running commit rate; or a fixed number."""
    margin: float = 0.0
    """Share of prompts an adaptive wave has beyond that (or, negative, short of it)."""
    commit: Literal["top_up", "stop"] = "top_up"
    """``top_up``: committed groups get all ``group_size`` rollouts; ``stop``: they keep what the probe gave, which
    makes groups of unequal size and pays only where update noise does not matter."""
    max_staleness: int = 0
    """Versions of the weights that a committed group beyond the batch may wait for a later step, before its top-up; it
    enters that step's batch first. 0: it is surplus. With 1, ``margin: 0.1`` costs almost nothing and saves rounds."""
    reserve: float = 2.0
    """With ``top_up``: standard deviations above the expected number of top-ups that a wave leaves budget for, so that
    a step's budget is spent in few waves; what more commit than that are surplus. Large: a whole group for each."""
    audit_fraction: float = 0.0
    """Share of abandoned groups completed all the same, never trained on: a live estimate of P(effective | abandoned)
    beside what is predicted. They ride in rounds made anyway and within the budget, else they are not completed."""
    alpha: float = 1.0
    """Prior pseudo-count of successes."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""
    carry_prior: bool = False
    """False: every prompt starts from the prior in every step; True: from its own discounted posterior."""
    discount: float = 0.7
    """With ``carry_prior``: weight of a prompt's earlier outcomes at each further visit. At most 0.8, since with an
    undiscounted prior a prompt is in the end never sampled again."""
    effective: Literal["outcome", "spread"] = "outcome"
    """What a group with signal is: ``outcome``, with right and wrong outcomes; ``spread``, with scores spread over more
    than ``tolerance``, for graded rewards. Not with scores shaped by length, whose spread says nothing."""
    score_low: float = 0.0
    """With ``spread``: the lowest score."""
    score_high: float = 1.0
    """With ``spread``: the highest score."""
    levels: int = 5
    """With ``spread``: equally spaced levels of the prior from lowest to highest score, scores taken to the nearest."""
    concentration: float = 2.0
    """With ``spread``: pseudo-count of the Dirichlet prior over all levels; 2 with two levels is the uniform prior."""
    growth: float = 1.3
    """Factor of an adaptive wave's size, for each wave after the second."""
    cap: float = 8.0
    """Most prompts of an adaptive wave, in units of ``stop.groups``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("probe", min(4, self.group_size) if self.tau_low is None else None)
        for name in ("alpha", "beta", "concentration"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.allocator.{name}", value, "a finite number above 0")
        require(not self.carry_prior or self.effective == "outcome", "allocation.allocator.carry_prior",
                self.carry_prior,
                "false with effective=spread: the carried prior is over right and wrong outcomes")  # fmt: skip
        require(0 < self.discount <= 0.8, "allocation.allocator.discount", self.discount, "a number in (0, 0.8]")
        require(self.levels >= 2, "allocation.allocator.levels", self.levels, "an integer of 2 or more")
        require(self.score_low < self.score_high, "allocation.allocator.score_high", self.score_high,
                f"a number above score_low={self.score_low}")  # fmt: skip
        require(self.effective == "outcome" or self.tolerance < self.score_high - self.score_low,
                "allocation.allocator.tolerance",
                self.tolerance, f"less than score_high - score_low={self.score_high - self.score_low}")  # fmt: skip
        make_judge(self)  # checks probe and tau_low
        require(self.chunk is None or self.chunk >= 1, "allocation.allocator.chunk", self.chunk,
                "null or an integer of 1 or more")  # fmt: skip
        window = self.window
        require(window == "adaptive" or window >= 1, "allocation.allocator.window", window,
                "adaptive, or an integer of 1 or more")  # fmt: skip
        require(-1 < self.margin <= 10, "allocation.allocator.margin", self.margin, "a number in (-1, 10]")
        require(self.max_staleness >= 0, "allocation.allocator.max_staleness", self.max_staleness,
                "an integer of 0 or more")  # fmt: skip
        require(0 <= self.reserve < float("inf"), "allocation.allocator.reserve", self.reserve, "a number of 0 or more")
        require(0 <= self.audit_fraction <= 1, "allocation.allocator.audit_fraction", self.audit_fraction,
                "a number in [0, 1]")  # fmt: skip
        require(1 <= self.growth <= 10, "allocation.allocator.growth", self.growth, "a number in [1, 10]")
        require(0 < self.cap <= 1000, "allocation.allocator.cap", self.cap, "a number in (0, 1000]")


@register_allocator("sara")
class Sara(Allocator):
    """Sequential adaptive allocation, one decision a group and round.

    No half-filled group is trained on. A wave of fresh prompts is admitted as far as the budget covers their probes and
    the top-ups that they and the undecided ones are likely to need (``reserve``), and only if rounds for both remain.
    Committed groups beyond the batch, or beyond the budget, get no top-up: they are dropped, or wait with
    ``max_staleness`` above 0.

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

    @property
    def largest_group(self) -> int:
        return self._worst

    @property
    def least_rounds(self) -> int:
        return 1 + self._top_up

    @property
    def needs_rounds(self) -> None:
        return None  # every group goes on by its own outcomes

    def check_carry(self) -> None:
        settings = self.settings
        require(settings.max_staleness == 0, "allocation.allocator.max_staleness", settings.max_staleness,
                "0 with allocation.async.carry, whose max_lag says it")  # fmt: skip
        require(settings.audit_fraction == 0, "allocation.allocator.audit_fraction", settings.audit_fraction,
                "0 with allocation.async.carry: a step would wait for its audits")  # fmt: skip

    def whole(self, ctx) -> list[Group]:
        full = super().whole(ctx)
        return [group for group in full if not self._top_up or group.requested == self.group_size]

    def begin_step(self, ctx) -> None:
        self._rate.begin_step()
        self._audit.begin_step()
        self._carried = len(self._waiting.resume(ctx))  # committed already: first in ctx.groups
        self._waves = 0
        self._need = ctx.wanted
        undecided = [group for group in ctx.groups if group.verdict is Verdict.CONTINUE]
        self._judge.start(undecided)
        self._open: list[list[Group]] = [undecided] if undecided else []  # waves with undecided groups
        self._committed = 0
        self._abandoned: list[float] = []  # effective probability of each abandoned group

    def ask(self, ctx) -> list[Request]:
        self._resolve(ctx)
        undecided = [group for wave in self._open for group in wave if group.verdict is Verdict.CONTINUE]
        committed, requests = self._commit(ctx)
        self._need = need = ctx.wanted - len(committed)
        left = ctx.budget_left - sum(request.n for request in requests)
        if need <= 0 and not ctx.carry:  # whatever is undecided is surplus
            return requests + self._audits(left, ctx) if requests else []
        promised = 0  # what is left of the probes of undecided groups
        for group in undecided:
            n = 0
            if not group.pending:
                rounds = ctx.rounds_of(group) - self._top_up  # in which a probe may still run
                n = self._chunk(self._judge.more(group), rounds)
                if rounds < 1 or n > left:
                    group.verdict = Verdict.ABANDON
                    continue
                requests.append(ctx.request(group, n))
                left -= n
            promised += max(0, self._judge.longest - group.requested - n)
        undecided = [group for group in undecided if group.verdict is Verdict.CONTINUE]
        left -= promised
        if requests:
            audits = self._audits(left - self._reserve(len(undecided), 0, ctx), ctx)
            requests += audits
            left -= sum(request.n for request in audits)
        rounds = ctx.rounds_left - self._top_up
        if rounds < 1:
            return requests
        size = self._size(need, len(undecided), ctx)
        affordable = bisect_right(range(1, size + 1), left, key=lambda n: self._reserve(len(undecided), n, ctx))
        wave = ctx.admit(affordable)
        if wave:
            self._judge.start(wave)
            probes = [ctx.request(group, self._chunk(self._judge.more(group), rounds)) for group in wave]
            if not requests:
                requests = self._audits(left - self._reserve(len(undecided), len(wave), ctx), ctx)
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
                self._committed += 1
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
        if self._need > 0 or ctx.carry:
            return []
        return [group for wave in self._open for group in wave if group.verdict is Verdict.CONTINUE and group.pending]

    def finish(self, ctx) -> list[Group]:
        self._resolve(ctx)
        self._rate.end_step()
        mixed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT]
        batch = self.whole(ctx)[: ctx.target_groups]
        if self.settings.max_staleness:
            taken = {group.uid for group in batch}
            self._waiting.groups = [g for g in mixed if g.fate is None and g.uid not in taken]
        waits = {group.uid for group in self._waiting.groups}
        if ctx.carry:
            waits = {group.uid for group in ctx.live} - {group.uid for group in batch}
        self._audit.end_step(self._judge.effective)
        self._judge.end_step([group for group in ctx.groups if group.uid not in waits])
        fresh = self._committed
        decided = fresh + len(self._abandoned)
        lags = [ctx.lag(group) for group in batch]
        self._numbers = {
            "commit_rate": fresh / decided if decided else 0.0,
            "commit_rate_running": self._rate.over_steps,
            "p_eff_predicted": self._predicted,
            "p_eff_realised": fresh / decided if decided else 0.0,
            "p_eff_abandoned": math.fsum(self._abandoned) / len(self._abandoned) if self._abandoned else 0.0,
            "abandoned_groups": float(len(self._abandoned)),
            "surplus_groups": float(sum(group.fate is Fate.SURPLUS or group.live for group in mixed)
                                    - len(batch) - sum(group.uid in waits for group in mixed)),
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

    METRICS = {
        "commit_rate": Metric("decided prompts of the step that were mixed", "share", "low: too easy or too hard"),
        "commit_rate_running": Metric("`commit_rate`, averaged over the steps; sizes the first wave", "share"),
        "p_eff_predicted": Metric("prior's probability that a prompt is mixed within its probe", "probability",
                                  "near `p_eff_realised`: the prior is calibrated"),
        "p_eff_realised": Metric("decided prompts that were mixed within their probe", "share"),
        "p_eff_abandoned": Metric("prior's probability that an abandoned group would have been mixed, mean",
                                  "probability", "small: little signal is given away"),
        "abandoned_groups": Metric("groups that were given up after their probe", "groups"),
        "surplus_groups": Metric("mixed groups beyond the batch", "groups", "0 is best; they were paid for"),
        "waves": Metric("waves of probes", "waves", "many: each costs the wait for its slowest answer"),
        "carried_groups": Metric("waiting groups that this batch took up", "groups"),
        **WAITING,
        **AUDITED,
    }  # fmt: skip

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

    def _commit(self, ctx) -> tuple[list[Group], list[Request]]:
        """Committed groups that are for the batch, and the top-ups they still need; drops what is beyond the batch."""
        committed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT and group.fate is None]
        if not self._top_up:
            return committed, []
        full = [group for group in committed if group.requested == self.group_size]
        rest = [group for group in committed if group.requested < self.group_size]
        room = max(0, ctx.wanted - len(full))
        if not (self.settings.max_staleness or ctx.carry):
            for group in rest[room:]:
                group.fate = Fate.SURPLUS
        requests: list[Request] = []
        left = ctx.budget_left
        for group in rest[:room]:
            n = self.group_size - group.requested
            if n <= left:
                full.append(group)
                requests.append(ctx.request(group, n))
                left -= n
        return full, requests

    def _reserve(self, undecided: int, fresh: int, ctx) -> int:
        """Rollouts to leave for ``fresh`` probes and for the top-ups of N = undecided + fresh groups.

        N r + z sqrt(N r (1 - r)) of them commit but for one time in forty (r the commit rate, z = ``reserve``), and no
        more than are missing are topped up: fresh n* + (k - n*) min(N, missing, N r + z sqrt(N r (1 - r))).
        """
        groups, longest = undecided + fresh, self._judge.longest
        rate = self._rate.pooled if ctx.streaming else self._rate.now
        likely = groups * rate + self.settings.reserve * math.sqrt(groups * rate * (1 - rate))
        return fresh * longest + math.ceil((self._worst - longest) * min(groups, self._need, likely))

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
