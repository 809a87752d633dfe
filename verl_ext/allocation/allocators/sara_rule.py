"""SARA's rule: from the outcomes of a prefix to a verdict.

A prompt's success rate is Beta(alpha, beta). After s successes in n scored rollouts, p_eff(s, n, m) is the probability
that its group ends mixed with m scored rollouts (:func:`~verl_ext.allocation.posterior.effective_probability`). Then

    COMMIT      0 < s < n
    ABANDON     a pure prefix (s = 0 or s = n) with n >= 1 and p_eff < tau, or nothing left to ask
    CONTINUE    else

tau is strict and not applied at n = 0. On a pure prefix p_eff falls with n to 0 at n = m, so one threshold is enough,
and a ``probe`` of n* rollouts is the tau between p_eff at n* - 1 and at n*. Rollouts that are lost or unscored shorten
the group that can still be reached: m = n + k - r after r of k came back. "Early Verdicts, Better Budgets", arXiv
2607.26253; what the paper leaves open is in :class:`~.sara.SaraSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...typed_settings import refused, require
from ..groups import Group
from ..posterior import abandonment_point, effective_probability, spread_probability
from ..state import check_keys

CONTINUE, COMMIT, ABANDON = 0, 1, 2
# Probabilities that differ by less are ties: not below tau.
_TIE = 1e-12


@dataclass(frozen=True, eq=False)
class SaraRule:
    """Verdicts for every prefix of a group of ``group_size``, as a table: one look-up a group."""

    group_size: int
    after_failures: int
    """n* of a prefix of failures, when no rollout is lost."""
    after_successes: int
    """n* of a prefix of successes."""
    _codes: np.ndarray  # [kind: failed, passed, mixed; n; r]
    _more: np.ndarray  # [kind: failed, passed; n; r]: rollouts to ask so that a pure prefix is decided

    @property
    def longest(self) -> int:
        """The longest probe, when no rollout is lost."""
        return max(self.after_failures, self.after_successes)

    def verdicts(self, successes: Any, trials: Any, returned: Any = None) -> np.ndarray:
        """int8 codes CONTINUE 0, COMMIT 1, ABANDON 2, of the arguments' shape.

        Raises:
            ValueError: not 0 <= successes <= trials <= returned <= group_size everywhere.
        """
        s, n = np.asarray(successes), np.asarray(trials)
        r = n if returned is None else np.asarray(returned)
        for name, array in (("successes", s), ("trials", n), ("returned", r)):
            if array.dtype.kind not in "iu":
                raise ValueError(f"{name} are {array.dtype}; accepted: integers")
        if s.size and (s.min() < 0 or (s > n).any() or r.max() > self.group_size or (r is not n and (n > r).any())):
            raise ValueError(f"accepted: 0 <= successes <= trials <= returned <= group_size={self.group_size}")
        kind = (s != 0).astype(np.intp) + ((s != n) & (s != 0))
        return self._codes[kind, n, r]

    def more(self, successes: int, trials: int, returned: int) -> int:
        """Rollouts after which an undecided prefix is decided, if all are scored and stay pure."""
        failed, passed = self._more[:, trials, returned]
        if trials == 0:
            return int(min(failed, passed))
        return int(failed if successes == 0 else passed)

    def commit_probability(self, alpha: float, beta: float) -> float:
        """P(a prompt is mixed within its probe) under the prior, before any rollout."""
        mixed_after_failure = effective_probability(0, 1, self.after_failures, alpha, beta)
        mixed_after_success = effective_probability(1, 1, self.after_successes, alpha, beta)
        return float((beta * mixed_after_failure + alpha * mixed_after_success) / (alpha + beta))


@lru_cache(maxsize=64)
def sara_rule(
    group_size: int, probe: int | None = 4, tau_low: float | None = None, alpha: float = 1.0, beta: float = 1.0
) -> SaraRule:
    """The rule of ``probe`` (n*) or of ``tau_low``; of both only if they agree.

    Raises:
        SettingError: neither is given, they disagree, one is out of range, or tau would abandon every prompt after
            its first rollout (the range that does not is named).
    """
    taus = thresholds(group_size, probe, tau_low, alpha, beta)
    points = (probe, probe)
    if tau_low is not None:
        points = abandonment_point(group_size, tau_low, alpha, beta)
        if min(points) < 2:
            most = min(effective_probability(s, 1, group_size, alpha, beta) for s in (0, 1))
            raise refused(
                "allocation.allocator.tau_low", tau_low,
                f"a number in (0, {most:.6g}]: above that, group_size={group_size}, alpha={alpha}, beta={beta} abandon "
                "prompts after one rollout",
            )  # fmt: skip
        if probe is not None and points != (probe, probe):
            raise refused(
                "allocation.allocator.tau_low", tau_low,
                f"null beside probe={probe}, or one that agrees with it: this one means a probe of {points[0]} after "
                f"failures and {points[1]} after successes; set allocation.allocator.probe=auto to use it",
            )  # fmt: skip
    n, r = np.meshgrid(np.arange(group_size + 1), np.arange(group_size + 1), indexing="ij")
    left, trials = group_size - r, np.maximum(n, 1)
    codes = np.full((3, group_size + 1, group_size + 1), CONTINUE, np.int8)
    codes[2] = COMMIT
    for kind, tau in enumerate(taus):
        p_eff = effective_probability(kind * trials, trials, np.maximum(n + left, trials), alpha, beta)
        codes[kind][np.where(n > 0, (p_eff < tau - _TIE) | (left == 0), left < 2)] = ABANDON
    more = np.zeros((2, group_size + 1, group_size + 1), np.int64)
    for kind in (0, 1):
        for i in range(group_size + 1):
            for j in range(i, group_size):
                steps = np.arange(1, group_size - j + 1)
                more[kind, i, j] = steps[(codes[kind, i + steps, j + steps] == ABANDON).argmax()]
    return SaraRule(group_size, points[0], points[1], codes, more)


def thresholds(
    group_size: int, probe: int | None, tau_low: float | None, alpha: float, beta: float
) -> tuple[float, float]:
    """tau after failures and after successes; a probe means that halfway between p_eff at n* - 1 and at n*.

    Raises:
        SettingError: neither is given, or one is out of range.
    """
    if probe is None and tau_low is None:
        raise refused("allocation.allocator.probe", None,
                f"an integer in [2, {group_size}], or allocator.tau_low instead")  # fmt: skip
    if probe is not None:
        require(2 <= probe <= group_size, "allocation.allocator.probe", probe,
                f"an integer in [2, group_size={group_size}]")  # fmt: skip
    if tau_low is not None:
        require(0 < tau_low < 1, "allocation.allocator.tau_low", tau_low, "null, or a number in (0, 1)")
        return tau_low, tau_low
    n = np.array([probe - 1, probe])
    failed, passed = (float(np.mean(effective_probability(s, n, group_size, alpha, beta))) for s in (0 * n, n))
    return failed, passed


def sara_verdicts(
    successes: Any,
    trials: Any,
    group_size: int,
    probe: int | None = None,
    tau: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    returned: Any = None,
) -> np.ndarray:
    """Verdicts of many groups at once: int8 codes CONTINUE 0, COMMIT 1, ABANDON 2.

    Args:
        successes, trials: integer arrays of one shape; scored outcomes.
        returned: rollouts back, unscored and failed ones included; default ``trials``.
        probe, tau: as ``probe`` and ``tau_low`` of the allocator; neither means a probe of 4.

    Raises:
        SettingError, ValueError: as :func:`sara_rule` and :meth:`SaraRule.verdicts`.
    """
    if probe is None and tau is None:
        probe = 4
    return sara_rule(group_size, probe, tau, alpha, beta).verdicts(successes, trials, returned)


class OutcomeJudge:
    """Every prompt starts from the same Beta prior; effective is what has right and wrong outcomes.

    Args:
        settings: of :class:`~.sara.Sara`.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._rule = sara_rule(settings.group_size, settings.probe, settings.tau_low, settings.alpha, settings.beta)
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

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.longest = settings.group_size
        self._tau = thresholds(settings.group_size, settings.probe, settings.tau_low, settings.alpha, settings.beta)
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
            below = np.asarray(effective_probability(successes, n, size, alpha, beta)) < tau - _TIE
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
        discount = self.settings.discount
        for group in groups:
            self._points.pop(group.uid, None)
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
        return p_eff < self._tau[passed] - _TIE


class SpreadJudge(OutcomeJudge):
    """Effective is a group whose scores are spread over more than ``tolerance``; scores are graded, on equal levels.

    See :func:`~verl_ext.allocation.posterior.spread_probability`. With ``probe`` a group without spread is abandoned
    after that many scored rollouts; with ``tau_low`` where the probability of a spread falls below it.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._levels = np.linspace(settings.score_low, settings.score_high, settings.levels)
        self._each = settings.concentration / settings.levels
        size, probe, tau = settings.group_size, settings.probe, settings.tau_low
        if (probe is None) == (tau is None):
            raise refused("allocation.allocator.probe", probe, "with effective=spread, one of probe and tau_low")
        if probe is not None:
            require(2 <= probe <= size, "allocation.allocator.probe", probe, f"an integer in [2, group_size={size}]")
            self._first = self.longest = probe
        else:
            require(0 < tau < 1, "allocation.allocator.tau_low", tau, "null, or a number in (0, 1)")
            counts = np.arange(1, size + 1)[:, None, None] * np.eye(settings.levels, dtype=np.int64)  # [n, level, :]
            pure = np.asarray(self._probability(counts, size))
            if pure[0].min() < tau:
                raise refused(
                    "allocation.allocator.tau_low", tau,
                    f"a number in (0, {pure[0].min():.6g}]: above that, some prompts are abandoned after one rollout",
                )  # fmt: skip
            self._first, self.longest = int((pure < tau).any(axis=1).argmax()) + 1, size
        self.predicted = float(self._probability(np.zeros(settings.levels, np.int64), self._first))

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

    def _by_level(self, group: Group) -> np.ndarray:
        """Scored rollouts at each level, scores taken to the nearest."""
        scores = np.array([outcome.score for outcome in group.outcomes if outcome.score is not None])
        low, high, levels = self.settings.score_low, self.settings.score_high, self.settings.levels
        nearest = np.rint((scores - low) / (high - low) * (levels - 1)).clip(0, levels - 1).astype(np.int64)
        return np.bincount(nearest, minlength=levels)

    def _probability(self, counts: np.ndarray, size: Any) -> np.ndarray | float:
        return spread_probability(counts, size, self._levels, self.settings.tolerance, self._each)


def make_judge(settings: Any) -> OutcomeJudge:
    """The judge that the settings ask for."""
    if settings.effective == "spread":
        return SpreadJudge(settings)
    return CarriedJudge(settings) if settings.carry_prior else OutcomeJudge(settings)


def _counts(groups: Sequence[Group]) -> np.ndarray:
    """(successes, trials, returned), one column a group."""
    return np.array([(g.successes, g.trials, g.returned) for g in groups], np.int64).reshape(-1, 3).T
