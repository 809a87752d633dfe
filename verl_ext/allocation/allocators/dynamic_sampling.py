"""Dynamic sampling: saturated groups are dropped and replaced (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...typed_settings import refused, require
from ..groups import Fate, Group, Outcome, Request, Verdict
from ..metric import WAITING, Metric
from ..posterior import effective_probability
from ..registry import register_allocator
from ..state import check_keys
from ..waiting import WaitingGroups
from .allocator import Allocator, AllocatorSettings
from .window import CommitRate, adaptive_wave


@dataclass(frozen=True)
class DynamicSamplingSettings(AllocatorSettings):
    """Settings of dynamic sampling."""

    refill: Literal["waves", "one_for_one"] = "waves"
    """``waves``: every round as many prompts as ``gen_multiple`` says; ``one_for_one``: as many as groups are missing,
    which wastes nothing and takes about log(B) rounds, more than the default ``max_rounds``."""
    gen_multiple: int | float | Literal["auto", "greso"] = 3
    """Prompts of a wave in units of the batch (3 as published); ``auto``: sized by what is missing and the running
    share of effective groups, as SARA's waves; ``greso``: by what is missing and the last wave's share, see
    :func:`greso_wave`. Not used by ``one_for_one``."""
    max_staleness: int = 0
    """Versions of the weights that an effective group beyond the batch may wait for a later step, whose batch it enters
    first. 0: it is surplus."""

    def __post_init__(self) -> None:
        super().__post_init__()
        multiple = self.gen_multiple
        require(isinstance(multiple, str) or multiple > 0, "allocation.allocator.gen_multiple", multiple,
                "a number above 0, auto, or greso")  # fmt: skip
        require(self.max_staleness >= 0, "allocation.allocator.max_staleness", self.max_staleness,
                "an integer of 0 or more")  # fmt: skip


@register_allocator("dynamic_sampling")
class DynamicSampling(Allocator):
    """``group_size`` rollouts a prompt, until the batch is full of effective groups; more are surplus, or wait."""

    Settings = DynamicSamplingSettings

    def __init__(self, settings: DynamicSamplingSettings) -> None:
        super().__init__(settings)
        self._rate = CommitRate(float(effective_probability(0, 0, settings.group_size)))
        self._waiting = WaitingGroups(settings.max_staleness)

    @property
    def needs_rounds(self) -> str | None:
        if self.settings.refill == "one_for_one" or self.settings.gen_multiple == "auto":
            return None
        return (
            f"refill=waves with gen_multiple={self.settings.gen_multiple} sends a wave when the last one is complete; "
            "use gen_multiple=auto or refill=one_for_one"
        )

    def check_carry(self) -> None:
        stale, reason = self.settings.max_staleness, self.needs_rounds
        require(stale == 0, "allocation.allocator.max_staleness", stale,
                "0 with allocation.async.carry, whose max_lag says it")  # fmt: skip
        if reason is not None:
            raise refused("allocation.async.carry", "above 0", f"0: {reason}")

    def begin_step(self, ctx) -> None:
        self._rate.begin_step()
        self._waiting.resume(ctx)
        self._effective = sum(group.verdict is Verdict.COMMIT for group in ctx.live)
        self._wave: list[Group] = []
        self._undecided = len(ctx.live) - self._effective

    def ask(self, ctx) -> list[Request]:
        need = ctx.wanted - self._effective
        if need <= 0:
            return []
        size = min(self._size(need, ctx), ctx.budget_left // self.group_size)
        self._wave = ctx.admit(size)
        self._undecided += len(self._wave)
        return [ctx.request(group, self.group_size) for group in self._wave]

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        for uid in dict.fromkeys(outcome.group for outcome in outcomes):
            group = ctx.group(uid)
            if group.pending:
                continue
            self._undecided -= 1
            if group.mixed:
                group.verdict = Verdict.COMMIT
                self._effective += 1
            else:
                group.verdict, group.fate = Verdict.ABANDON, Fate.FILTERED
            if ctx.streaming:
                self._rate.decided(1, int(group.mixed))
        if not ctx.streaming and all(group.verdict is not Verdict.CONTINUE for group in self._wave):
            self._rate.resolved(len(self._wave), sum(group.mixed for group in self._wave))

    def unwanted(self, ctx) -> list[Group]:
        if ctx.carry or self._effective < ctx.target_groups:
            return []
        return [group for group in ctx.groups if group.verdict is Verdict.CONTINUE]

    def finish(self, ctx) -> list[Group]:
        self._rate.end_step()
        committed = [group for group in ctx.groups if group.verdict is Verdict.COMMIT]
        batch, rest = committed[: ctx.target_groups], [] if ctx.carry else committed[ctx.target_groups :]
        self._waiting.groups = rest if self.settings.max_staleness else []
        decided = [group for group in ctx.groups if group.verdict is not Verdict.CONTINUE]
        fresh = [group for group in decided if group.offered_at == ctx.step]
        mixed = sum(group.verdict is Verdict.COMMIT for group in fresh)
        self._numbers = {
            "commit_rate": mixed / len(fresh) if fresh else 0.0,
            "commit_rate_running": self._rate.over_steps,
            "surplus_groups": float(len(rest) - len(self._waiting.groups)),
        }
        if self.settings.max_staleness:
            self._numbers["stale_groups"] = float(self._waiting.stale)
            self._numbers["lag_max"] = float(max(map(ctx.lag, batch), default=0))
        return batch

    def waiting(self, ctx) -> list[Group]:
        return list(self._waiting.groups)

    def most_waiting(self, target_groups: int) -> int:
        """A wave beyond the batch, at its largest."""
        if not self.settings.max_staleness:
            return 0
        if self.settings.refill == "one_for_one":
            return 0  # never more than is missing
        wave = {"auto": 8, "greso": 1.5}.get(self.settings.gen_multiple, self.settings.gen_multiple)
        return math.ceil(wave * target_groups) * self.group_size

    METRICS = {
        "commit_rate": Metric("groups decided in the step that were mixed", "share", "low: too easy or too hard"),
        "commit_rate_running": Metric("`commit_rate`, averaged over the steps; sizes the first wave", "share"),
        "surplus_groups": Metric("mixed groups beyond the batch", "groups", "0 is best; they were paid for"),
        "stale_groups": WAITING["stale_groups"],
        "lag_max": WAITING["lag_max"],
    }

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self._rate.state_dict(), "waiting": self._waiting.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("dynamic_sampling", state, ("rate", "waiting"))
        self._waiting.load_state_dict(state["waiting"])
        self._rate.load_state_dict(state["rate"])

    def _size(self, need: int, ctx) -> int:
        if self.settings.refill == "one_for_one":
            return need - self._undecided
        if self.settings.gen_multiple == "auto":
            rate = self._rate.pooled if ctx.streaming else self._rate.now
            return adaptive_wave(need - rate * self._undecided, rate, ctx.round, ctx.target_groups)
        if self.settings.gen_multiple == "greso":
            return greso_wave(need, sum(group.mixed for group in self._wave), len(self._wave), ctx.target_groups)
        return max(1, round(self.settings.gen_multiple * ctx.target_groups))


def greso_wave(need: int, effective: int, prompts: int, target: int) -> int:
    """Prompts of GRESO's next wave: floor(1.25 need / share) within a quarter and one and a half of the batch.

    The share is that of effective groups in the last wave, ``effective`` of ``prompts``; the first wave is the largest.
    Published with a batch of 256 and waves of 64 to 384. The official code takes the first wave below the largest for
    the step's last, whether or not it fills the batch; here waves go on.
    """
    most, least = max(1, 3 * target // 2), max(1, target // 4)
    if not effective:
        return most
    return max(least, min(most, 5 * need * prompts // (4 * effective)))
