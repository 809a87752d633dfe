"""SARA: probe a few rollouts, commit to mixed groups, abandon those unlikely to become mixed.

"Early Verdicts, Better Budgets: Sequential Adaptive Rollout Allocation for Compute-Efficient RLVR", arXiv 2607.26253.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..groups import Fate, Group, Outcome, Request, Verdict
from ..posterior import effective_probability
from ..registry import register_allocator
from ..settings import require
from ..state import check_keys
from .base import Allocator, AllocatorSettings
from .sara_rule import ABANDON, COMMIT, SaraRule, sara_rule
from .window import CommitRate, adaptive_wave


@dataclass(frozen=True)
class SaraSettings(AllocatorSettings):
    """Settings of SARA.

    The guarantee that an abandoned group would have been effective with probability below tau is conditional on the
    prior being right; on a U-shaped population the uniform prior over-predicts that probability three- to sixfold.
    ``top_up`` costs fewer rollouts per effective group than uniform sampling only if P(effective | abandoned) is at
    most e (k - n*) / k, e being the effective share; it reverses above e of about 0.65. ``stop`` always costs fewer.
    """

    probe: int | None = 4
    """n*, the length of a pure prefix at which a group is abandoned; the primary knob. null if ``tau_low`` is given."""
    tau_low: float | None = None
    """Abandon where the probability of becoming mixed is below this, strictly. It does not carry over to another
    ``group_size``: at 64, 0.45 means a probe of 35. Given together with ``probe`` only if the two agree."""
    chunk: int | None = None
    """Rollouts a round while probing; null: the whole probe. With ``top_up`` smaller chunks only add rounds."""
    window: int | Literal["adaptive"] = "adaptive"
    """Prompts of a wave. ``adaptive``: what is missing over the running commit rate; or a fixed number."""
    margin: float = 0.0
    """Share of prompts an adaptive wave has beyond that (or, negative, short of it)."""
    commit: Literal["top_up", "stop"] = "top_up"
    """``top_up``: committed groups get all ``group_size`` rollouts; ``stop``: they keep what the probe gave, which
    makes groups of unequal size and pays only where update noise does not matter."""
    alpha: float = 1.0
    """Prior pseudo-count of successes; every prompt starts from the prior in every step."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""
    growth: float = 1.3
    """Factor of an adaptive wave's size, for each wave after the second."""
    cap: float = 8.0
    """Most prompts of an adaptive wave, in units of ``stop.groups``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocator.{name}", value, "a finite number above 0")
        self.rule()  # checks probe and tau_low
        require(self.chunk is None or self.chunk >= 1, "allocator.chunk", self.chunk, "null or an integer of 1 or more")
        window = self.window
        require(window == "adaptive" or window >= 1, "allocator.window", window, "adaptive, or an integer of 1 or more")
        require(-1 < self.margin <= 10, "allocator.margin", self.margin, "a number in (-1, 10]")
        require(1 <= self.growth <= 10, "allocator.growth", self.growth, "a number in [1, 10]")
        require(0 < self.cap <= 1000, "allocator.cap", self.cap, "a number in (0, 1000]")

    def rule(self) -> SaraRule:
        """The verdicts that these settings mean."""
        return sara_rule(self.group_size, self.probe, self.tau_low, self.alpha, self.beta)


@register_allocator("sara")
class Sara(Allocator):
    """Sequential adaptive allocation, one decision a group and round.

    A step never ends with a half-filled group: a fresh prompt is admitted only if the budget covers its worst case
    beside everything promised to those already running, and only if rounds for its probe and its top-up remain.
    Committed groups beyond the batch are dropped before their top-up.
    """

    Settings = SaraSettings

    def __init__(self, settings: SaraSettings) -> None:
        super().__init__(settings)
        self._rule = settings.rule()
        self._top_up = settings.commit == "top_up"
        self._worst = settings.group_size if self._top_up else self._rule.longest
        self._predicted = self._rule.commit_probability(settings.alpha, settings.beta)
        self._rate = CommitRate(self._predicted)
        self._numbers: dict[str, float] = {}

    def begin_step(self, ctx) -> None:
        require(
            ctx.max_rounds > self._top_up,
            "max_rounds", ctx.max_rounds, "2 or more with allocation.allocator.commit=top_up: a probe, then its top-up",
        )  # fmt: skip
        self._rate.begin_step()
        self._waves = 0
        self._open: list[list[Group]] = []  # waves with undecided groups
        self._abandoned: list[float] = []  # effective probability of each abandoned group

    def ask(self, ctx) -> list[Request]:
        self._resolve()
        committed, requests = self._commit(ctx)
        need = ctx.target_groups - len(committed)
        rounds = ctx.rounds_left - self._top_up  # rounds in which a probe may still run
        if need <= 0:
            return requests  # whatever is undecided is surplus
        undecided = [group for wave in self._open for group in wave if group.verdict is Verdict.CONTINUE]
        left = ctx.budget_left - sum(request.n for request in requests)
        for group in undecided:
            n = self._chunk(self._rule.more(group.successes, group.trials, group.returned), rounds)
            if rounds < 1 or n > left:  # only rollouts without a score can make a probe longer than was planned
                group.verdict = Verdict.ABANDON
                continue
            requests.append(ctx.request(group, n))
            left -= max(n, self._worst - group.requested)
        if rounds < 1:
            return requests
        undecided = [group for group in undecided if group.verdict is Verdict.CONTINUE]
        wave = ctx.admit(min(self._size(need, len(undecided), ctx), max(0, left) // self._worst))
        if wave:
            n = self._chunk(self._rule.more(0, 0, 0), rounds)
            requests += [ctx.request(group, n) for group in wave]
            self._waves += 1
            self._open.append(wave)
        return requests

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        told = [ctx.group(uid) for uid in {outcome.group: None for outcome in outcomes}]
        told = [group for group in told if group.verdict is Verdict.CONTINUE and not group.pending]
        if not told:
            return
        counts = np.array([(group.successes, group.trials, group.returned) for group in told]).T
        codes = self._rule.verdicts(*counts)
        for group, code in zip(told, codes.tolist(), strict=True):
            if code == COMMIT:
                group.verdict = Verdict.COMMIT
            elif code == ABANDON:
                group.verdict = Verdict.ABANDON
                if group.returned == self.group_size and group.saturated:
                    group.fate = Fate.FILTERED
        successes, trials, returned = counts[:, codes == ABANDON]
        size = np.maximum(1, trials + self.group_size - returned)
        p_eff = effective_probability(successes, trials, size, self.settings.alpha, self.settings.beta)
        self._abandoned += p_eff.tolist()

    def finish(self, ctx) -> list[Group]:
        self._resolve()
        self._rate.end_step()
        mixed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT]
        full = [g for g in mixed if g.fate is None and (not self._top_up or g.requested == self.group_size)]
        batch = full[: ctx.target_groups]
        decided = len(mixed) + len(self._abandoned)
        self._numbers = {
            "commit_rate": len(mixed) / decided if decided else 0.0,
            "commit_rate_running": self._rate.over_steps,
            "p_eff_predicted": self._predicted,
            "p_eff_realised": len(mixed) / decided if decided else 0.0,
            "p_eff_abandoned": math.fsum(self._abandoned) / len(self._abandoned) if self._abandoned else 0.0,
            "abandoned_groups": float(len(self._abandoned)),
            "surplus_groups": float(len(mixed) - len(batch)),
            "waves": float(self._waves),
        }
        return batch

    def metrics(self) -> dict[str, float]:
        """``p_eff_predicted`` is the prior's probability that a prompt is mixed within its probe, ``p_eff_realised``
        the share that was; ``p_eff_abandoned`` is what the prior says of the abandoned groups, on average: the
        predicted share of false abandonments."""
        return dict(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("sara", state, ("rate",))
        self._rate.load_state_dict(state["rate"])

    def _commit(self, ctx) -> tuple[list[Group], list[Request]]:
        """Committed groups that are for the batch, and the top-ups they still need; drops what is beyond the batch."""
        committed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT and group.fate is None]
        if not self._top_up:
            return committed, []
        full = [group for group in committed if group.requested == self.group_size]
        rest = [group for group in committed if group.requested < self.group_size]
        room = max(0, ctx.target_groups - len(full))
        for group in rest[room:]:
            group.fate = Fate.SURPLUS
        requests = [ctx.request(group, self.group_size - group.requested) for group in rest[:room]]
        return full + rest[:room], requests

    def _resolve(self) -> None:
        """Enter waves that are decided whole into the commit rate."""
        still_open = []
        for wave in self._open:
            if any(group.verdict is Verdict.CONTINUE for group in wave):
                still_open.append(wave)
            else:
                self._rate.resolved(len(wave), sum(group.verdict is Verdict.COMMIT for group in wave))
        self._open = still_open

    def _chunk(self, more: int, rounds: int) -> int:
        """Rollouts of a probe to ask now, so that ``more`` are back when the rounds for probing end."""
        chunk = more if self.settings.chunk is None else min(self.settings.chunk, more)
        return max(chunk, -(-more // max(1, rounds)))

    def _size(self, need: int, undecided: int, ctx) -> int:
        if self.settings.window != "adaptive":
            return self.settings.window
        rate, settings = self._rate.now, self.settings
        return adaptive_wave(
            need - rate * undecided, rate, self._waves + 1, ctx.target_groups,
            margin=settings.margin, growth=settings.growth, cap=settings.cap,
        )  # fmt: skip
