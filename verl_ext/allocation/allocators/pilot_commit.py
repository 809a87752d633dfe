"""Pilot-Commit: a pilot of each prompt, a commitment to those of middling success.

"Spend Your Rollouts Where It Counts", arXiv 2605.26606.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..downsamplers import max_variance_subset
from ..groups import Fate, Group, Outcome, Request, Verdict
from ..metric import WAITING, Metric
from ..registry import register_allocator
from ..state import check_keys
from ..waiting import WaitingGroups
from .allocator import Allocator, AllocatorSettings
from .window import CommitRate


@dataclass(frozen=True)
class PilotCommitSettings(AllocatorSettings):
    """Settings of Pilot-Commit.

    ``group_size`` is ``n_pilot + n_commit``, the size of a finished group; a group has ``n_pilot_kept + n_commit``
    rows. With the published sizes a step costs 0.75 + 0.25 / share times the rollouts of GRPO, the share being that of
    pilots in the band; with ``wave: full``, as published, at least 1.5 times: max(1.5, 0.75 + 0.25 / share).

    SPEED-RL is the open band (0, 1), any mixed pilot. The bounds here are inclusive and p_hat is a multiple of
    1 / n_pilot, so that any ``p_lower`` in (0, 1 / n_pilot] with ``p_upper = 1 - p_lower`` is that band, e.g. 0.001 and
    0.999; with ``p_solve: null`` (it retires nothing), and 4 of 16 rollouts as the pilot.
    """

    group_size: int = 64
    """Rollouts of a finished group: n_pilot + n_commit."""
    n_pilot: int | Literal["auto"] = "auto"
    """Rollouts of a prompt's pilot; auto: a quarter of ``group_size``, 16 of 64 as published, and at least 2."""
    n_commit: int | None = None
    """Rollouts added to a qualified pilot; null: group_size - n_pilot, 48 of 64."""
    p_lower: float = 0.125
    """Least share of correct pilot rollouts that qualifies, inclusive. Harder prompts wait for the next epoch."""
    p_upper: float = 0.75
    """Largest share that qualifies, inclusive. Easier prompts are deferred, unless they count as solved."""
    p_solve: float | None = 1.0
    """Share from which on a pilot is solved; null: no prompt is ever retired."""
    retire_after: int | Literal["auto"] = "auto"
    """Solved pilots in a row that retire a prompt. 1 is the paper's; of prompts retired at 16 of 16 a fifth to a half
    would still be mixed in 64, and 2 lowers that. auto: 1 for a pilot of 16 or more, else 2."""
    readmit: bool = False
    """Whether all prompts come back once every one is retired; else the run ends there."""
    gen_multiple: float = 3.0
    """Most pilots of a wave in units of the batch (G = gen_multiple x stop.groups)."""
    wave: Literal["need", "full"] = "need"
    """Pilots of a wave: ``need``, as many as are likely to qualify for the groups missing (see :func:`pilots_for`);
    ``full``, always G, as published."""
    binding: bool = True
    """True: one round carries the commits of prompts qualified in an earlier step and the pilots for the next one, and
    only the first step needs a second round. False: pilots and commits within the step, in two rounds or more."""
    max_staleness: int = 4
    """A pilot older than this many versions of the weights is dropped before it can be used, exactly."""
    n_pilot_kept: int | None = None
    """Pilot rollouts trained on, chosen when the prompt is committed; null: all."""
    pilots_kept: Literal["max_variance", "first"] = "max_variance"
    """Which those are: with the largest variance of scores, or the first."""
    buffer_size: int | None = None
    """Most qualified pilots kept between steps, oldest dropped first; null: as many as max_staleness waves have."""
    buffer_order: Literal["random", "max_variance", "most_recent", "least_recent"] = "random"
    """Which qualified pilots are committed first: any, those with p_hat nearest 1/2 (ties: the newest), the newest, or
    the oldest (for which the official code takes the newest, too)."""
    flush: bool = False
    """Whether pilots of an earlier epoch of the prompts are dropped, as in the official code; False: only
    ``max_staleness`` ends their waiting."""
    off_policy: Literal["recompute", "importance"] = "recompute"
    """How the update treats rollouts of an older policy; read by the training side. ``recompute``: as on-policy, with
    log-probs of the current policy, as the official code; ``importance``: corrected by the rollouts' own log-probs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve("n_pilot", min(max(2, self.group_size // 4), self.group_size - 1))
        self.resolve("retire_after", 1 if self.n_pilot >= 16 else 2)
        require(1 <= self.n_pilot < self.group_size, "allocation.allocator.n_pilot", self.n_pilot,
                f"auto, or an integer in [1, {self.group_size - 1}], below group_size={self.group_size}")  # fmt: skip
        require(self.n_commit in (None, self.group_size - self.n_pilot), "allocation.allocator.n_commit", self.n_commit,
                f"null or {self.group_size - self.n_pilot}: n_pilot={self.n_pilot} + n_commit must be "
                f"group_size={self.group_size}")  # fmt: skip
        require(0 <= self.p_lower <= 1, "allocation.allocator.p_lower", self.p_lower, "a number in [0, 1]")
        require(self.p_lower <= self.p_upper <= 1, "allocation.allocator.p_upper", self.p_upper,
                f"a number in [p_lower={self.p_lower}, 1]")  # fmt: skip
        require(any(self.in_band(count, self.n_pilot) for count in range(self.n_pilot + 1)),
                "allocation.allocator.p_lower", self.p_lower, f"a band up to p_upper={self.p_upper} with a multiple of "
                f"1 / n_pilot={self.n_pilot} in it")  # fmt: skip
        require(self.p_solve is None or self.p_upper < self.p_solve <= 1, "allocation.allocator.p_solve", self.p_solve,
                f"null, or a number in (p_upper={self.p_upper}, 1]")  # fmt: skip
        require(self.retire_after >= 1, "allocation.allocator.retire_after", self.retire_after,
                "an integer of 1 or more")  # fmt: skip
        require(0 < self.gen_multiple <= 1000, "allocation.allocator.gen_multiple", self.gen_multiple,
                "a number in (0, 1000]")  # fmt: skip
        least = "1 or more with binding=true, whose pilots wait for a step" if self.binding else "0 or more"
        require(self.max_staleness >= self.binding, "allocation.allocator.max_staleness", self.max_staleness,
                f"an integer of {least}")  # fmt: skip
        require(self.n_pilot_kept is None or 1 <= self.n_pilot_kept <= self.n_pilot,
                "allocation.allocator.n_pilot_kept",
                self.n_pilot_kept, f"null or an integer in [1, n_pilot={self.n_pilot}]")  # fmt: skip
        require(self.buffer_size is None or self.buffer_size >= 1, "allocation.allocator.buffer_size", self.buffer_size,
                "null or an integer of 1 or more")  # fmt: skip

    @property
    def commit(self) -> int:
        """Rollouts added to a qualified pilot."""
        return self.group_size - self.n_pilot

    def in_band(self, successes: int, trials: int) -> bool:
        """Whether a pilot of this many correct rollouts qualifies."""
        # A quotient of integers is the float nearest to it: 2/16 equals a bound written 0.125, 3/10 one written 0.3.
        return self.p_lower <= successes / trials <= self.p_upper


@register_allocator("pilot_commit")
class PilotCommit(Allocator):
    """Pilots qualify, wait in a buffer of groups, and are committed in full; a prompt waits at most once.

    Every round commits as many waiting pilots as the batch needs. It also carries a wave of pilots where the batch
    needs more than wait, and, with ``binding``, those likely to be missing from the next step's batch; no further round
    is made for these alone. Pilots that
    the step itself needs leave budget for the commits they are likely to lead to.
    """

    Settings = PilotCommitSettings

    def __init__(self, settings: PilotCommitSettings) -> None:
        super().__init__(settings)
        in_band = [settings.in_band(successes, settings.n_pilot) for successes in range(settings.n_pilot + 1)]
        self._rate = CommitRate(sum(in_band) / len(in_band))  # under a uniform prior every count is as likely
        self._waiting = WaitingGroups(settings.max_staleness)
        self._solved: dict[int, int] = {}  # by prompt: solved pilots in a row, where a retirement is still open
        self._epochs: dict[str, int] = {}  # by pilot that waits: the prompts' epoch that it was offered in

    @property
    def largest_group(self) -> int:
        kept = self.settings.n_pilot_kept
        return (self.settings.n_pilot if kept is None else kept) + self.settings.commit

    @property
    def least_rounds(self) -> int:
        return 2

    @property
    def needs_rounds(self) -> str | None:
        return (
            "pilots are chosen from among a whole wave and those of the steps before, and ride with their commits; "
            "with allocation.async.carry above 0 they need none"
        )

    def check_carry(self) -> None:
        """A pilot of one version and its commit of the next are what carrying is: ``binding`` says nothing more."""
        settings = self.settings
        require(not settings.flush, "allocation.allocator.flush", settings.flush, "false with allocation.async.carry")
        require(settings.buffer_size is None, "allocation.allocator.buffer_size", settings.buffer_size,
                "null with allocation.async.carry: as many as are in hand")  # fmt: skip
        require(settings.wave == "need", "allocation.allocator.wave", settings.wave, "need with allocation.async.carry")

    @property
    def readmits(self) -> bool:
        return self.settings.readmit

    def begin_step(self, ctx) -> None:
        self._buffer = self._waiting.resume(ctx)  # qualified pilots, oldest first
        if ctx.carry:
            self._buffer = [group for group in ctx.live if group.verdict is Verdict.CONTINUE and not group.pending]
        flushed = [g for g in self._buffer if self.settings.flush and self._epochs[g.uid] < ctx.epoch]
        for group in flushed:
            group.verdict, group.fate = Verdict.ABANDON, Fate.STALE
            self._buffer.remove(group)
        self._flushed = len(flushed)
        self._wave: list[Group] = []
        self._batch: list[Group] = []
        self._pilots = self._qualified = self._retired = self._deferred = 0
        self._rate.begin_step()

    def ask(self, ctx) -> list[Request]:
        self._resolve()
        commit = self.settings.commit
        if ctx.carry:
            return self._ask_carrying(ctx)
        need = ctx.target_groups - len(self._batch)
        chosen = self._pick(min(need, ctx.budget_left // commit), ctx)
        self._batch += chosen
        requests = [ctx.request(group, commit) for group in chosen]
        wave = ctx.admit(self._wave_size(need, len(chosen), ctx))
        self._wave = wave
        self._epochs.update((group.uid, ctx.epoch) for group in wave)
        self._pilots += len(wave)
        return requests + [ctx.request(group, self.settings.n_pilot) for group in wave]

    def _ask_carrying(self, ctx) -> list[Request]:
        """Commits for the groups missing, and as many pilots in flight as are likely to qualify for what is left."""
        settings, live = self.settings, ctx.live
        need = ctx.wanted - sum(group.verdict is Verdict.COMMIT for group in live)
        chosen = self._pick(min(need, ctx.budget_left // settings.commit), ctx)
        running = sum(group.verdict is Verdict.CONTINUE and group.pending > 0 for group in live)
        wave = pilots_for(need - len(chosen) - len(self._buffer), self._rate.pooled)
        wave = min(wave, max(1, round(settings.gen_multiple * ctx.wanted))) - running
        left = ctx.budget_left - settings.commit * len(chosen)
        fresh = ctx.admit(min(wave, int(left / (settings.n_pilot + settings.commit * self._rate.pooled))))
        self._pilots += len(fresh)
        requests = [ctx.request(group, settings.commit) for group in chosen]
        return requests + [ctx.request(group, settings.n_pilot) for group in fresh]

    def tell(self, outcomes: Sequence[Outcome], ctx) -> None:
        for uid in dict.fromkeys(outcome.group for outcome in outcomes):
            group = ctx.group(uid)
            if group.verdict is Verdict.CONTINUE and not group.pending:
                self._judge(group)
                if ctx.carry:
                    qualified = group.verdict is Verdict.CONTINUE
                    self._buffer += [group] if qualified else []
                    self._qualified += qualified
                    self._rate.decided(1, qualified)

    def finish(self, ctx) -> list[Group]:
        self._resolve()
        self._rate.end_step()
        if ctx.carry:
            self._batch, self._buffer = self.whole(ctx)[: ctx.target_groups], []
        most = self._most_groups(ctx.target_groups)
        beyond = self._buffer[: max(0, len(self._buffer) - most)]
        for group in beyond:
            group.verdict, group.fate = Verdict.ABANDON, Fate.SURPLUS
        self._waiting.groups = self._buffer[len(beyond) :]
        self._epochs = {group.uid: self._epochs[group.uid] for group in self._waiting.groups}
        lags = [ctx.lag(group) for group in self._batch]
        self._numbers = {
            "pilots": float(self._pilots),
            "pilots_qualified": float(self._qualified),
            "band_share": self._qualified / self._pilots if self._pilots else 0.0,
            "band_share_running": self._rate.over_steps,
            "pilots_retired": float(self._retired),
            "pilots_deferred": float(self._deferred),
            "pilots_stale": float(self._waiting.stale),
            "pilots_flushed": float(self._flushed),
            "pilots_beyond_buffer": float(len(beyond)),
            "commits": float(len(self._batch)),
            "lag_mean": sum(lags) / len(lags) if lags else 0.0,
            "lag_max": float(max(lags, default=0)),
        }
        return list(self._batch)

    def waiting(self, ctx) -> list[Group]:
        return list(self._waiting.groups)

    def most_waiting(self, target_groups: int) -> int:
        return self._most_groups(target_groups) * self.settings.n_pilot

    METRICS = {
        "pilots": Metric("pilots that came back", "groups"),
        "pilots_qualified": Metric("pilots whose success rate is within the band", "groups"),
        "band_share": Metric("`pilots_qualified` / `pilots`", "share", "low: most pilots are in vain"),
        "band_share_running": Metric("`band_share`, averaged over the steps; sizes the next pilot", "share"),
        "pilots_retired": Metric("pilots solved `retire_after` times in a row, whose prompts leave the pool", "groups"),
        "pilots_deferred": Metric("other pilots outside the band, whose prompts wait for the next epoch", "groups"),
        "pilots_stale": Metric("pilots that waited longer than is allowed, and were dropped", "groups", "0 is best"),
        "pilots_flushed": Metric("waiting pilots that were dropped at the end of an epoch", "groups"),
        "pilots_beyond_buffer": Metric("qualified pilots that the buffer had no room for", "groups", "0 is best"),
        "commits": Metric("groups that were completed for the batch", "groups", "`stop.groups` is best"),
        "lag_mean": WAITING["lag_mean"],
        "lag_max": WAITING["lag_max"],
    }

    def state_dict(self) -> dict[str, Any]:
        return {
            "rate": self._rate.state_dict(),
            "waiting": self._waiting.state_dict(),
            "epochs": [self._epochs[group.uid] for group in self._waiting.groups],
            "solved_prompts": np.array(sorted(self._solved), np.int64),
            "solved_pilots": np.array([self._solved[prompt] for prompt in sorted(self._solved)], np.int32),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("pilot_commit", state, ("rate", "waiting", "epochs", "solved_prompts", "solved_pilots"))
        self._waiting.load_state_dict(state["waiting"])
        waiting = self._waiting.groups
        self._epochs = {group.uid: int(epoch) for group, epoch in zip(waiting, state["epochs"], strict=True)}
        self._rate.load_state_dict(state["rate"])
        prompts, pilots = np.asarray(state["solved_prompts"]), np.asarray(state["solved_pilots"])
        self._solved = dict(zip(prompts.tolist(), pilots.tolist(), strict=True))

    def _judge(self, group: Group) -> None:
        """A pilot is back. Unscored rollouts say nothing; half the pilot must be scored for a prompt to be retired."""
        settings, prompt = self.settings, group.prompt
        successes, trials = group.successes, group.trials
        if trials and settings.in_band(successes, trials):
            self._solved.pop(prompt, None)
            return  # undecided, until it is committed
        group.verdict = Verdict.DEFER
        if settings.p_solve is not None and 2 * trials >= settings.n_pilot and successes / trials >= settings.p_solve:
            row = self._solved.pop(prompt, 0) + 1
            if row >= settings.retire_after:
                group.verdict = Verdict.RETIRE
            else:
                self._solved[prompt] = row
        elif trials:
            self._solved.pop(prompt, None)
        self._retired += group.verdict is Verdict.RETIRE
        self._deferred += group.verdict is Verdict.DEFER

    def _resolve(self) -> None:
        """Enter the last wave into the buffer, in order of admission, and into the band's running share."""
        qualified = [group for group in self._wave if group.verdict is Verdict.CONTINUE]
        if self._wave:
            self._rate.resolved(len(self._wave), len(qualified))
        self._buffer += qualified
        self._qualified += len(qualified)
        self._wave = []

    def _pick(self, n: int, ctx) -> list[Group]:
        """Take up to ``n`` pilots out of the buffer and commit them."""
        n = min(n, len(self._buffer))
        if n <= 0:
            return []
        order = self.settings.buffer_order
        ranks = []
        for group, tie in zip(self._buffer, ctx.rng.permutation(len(self._buffer)).tolist(), strict=True):
            p = group.successes / group.trials
            variance = -round(p * (1 - p), 12) if order == "max_variance" else 0
            age = {"random": 0, "least_recent": group.version}.get(order, -group.version)
            ranks.append((variance, age, tie))
        picked = set(sorted(range(len(ranks)), key=ranks.__getitem__)[:n])
        chosen = [group for i, group in enumerate(self._buffer) if i in picked]
        self._buffer = [group for i, group in enumerate(self._buffer) if i not in picked]
        keep = self.settings.n_pilot_kept
        for group in chosen:
            group.verdict = Verdict.COMMIT
            scored = group.trainable
            if keep is not None and len(scored) > keep and self.settings.pilots_kept == "first":
                group.set_aside(outcome.session for outcome in scored[keep:])
            elif keep is not None and len(scored) > keep:
                kept = set(max_variance_subset([outcome.score for outcome in scored], keep, ctx.rng).tolist())
                group.set_aside(outcome.session for i, outcome in enumerate(scored) if i not in kept)
        return chosen

    def _wave_size(self, need: int, chosen: int, ctx) -> int:
        """Pilots of this round, which commits ``chosen`` of the ``need`` groups that the batch lacks."""
        settings = self.settings
        left = ctx.budget_left - chosen * settings.commit
        wave = max(1, round(settings.gen_multiple * ctx.target_groups))
        if need > chosen and not self._buffer:
            if ctx.rounds_left < 2 and settings.max_staleness == 0:
                return 0  # they could never be committed
            if settings.wave == "need":
                wave = min(wave, pilots_for(need - chosen, self._rate.now))
            return min(wave, int(left / (settings.n_pilot + settings.commit * self._rate.now)))
        if not settings.binding or (ctx.round > 1 and not chosen):
            return 0
        if ctx.round > 1 or settings.wave == "need":
            wave = min(wave, pilots_for(ctx.target_groups - len(self._buffer), self._rate.now))
        return min(wave, left // settings.n_pilot)

    def _most_groups(self, target_groups: int) -> int:
        settings = self.settings
        if settings.max_staleness == 0:
            return 0
        wave = max(1, round(settings.gen_multiple * target_groups))
        natural = settings.max_staleness * wave
        return natural if settings.buffer_size is None else settings.buffer_size


def pilots_for(groups: int, share: float, deviations: float = 2.0) -> int:
    """Least n with n share - deviations sqrt(n share (1 - share)) >= groups (derived): pilots of which that many
    qualify, each with probability ``share`` > 0, but for one time in forty."""
    if groups <= 0:
        return 0
    spread = deviations * math.sqrt(1 - share)
    root = (spread + math.sqrt(spread**2 + 4 * groups)) / (2 * math.sqrt(share))
    return math.ceil(round(root**2, 9))
