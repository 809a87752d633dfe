"""How SARA judges a prefix: by outcomes and one prior, by each prompt's own prior, or by the spread of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..groups import Group
from ..posterior import effective_probability, spread_probability
from ..settings import SettingError, require
from ..state import check_keys
from .sara_rule import ABANDON, COMMIT, CONTINUE

if TYPE_CHECKING:
    from .sara_settings import SaraSettings


class OutcomeJudge:
    """Every prompt starts from the same Beta prior; effective is what has right and wrong outcomes."""

    def __init__(self, settings: SaraSettings) -> None:
        self.settings = settings
        self._rule = settings.rule()
        self.longest = self._rule.longest
        """The longest probe, when no rollout is lost."""
        self.predicted = self._rule.commit_probability(settings.alpha, settings.beta)
        """Probability under the fresh prior that a prompt commits within its probe."""

    def start(self, groups: Sequence[Group]) -> None:
        """These groups are fresh."""

    def more(self, group: Group) -> int:
        """Rollouts after which an undecided group is decided, if all are scored and show nothing new."""
        return self._rule.more(group.successes, group.trials, group.returned)

    def verdicts(self, groups: Sequence[Group]) -> np.ndarray:
        """Codes CONTINUE, COMMIT, ABANDON."""
        return self._rule.verdicts(*_counts(groups))

    def p_eff(self, groups: Sequence[Group]) -> np.ndarray:
        """Probability that a group would be effective if it were completed."""
        successes, trials, returned = _counts(groups)
        size = np.maximum(1, trials + self.settings.group_size - returned)
        return np.asarray(effective_probability(successes, trials, size, *self._prior(groups)))

    def effective(self, group: Group) -> bool:
        """Whether a group has signal."""
        return group.mixed

    def end_step(self, groups: Sequence[Group]) -> None:
        """These groups are done with."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("sara's verdicts", state, ())

    def _prior(self, groups: Sequence[Group]) -> tuple[Any, Any]:
        return self.settings.alpha, self.settings.beta


class CarriedJudge(OutcomeJudge):
    """A prompt starts from its own discounted posterior: Beta(alpha + d S, beta + d F), after which S <- d S + s.

    Without the discount, or with tau applied to the prior alone, a prompt that failed a few times would never be
    sampled again; so d <= 0.8, and a prompt is abandoned after two scored rollouts at the earliest.
    """

    def __init__(self, settings: SaraSettings) -> None:
        super().__init__(settings)
        self.longest = settings.group_size
        self._tau = self._thresholds()
        self._past: dict[int, tuple[float, float]] = {}  # by prompt: discounted successes and failures
        self._points: dict[str, tuple[int, int]] = {}  # by group: n* after failures, after successes

    def start(self, groups: Sequence[Group]) -> None:
        known = [group for group in groups if group.prompt in self._past]
        if not known:
            return
        size = self.settings.group_size
        alpha, beta = (column[:, None] for column in self._prior(known))
        n = np.arange(1, size + 1)
        points = []
        for successes, tau in zip((0 * n, n), self._tau, strict=True):
            below = np.asarray(effective_probability(successes, n, size, alpha, beta)) < tau - 1e-12
            below[:, -1] = True
            points.append(np.maximum(2, n[below.argmax(axis=1)]).tolist())
        self._points.update(zip((group.uid for group in known), zip(*points, strict=True), strict=True))

    def more(self, group: Group) -> int:
        points = self._points.get(group.uid)
        if points is None:
            return super().more(group)
        left = self.settings.group_size - group.returned
        for n in range(1, left):
            kinds = (0, 1) if group.trials == 0 else (int(group.successes > 0),)
            if any(self._below(group, kind, group.trials + n, points) for kind in kinds):
                return n
        return max(1, left)

    def verdicts(self, groups: Sequence[Group]) -> np.ndarray:
        codes = super().verdicts(groups)
        for i, group in enumerate(groups):
            points = self._points.get(group.uid)
            if points is None or group.mixed or group.returned == self.settings.group_size or group.trials == 0:
                continue
            below = self._below(group, int(group.successes > 0), group.trials, points)
            codes[i] = ABANDON if below else CONTINUE
        return codes

    def end_step(self, groups: Sequence[Group]) -> None:
        self._points = {}
        discount = self.settings.discount
        for group in groups:
            if group.trials:
                successes, failures = self._past.get(group.prompt, (0.0, 0.0))
                failed = group.trials - group.successes
                self._past[group.prompt] = discount * successes + group.successes, discount * failures + failed

    def state_dict(self) -> dict[str, Any]:
        """24 bytes a prompt seen."""
        counts = np.array(list(self._past.values()), np.float64).reshape(-1, 2)
        return {"prompts": np.array(list(self._past), np.int64), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("sara's verdicts", state, ("prompts", "counts"))
        prompts, counts = np.asarray(state["prompts"]).tolist(), np.asarray(state["counts"]).tolist()
        self._past = {prompt: (s, f) for prompt, (s, f) in zip(prompts, counts, strict=True)}

    def _prior(self, groups: Sequence[Group]) -> tuple[Any, Any]:
        past = np.array([self._past.get(group.prompt, (0.0, 0.0)) for group in groups]).reshape(-1, 2)
        settings = self.settings
        return settings.alpha + settings.discount * past[:, 0], settings.beta + settings.discount * past[:, 1]

    def _below(self, group: Group, passed: int, trials: int, points: tuple[int, int]) -> bool:
        """Whether a pure prefix of ``trials`` is below tau; lost rollouts shorten the group that can be reached."""
        if group.trials == group.returned:
            return trials >= points[passed]
        if trials < 2:
            return False
        reachable = group.trials + self.settings.group_size - group.returned
        alpha, beta = (float(column[0]) for column in self._prior([group]))
        p_eff = effective_probability(passed * trials, trials, max(trials, reachable), alpha, beta)
        return p_eff < self._tau[passed] - 1e-12

    def _thresholds(self) -> tuple[float, float]:
        """tau after failures and after successes; a probe means that halfway between the values at n* - 1 and n*."""
        settings = self.settings
        if settings.tau_low is not None:
            return settings.tau_low, settings.tau_low
        points = np.array([settings.probe - 1, settings.probe])
        prior = settings.group_size, settings.alpha, settings.beta
        return tuple(float(np.mean(effective_probability(s, points, *prior))) for s in (0 * points, points))  # type: ignore[return-value]


class SpreadJudge:
    """Effective is a group whose scores are spread over more than ``tolerance``; scores are graded, on equal levels.

    See :func:`~verl_ext.allocation.posterior.spread_probability`. With ``probe`` a group without spread is abandoned
    after that many scored rollouts; with ``tau_low`` where the probability of a spread falls below it.
    """

    def __init__(self, settings: SaraSettings) -> None:
        self.settings = settings
        self._levels = np.linspace(settings.score_low, settings.score_high, settings.levels)
        self._each = settings.concentration / settings.levels
        size, probe, tau = settings.group_size, settings.probe, settings.tau_low
        if (probe is None) == (tau is None):
            raise SettingError("allocator.probe", probe, "with effective=spread, one of probe and tau_low")
        if probe is not None:
            require(2 <= probe <= size, "allocator.probe", probe, f"an integer in [2, group_size={size}]")
            self._first = self.longest = probe
        else:
            require(0 < tau < 1, "allocator.tau_low", tau, "null, or a number in (0, 1)")
            counts = np.arange(1, size + 1)[:, None, None] * np.eye(settings.levels, dtype=np.int64)  # [n, level, :]
            pure = np.asarray(self._probability(counts, size))
            if pure[0].min() < tau:
                raise SettingError(
                    "allocator.tau_low", tau,
                    f"a number in (0, {pure[0].min():.6g}]: above that, some prompts are abandoned after one rollout",
                )  # fmt: skip
            self._first, self.longest = int((pure < tau).any(axis=1).argmax()) + 1, size
        self.predicted = float(self._probability(np.zeros(settings.levels, np.int64), self._first))

    def start(self, groups: Sequence[Group]) -> None:
        pass

    def more(self, group: Group) -> int:
        left = self.settings.group_size - group.returned
        if self.settings.probe is not None:
            return max(1, min(left, self.settings.probe - group.trials))
        if group.trials == 0:
            return max(1, min(left, self._first))
        counts = self._by_level(group)
        likely = np.zeros_like(counts)
        likely[counts.argmax()] = 1
        steps = np.arange(1, left + 1)[:, None]
        below = np.asarray(self._probability(counts + steps * likely, group.trials + left)) < self.settings.tau_low
        return int(below.argmax()) + 1 if below.any() else max(1, left)

    def verdicts(self, groups: Sequence[Group]) -> np.ndarray:
        size, probe = self.settings.group_size, self.settings.probe
        codes = np.full(len(groups), CONTINUE, np.int8)
        p_eff = self.p_eff(groups) if probe is None else None
        for i, group in enumerate(groups):
            left = size - group.returned
            if self.effective(group):
                codes[i] = COMMIT
            elif left == 0 or group.trials + left < 2:
                codes[i] = ABANDON
            elif group.trials and (group.trials >= probe if p_eff is None else p_eff[i] < self.settings.tau_low):
                codes[i] = ABANDON
        return codes

    def p_eff(self, groups: Sequence[Group]) -> np.ndarray:
        if not groups:
            return np.zeros(0)
        _, trials, returned = _counts(groups)
        counts = np.array([self._by_level(group) for group in groups])
        return np.asarray(self._probability(counts, np.maximum(1, trials + self.settings.group_size - returned)))

    def effective(self, group: Group) -> bool:
        scores = [outcome.score for outcome in group.outcomes if outcome.score is not None]
        return bool(scores) and max(scores) - min(scores) > self.settings.tolerance + 1e-9

    def end_step(self, groups: Sequence[Group]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("sara's verdicts", state, ())

    def _by_level(self, group: Group) -> np.ndarray:
        """Scored rollouts at each level, scores taken to the nearest."""
        scores = np.array([outcome.score for outcome in group.outcomes if outcome.score is not None])
        low, high, levels = self.settings.score_low, self.settings.score_high, self.settings.levels
        nearest = np.rint((scores - low) / (high - low) * (levels - 1)).clip(0, levels - 1).astype(np.int64)
        return np.bincount(nearest, minlength=levels)

    def _probability(self, counts: np.ndarray, size: Any) -> np.ndarray | float:
        return spread_probability(counts, size, self._levels, self.settings.tolerance, self._each)


def make_judge(settings: SaraSettings) -> OutcomeJudge | SpreadJudge:
    """The judge that the settings ask for."""
    if settings.effective == "spread":
        return SpreadJudge(settings)
    return CarriedJudge(settings) if settings.carry_prior else OutcomeJudge(settings)


def _counts(groups: Sequence[Group]) -> np.ndarray:
    """(successes, trials, returned), one column a group."""
    return np.array([(g.successes, g.trials, g.returned) for g in groups], np.int64).reshape(-1, 3).T
